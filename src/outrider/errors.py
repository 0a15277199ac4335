"""The error tree, and the record an error becomes.

    OutriderError                     boundary    http  retried
    ├── RequestError                  request     400   no      the caller sent something wrong
    │   ├── InvalidField              request     422   no      a named field is wrong
    │   ├── Unauthorized              request     401   no
    │   ├── NotFound                  request     404   no
    │   ├── Conflict                  request     409   no
    │   └── TooLarge                  request     413   no
    ├── EngineError                   engine      502   yes
    │   ├── ContextOverflow           engine      400   no      prompt does not fit the model
    │   ├── EngineRejected            engine      400   no      the engine refused the request itself
    │   ├── EngineUnavailable         engine      503   yes     no engine, or it went away
    │   ├── EngineMisbehaved          engine      502   yes     it sent what no engine may
    │   └── ModelMismatch             engine      409   no      engine and tokenizer are of different families
    ├── RuntimeFailure                runtime     500   yes     the sandbox failed
    │   └── RuntimeUnavailable        runtime     501   no      this machine cannot run that kind
    ├── HarnessError                  harness     500   yes     the agent program failed
    │   └── HarnessUnavailable        harness     501   no      its program is not installed
    ├── EvaluatorError                evaluator   500   yes
    └── ServiceError                  service     500   yes

A rollout that fails is data: the error is attributed to the boundary it crossed, recorded once as an
`ErrorRecord`, and never turned into a reward. This module knows nothing of HTTP beyond the status numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import ClassVar, overload

import msgspec


class Boundary(StrEnum):
    """The seam a failure crossed. Ranked: when several fail in one session, the first listed is the cause."""

    ENGINE = "engine"
    REQUEST = "request"
    RUNTIME = "runtime"
    HARNESS = "harness"
    EVALUATOR = "evaluator"
    SERVICE = "service"


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An error at rest: in the store, in results, in HTTP replies.

    `code` is the class name in snake case, `hint` says what to do next, `log_tail` is the end of the failing
    program's own output (at most a few kB).
    """

    boundary: Boundary
    code: str
    message: str
    hint: str | None = None
    field: str | None = None
    log_tail: str | None = None
    retryable: bool = False


class OutriderError(Exception):
    """Base of every error Outrider raises on purpose.

    `inside`: what failed did so in a sandbox, of a command or of the sandbox itself. Once an agent has been there, it
    may be what the agent did (see sessions/grading.py).
    """

    boundary: ClassVar[Boundary] = Boundary.SERVICE
    code: ClassVar[str] = "outrider_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        field: str | None = None,
        log_tail: str | None = None,
        inside: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.field = field
        self.log_tail = log_tail
        self.inside = inside

    def record(self) -> ErrorRecord:
        return ErrorRecord(
            boundary=self.boundary,
            code=self.code,
            message=plain(self.message),
            hint=plain(self.hint),
            field=plain(self.field),
            log_tail=plain(self.log_tail),
            retryable=self.retryable,
        )


class RequestError(OutriderError):
    boundary = Boundary.REQUEST
    code = "bad_request"
    http_status = 400


class InvalidField(RequestError):
    code = "invalid_field"
    http_status = 422


class Unauthorized(RequestError):
    code = "unauthorized"
    http_status = 401


class NotFound(RequestError):
    code = "not_found"
    http_status = 404


class Conflict(RequestError):
    code = "conflict"
    http_status = 409


class TooLarge(RequestError):
    code = "too_large"
    http_status = 413


class EngineError(OutriderError):
    boundary = Boundary.ENGINE
    code = "engine_error"
    http_status = 502
    retryable = True


class ContextOverflow(EngineError):
    code = "context_overflow"
    http_status = 400
    retryable = False


class EngineRejected(EngineError):
    code = "engine_rejected"
    http_status = 400
    retryable = False


class EngineUnavailable(EngineError):
    code = "engine_unavailable"
    http_status = 503


class EngineMisbehaved(EngineError):
    code = "engine_misbehaved"


class ModelMismatch(EngineError):
    code = "model_mismatch"
    http_status = 409
    retryable = False


class RuntimeFailure(OutriderError):
    boundary = Boundary.RUNTIME
    code = "runtime_failure"
    retryable = True


class RuntimeUnavailable(RuntimeFailure):
    code = "runtime_unavailable"
    http_status = 501
    retryable = False


class HarnessError(OutriderError):
    boundary = Boundary.HARNESS
    code = "harness_error"
    retryable = True


class HarnessUnavailable(HarnessError):
    code = "harness_unavailable"
    http_status = 501
    retryable = False


class EvaluatorError(OutriderError):
    boundary = Boundary.EVALUATOR
    code = "evaluator_error"
    retryable = True


class ServiceError(OutriderError):
    code = "service_error"
    retryable = True


def record_of(error: BaseException) -> ErrorRecord:
    """The record of any exception; one we did not raise on purpose is a bug of ours and says so."""
    if isinstance(error, OutriderError):
        return error.record()
    return ErrorRecord(
        boundary=Boundary.SERVICE,
        code="internal_error",
        message=plain(f"{type(error).__name__}: {error}"),
        hint="this is a bug in Outrider: please report it with the service log",
        retryable=True,
    )


@overload
def plain(said: str) -> str: ...
@overload
def plain(said: str | None) -> str | None: ...
def plain(said: object) -> str | None:
    """What a program said, as it can be stored and sent: what UTF-8 has no bytes for is escaped, such as the halves of
    characters that stand for the odd bytes of a file's name."""
    return None if said is None else str(said).encode("utf-8", "backslashreplace").decode()


def error_from(record: ErrorRecord) -> OutriderError:
    """The exception a record stands for: its own class where that still exists, else a ServiceError."""
    kinds = {kind.code: kind for kind in _kinds(OutriderError) if "code" in vars(kind)}
    kind = kinds.get(record.code, ServiceError)
    return kind(record.message, hint=record.hint, field=record.field, log_tail=record.log_tail)


def _kinds(kind: type[OutriderError]) -> Iterator[type[OutriderError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _kinds(child)
