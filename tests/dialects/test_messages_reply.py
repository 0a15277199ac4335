"""Anthropic Messages replies, streamed and not: blocks, stop reasons, usage, errors, models, and the end of a
stream."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from outrider.dialects.base import Completion, ModelRequest, Opening, StreamWriter, WireCall
from outrider.dialects.messages import MESSAGES_DIALECT
from outrider.dialects.messages.reply import MODELS, input_json
from outrider.errors import (
    Conflict,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    NotFound,
    OutriderError,
    Overflow,
    RequestError,
    ServiceError,
    TooLarge,
    Unauthorized,
)
from outrider.messages import Delta, Message, Role, ToolCall
from outrider.trajectory import FinishReason
from support.later import anthropic

DIALECT = MESSAGES_DIALECT
OPENING = Opening(id="1", created=1, model="m", prompt_tokens=7)
DONE = Completion(
    id="1",
    created=1,
    model="m",
    reply=Message(role=Role.ASSISTANT, content="Hi"),
    finish=FinishReason.STOP,
    prompt_tokens=7,
    completion_tokens=2,
)
CALLING = Message(role=Role.ASSISTANT, tool_calls=(ToolCall("c", "f", "{}"),))


class Limited(RequestError):
    code = "limited_in_test_messages_reply"
    http_status = 429


class Forbidden(RequestError):
    code = "forbidden_in_test_messages_reply"
    http_status = 403


class Overloaded(EngineError):
    code = "overloaded_in_test_messages_reply"
    http_status = 529


def asked(**fields: Any) -> ModelRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return DIALECT.parse(WireCall("POST", "/v1/messages"), json.dumps(body).encode(), {})


def whole(completion: Completion, **fields: Any) -> Any:
    return json.loads(DIALECT.reply(asked(**fields), completion))


def changed(**fields: Any) -> Completion:
    return msgspec.structs.replace(DONE, **fields)


def events(written: bytes) -> list[dict[str, Any]]:
    """The payloads of a stream. Checks that the name of each event is the payload's type."""
    payloads = []
    for event in written.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        payloads.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {payloads[-1]['type']}"
    return payloads


def opened(**fields: Any) -> StreamWriter:
    writer = DIALECT.stream(asked(**fields))
    writer.open(OPENING)
    return writer


def test_the_cached_part_of_a_prompt_is_counted_apart() -> None:
    usage = {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 2}
    done = changed(cached_tokens=4)
    assert whole(done)["usage"] == usage
    assert events(opened().close(done))[-2]["usage"] == usage
    assert events(DIALECT.stream(asked()).open(OPENING))[0]["message"]["usage"]["input_tokens"] == 7


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "end_turn"),
        ({"reply": CALLING}, "tool_use"),
        ({"finish": FinishReason.LENGTH}, "max_tokens"),
        ({"finish": FinishReason.LENGTH, "reply": CALLING}, "max_tokens"),
        ({"finish": FinishReason.ABORT}, "max_tokens"),
    ],
)
def test_stop_reasons(fields: dict[str, Any], reason: str) -> None:
    done = changed(**fields)
    assert (whole(done)["stop_reason"], whole(done)["stop_sequence"]) == (reason, None)
    assert events(opened().close(done))[-2]["delta"] == {"stop_reason": reason, "stop_sequence": None}


@pytest.mark.parametrize(
    ("fields", "stop"),
    [
        ({"stop_match": "STOP"}, ("stop_sequence", "STOP")),
        ({"stop_match": "€"}, ("stop_sequence", "€")),
        ({"stop_match": "something else"}, ("end_turn", None)),
        ({"stop_match": 5}, ("end_turn", None)),
        ({}, ("end_turn", None)),
        ({"stop_match": "STOP", "reply": CALLING}, ("tool_use", None)),
        ({"stop_match": "STOP", "finish": FinishReason.LENGTH}, ("max_tokens", None)),
    ],
)
def test_the_sequence_that_ended_a_reply(fields: dict[str, Any], stop: tuple[str, str | None]) -> None:
    done = changed(**fields)
    got = whole(done, stop_sequences=["STOP", "€"])
    assert (got["stop_reason"], got["stop_sequence"]) == stop
    streamed = events(opened(stop_sequences=["STOP", "€"]).close(done))[-2]["delta"]
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == stop


