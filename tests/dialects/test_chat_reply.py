"""Errors, the model list, and special cases of replies that the golden transcripts do not show."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest

from outrider.dialects.base import Completion, Opening, WireCall
from outrider.dialects.chat import CHAT_DIALECT
from outrider.dialects.chat.reply import UNKNOWN_LOGPROB
from outrider.errors import (
    ContextOverflow,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    InvalidField,
    NotFound,
    OutriderError,
    RequestError,
    ServiceError,
    TooLarge,
    Unauthorized,
)
from outrider.messages import Delta, Message, Role, ToolCall
from outrider.trajectory import FinishReason
from support.later import openai
from support.wire import CALL

TOOL_CALL = ToolCall("c", "f", "{}")
OPENING = Opening(id="1", created=1, model="m")


class Throttled(RequestError):
    code = "throttled"
    http_status = 429


def finished(*calls: ToolCall, **fields: Any) -> Completion:
    fields = {"finish": FinishReason.STOP, "prompt_tokens": 1, "completion_tokens": 1, **fields}
    reply = Message(role=Role.ASSISTANT, content="x", tool_calls=calls)
    return Completion(id="1", created=1, model="m", reply=reply, **fields)


def request(**fields: Any) -> Any:
    return CHAT_DIALECT.parse(CALL, json.dumps({"model": "m", "messages": [{"role": "user"}], **fields}).encode(), {})


def reply(completion: Completion, **fields: Any) -> Any:
    return json.loads(CHAT_DIALECT.reply(request(**fields), completion))


ERRORS = [
    (RequestError("x"), 400, "invalid_request_error", "bad_request"),
    (InvalidField("x"), 422, "invalid_request_error", "invalid_field"),
    (ContextOverflow("x"), 400, "invalid_request_error", "context_length_exceeded"),
    (EngineRejected("x"), 400, "invalid_request_error", "engine_rejected"),
    (Unauthorized("x"), 401, "invalid_request_error", "invalid_api_key"),
    (NotFound("x"), 404, "invalid_request_error", "not_found"),
    (TooLarge("x"), 413, "invalid_request_error", "too_large"),
    (Throttled("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
    (EngineError("x"), 502, "server_error", "engine_error"),
    (EngineUnavailable("x"), 503, "server_error", "engine_unavailable"),
    (ServiceError("x"), 500, "server_error", "service_error"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), ERRORS, ids=[code for *_, code in ERRORS])
def test_an_error_has_its_status_type_and_code(error: OutriderError, status: int, kind: str, code: str) -> None:
    shown = CHAT_DIALECT.error(error)["error"]
    assert (error.http_status, shown["type"], shown["code"], shown["param"]) == (status, kind, code, None)
    assert set(shown) == {"message", "type", "param", "code"}


def test_an_error_says_which_field_and_what_to_do() -> None:
    body = CHAT_DIALECT.error(RequestError("n: only 1", field="n", hint="leave it out"))
    assert body["error"]["param"] == "n"
    assert body["error"]["message"] == "n: only 1 (leave it out)"


@pytest.mark.parametrize("words", ["this model's maximum context length is", "reduce the length of the messages"])
def test_an_overflow_is_worded_as_clients_look_for_it(words: str) -> None:
    body = CHAT_DIALECT.error(ContextOverflow("300 tokens do not fit in 256."))
    message = body["error"]["message"]
    assert re.search(words, message, re.IGNORECASE)
    assert "300 tokens do not fit in 256. Please" in message


def test_an_error_that_names_a_strange_file_can_be_sent() -> None:
    body = CHAT_DIALECT.error(ServiceError("no file \udcff", field="\udcff"))
    assert body["error"]["message"] == "no file \\udcff"


def test_models() -> None:
    call = WireCall("GET", "/v1/models")
    listed = json.loads(CHAT_DIALECT.models(call, {"a": 4096, "b": 8192}))
    assert listed["object"] == "list"
    assert [openai.types.Model.model_validate(model, strict=True).id for model in listed["data"]] == ["a", "b"]
    assert [model["max_model_len"] for model in listed["data"]] == [4096, 8192]
    assert "max_model_len" not in json.loads(CHAT_DIALECT.models(call, {"a": None}))["data"][0]


@pytest.mark.parametrize(
    ("finish", "calls", "said"),
    [
        (FinishReason.STOP, (), "stop"),
        (FinishReason.STOP, (TOOL_CALL,), "tool_calls"),
        (FinishReason.LENGTH, (), "length"),
        (FinishReason.LENGTH, (TOOL_CALL,), "length"),
        (FinishReason.ABORT, (), "length"),
    ],
)
def test_finish_reason(finish: FinishReason, calls: tuple[ToolCall, ...], said: str) -> None:
    assert reply(finished(*calls, finish=finish))["choices"][0]["finish_reason"] == said


def test_logprobs_are_the_engine_s_numbers() -> None:
    numbers = np.array([-0.1, -1 / 3, -5e-324, -123.456789012345678])
    pieces = (b"a", b"\xff", b"", b"b")
    entries = reply(finished(logprobs=numbers, pieces=pieces), logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == numbers.tolist()
    assert [bytes(entry["bytes"]) for entry in entries] == list(pieces)
    assert entries[1]["token"] == "\ufffd"


@pytest.mark.parametrize("number", [-math.inf, math.nan])
def test_a_logprob_that_json_cannot_write_is_marked(number: float) -> None:
    entries = reply(finished(logprobs=np.array([number]), pieces=(b"a",)), logprobs=True)
    assert entries["choices"][0]["logprobs"]["content"][0]["logprob"] == UNKNOWN_LOGPROB


def test_tokens_without_text_are_named_by_id() -> None:
    done = finished(logprobs=np.array([-0.5]), output_ids=np.array([7], dtype=np.int32))
    assert reply(done, logprobs=True)["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:7"


def test_ids_and_logprobs_that_are_not_known_are_null() -> None:
    body = reply(finished(), logprobs=True, return_token_ids=True)
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"], body["choices"][0]["logprobs"]) == (None,) * 3


def test_ids_come_out_of_any_array() -> None:
    strided = np.arange(6, dtype=np.int64)[::2]
    assert reply(finished(prompt_ids=strided), return_token_ids=True)["prompt_token_ids"] == [0, 2, 4]


def test_a_step_that_shows_nothing_sends_nothing() -> None:
    writer = CHAT_DIALECT.stream(request(stream=True))
    writer.open(OPENING)
    assert writer.delta(Delta(ids=[1], logprobs=[-0.5])) == b""


def test_a_stream_can_fail_before_it_opens() -> None:
    sent = CHAT_DIALECT.stream(request(stream=True)).error(EngineUnavailable("gone"))
    assert sent.startswith(b'data: {"error":{"message":"gone"')
    assert sent.endswith(b"data: [DONE]\n\n")
