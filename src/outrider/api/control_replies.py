"""Encodes the replies to control calls as JSON. The HTTP status of an error reply is set by the error's class
(`errors.py`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse

from outrider.errors import Busy, InvalidField, NotFound, OutriderError, Unauthorized, record_of
from outrider.faults import fault_text
from outrider.redaction import redacted

PIECE = 256 << 10
"""Maximum number of bytes in one write to the connection."""
RETRY_AFTER = 10.0
"""Default for the header Retry-After, in seconds. The true wait is unknown, because sessions take seconds to hours."""


def long_reply(body: Sequence[bytes], media_type: str = "application/json") -> Response:
    """Return a reply of any length. `body` has the pieces of its body. They are sent in writes of at most PIECE bytes,
    because one write of many megabytes would block the event loop."""
    size = sum(map(len, body))
    if size <= PIECE:
        return Response(b"".join(body), media_type=media_type)

    # The generator is async because Starlette runs ordinary iterators in a thread.
    async def pieces() -> AsyncIterator[bytes | memoryview]:
        for piece in body:
            if len(piece) <= PIECE:
                yield piece
                continue
            view = memoryview(piece)  # slices of a memoryview are not copied
            for start in range(0, len(view), PIECE):
                yield view[start : start + PIECE]

    return StreamingResponse(pieces(), media_type=media_type, headers={"Content-Length": str(size)})


def json_reply(value: msgspec.Struct, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(value), status_code=status, media_type="application/json", headers=dict(headers or {})
    )


def error_reply(error: BaseException) -> Response:
    """Return the reply to an error, with secrets removed. An OutriderError has the status of its class. Any other error
    is a bug and gives status 500."""
    status = error.http_status if isinstance(error, OutriderError) else 500
    record = record_of(error)
    shown = msgspec.structs.replace(
        record,
        message=redacted(record.message),
        hint=record.hint and redacted(record.hint),
        log_tail=record.log_tail and redacted(record.log_tail),
    )
    return json_reply(shown, status=status, headers=error_headers(error, status))


def error_headers(error: BaseException, status: int) -> dict[str, str]:
    """Return the headers for an error reply with this status."""
    headers = {}
    if status == Unauthorized.http_status:
        headers["WWW-Authenticate"] = "Bearer"
    if status == Busy.http_status:
        headers["Retry-After"] = f"{getattr(error, 'retry_after', RETRY_AFTER):.0f}"
    return headers


async def outrider_error(request: Request, error: Exception) -> Response:
    return error_reply(error)


async def bad_query(request: Request, error: Exception) -> Response:
    """Return the reply to a request that FastAPI refused because of its path or a query parameter."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"][1:])
    return await outrider_error(request, InvalidField(fault_text(first), field=path))


def not_served(request: Request) -> NotFound:
    return NotFound(f"{request.method} {request.url.path} is not served here")
