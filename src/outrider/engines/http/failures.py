"""Translates statuses and error bodies of engine servers to Outrider's errors.

Engines, routes and versions word their errors differently. So a context overflow is recognised by an error code, or by
the status together with the numbers in the message.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import orjson

from outrider.errors import ContextOverflow, EngineError, EngineRejected, EngineUnavailable, Overflow

MAX_QUOTED = 500
OVERFLOW_STATUSES = frozenset({400, 413, 422})
UNKNOWN_STATUS = 0
"""The `status` of a failure that has no HTTP status, such as an error event in a stream."""

_HINTS = {
    401: "check the engine's api_key option",
    403: "check the engine's api_key option and its start-up flags",
    404: "check the engine's URL, kind and model name",
}
_NUMBER = re.compile(r"\d{2,}")
_STATUS = re.compile(r"[0-9]{1,3}")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a request in tokens: its prompt, its maximum output, and the model's context. Prompt and context are
    None if unknown."""

    prompt: int | None = None
    output: int = 0
    context: int | None = None

    def overflow(self) -> Overflow | None:
        """Return the sizes of prompt and context if the prompt alone fills the context. Returns None if the prompt is
        shorter, or if one of the two sizes is unknown."""
        if self.prompt is None or self.context is None or self.prompt < self.context:
            return None
        return Overflow(self.prompt, self.context)


UNSIZED = Sizes()


class StatusFailure(Exception):
    """A server's refusal: its HTTP status (or UNKNOWN_STATUS) and body.

    `HttpClient` raises this failure. The adapter converts it to an EngineError with `translate`, because only the
    adapter has the sizes of the request. `retryable` is True if the server says that a retry may help. `retry_after` is
    the wait in seconds that the server requests, or None.
    """

    def __init__(self, status: int, body: bytes, *, retryable: bool = False, retry_after: float | None = None) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body
        self.retryable = retryable
        self.retry_after = retry_after

    @property
    def transient(self) -> bool:
        """True if the request may succeed later, on this engine or on another one."""
        return self.retryable or self.status in (408, 425, 429) or self.status >= 500


def failure_of_event(error: Any) -> StatusFailure:
    """Return the failure for an `{"error": ...}` event of a stream. `error` is the value in the event. Its `code` or
    `status_code` becomes the status, if numeric."""
    status, retryable = UNKNOWN_STATUS, False
    if isinstance(error, dict):
        code = error.get("code", error.get("status_code"))
        if isinstance(code, int | str) and _STATUS.fullmatch(str(code)):
            status = int(code)
        retryable = error.get("retryable") is True
    return StatusFailure(status, _written({"error": error}), retryable=retryable)


def translate(failure: StatusFailure, engine: str, sizes: Sizes = UNSIZED) -> EngineError:
    """Convert a failure to an error:

    - ContextOverflow, if the error code or the numbers in the message show an overflow.
    - EngineUnavailable, if the failure is transient.
    - EngineError, for UNKNOWN_STATUS.
    - EngineRejected otherwise."""
    code = None
    try:
        content = orjson.loads(failure.body)
    except orjson.JSONDecodeError:
        message = failure.body[:MAX_QUOTED].decode(errors="replace").strip() or "(no body)"
    else:  # engines put the message and the error code in different places
        inner = content.get("error", content) if isinstance(content, dict) else content
        words = inner
        if isinstance(inner, dict):
            code = inner.get("code")
            words = inner.get("message") or inner.get("detail")
        message = (words if isinstance(words, str) else _written(words or inner).decode())[:MAX_QUOTED]
    text = f"engine {engine!r} answered {failure.status or 'an error'}: {message}"
    if code == "context_length_exceeded" or _overflows(failure.status, message, sizes):
        return ContextOverflow(text, overflow=sizes.overflow())
    if failure.transient:
        return EngineUnavailable(text)
    if failure.status == UNKNOWN_STATUS:
        return EngineError(text)
    return EngineRejected(text, hint=_HINTS.get(failure.status))


def _written(value: Any) -> bytes:
    """Encode the error value of an engine as JSON. Returns a fixed text if it is nested too deeply: orjson reads 1,024
    nested lists but writes only 254."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return b'"an error that is nested too deeply"'


def _overflows(status: int, message: str, sizes: Sizes) -> bool:
    if status not in OVERFLOW_STATUSES and status != UNKNOWN_STATUS:
        return False
    numbers = [int(digits) for digits in _NUMBER.findall(message)]
    if sizes.prompt is None:
        return sizes.context in numbers and max(numbers) > (sizes.context or 0)
    total = sizes.prompt + sizes.output
    if sizes.context is not None:
        return total > sizes.context or sizes.prompt >= sizes.context
    # If the prompt is exactly as long as the context, the message has the same number twice: "The input (64 tokens) is
    # longer than ... length (64 tokens)".
    return any(size in numbers and (min(numbers) < size or numbers.count(size) > 1) for size in (sizes.prompt, total))
