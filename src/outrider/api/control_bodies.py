"""Limits the bodies of control calls: their size, the time in which they must arrive, and their total memory.

Memory is reserved before a body is read. The memory is released at the end of the call or by `release_body`. It is not
released as soon as the body is parsed, because the objects made from a body are several times as large as the body. If
no memory is free, calls wait in line (see `PrioritySemaphore`). Meanwhile the body is not read, so the kernel stops the
client from sending.

Model calls have limits of their own (`sessions/calls/limits.py`), because many sessions send at once, and no session
must wait for another. Invariant: bodies larger than FREE take at most EACH bytes for one caller, and at most ALL bytes
in total.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from fastapi import Request
from starlette.requests import ClientDisconnect

from outrider.errors import Busy, RequestError, TooLarge
from outrider.sessions.calls.limits import MAX_BODY, MAX_IN_SESSION, TooSlow
from outrider.sessions.priority_semaphore import PrioritySemaphore

ROOM = "outrider.room"
EACH = MAX_IN_SESSION
"""Maximum total size of the bodies of one caller's running calls, in bytes. Only bodies larger than FREE count."""
ALL = 2 * EACH
"""Maximum total size of the bodies of all running calls, in bytes. Only bodies larger than FREE count."""
FREE = 64 << 10
"""Bodies of up to this many bytes are not limited by EACH and ALL. The server buffers this much of each request
anyway."""
WAIT_SECONDS = 120.0
"""Maximum time that a body waits for memory, in seconds."""
BODY_SECONDS = 300.0
"""Maximum time in which a body must arrive, in seconds. It is long because some trainers have slow connections."""

Receive = Callable[[int | None, AsyncIterator[bytes]], Awaitable[bytes]]
"""A function that receives a body. Its arguments are the body's declared length (or None) and an iterator over the
body's parts."""


class HeldBody(NamedTuple):
    """Receives the body of one call. `release` frees the body's reserved memory before the end of the call."""

    receive: Receive
    release: Callable[[], None]


class BodyRoom:
    """The memory that the request bodies of all callers share."""

    def __init__(self) -> None:
        self._room = PrioritySemaphore(ALL, share=EACH / ALL)

    @contextmanager
    def of(self, caller: str) -> Iterator[HeldBody]:
        """Yield a receiver for the body of one call. At the end of the block, the reserved memory is released."""
        with ExitStack() as held:
            yield HeldBody(partial(self._receive, held, caller), held.close)

    async def _receive(self, held: ExitStack, caller: str, length: int | None, parts: AsyncIterator[bytes]) -> bytes:
        size = MAX_BODY if length is None else length
        if size > MAX_BODY:
            raise TooLarge(f"the request body is larger than {MAX_BODY} bytes")
        if size > FREE:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    slot = await self._room.take((size,), owner=caller)
            except TimeoutError as error:
                raise Busy(
                    f"the requests under way have {ALL} bytes together, or {caller!r} has half",
                    hint="submit large groups one after another, or let prepare steps fetch large files",
                ) from error
            held.callback(slot.release)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await _joined(parts)
        except TimeoutError as error:
            raise TooSlow(f"the request did not arrive within {BODY_SECONDS:g} s") from error


async def _joined(parts: AsyncIterator[bytes]) -> bytes:
    held: list[bytes] = []
    size = 0
    try:
        async for part in parts:
            size += len(part)
            if size > MAX_BODY:
                raise TooLarge(f"the request body is larger than {MAX_BODY} bytes")
            held.append(part)
    except ClientDisconnect as error:  # the client does not see this error, but the audit log shows it
        raise RequestError("the client has left before its request had arrived") from error
    return b"".join(held)


async def whole_body(request: Request) -> bytes:
    """Receive the body of a request. The memory reserved for it is released when the call ends. Raises TooLarge, Busy
    or TooSlow. Raises RequestError if the client disconnects before the body has arrived."""
    held: HeldBody = request.scope[ROOM]
    length = request.headers.get("content-length")
    return await held.receive(None if length is None else int(length), request.stream())


def release_body(request: Request) -> None:
    """Release the memory that was reserved for the body of a request. Call this before a long wait, when the body is no
    longer needed. Otherwise waiting calls would leave no memory for others."""
    held: HeldBody = request.scope[ROOM]
    held.release()
