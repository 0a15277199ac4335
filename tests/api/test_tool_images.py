"""Images and other files in tools' results, on an engine that takes token ids: a text replaces each file, in all
dialects, streamed and not, and a history that is sent again continues the recorded one.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

from api.test_gateway import KEY, a_gateway
from outrider.errors import RequestError
from outrider.messages import Message, Role, ToolCall, image_from_bytes
from outrider.sessions.models import completed
from outrider.trajectory import JoinKind
from support.pictures import ADDRESS, COUNTED, PATHS, png

IMAGE = png(640, 480) + bytes(12_312)
DATA = base64.b64encode(IMAGE).decode()
URL = f"data:image/png;base64,{DATA}"
NOTE = "[image/png, 640x480, 12,345 bytes: this model reads no images]"
PDF = base64.b64encode(b"%PDF-1.7 and so on").decode()
PDF_NOTE = "[application/pdf, 18 bytes: this model does not read such files]"
LINKED = f"[image, {ADDRESS}: this model reads no images]"
BROKEN = "[image/png: the image cannot be read]"

CALL = {"id": "call_1", "type": "function", "function": {"name": "view", "arguments": "{}"}}
FUNCTION_CALL = {"type": "function_call", "call_id": "call_1", "name": "view", "arguments": "{}"}
TOOL_USE = {"type": "tool_use", "id": "call_1", "name": "view", "input": {}}


def chat(result: Any, *after: dict[str, Any]) -> list[dict[str, Any]]:
    told = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": result}
    return [{"role": "user", "content": "look"}, told, answer, *after]


def responses(output: Any, *after: dict[str, Any]) -> list[dict[str, Any]]:
    answer = {"type": "function_call_output", "call_id": "call_1", "output": output}
    return [{"role": "user", "content": "look"}, FUNCTION_CALL, answer, *after]


def messages(content: Any, *beside: dict[str, Any]) -> list[dict[str, Any]]:
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": content}
    told = {"role": "assistant", "content": [TOOL_USE]}
    return [{"role": "user", "content": "look"}, told, {"role": "user", "content": [result, *beside]}]


def gemini(answer: dict[str, Any], *beside: dict[str, Any]) -> list[dict[str, Any]]:
    result = {"functionResponse": {"name": "view", "response": {"output": "Binary content."}, **answer}}
    told = {"role": "model", "parts": [{"functionCall": {"name": "view", "args": {}}}]}
    return [{"role": "user", "parts": [{"text": "look"}]}, told, {"role": "user", "parts": [result, *beside]}]


def linked(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def shown(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url}


def block(kind: str = "image", **source: Any) -> dict[str, Any]:
    return {"type": kind, "source": source or {"type": "base64", "media_type": "image/png", "data": DATA}}


def inline(kind: str = "image/png", data: str = DATA) -> dict[str, Any]:
    return {"inlineData": {"mimeType": kind, "data": data}}


TEXT = {"type": "text", "text": "taken"}
INPUT_TEXT = {"type": "input_text", "text": "taken"}
PDF_BLOCK = block("document", type="base64", media_type="application/pdf", data=PDF)
FORMS: dict[str, tuple[str, list[dict[str, Any]], list[str], list[str]]] = {
    # dialect, history, texts of the messages after the agent's call, kinds of file in `Turn.ignored`
    "chat": ("chat", chat([TEXT, linked(URL)]), [f"taken\n{NOTE}"], ["image/png"]),
    "chat, by address": ("chat", chat([linked(ADDRESS)]), [LINKED], ["image"]),
    "chat, broken": ("chat", chat([linked("data:image/png;base64,?"), linked("data:image/png;base64,")]),
                     [f"{BROKEN}\n{BROKEN}"], ["image/png"]),
    "chat, in a message of the user, as Pi and OpenCode send it": (
        "chat",
        chat("(see attached image)", {"role": "user", "content": [TEXT, linked(URL), linked(URL)]}),
        ["(see attached image)", f"taken\n{NOTE}\n{NOTE}"],
        ["image/png"],
    ),
    "chat, other files": (
        "chat",
        chat([
            {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}},
            {"type": "input_audio", "input_audio": {"data": PDF, "format": "wav"}},
            {"type": "video_url", "video_url": {"url": ADDRESS}},
            linked(f"data:application/pdf;base64,{PDF}"),
        ]),
        ["\n".join([
            PDF_NOTE,
            "[audio/wav, 18 bytes: this model does not read such files]",
            f"[file, {ADDRESS}: this model does not read such files]",
            PDF_NOTE,
        ])],
        ["application/pdf", "audio/wav", "file"],
    ),
    "responses, as Codex sends it": ("responses", responses([shown(URL)]), [NOTE], ["image/png"]),
    "responses, mixed": (
        "responses",
        responses([INPUT_TEXT, shown(ADDRESS),
                   {"type": "input_file", "file_data": f"data:application/pdf;base64,{PDF}"},
                   {"type": "input_audio", "input_audio": {"data": PDF, "format": "mp3"}}]),
        [f"taken\n{LINKED}\n{PDF_NOTE}\n[audio/mp3, 18 bytes: this model does not read such files]"],
        ["image", "application/pdf", "audio/mp3"],
    ),
    "responses, in a message of the user, as Codex has sent it": (
        "responses",
        responses("attached local image path", {"role": "user", "content": [shown(URL)]}),
        ["attached local image path", NOTE],
        ["image/png"],
    ),
    "messages, as Claude Code sends it": ("messages", messages([block()]), [NOTE], ["image/png"]),
    "messages, an error": (
        "messages",
        [*messages("x")[:2], {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "is_error": True, "content": [block()]}]}],
        [f"{NOTE}\n[tool error]"],
        ["image/png"],
    ),
    "messages, a document beside the result, as Claude Code sends it": (
        "messages", messages([{"type": "text", "text": "PDF file read"}], PDF_BLOCK),
        ["PDF file read", PDF_NOTE], ["application/pdf"],
    ),
    "messages, mixed": (
        "messages",
        messages([PDF_BLOCK, block(type="url", url=ADDRESS), block(type="base64", media_type="image/bmp", data="QUJD"),
                  block(type="base64", media_type="image/png", data="*")]),
        [f"{PDF_NOTE}\n{LINKED}\n[image/bmp, 3 bytes: this model does not read such files]\n{BROKEN}"],
        ["application/pdf", "image", "image/bmp", "image/png"],
    ),
    "gemini, inside the answer": ("gemini", gemini({"parts": [inline()]}), [f"Binary content.\n{NOTE}"], ["image/png"]),
    "gemini, beside the answer, as Gemini CLI sends it": (
        "gemini", gemini({}, inline(), inline("application/pdf", PDF)),
        ["Binary content.", f"{NOTE}\n{PDF_NOTE}"], ["image/png", "application/pdf"],
    ),
    "gemini, mixed": (
        "gemini",
        gemini({"parts": [inline("audio/wav", PDF), inline(data="*"),
                          {"fileData": {"fileUri": ADDRESS, "mimeType": "image/png"}}]}),
        [f"Binary content.\n[audio/wav, 18 bytes: this model does not read such files]\n{BROKEN}\n{LINKED}"],
        ["audio/wav", "image/png", "image"],
    ),
}  # fmt: skip

HISTORIES = {"chat": "messages", "responses": "input", "messages": "messages", "gemini": "contents"}


def request(dialect: str, history: list[dict[str, Any]], *, stream: bool = False) -> tuple[str, dict[str, Any]]:
    path, body = PATHS[dialect], {HISTORIES[dialect]: history}
    if dialect == "gemini":
        return (path.replace("generateContent", "streamGenerateContent?alt=sse") if stream else path), body
    limit = "max_output_tokens" if dialect == "responses" else "max_tokens"
    return path, {"model": "any", limit: 64, "stream": stream, **body}


def said(dialect: str, role: str, text: str) -> dict[str, Any]:
    if dialect == "gemini":
        return {"role": "model" if role == "assistant" else role, "parts": [{"text": text}]}
    return {"role": role, "content": text}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("form", FORMS)
async def test_a_file_of_a_tool_becomes_a_text_and_its_history_goes_on(tmp_path: Path, form: str, stream: bool) -> None:
    dialect, history, read, kinds = FORMS[form]
    async with a_gateway(tmp_path, "seen<|im_end|>", "done<|im_end|>") as (world, http):
        for more in ([], [said(dialect, "assistant", "seen"), said(dialect, "user", "go on")]):
            path, body = request(dialect, [*history, *more], stream=stream)
            async with http.post(f"/s/{KEY}{path}", json=body) as reply:
                told = await reply.text()
                assert (reply.status, '"error":{' in told) == (200, False), told
        first, second = world.turns
        assert [message.content for message in first.messages if message.role is not Role.ASSISTANT] == ["look", *read]
        assert not any(message.parts for message in first.messages)
        assert first.ignored == tuple(f"results.{kind}" for kind in kinds)
        assert (second.join, second.parent, second.ignored) == (JoinKind.APPEND, 0, ())
        assert world.conversation.tree.forks == {}
        assert read[-1] in "".join(world.conversation.backend.renderer.tokenizer.decode(first_ids(world)))


def first_ids(world: Any) -> list[int]:
    return [int(token) for token in world.engine.requests[0].input_ids]


OWN: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "chat": ("chat", [{"role": "user", "content": [linked(URL)]}]),
    "chat, after a reply": (
        "chat", [*chat("x"), said("chat", "assistant", "seen"), {"role": "user", "content": [linked(URL)]}]),
    "responses": ("responses", [{"role": "user", "content": [shown(URL)]}]),
    "messages": ("messages", [{"role": "user", "content": [block()]}]),
    "gemini": ("gemini", [{"role": "user", "parts": [inline()]}]),
}  # fmt: skip


@pytest.mark.parametrize("form", OWN)
async def test_an_image_of_the_user_is_refused_and_the_error_says_what_to_do(tmp_path: Path, form: str) -> None:
    dialect, history = OWN[form]
    async with a_gateway(tmp_path, "seen<|im_end|>") as (world, http):
        path, body = request(dialect, history)
        async with http.post(f"/s/{KEY}{path}", json=body) as reply:
            told = (await reply.json())["error"]["message"]
        assert reply.status == 400
        assert "text only" in told
        assert "kind 'openai'" in told
        assert world.turns == []


OTHER_FILES = {
    "chat": [{"role": "user", "content": [{"type": "file", "file": {"file_data": PDF}}]}],
    "responses": [{"role": "user", "content": [{"type": "input_file", "file_data": PDF}]}],
    "messages": [{"role": "user", "content": [PDF_BLOCK]}],
    "gemini": [{"role": "user", "parts": [inline("application/pdf", PDF)]}],
}


@pytest.mark.parametrize("dialect", OTHER_FILES)
async def test_another_file_of_the_user_is_refused(tmp_path: Path, dialect: str) -> None:
    async with a_gateway(tmp_path, "seen<|im_end|>") as (world, http):
        path, body = request(dialect, OTHER_FILES[dialect])
        async with http.post(f"/s/{KEY}{path}", json=body) as reply:
            assert reply.status == 400
            assert "support" in await reply.text() or "only images" in await reply.text()
        assert world.turns == []


HUGE = base64.b64encode(bytes(2 << 20)).decode()


@pytest.mark.parametrize("dialect", PATHS)
async def test_an_image_may_be_larger_than_the_context_has_room_for_text(tmp_path: Path, dialect: str) -> None:
    """The file does not count against the model's context: only the text that stands for the file does."""
    histories = {
        "chat": chat([linked(f"data:image/png;base64,{HUGE}")]),
        "responses": responses([shown(f"data:image/png;base64,{HUGE}")]),
        "messages": messages([block(type="base64", media_type="image/png", data=HUGE)]),
        "gemini": gemini({"parts": [inline(data=HUGE)]}),
    }
    async with a_gateway(tmp_path, "seen<|im_end|>", context_tokens=1024) as (world, http):
        path, body = request(dialect, histories[dialect])
        async with http.post(f"/s/{KEY}{path}", data=io.BytesIO(json.dumps(body).encode())) as reply:
            assert reply.status == 200, await reply.text()
        assert world.turns[0].messages[-1].content.endswith("[image/png, 2,097,152 bytes: this model reads no images]")


