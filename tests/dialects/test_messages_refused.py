"""Anthropic Messages requests that are refused: every refusal is a 400 and names the field."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from outrider.dialects.base import WireCall
from outrider.dialects.messages import MESSAGES_DIALECT
from outrider.errors import RequestError
from outrider.messages import Message

HI = {"role": "user", "content": "hi"}
PNG = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"png").decode()}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 9, "messages": [HI], **fields}).encode()


def read_all(data: bytes) -> list[Message]:
    read_as = MESSAGES_DIALECT.parse(WireCall("POST", "/v1/messages"), data, {}).messages
    return [read_as.parse(index) for index in range(len(read_as))]


def text(said: Any) -> dict[str, Any]:
    return {"type": "text", "text": said}


def result(id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, **fields}


def use(id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "f", **fields}


def one(block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


def reply(block: Any) -> dict[str, Any]:
    return {"messages": [HI, {"role": "assistant", "content": [block]}, HI]}


def inner(block: Any) -> dict[str, Any]:
    return {"messages": [HI, {"role": "user", "content": [text("x"), result("c", content=[block])]}]}


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": {**PNG, **source}}


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source}


FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": 7}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[1].role", {"system": "s", "messages": [HI, {"role": "developer", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
    ("messages[0].content[0].type", one({})),
    ("messages[0].content[0]", one("x")),
    ("messages[0].content[0].text", one({"type": "text"})),
    ("messages[0].content[0].text", one(text(7))),
    ("messages[0].content[0].text", one({"type": "text", "text": None})),
    ("messages[0].content[0].type", one({"type": "audio"})),
    ("messages[0].content[0].type", one(use("c"))),
    ("messages[0].content[0].source", one({"type": "image"})),
    ("messages[0].content[0].source.type", one(image(type="file", file_id="f"))),
    ("messages[0].content[0].source.media_type", one(image(media_type="image/bmp"))),
    ("messages[0].content[0].source.data", one(image(data="*"))),
    ("messages[0].content[0].source.data", one(image(data="é"))),
    ("messages[0].content[0].source.data", one(image(data=""))),
    ("messages[0].content[0].source.url", one(image(type="url", url="file:///etc/passwd"))),
    ("messages[0].content[0].source.type", one(document(type="base64", media_type="application/msword", data="AA=="))),
    ("messages[0].content[0].source.data", one(document(type="text"))),
    ("messages[0].content[0].source.content[0].type", one(document(type="content", content=[image()]))),
    ("messages[0].content[0].title", one({**document(type="text", data="x"), "title": 7})),
    ("messages[0].content[0].tool_use_id", one({"type": "tool_result", "content": "x"})),
    ("messages[0].content[0].is_error", one(result("c", is_error="yes"))),
    ("messages[0].content[0].content", one(result("c", content=7))),
    ("messages[1].content[1].content[0].type", inner({"type": "search_result"})),
    ("messages[1].content[1].content[0].tool_name", inner({"type": "tool_reference"})),
    ("messages[1].content[0].type", reply(result("c"))),
    ("messages[1].content[0].thinking", reply({"type": "thinking", "signature": "s"})),
    ("messages[1].content[0].id", reply({"type": "tool_use", "name": "f"})),
    ("messages[1].content[0].name", reply({"type": "tool_use", "id": "c"})),
    ("messages[1].content[0].input", reply(use("c", input=[1]))),
    ("messages[1].content[0].input", reply(use("c", input="{}"))),
    ("system", {"system": 7}),
    ("system[1].type", {"system": [text("x"), image()]}),
    ("system[0].text", {"system": [{"type": "text"}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "system", "content": [image()]}, HI]}),
    ("tools", {"tools": {}}),
    ("tools[0].name", {"tools": [{"input_schema": {}}]}),
    ("tools[0].name", {"tools": [{**TOOL, "name": ""}]}),
    ("tools[1].name", {"tools": [TOOL, {"type": "bash_20250124"}]}),
    ("tools[0].input_schema", {"tools": [{"name": "f"}]}),
    ("tools[0].input_schema", {"tools": [{"name": "f", "input_schema": "x"}]}),
    ("tools[0].input_schema", {"tools": [{"name": "f", "input_schema": json.loads("[" * 70 + "]" * 70)}]}),
    ("tools[0].input_schema", {"tools": [{"name": "f", "input_schema": json.loads('{"a":' * 70 + "1" + "}" * 70)}]}),
    ("tools[0].description", {"tools": [{**TOOL, "description": 7}]}),
    ("tool_choice", {"tool_choice": "auto"}),
    ("tool_choice.type", {"tool_choice": {"type": "required"}}),
    ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}),
    ("stream", {"stream": "yes"}),
    ("max_tokens", {"max_tokens": 0}),
    ("temperature", {"temperature": -0.5}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": -2}),
    ("stop_sequences", {"stop_sequences": "x"}),
    ("stop_sequences[0]", {"stop_sequences": [""]}),
]


@pytest.mark.parametrize(("field", "fields"), FIELDS, ids=[f"{n}-{field}" for n, (field, _) in enumerate(FIELDS)])
def test_a_wrong_field_is_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        read_all(body(**fields))
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")


SURROGATE = b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"\\ud800"}]}]}'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{} {}",
        body()[:-1],
        body(x=float("nan")),
        body(temperature="@").replace(b'"@"', b"1e999"),
        SURROGATE,
        SURROGATE.replace(b'text":"\\ud800', b'text":"\xff'),
        b'{"model":"m","messages":' + b"[" * 200_000,
        b'{"model":"m","messages":[{"role":"user","content":' + b'[{"type":"tool_result","content":' * 50_000,
    ],
)
def test_a_body_that_is_not_a_request_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_all(data)
    assert caught.value.http_status == 400
