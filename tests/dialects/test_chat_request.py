"""Chat requests: which are refused, which field a refusal names, and how fields are read. The golden transcripts show
the tolerated fields."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from outrider.dialects.base import Caller, ModelRequest, WireCall
from outrider.dialects.chat import CHAT_DIALECT
from outrider.dialects.reading import MAX_DEPTH, MAX_TOKENS
from outrider.errors import RequestError
from outrider.messages import Message, Role, Text, ToolCall, image_from_bytes, image_from_url
from outrider.tokens.tree.canonical import message_key
from support.wire import CALL

USER = {"role": "user", "content": "hi"}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


def said(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def read(data: bytes) -> list[Message]:
    request = CHAT_DIALECT.parse(CALL, data, {})
    return [request.messages.parse(index) for index in range(len(request.messages))]


def parse(**fields: Any) -> ModelRequest:
    return CHAT_DIALECT.parse(CALL, body(**fields), {})


def test_the_caller_is_read_from_opencodes_headers() -> None:
    def caller(*headers: tuple[bytes, bytes]) -> Caller:
        return CHAT_DIALECT.parse(WireCall("POST", CALL.path, b"", headers), body(), {}).caller

    own, parent = (b"x-session-id", b"s"), (b"x-parent-session-id", b"p")
    assert caller() == caller(own) == caller(own, (parent[0], b"")) == Caller()
    assert caller(own, parent) == Caller(agent_id="s", parent_id="p")


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def assistant(**fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", **fields}]


FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": "hi"}),
    ("model", {"model": None}),
    ("n", {"n": 2}),
    ("n", {"n": 0}),
    ("stream", {"stream": "yes"}),
    ("stream_options.include_usage", {"stream_options": {"include_usage": 1}}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.5}),
    ("seed", {"seed": 1 << 63}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": 1.5}),
    ("stop", {"stop": ""}),
    ("stop[1]", {"stop": ["a", ""]}),
    ("stop[0]", {"stop": [3]}),
    ("stop", {"stop": ["a"] * 65}),
    ("logprobs", {"logprobs": 3}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("tool_choice", {"tool_choice": "perhaps"}),
    ("tool_choice", {"tool_choice": 1}),
    ("tools", {"tools": {"name": "f"}}),
    ("tools[1]", {"tools": [{"name": "f"}, 3]}),
    ("tools[1].type", {"tools": [{"name": "f"}, {"type": "custom", "custom": {"name": "g"}}]}),
    ("tools[0].type", {"tools": [{"type": None, "name": "f"}]}),
    ("tools[0].name", {"tools": [{"parameters": {}}]}),
    ("tools[0].function", {"tools": [{"type": "function", "function": "f"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": ""}}]}),
    ("tools[0].function.description", {"tools": [{"function": {"name": "f", "description": 1}}]}),
    ("tools[0].function.parameters", {"tools": [{"function": {"name": "f", "parameters": []}}]}),
    ("tools[0]", {"tools": [{"function": {"name": "f", "parameters": nested(MAX_DEPTH - 1)}}]}),
    ("messages[0]", {"messages": [3]}),
    ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[1].role", {"messages": [USER, {"role": "wizard", "content": "x"}]}),
    ("messages[1].content", {"messages": [USER, {"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "tool", "tool_call_id": "c"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    (
        "messages[0].content[1].image_url",
        {"messages": [{"role": "user", "content": [{"text": "a"}, {"type": "image_url"}]}]},
    ),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
    (
        "messages[0].content[0].image_url",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "ftp://a"}]}]},
    ),
    (
        "messages[0].content[0].image_url",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}]}
            ]
        },
    ),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": ["a"]}]}),
    ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}),
    ("messages[0].tool_calls", {"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}]}]}),
    ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]}),
    ("messages[1].reasoning_content", {"messages": assistant(reasoning_content=["x"])}),
    ("messages[1].tool_calls", {"messages": assistant(tool_calls={})}),
    ("messages[1].tool_calls[0].function", {"messages": assistant(tool_calls=[{"id": "c"}])}),
    ("messages[1].tool_calls[0].function.name", {"messages": assistant(tool_calls=[{"function": {}}])}),
    (
        "messages[1].tool_calls[0].function.arguments",
        {"messages": assistant(tool_calls=[{"function": {"name": "f", "arguments": [1]}}])},
    ),
    (
        "messages[1].tool_calls[1].type",
        {
            "messages": assistant(
                tool_calls=[{"function": {"name": "f"}}, {"type": "custom", "function": {"name": "g"}}]
            )
        },
    ),
    ("messages[1].function_call.arguments", {"messages": assistant(function_call={"name": "f", "arguments": 1})}),
]


@pytest.mark.parametrize(("field", "fields"), FIELDS, ids=[f"{n}-{field}" for n, (field, _) in enumerate(FIELDS)])
def test_a_wrong_field_is_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        read(body(**fields))
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'"hi"',
        b"\xef\xbb\xbf{}",
        b"{} {}",
        body()[:-1],
        body(x=float("nan")),
        body(temperature=float("inf")),
        body(n=1) + b"\0",
        b'{"model":"\xff","messages":[{"role":"user","content":"hi"}]}',
        b'{"model":"m","messages":' + b"[" * 200_000,
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"x":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001,
        body(temperature="@").replace(b'"@"', b"1e999"),
        body(seed="@").replace(b'"@"', b"9" * 5000),
        body(tools=["@"]).replace(b'"@"', b'{"name":"f","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    ],
)
def test_a_body_that_is_not_a_request_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read(data)
    assert caught.value.http_status == 400


def test_missing_fields_are_named() -> None:
    for missing, data in (("messages", b'{"model":"m"}'), ("model", b'{"messages":[]}')):
        with pytest.raises(RequestError) as caught:
            CHAT_DIALECT.parse(CALL, data, {})
        assert caught.value.field == missing


@pytest.mark.parametrize("escape", [r"\ud800", r"\udc00", r"\uD83Dx", r"\ud800\ud800"])
def test_an_unpaired_surrogate_is_refused_by_name(escape: str) -> None:
    data = body(messages=[USER, {"role": "tool", "content": "@"}]).replace(b"@", escape.encode())
    with pytest.raises(RequestError) as caught:
        CHAT_DIALECT.parse(CALL, data, {})
    assert caught.value.field == "messages[1].content"


def test_a_surrogate_pair_is_one_character() -> None:
    assert read(body(messages=[{"role": "user", "content": "\U0001f600"}]))[0].content == "\U0001f600"


def test_an_error_names_a_key_with_a_surrogate_in_printable_form() -> None:
    with pytest.raises(RequestError) as caught:
        CHAT_DIALECT.parse(CALL, rb'{"model":"m","messages":[],"\ud800":"\ud800"}', {})
    assert caught.value.field is not None
    assert caught.value.field.encode("ascii") == rb"\ud800"


def test_invalid_utf8_is_found_in_the_message_that_holds_it() -> None:
    data = body(messages=[USER, {"role": "user", "content": "@"}]).replace(b"@", b"\xff")
    request = CHAT_DIALECT.parse(CALL, data, {})
    assert request.messages.parse(0).content == "hi"
    with pytest.raises(RequestError) as caught:
        request.messages.parse(1)
    assert caught.value.field == "messages[1]"


def test_messages_are_read_one_by_one() -> None:
    request = parse(messages=[{"role": 5}, USER])
    assert len(request.messages) == 2
    assert request.messages.raw(1) == json.dumps(USER).encode()
    assert request.messages.parse(1) == Message(role=Role.USER, content="hi")
    with pytest.raises(RequestError):
        request.messages.parse(0)


def test_a_key_given_twice_counts_the_last_time() -> None:
    data = b'{"model":"m","messages":[],"messages":[{"role":"user","content":"a","content":"b"}]}'
    assert [message.content for message in read(data)] == ["b"]


@pytest.mark.parametrize("choice", ["auto", "required", None, {"type": "function", "function": {"name": "f"}}])
def test_tool_choice_keeps_the_tools(choice: Any) -> None:
    request = parse(tools=[{"name": "f"}], tool_choice=choice)
    assert request.tools == ({"type": "function", "function": {"name": "f"}},)
    assert request.tools_raw == b'[{"name": "f"}]'


@pytest.mark.parametrize(
    "fields", [{"tools": None}, {"tools": []}, {}, {"tools": [{"name": "f"}], "tool_choice": "none"}]
)
def test_no_tools(fields: dict[str, Any]) -> None:
    request = parse(**fields)
    assert request.tools == ()
    assert request.tools_raw == b""


def test_a_tool_keeps_the_order_of_its_keys() -> None:
    spec = {"function": {"z": 1, "name": "f", "a": {"y": 1, "b": 2}}, "type": "function", "cache": {}}
    (kept,) = parse(tools=[spec]).tools
    assert json.dumps(kept) == json.dumps(spec)


def test_a_flat_tool_is_wrapped() -> None:
    (tool,) = parse(tools=[{"type": "function", "name": "f", "parameters": {}}]).tools
    assert tool == {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_a_tool_may_nest_up_to_the_limit() -> None:
    assert len(parse(tools=[{"function": {"name": "f", "parameters": nested(MAX_DEPTH - 2)}}]).tools) == 1


@pytest.mark.parametrize("asked", [MAX_TOKENS + 1, 1 << 70])
def test_an_oversized_output_limit_is_clamped(asked: int) -> None:
    assert parse(max_tokens=asked).sampling.max_tokens == MAX_TOKENS


def test_nulls_leave_the_choice_to_the_server() -> None:
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "stop", "n")
    flags = ("stream", "stream_options", "logprobs", "return_token_ids", "tools", "tool_choice", "functions")
    assert parse(**dict.fromkeys((*names, *flags))).sampling == parse().sampling


def test_arguments_that_are_not_json_are_kept() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{oops"}}
    assert read(body(messages=assistant(tool_calls=[call])))[1].tool_calls == (ToolCall("c", "f", "{oops"),)


def test_images_keep_their_place_among_texts() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}},
        {"type": "image_url", "image_url": "https://example.org/x.png"},
        {"type": "text", "text": "c"},
    ]
    message = parse(messages=[{"role": "user", "content": content}]).messages.parse(0)
    assert message.content == "abc"
    shown, fetched = image_from_bytes("image/png", b"hi"), image_from_url("https://example.org/x.png")
    assert message.parts == (Text("ab"), shown, fetched, Text("c"))
    again = parse(messages=[{"role": "user", "content": content}]).messages.parse(0)
    assert message_key(again) == message_key(message)
    moved = parse(messages=[{"role": "user", "content": content[::-1]}]).messages.parse(0)
    assert message_key(moved) != message_key(message)


@pytest.mark.parametrize("head", ["data:", "data:image/png;", "data:image/png"])
@pytest.mark.parametrize("filler", ["a", ";"])
def test_a_hostile_address_is_refused_at_once(head: str, filler: str) -> None:
    part = {"type": "image_url", "image_url": head + filler * (8 << 20)}
    request = parse(**said(part))
    began = time.process_time()
    with pytest.raises(RequestError, match="must be an http or https address"):
        request.messages.parse(0)
    assert time.process_time() - began < 0.5