@pytest.mark.parametrize("dialect", PATHS)
async def test_a_text_that_looks_like_a_file_is_still_a_text(tmp_path: Path, dialect: str) -> None:
    """Base64 in a text is not left out, so it counts against the context."""
    histories = {
        "chat": chat(HUGE),
        "responses": responses(HUGE),
        "messages": messages(HUGE),
        "gemini": gemini({"response": {"output": HUGE}}),
    }
    async with a_gateway(tmp_path, "seen<|im_end|>", context_tokens=1024) as (world, http):
        path, body = request(dialect, histories[dialect])
        async with http.post(f"/s/{KEY}{path}", data=io.BytesIO(json.dumps(body).encode())) as reply:
            assert reply.status in (400, 413), await reply.text()
        assert world.turns == []


async def test_a_text_that_stands_for_an_image_is_counted_as_it_is_sent(tmp_path: Path) -> None:
    _, body = request("messages", messages([block()]))
    async with a_gateway(tmp_path, "seen<|im_end|>") as (world, http):
        async with http.post(f"/s/{KEY}{COUNTED}", json=body) as reply:
            counted = (await reply.json())["input_tokens"]
        async with http.post(f"/s/{KEY}{PATHS['messages']}", json=body) as reply:
            assert reply.status == 200
        assert counted == world.turns[0].prompt_length


async def test_an_agent_that_controls_a_desktop_by_sight_is_refused(tmp_path: Path) -> None:
    """With texts in place of its screenshots the agent would work blindly, and there would be nothing to learn."""
    call = Message(role=Role.ASSISTANT, tool_calls=(ToolCall("call_1", "screenshot", "{}"),))
    screen = Message(role=Role.TOOL, parts=(image_from_bytes("image/png", IMAGE),), tool_call_id="call_1")
    async with a_gateway(tmp_path, "seen<|im_end|>") as (world, _):
        with pytest.raises(RequestError, match="text only"):
            await completed(world.conversation, [Message(role=Role.USER, content="look"), call, screen])
        assert world.turns == []
