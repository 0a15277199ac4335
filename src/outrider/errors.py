"""The error tree, and the record of an error.

    OutriderError                     boundary    http  retried
    ├── RequestError                  request     400   no      the caller sent something wrong
    │   ├── InvalidField              request     422   no      a named field is wrong
    │   ├── Unauthorized              request     401   no
    │   ├── Forbidden                 request     403   no      the token's role does not allow it
    │   ├── NotFound                  request     404   no
    │   ├── Conflict                  request     409   no
    │   ├── TooLarge                  request     413   no
    │   └── QuotaExceeded             request     429   no      the token has reached its maximum number of sessions
    ├── EngineError                   engine      502   yes
    │   ├── ContextOverflow           engine      400   no      prompt does not fit the model
    │   ├── EngineRejected            engine      400   no      the engine refused the request itself
    │   ├── EngineUnavailable         engine      503   yes     no engine, or it went away
    │   │   └── EngineSilent          engine      503   yes     no output, far longer than usual
    │   ├── EngineMisbehaved          engine      502   yes     the engine sent an invalid response
    │   └── ModelMismatch             engine      409   no      engine and tokenizer are of different families
    ├── RuntimeFailure                runtime     500   yes     the sandbox failed
    │   └── RuntimeUnavailable        runtime     501   no      this machine cannot run that kind
    ├── HarnessError                  harness     500   yes     the agent program failed
    │   └── HarnessUnavailable        harness     501   no      the agent program is not installed
    ├── EvaluatorError                evaluator   500   yes
    ├── UnreadableTask                service     409   no      a stored task cannot be read, or not with this key
    └── ServiceError                  service     500   yes
        ├── ServiceUnusable           service     500   no      the address, a proxy or the version is wrong
        ├── ServiceStopping           service     503   yes
        ├── StoreUnavailable          service     503   yes
        └── Busy                      service     429   yes     come back later: the caller has too much under way
            └── QueueFull             service     429   yes     too many sessions wait

A rollout that fails is data: its error is attributed to the boundary it crossed, recorded once as an `ErrorRecord`, and
never turned into a reward. The module uses nothing of HTTP but status codes. Invariant: `error_from` turns a record
into an error of the class that the record's `code` names, if this version has the class.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import Any, ClassVar, Self, overload

import msgspec

MAX_TEXT = 8192
"""Maximum characters of an error's message, hint or field in a record."""
LOG_TAIL = 4096
"""Maximum bytes of a failed program's output that the error includes."""
MAX_LOG_TAIL = 65_536
"""Maximum characters of a log's end in a record."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for bytes that cannot be decoded. They include two of Python's own errors: for invalid
UTF-8, and for lists or maps nested too deeply."""


class Boundary(StrEnum):
    """The boundary that a failure crossed. If several failures occur in one session, the order of the rules in
    `sessions/blame.py` decides which failure is reported."""

    ENGINE = "engine"
    REQUEST = "request"
    RUNTIME = "runtime"
    HARNESS = "harness"
    EVALUATOR = "evaluator"
    SERVICE = "service"


CODES_WITHOUT_CLASS = ("internal_error", "expired", "lease_expired")
"""Codes that belong to no class of exceptions: `internal_error` stands for any unexpected exception. The other codes
are used in records that are made without an exception."""

NO_THREAD = "can't start new thread"
"""Text of Python's RuntimeError when no thread can be started."""


