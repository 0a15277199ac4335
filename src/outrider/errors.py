"""The tree of error classes, and the record of an error.

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
    │   ├── ContextOverflow           engine      400   no      the prompt does not fit the model
    │   ├── EngineRejected            engine      400   no      the engine refused the request as invalid
    │   ├── EngineUnavailable         engine      503   yes     no engine is attached, or it went away
    │   │   └── EngineSilent          engine      503   yes     no output for far longer than usual
    │   ├── EngineMisbehaved          engine      502   yes     the engine sent an invalid response
    │   └── ModelMismatch             engine      409   no      the engine does not fit the tokenizer or the model
    ├── RuntimeFailure                runtime     500   yes     the sandbox failed
    │   └── RuntimeUnavailable        runtime     501   no      this machine cannot run this kind of sandbox
    ├── HarnessError                  harness     500   yes     the agent program failed
    │   └── HarnessUnavailable        harness     501   no      the agent program is not installed
    ├── EvaluatorError                evaluator   500   yes
    ├── UnreadableTask                service     409   no      a stored task is damaged or encrypted with another key
    └── ServiceError                  service     500   yes
        ├── ServiceUnusable           service     500   no      the address, a proxy or the version is wrong
        ├── ServiceStopping           service     503   yes
        ├── StoreUnavailable          service     503   yes
        └── Busy                      service     429   yes     try again later: there is too much to do
            └── QueueFull             service     429   yes     too many sessions wait in the queue

`Boundary` explains the column "boundary". The error of a failed rollout is recorded once, as an `ErrorRecord`, and
never turned into a reward. Invariant: `error_from` turns a record into an error of the class that the record's `code`
names, if this version has the class.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import Any, ClassVar, Self, overload

import msgspec

MAX_TEXT = 8192
"""Maximum characters of the message, hint or field in an error record."""
LOG_TAIL = 4096
"""Maximum bytes of a failed program's output that are attached to its error."""
MAX_LOG_TAIL = 65_536
"""Maximum characters of `ErrorRecord.log_tail`."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for bytes that it cannot decode: its own, Python's UnicodeDecodeError for invalid
UTF-8, and RecursionError for lists or maps that are nested too deeply."""


class Boundary(StrEnum):
    """The part of the system that a failure came from. If a session fails in several parts, the rules in
    `sessions/blame.py` decide which failure is reported."""

    ENGINE = "engine"
    REQUEST = "request"
    RUNTIME = "runtime"
    HARNESS = "harness"
    EVALUATOR = "evaluator"
    SERVICE = "service"


CODES_WITHOUT_CLASS = ("internal_error", "expired", "lease_expired")
"""Error codes without an exception class. `internal_error` is the code of any unexpected exception. The other two codes
are recorded without an exception."""

NO_THREAD = "can't start new thread"
"""The text of Python's RuntimeError if the system cannot start another thread."""


class Overflow(msgspec.Struct, frozen=True):
    """The sizes, in tokens, of a prompt that is too long and of the model's context. `prompt_tokens` may be a lower
    bound."""

    prompt_tokens: int
    context_tokens: int


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An error as data, in the store, in results and in HTTP replies.

    - `code`: identifies the class of the error.
    - `hint`: how to solve the problem.
    - `field`: the path of the wrong field in a request.
    - `log_tail`: the end of the failed program's output, at most 65,536 characters.
    - `overflow`: for the code `context_overflow` only, the sizes of the prompt and the context, if they are known.
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
    """Background work that has failed and is retried. It is listed until it succeeds.

    The work has failed `count` times, first at `since` and most recently at `last`, in seconds since the epoch. `error`
    is the most recent error. `node` is the node that does the work, None for the service.
    """

    name: str
    node: str | None = None
    since: float
    last: float
    count: int
    error: str


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose.

    `inside` is True if the failure happened inside a sandbox. An agent that ran there may have caused it (see
    sessions/grading.py).
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

    def replace(self, **changes: str | float | bool | None) -> Self:
        """Return a copy with the attributes in `changes` replaced. The error itself stays unchanged, because it may
        already have been raised."""
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
    """Replace the field name `old` by `new` in an error that is raised in the block, also if the error is about a field
    below `old`. So one check can serve several fields: the check of `task.runtime` can also check an evaluator's
    sandbox."""
    return renamed_fields(((old, new),))


