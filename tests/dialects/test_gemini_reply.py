"""Replies, streams, errors, models and routes of the Google dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.dialects.base import Action, Opening, WireCall
from outrider.errors import (
    ContextOverflow,
    EngineUnavailable,
    NotFound,
    OutriderError,
    RequestError,
    ServiceError,
    TooLarge,
    Unauthorized,
)
from outrider.lifecycle import StopReason
from outrider.messages import Delta, ToolCall
from outrider.sessions.calls.limits import LimitReached
from outrider.sessions.conversation import RunEnded
from outrider.trajectory import FinishReason
from support.gemini import ARRAY, DIALECT, EVENTS, chunks, completed, read, said, stream, text, user
from support.wire import action_of

HI = user(text("hi"))
THOUGHTS: dict[str, Any] = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
FULL = said("Fine.", reasoning="Hm.", tool_calls=(ToolCall("call_a", "bash", '{ "cmd" : "l\\ns" }'),))
CALL_PART = {
    "functionCall": {"id": "call_a", "name": "bash", "args": {"cmd": "l\ns"}},
    "thoughtSignature": "b3V0cmlkZXI6Y2FsbF9h",
}


def candidate(reply: Any) -> Any:
    [only] = reply["candidates"]
    return only


def test_a_whole_reply() -> None:
    reply = json.loads(DIALECT.reply(read(HI, **THOUGHTS), completed(FULL)))
    assert candidate(reply) == {
        "content": {"parts": [{"text": "Hm.", "thought": True}, {"text": "Fine."}, CALL_PART], "role": "model"},
        "finishReason": "STOP",
        "index": 0,
    }
    assert reply["usageMetadata"] == {
        "promptTokenCount": 7,
        "candidatesTokenCount": 3,
        "totalTokenCount": 10,
        "cachedContentTokenCount": 2,
    }
    assert (reply["modelVersion"], reply["responseId"]) == ("m", "r1")


def test_thoughts_are_for_those_who_ask() -> None:
    reply = json.loads(DIALECT.reply(read(HI), completed(FULL)))
    assert candidate(reply)["content"]["parts"] == [{"text": "Fine."}, CALL_PART]


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.ABORT])
def test_a_reply_cut_off_before_it_said_anything(finish: FinishReason) -> None:
    reply = json.loads(DIALECT.reply(read(HI), completed(said(), finish)))
    assert candidate(reply)["content"]["parts"] == [{"text": ""}]
    assert candidate(reply)["finishReason"] == "MAX_TOKENS"
    assert reply["usageMetadata"]["thoughtsTokenCount"] == 0


STEPS = [Delta(reasoning="Hm"), Delta(reasoning=".", text="Fi"), Delta(ids=[4]), Delta(text="ne\u2028\n.")]


@pytest.mark.parametrize("call", [EVENTS, ARRAY])
def test_a_stream_chunk_by_chunk(call: WireCall) -> None:
    done = completed(said("Fine\u2028\n.", reasoning="Hm.", tool_calls=FULL.tool_calls))
    written = stream(read(HI, call=call, **THOUGHTS), STEPS, done)
    got = chunks(written, events=call is EVENTS)
    assert [candidate(chunk)["content"]["parts"] for chunk in got] == [
        [{"text": "Hm", "thought": True}],
        [{"text": ".", "thought": True}],
        [{"text": "Fi"}],
        [{"text": "ne\u2028\n."}],
        [CALL_PART],
    ]
    assert [candidate(chunk).get("finishReason") for chunk in got] == [None, None, None, None, "STOP"]
    assert [chunk.get("usageMetadata", {}).get("totalTokenCount") for chunk in got] == [None, None, None, None, 10]
    assert {(chunk["modelVersion"], chunk["responseId"]) for chunk in got} == {("m", "r1")}


def test_what_a_stream_is_called() -> None:
    assert DIALECT.stream(read(HI, call=EVENTS)).content_type == "text/event-stream; charset=utf-8"
    assert DIALECT.stream(read(HI, call=ARRAY)).content_type.startswith("application/json")


@pytest.mark.parametrize("call", [EVENTS, ARRAY])
@pytest.mark.parametrize("steps", [STEPS, []])
@pytest.mark.parametrize("opened", [True, False])
def test_a_stream_that_breaks_says_so_and_nothing_more(call: WireCall, steps: list[Delta], opened: bool) -> None:
    writer = DIALECT.stream(read(HI, call=call))
    written = writer.ping
    if opened:
        written += writer.open(Opening(id="r1", created=1, model="m"))
        written += b"".join(map(writer.delta, steps))
    written += writer.error(EngineUnavailable("the engine went away"))
    got = chunks(written, events=call is EVENTS)
    assert got[-1]["error"]["message"] == "the engine went away"
    assert got[-1]["error"]["status"] == "UNAVAILABLE"


ERRORS: list[tuple[OutriderError, int, str]] = [
    (RequestError("x"), 400, "INVALID_ARGUMENT"),
    (Unauthorized("x"), 401, "UNAUTHENTICATED"),
    (NotFound("x"), 404, "NOT_FOUND"),
    (RunEnded("x"), 410, "FAILED_PRECONDITION"),
    (TooLarge("x"), 413, "INVALID_ARGUMENT"),
    (LimitReached(StopReason.MAX_TURNS), 429, "RESOURCE_EXHAUSTED"),
    (ServiceError("x"), 500, "INTERNAL"),
    (EngineUnavailable("x"), 503, "UNAVAILABLE"),
]


@pytest.mark.parametrize(("error", "status", "word"), ERRORS, ids=[word for _, _, word in ERRORS])
def test_errors(error: OutriderError, status: int, word: str) -> None:
    told = DIALECT.error(error)["error"]
    assert (error.http_status, told["code"], told["status"]) == (status, status, word)
    assert told["details"][0]["reason"] == error.code.upper()


def test_an_error_names_its_field_and_what_to_do() -> None:
    told = DIALECT.error(RequestError("wrong", field="contents[0]", hint="put it right"))["error"]
    assert told["message"] == "wrong (put it right)"
    assert told["details"][1]["fieldViolations"] == [{"field": "contents[0]", "description": "wrong"}]


def test_an_overflow_is_told_in_google_s_words() -> None:
    message = DIALECT.error(ContextOverflow("300 tokens do not fit in 256"))["error"]["message"]
    assert message.startswith("The input token count exceeds the maximum number of tokens allowed")


@pytest.mark.parametrize(
    ("method", "path", "action"),
    [
        ("POST", "/v1beta/models/m:generateContent", Action.GENERATE),
        ("POST", "/v1beta/models/a/b:streamGenerateContent", Action.GENERATE),
        ("POST", "/v1alpha/models/m:countTokens", Action.COUNT_TOKENS),
        ("POST", "/v1/models/m:generateContent", Action.GENERATE),
        ("GET", "/v1beta/models", Action.MODELS),
        ("GET", "/v1alpha/models/a/b", Action.MODEL),
        ("POST", "/v1/models/m", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/m", None),
        ("POST", "/v1/chat/completions", None),
        ("POST", "/v1beta", None),
        ("POST", "/v1/embeddings", None),
    ],
)
def test_routes(method: str, path: str, action: Action | None) -> None:
    assert action_of(DIALECT, WireCall(method, path)) is action


def test_the_list_of_v1_is_google_s_for_a_key_sent_google_s_way() -> None:
    headers = [(b"x-goog-api-key", b"k")]
    assert action_of(DIALECT, WireCall("GET", "/v1/models", b"", headers)) is Action.MODELS
    assert action_of(DIALECT, WireCall("GET", "/v1/models/m", b"", headers)) is Action.MODEL
    assert action_of(DIALECT, WireCall("GET", "/v1/modelsx", b"", headers)) is None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1beta/models/m:embedContent"),
        ("POST", "/v1/models/m:batchGenerateContent"),
        ("POST", "/v1beta/models/m"),
        ("POST", "/v1beta/models/:generateContent"),
        ("POST", "/v1beta/cachedContents"),
        ("GET", "/v1beta/files"),
        ("PUT", "/v1beta/models/m:generateContent"),
        ("GET", "/v1alpha/"),
    ],
)
def test_a_route_that_is_not_served_is_not_found(method: str, path: str) -> None:
    assert action_of(DIALECT, WireCall(method, path)) == "not served"


def test_models() -> None:
    listed = json.loads(DIALECT.models(WireCall("GET", "/v1beta/models"), {"a/b": 4096, "c": None}))
    assert [entry["name"] for entry in listed["models"]] == ["models/a/b", "models/c"]
    assert listed["models"][0]["inputTokenLimit"] == 4096
    one = json.loads(DIALECT.models(WireCall("GET", "/v1beta/models/a/b"), {"a/b": None}))
    assert (one["name"], "inputTokenLimit" in one) == ("models/a/b", False)
    with pytest.raises(NotFound):
        DIALECT.models(WireCall("GET", "/v1beta/models/x"), {"a/b": None})