class Overflow(msgspec.Struct, frozen=True):
    """The sizes of a prompt and of the context that the prompt does not fit, in tokens. `prompt_tokens` may be a lower
    bound."""

    prompt_tokens: int
    context_tokens: int


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An error as data: in the store, in results, in HTTP replies.

    `code` names the class of the error, `hint` says how to solve the problem, `field` is the path of the wrong field of
    a request, and `log_tail` is the end of the failed program's output (at most 65,536 characters). `overflow` has the
    numbers of a `context_overflow`, if they are known; other records do not have this field.
    """

    boundary: Boundary
    code: str
    message: str
    hint: str | None = None
    field: str | None = None
    log_tail: str | None = None
    retryable: bool = False
    overflow: Overflow | msgspec.UnsetType = msgspec.UNSET


class FailingChore(msgspec.Struct, frozen=True, kw_only=True):
    """Background work that fails and is retried: it has failed `count` times, first at `since` and last at `last`
    (seconds since the epoch). `error` is the error of the last time. `node` is the node of the work, None for the
    service. The work is listed until it succeeds."""

    name: str
    node: str | None = None
    since: float
    last: float
    count: int
    error: str


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose.

    `inside`: the failure happened inside a sandbox. If an agent has run there, the agent may have caused the failure
    (see sessions/grading.py).
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

    def replace(self, **changes: str | bool | None) -> Self:
        """Return a copy whose attributes have the values in `changes`. The error itself is unchanged, because it may
        have been raised already."""
        other = type(self).__new__(type(self), *self.args)
        vars(other).update(vars(self) | changes)
        if "message" in changes:
            other.args = (changes["message"],)
        other.__cause__, other.__traceback__ = self.__cause__, self.__traceback__
        return other

    def record(self) -> ErrorRecord:
        return bounded(
            ErrorRecord(
                boundary=self.boundary,
                code=self.code,
                message=storable(self.message),
                hint=storable(self.hint),
                field=storable(self.field),
                log_tail=storable(self.log_tail),
                retryable=self.retryable,
            )
        )


def renamed_field(old: str, new: str) -> AbstractContextManager[None]:
    """Within the block, an error about the field `old`, or about a field below `old`, names the field `new` instead. So
    one check of a sandbox, for example, serves all fields of a request that have a sandbox."""
    return renamed_fields(((old, new),))


@contextmanager
def renamed_fields(names: Iterable[tuple[str, str]], *, whole: Collection[str] = ()) -> Iterator[None]:
    """Like `renamed_field`, for pairs of an old and a new name. The first pair that matches is used. If the new name is
    in `whole`, the error names only the new name, without the rest of the path below it."""
    try:
        yield
    except OutriderError as error:
        field = error.field or ""
        for old, new in names:
            if re.match(rf"{re.escape(old)}\b", field):
                named = new if new in whole else new + field.removeprefix(old)
                raise error.replace(field=named) from error.__cause__
        raise


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


class Forbidden(RequestError):
    code = "forbidden"
    http_status = 403


class NotFound(RequestError):
    code = "not_found"
    http_status = 404


class Conflict(RequestError):
    code = "conflict"
    http_status = 409


class TooLarge(RequestError):
    code = "too_large"
    http_status = 413


class QuotaExceeded(RequestError):
    code = "quota_exceeded"
    http_status = 429


class EngineError(OutriderError):
    boundary = Boundary.ENGINE
    code = "engine_error"
    http_status = 502
    retryable = True


class ContextOverflow(EngineError):
    """The prompt does not fit the model's context. `overflow` has the numbers, if they are known."""

    code = "context_overflow"
    http_status = 400
    retryable = False

    def __init__(self, message: str, *, overflow: Overflow | None = None, **about: Any) -> None:
        super().__init__(message, **about)
        self.overflow = overflow

    def record(self) -> ErrorRecord:
        return msgspec.structs.replace(super().record(), overflow=self.overflow or msgspec.UNSET)


class EngineRejected(EngineError):
    code = "engine_rejected"
    http_status = 400
    retryable = False


class EngineUnavailable(EngineError):
    code = "engine_unavailable"
    http_status = 503


class EngineSilent(EngineUnavailable):
    code = "engine_silent"


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


class UnreadableTask(OutriderError):
    """A stored task cannot be read. Reading it again does not help, so this is not a `ServiceError`, which would be
    retried."""

    code = "unreadable_task"
    http_status = 409


class ServiceError(OutriderError):
    code = "service_error"
    retryable = True


class ServiceUnusable(ServiceError):
    """A client cannot use the service, and another try does not help: the address, a proxy in front of the service, a
    certificate or a version is wrong."""

    code = "service_unusable"
    retryable = False


class ServiceStopping(ServiceError):
    code = "service_stopping"
    http_status = 503


class StoreUnavailable(ServiceError):
    code = "store_unavailable"
    http_status = 503


