"""Errors are the same after their records were written and read, and each error class has its own code."""

from __future__ import annotations

import msgspec
import pytest

from outrider.errors import (
    Boundary,
    ContextOverflow,
    ErrorRecord,
    OutriderError,
    Overflow,
    ServiceError,
    error_from,
    record_of,
)
from outrider.sessions.calls.limits import LimitReached


def every_error(kind: type[OutriderError] = OutriderError) -> list[type[OutriderError]]:
    """Return all error classes that have their own code. Outside of its process, an error of any other class becomes an
    error of the more general class whose code it uses."""
    found = [child for direct in kind.__subclasses__() for child in (direct, *every_error(direct))]
    return [child for child in found if "code" in vars(child)]


@pytest.mark.parametrize("kind", [kind for kind in every_error() if kind is not LimitReached])
def test_an_error_survives_its_record(kind: type[OutriderError]) -> None:
    error = kind("what happened", hint="what to do", field="task.x", log_tail="the end")
    again = error_from(error.record())
    assert type(again) is kind
    assert again.record() == error.record()


@pytest.mark.parametrize("overflow", [Overflow(300, 256), None])
def test_the_numbers_of_an_overflow_survive_its_record(overflow: Overflow | None) -> None:
    error = ContextOverflow("x" * 10_000, overflow=overflow)
    again = error_from(msgspec.json.decode(msgspec.json.encode(error.record()), type=ErrorRecord))
    assert isinstance(again, ContextOverflow)
    assert again.overflow == overflow
    assert b"overflow" not in msgspec.json.encode(ServiceError("x").record())


def test_codes_tell_errors_apart() -> None:
    codes = [kind.code for kind in every_error()]
    assert len(codes) == len(set(codes))


def test_a_record_from_a_newer_version_is_still_an_error() -> None:
    record = ServiceError("x").record()
    assert type(error_from(type(record)(boundary=Boundary.ENGINE, code="from_the_future", message="x"))) is ServiceError


def test_a_bug_is_recorded_as_one() -> None:
    record = record_of(ZeroDivisionError("division by zero"))
    assert (record.code, record.retryable) == ("internal_error", True)
    assert "ZeroDivisionError" in record.message
