"""How the control API reads and answers: bounded bodies in, msgspec structs and errors' records as JSON out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse

from outrider.errors import InvalidField, NotFound, OutriderError, TooLarge, record_of
from outrider.sessions.calls.body_limits import MAX_BODY

PIECE = 256 << 10
"""Bytes of a long reply that are given to the connection at once."""


async def whole_body(request: Request) -> bytes:
    """Raises TooLarge past MAX_BODY."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise TooLarge(f"the request body is larger than {MAX_BODY} bytes")
        parts.append(part)
    return b"".join(parts)


def long_reply(body: bytes) -> Response:
    """JSON of any length."""
    if len(body) <= PIECE:
        return Response(body, media_type="application/json")
    pieces = (body[start : start + PIECE] for start in range(0, len(body), PIECE))
    return StreamingResponse(_each(pieces), media_type="application/json", headers={"Content-Length": str(len(body))})


async def _each(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def json_reply(value: msgspec.Struct, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def outrider_error(request: Request, error: Exception) -> Response:
    """An error we raised on purpose, with its own status; any other is a bug, and says so."""
    status = error.http_status if isinstance(error, OutriderError) else 500
    return json_reply(record_of(error), status=status)


async def bad_query(request: Request, error: Exception) -> Response:
    """FastAPI's own complaint about a path or query parameter."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"][1:])
    return await outrider_error(request, InvalidField(first["msg"], field=path))


async def unknown_route(request: Request, error: Exception) -> Response:
    return await outrider_error(request, NotFound(f"{request.method} {request.url.path} is not served here"))
