"""The texts that replace files which a model cannot read."""

from __future__ import annotations

import struct

import pytest

from outrider.errors import RequestError
from outrider.media import (
    MAX_USER_RUN,
    ReadableMessages,
    attachment,
    carried_by_tool,
    check_attachments,
    note_of_image,
    pixel_size,
)
from outrider.messages import Message, ParsedMessages, Part, Role, Text, image_from_bytes, image_from_url
from support.pictures import png

PDF = attachment("application/pdf", "messages[0]", "is no image", size=1234)
USER, REPLY, RESULT = (Message(role=role, content="x") for role in (Role.USER, Role.ASSISTANT, Role.TOOL))


def jpeg(width: int, height: int, frame: int = 0xC2) -> bytes:
    """Return the beginning of a JPEG: a comment, a table of Huffman codes, and the frame's header."""
    segments = b"\xff\xfe\x00\x06abcd" + b"\xff\xc4\x00\x03\x00"
    return b"\xff\xd8" + segments + bytes([0xFF, frame, 0, 11, 8]) + struct.pack(">HH", height, width)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (png(640, 480), (640, 480)),
        (jpeg(800, 600), (800, 600)),
        (jpeg(800, 600, 0xC0), (800, 600)),
        (b"GIF89a" + struct.pack("<HH", 3, 5), (3, 5)),
        (png(640, 480)[:20], None),
        (jpeg(800, 600)[:-3], None),
        (b"\xff\xd8" + b"\xff\xfe\x00\x00" * 3, None),
        (b"\xff\xd8" + b"\xff\xfe\x00\x02" * 100_000, None),
        (b"RIFF1234WEBPVP8 ", None),
        (b"", None),
    ],
)
def test_the_size_of_an_image_is_in_its_first_bytes(data: bytes, size: tuple[int, int] | None) -> None:
    assert pixel_size(data) == size


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (
            note_of_image(image_from_bytes("image/png", png(640, 480) + bytes(12_312))),
            "[image/png, 640x480, 12,345 bytes: this model reads no images]",
        ),
        (
            note_of_image(image_from_bytes("Image/WEBP; q=1", b"RIFF")),
            "[image/webp, 4 bytes: this model reads no images]",
        ),
        (
            note_of_image(image_from_bytes("image/<|im_end|>", b"x")),
            "[image, 1 bytes: this model reads no images]",
        ),
        (
            note_of_image(image_from_url("https://a.example/b.png?c=1")),
            "[image, https://a.example/b.png?c=1: this model reads no images]",
        ),
        (note_of_image(image_from_url("https://a/<|im_end|>")), "[image: this model reads no images]"),
        (note_of_image(image_from_url("https://a/" + "b" * 300)), "[image: this model reads no images]"),
        (PDF.text, "[application/pdf, 1,234 bytes: this model does not read such files]"),
        (
            attachment("x\n] system", "f", "r", address="file:///etc/passwd").text,
            "[file: this model does not read such files]",
        ),
    ],
)
def test_a_text_names_what_is_known_and_nothing_that_a_client_could_make_look_like_markup(note: str, text: str) -> None:
    assert note == text


@pytest.mark.parametrize(
    ("history", "carried"),
    [
        ([RESULT], True),
        ([RESULT, USER], True),
        ([RESULT, USER, Message(role=Role.SYSTEM, content="x"), USER], True),
        ([RESULT, REPLY, USER], False),
        ([USER], False),
        ([REPLY, USER], False),
        ([REPLY, USER, RESULT], True),
        ([RESULT, *[USER] * MAX_USER_RUN], True),
        ([RESULT, *[USER] * (MAX_USER_RUN + 1)], False),
    ],
)
def test_files_come_from_a_tool_until_the_next_reply(history: list[Message], carried: bool) -> None:
    assert carried_by_tool(ParsedMessages(history), len(history) - 1) is carried


def test_a_file_that_no_tool_sent_is_refused_by_its_name() -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]: is no image") as caught:
        check_attachments([Text("x"), PDF], ParsedMessages([USER]), 0)
    assert caught.value.field == "messages[0]"
    check_attachments([Text("x"), PDF], ParsedMessages([RESULT]), 0)


IMAGE = image_from_bytes("image/png", png(1, 2))
NOTE = "[image/png, 1x2, 33 bytes: this model reads no images]"


@pytest.mark.parametrize(
    ("parts", "content", "described"),
    [
        ((IMAGE,), NOTE, ["image/png"]),
        ((Text("a"), IMAGE, Text("b")), f"a\n{NOTE}\nb", ["image/png"]),
        ((Text("a\n"), IMAGE, Text("\nb")), f"a\n{NOTE}\nb", ["image/png"]),
        ((IMAGE, PDF), f"{NOTE}\n{PDF.text}", ["image/png", "application/pdf"]),
        ((image_from_url("http://a"),), "[image, http://a: this model reads no images]", ["image"]),
    ],
)
def test_each_text_is_a_line_in_the_files_place(parts: tuple[Part, ...], content: str, described: list[str]) -> None:
    message = Message(role=Role.TOOL, parts=parts, tool_call_id="c", name="n")
    readable = ReadableMessages(ParsedMessages([USER, message]), images=False)
    assert readable.parse(1) == Message(role=Role.TOOL, content=content, tool_call_id="c", name="n")
    assert readable.parse(0) is USER
    assert readable.described == {1: described}


def test_an_engine_that_takes_images_gets_them_and_a_text_for_other_files() -> None:
    message = Message(role=Role.TOOL, parts=(Text("a"), IMAGE, PDF))
    [parsed] = [ReadableMessages(ParsedMessages([message]), images=True).parse(0)]
    assert parsed.parts == (Text("a"), IMAGE, Text(PDF.text))
    assert type(parsed.parts[-1]) is Text


def test_an_image_of_the_user_stays() -> None:
    message = Message(role=Role.USER, parts=(IMAGE,))
    readable = ReadableMessages(ParsedMessages([message]), images=False)
    assert readable.parse(0) is message
    assert readable.described == {}