class Busy(ServiceError):
    """The caller has too much under way. `retry_after` is the number of seconds to wait before the next try: the header
    Retry-After of the reply."""

    code = "busy"
    http_status = 429

    def __init__(self, message: str, *, retry_after: float = 1.0, **about: Any) -> None:
        super().__init__(message, **about)
        self.retry_after = retry_after


class QueueFull(Busy):
    code = "queue_full"


def lacks_means(error: BaseException) -> bool:
    """Return True if the cause can be outside the code: disk, descriptors, memory or threads are used up, a file or a
    connection fails, or the database is out of reach."""
    return isinstance(error, OSError | MemoryError | ServiceError) or (
        isinstance(error, RuntimeError) and str(error) == NO_THREAD
    )


def error_text(error: OutriderError | ErrorRecord) -> str:
    """Return the error's message, followed by the error's hint if there is one. The text can be encoded as UTF-8."""
    return storable(f"{error.message} ({error.hint})" if error.hint else error.message)


def described(error: BaseException) -> str:
    """Return an error as text: the message of an OutriderError, or the class name and the message of any other
    error."""
    if isinstance(error, OutriderError):
        return storable(str(error))
    return storable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def record_of(error: BaseException) -> ErrorRecord:
    """Return the record of any exception. An error for which `lacks_means` is true is recorded as a ServiceError. Any
    other exception that is not an OutriderError is recorded as a bug in Outrider."""
    if isinstance(error, OutriderError):
        return error.record()
    if lacks_means(error):
        hint = "the machine lacks what this says: disk, descriptors (ulimit -n), memory or threads"
        return ServiceError(described(error), hint=hint).record()
    return bounded(
        ErrorRecord(
            boundary=Boundary.SERVICE,
            code="internal_error",
            message=storable(f"{type(error).__name__}: {error}"),
            hint="this is a bug in Outrider: please report it with the service log",
            retryable=True,
        )
    )


def bounded(record: ErrorRecord) -> ErrorRecord:
    """Return the record with its texts cut to MAX_TEXT and MAX_LOG_TAIL: a log keeps its end, every other text its
    beginning. Engines, nodes and plugins can send texts of any length, and every text of an error is searched for
    secrets, stored and shown."""
    code, message, hint, field, tail = record.code, record.message, record.hint, record.field, record.log_tail
    if max(len(code), len(message), len(hint or ""), len(field or "")) <= MAX_TEXT and len(tail or "") <= MAX_LOG_TAIL:
        return record
    return msgspec.structs.replace(
        record,
        code=code[:MAX_TEXT],
        message=message[:MAX_TEXT],
        hint=hint and hint[:MAX_TEXT],
        field=field and field[:MAX_TEXT],
        log_tail=tail and tail[-MAX_LOG_TAIL:],
    )


@overload
def storable(text: str) -> str: ...
@overload
def storable(text: str | None) -> str | None: ...
def storable(text: object) -> str | None:
    """Return a text that can be stored and sent: characters that UTF-8 cannot encode are escaped. Python uses such
    characters (lone surrogates) for the undecodable bytes in file names and program output."""
    return None if text is None else str(text).encode("utf-8", "backslashreplace").decode()


def error_from(record: ErrorRecord) -> OutriderError:
    """Rebuild the exception from its record. A code without a class (of another version) becomes a ServiceError."""
    # A subclass without a code of its own inherits its parent's code, and must not replace the parent here.
    kinds = {kind.code: kind for kind in _subclasses(OutriderError) if "code" in vars(kind)}
    kind = kinds.get(record.code, ServiceError)
    record = bounded(record)
    error = kind(record.message, hint=record.hint, field=record.field, log_tail=record.log_tail)
    if isinstance(error, ContextOverflow):
        error.overflow = record.overflow or None
    return error


def known_codes() -> dict[str, Boundary]:
    """Return the codes that the errors of this process may have, with their boundaries. Records of other processes and
    versions may have other codes."""
    kinds = {kind.code: kind.boundary for kind in _subclasses(OutriderError) if "code" in vars(kind)}
    return kinds | dict.fromkeys(CODES_WITHOUT_CLASS, Boundary.SERVICE)


def _subclasses(kind: type[OutriderError]) -> Iterator[type[OutriderError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)