@pytest.mark.parametrize(
    ("arguments", "input"),
    [
        ('{"a": [1.0], "b": "\\u00e9"}', {"a": [1.0], "b": "é"}),
        ("{}", {}),
        ("", {}),
        (" \n", {}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('{"a": "\\ud800"}', {"INVALID_JSON": '{"a": "\\ud800"}'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("null", {"INVALID_JSON": "null"}),
        ('"ls"', {"INVALID_JSON": '"ls"'}),
        ("ls -l", {"INVALID_JSON": "ls -l"}),
        ('{"INVALID_JSON": "x"}', {"INVALID_JSON": '{"INVALID_JSON": "x"}'}),
        ('{"INVALID_JSON": 1}', {"INVALID_JSON": 1}),
        ('{"INVALID_JSON": "x", "a": 1}', {"INVALID_JSON": "x", "a": 1}),
        ("[" * 100_000, {"INVALID_JSON": "[" * 100_000}),
    ],
)
def test_arguments_become_an_object(arguments: str, input: Any) -> None:
    assert json.loads(input_json(arguments)) == input
    done = changed(reply=Message(role=Role.ASSISTANT, tool_calls=(ToolCall("c", "f", arguments),)))
    assert whole(done)["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": input}]


def test_blocks_follow_each_other_in_a_stream() -> None:
    writer = DIALECT.stream(asked())
    written = writer.ping + writer.open(OPENING)
    for delta in (
        Delta(reasoning="a"),
        Delta(ids=[1]),
        Delta(reasoning="b", text="c\u2028"),
        Delta(text="d"),
        Delta(reasoning="e"),
    ):
        written += writer.delta(delta)
    got = events(written + writer.close(changed(reply=CALLING)))
    assert [(event["type"], event.get("index")) for event in got] == [
        ("ping", None),
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]
    deltas = [event["delta"] for event in got if event["type"] == "content_block_delta"]
    kinds = [delta["type"].removesuffix("_delta") for delta in deltas]
    assert kinds == ["thinking", "thinking", "signature", "text", "text", "thinking", "signature", "input_json"]
    assert deltas[2]["signature"] != deltas[6]["signature"]


def test_a_signature_is_that_of_the_text_however_it_came() -> None:
    def signature(*parts: str) -> str:
        writer = opened()
        for part in parts:
            writer.delta(Delta(reasoning=part))
        found: str = events(writer.close(DONE))[0]["delta"]["signature"]
        return found

    done = changed(reply=Message(role=Role.ASSISTANT, reasoning="abc"))
    assert signature("abc") == signature("a", "bc") == whole(done)["content"][0]["signature"] != signature("abd")


def test_an_empty_reply_has_a_block() -> None:
    done = changed(reply=Message(role=Role.ASSISTANT))
    assert whole(done)["content"] == [{"type": "text", "text": ""}]
    assert [event["type"] for event in events(opened().close(done))] == [
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_an_error_ends_a_stream() -> None:
    assert events(opened().error(EngineUnavailable("gone")))[0]["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (RequestError("x: bad", field="x"), 400, "invalid_request_error", "x: bad"),
        (Unauthorized("who?"), 401, "authentication_error", "who?"),
        (Forbidden("no"), 403, "permission_error", "no"),
        (NotFound("where?"), 404, "not_found_error", "where?"),
        (Conflict("busy"), 409, "invalid_request_error", "busy"),
        (TooLarge("big"), 413, "request_too_large", "big"),
        (Limited("slow", hint="wait"), 429, "rate_limit_error", "slow (wait)"),
        (ServiceError("\ud800"), 500, "api_error", "\\ud800"),
        (EngineError("bad"), 502, "api_error", "bad"),
        (EngineUnavailable("gone"), 503, "overloaded_error", "gone"),
        (Overloaded("full"), 529, "overloaded_error", "full"),
        (
            ContextOverflow("the context of 256 has no room for 300", overflow=Overflow(300, 256)),
            400,
            "invalid_request_error",
            "prompt is too long: 300 tokens > 256 maximum",
        ),
        (ContextOverflow("no room"), 400, "invalid_request_error", "prompt is too long: no room"),
        (ContextOverflow("404: at most 9"), 400, "invalid_request_error", "prompt is too long: 404: at most 9"),
    ],
)
def test_errors(error: OutriderError, status: int, kind: str, message: str) -> None:
    told = DIALECT.error(error)
    assert error.http_status == status
    assert told == {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
    if status != 413:  # the SDK's types lack this error, which is documented
        anthropic.types.ErrorResponse.model_validate_json(json.dumps(told), strict=True)


def test_a_count() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":""}]}'
    request = DIALECT.parse(WireCall("POST", "/v1/messages/count_tokens"), body, {})
    assert len(request.messages) == 1
    assert DIALECT.count(12) == {"input_tokens": 12}


@pytest.mark.parametrize("context", [None, 4096])
def test_models(context: int | None) -> None:
    listed = json.loads(DIALECT.models(WireCall("GET", MODELS), {"a": 512, "b/c": context}))
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "a", "b/c")
    one = json.loads(DIALECT.models(WireCall("GET", f"{MODELS}/b/c"), {"a": 512, "b/c": context}))
    assert one == listed["data"][1]
    assert anthropic.types.ModelInfo.model_validate_json(json.dumps(one), strict=True).max_input_tokens == context
    with pytest.raises(NotFound):
        DIALECT.models(WireCall("GET", f"{MODELS}/c"), {"a": context})
    empty = json.loads(DIALECT.models(WireCall("GET", MODELS), {}))
    assert empty == {"data": [], "has_more": False, "first_id": None, "last_id": None}
