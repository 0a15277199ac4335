"""The errors that the adapters make from a server's refusals and from error events."""

from __future__ import annotations

import orjson
import pytest

from outrider.engines.http.failures import UNKNOWN_STATUS, Sizes, StatusFailure, failure_of_event, translate
from outrider.errors import ContextOverflow, EngineError, EngineRejected, EngineUnavailable, Overflow

SIZED = Sizes(prompt=1100, output=10)
LIMITED = Sizes(prompt=1100, output=10, context=1024)


@pytest.mark.parametrize(
    ("status", "message", "sizes", "expected"),
    [
        (400, "maximum context length is 1024 tokens, you requested 1110 tokens", SIZED, ContextOverflow),
        (400, "The decoder prompt (length 1100) is longer than 1024", SIZED, ContextOverflow),
        (400, "whatever it says", LIMITED, ContextOverflow),
        (413, "whatever it says", LIMITED, ContextOverflow),
        (400, "1100 is not a temperature", SIZED, EngineRejected),
        (400, "top_p must be in 0..1, got 7", Sizes(prompt=10, output=10, context=1024), EngineRejected),
        (400, "limit 1024, your messages have 2048", Sizes(context=1024), ContextOverflow),
        (400, "your messages are too clever", Sizes(context=1024), EngineRejected),
        (401, "no key", SIZED, EngineRejected),
        (404, "no model", SIZED, EngineRejected),
        (422, "bad body", Sizes(prompt=3, output=3), EngineRejected),
        (429, "slow down", LIMITED, EngineUnavailable),
        (500, "oh", LIMITED, EngineUnavailable),
        (503, "paused", SIZED, EngineUnavailable),
    ],
)
def test_table(status: int, message: str, sizes: Sizes, expected: type[EngineError]) -> None:
    body = orjson.dumps({"error": {"message": message, "code": status}})
    error = translate(StatusFailure(status, body), "e", sizes)
    assert type(error) is expected
    assert message in error.message


@pytest.mark.parametrize(
    ("sizes", "overflow"),
    [
        (LIMITED, Overflow(1100, 1024)),
        (Sizes(prompt=1024, output=1, context=1024), Overflow(1024, 1024)),
        (Sizes(prompt=1000, output=100, context=1024), None),
        (Sizes(prompt=1100, output=10), None),
    ],
)
def test_an_overflow_has_the_numbers_of_a_prompt_that_fills_the_context(
    sizes: Sizes, overflow: Overflow | None
) -> None:
    body = orjson.dumps({"error": {"message": "1100 is over 1024", "code": 400}})
    error = translate(StatusFailure(400, body), "e", sizes)
    assert isinstance(error, ContextOverflow)
    assert error.overflow == overflow


def test_openai_names_its_overflow() -> None:
    body = orjson.dumps({"error": {"message": "too long", "code": "context_length_exceeded"}})
    assert type(translate(StatusFailure(400, body), "e")) is ContextOverflow


DEEP = b'{"error": ' + b"[" * 500 + b"]" * 500 + b"}"
"""orjson can read this, but not write it."""


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"detail": [{"loc": ["x"]}]}', b"null", b'"words"', b"[1]", DEEP])
def test_any_body_is_quoted(body: bytes) -> None:
    error = translate(StatusFailure(404, body), "e")
    assert type(error) is EngineRejected
    assert error.hint


@pytest.mark.parametrize(
    ("event", "status", "expected"),
    [
        ({"message": "no", "code": 400}, 400, EngineRejected),
        ({"message": "no", "code": "503"}, 503, EngineUnavailable),
        ({"message": "no", "retryable": True}, UNKNOWN_STATUS, EngineUnavailable),
        ({"message": "no"}, UNKNOWN_STATUS, EngineError),
        ({"message": "input of 1100 tokens is over 1024"}, UNKNOWN_STATUS, ContextOverflow),
        ("just words", UNKNOWN_STATUS, EngineError),
        (orjson.loads(DEEP), UNKNOWN_STATUS, EngineError),
        ({"message": "no", "code": "9" * 5000}, UNKNOWN_STATUS, EngineError),
        ({"message": "no", "code": 1 << 60}, UNKNOWN_STATUS, EngineError),
    ],
)
def test_events(event: object, status: int, expected: type[EngineError]) -> None:
    failure = failure_of_event(event)
    assert failure.status == status
    assert type(translate(failure, "e", SIZED)) is expected