@contextmanager
def renamed_fields(names: Iterable[tuple[str, str]], *, whole: Collection[str] = ()) -> Iterator[None]:
    """Like `renamed_field`, for several pairs of an old and a new name. The first matching pair is used. If its new
    name is in `whole`, the error names only this field, without the path below it."""
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
    """The prompt does not fit into the model's context. `overflow` has the sizes of both, if they are known."""

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
    """A stored task cannot be read. Reading it again would not help, so this is not a `ServiceError`, which would be
    retried."""

    code = "unreadable_task"
    http_status = 409


class ServiceError(OutriderError):
    code = "service_error"
    retryable = True


class ServiceUnusable(ServiceError):
    """A client cannot use the service, and retrying does not help. The address, a proxy, a certificate or a version is
    wrong."""

    code = "service_unusable"
    retryable = False


class ServiceStopping(ServiceError):
    code = "service_stopping"
    http_status = 503


class StoreUnavailable(ServiceError):
    code = "store_unavailable"
    http_status = 503


class Busy(ServiceError):
    """The service does not accept the request now, for example because the caller has too many requests in progress.
    `retry_after` is the number of seconds to wait before the next try. The reply sends it in the header Retry-After."""

    code = "busy"
    http_status = 429

    def __init__(self, message: str, *, retry_after: float = 1.0, **about: Any) -> None:
        super().__init__(message, **about)
        self.retry_after = retry_after


class QueueFull(Busy):
    code = "queue_full"


def may_come_from_machine(error: BaseException) -> bool:
    """Return True if the error may come from the machine and not from the code: the disk, descriptors, memory or
    threads are used up, a file or a connection fails, or the database cannot be reached."""
    return isinstance(error, OSError | MemoryError | ServiceError) or (
        isinstance(error, RuntimeError) and str(error) == NO_THREAD
    )


def error_text(error: OutriderError | ErrorRecord) -> str:
    """Return the error's message, followed by its hint, if any. The text can always be encoded as UTF-8."""
    return storable(f"{error.message} ({error.hint})" if error.hint else error.message)


def described(error: BaseException) -> str:
    """Return the message of an OutriderError. For any other error, return its class name and message."""
    if isinstance(error, OutriderError):
        return storable(str(error))
    return storable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def record_of(error: BaseException) -> ErrorRecord:
    """Return the record of any exception. An OutriderError makes its own record. An error for which
    `may_come_from_machine` is True is recorded as a ServiceError. Any other exception is recorded as a bug in
    Outrider."""
    if isinstance(error, OutriderError):
        return error.record()
    if may_come_from_machine(error):
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
    """Return the record with its texts cut to MAX_TEXT and MAX_LOG_TAIL. The end of `log_tail` is kept, and the
    beginning of all other texts. The limits are needed because engines, nodes and plugins can send texts of any length,
    and each text is searched for secrets, stored and shown."""
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
    """Return a text that can be stored and sent. Characters that UTF-8 cannot encode (lone surrogates) are written as
    escapes. Python decodes invalid bytes of file names and program output to such characters."""
    return None if text is None else str(text).encode("utf-8", "backslashreplace").decode()


def error_from(record: ErrorRecord) -> OutriderError:
    """Make the exception that a record describes. A code without a class, such as one of another version, becomes a
    ServiceError."""
    # Leave out a subclass without its own code: it has its parent's code, and would take the parent's place.
    kinds = {kind.code: kind for kind in _subclasses(OutriderError) if "code" in vars(kind)}
    kind = kinds.get(record.code, ServiceError)
    record = bounded(record)
    sizes: dict[str, Any] = {"overflow": record.overflow or None} if issubclass(kind, ContextOverflow) else {}
    return kind(record.message, hint=record.hint, field=record.field, log_tail=record.log_tail, **sizes)


def known_codes() -> dict[str, Boundary]:
    """Return the error codes that this process knows, with their boundaries. Records from other versions may have other
    codes."""
    kinds = {kind.code: kind.boundary for kind in _subclasses(OutriderError) if "code" in vars(kind)}
    return kinds | dict.fromkeys(CODES_WITHOUT_CLASS, Boundary.SERVICE)


def _subclasses(kind: type[OutriderError]) -> Iterator[type[OutriderError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)
