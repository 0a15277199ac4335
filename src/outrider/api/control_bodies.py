"""Limits the size, the arrival time and the total memory of the bodies of control calls.

Memory for a body is reserved before the body is read. It is released only at the end of the call, because the objects
made from a body are several times as large. Callers wait in line for this memory (see `PrioritySemaphore`). A waiting
body is not read, so the kernel stops the client from sending. Model calls have other limits
(`sessions/calls/limits.py`), since many sessions send at once, and no session may wait for another. Invariant: bodies
larger than FREE take at most EACH bytes for one caller, and at most ALL bytes for all callers together.
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
"""Maximum total bytes of the bodies of one caller's calls under way. Bodies of up to FREE bytes do not count."""
ALL = 2 * EACH
"""Maximum total bytes of the bodies of all callers' calls under way. Bodies of up to FREE bytes do not count."""
FREE = 64 << 10
"""Bodies of up to this many bytes do not count toward EACH and ALL. The server buffers this much of any request
anyway."""
WAIT_SECONDS = 120.0
"""Maximum seconds that a body waits for memory."""
BODY_SECONDS = 300.0
"""Maximum seconds for a body to arrive. The limit is high because trainers may have slow connections."""

Receive = Callable[[int | None, AsyncIterator[bytes]], Awaitable[bytes]]
"""Receives a body. The arguments are the body's declared length (None if it is not declared) and its parts."""


class HeldBody(NamedTuple):
    """Receives the body of one call. `release` gives the memory reserved for the body back before the call ends."""

    receive: Receive
    release: Callable[[], None]


class BodyRoom:
    """The memory for request bodies, shared by all callers."""

    def __init__(self) -> None:
        self._room = PrioritySemaphore(ALL, share=EACH / ALL)

    @contextmanager
    def of(self, caller: str) -> Iterator[HeldBody]:
        """Yield the receiver of one call's body. The memory reserved for the body is released at the end of the
        block."""
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
    except ClientDisconnect as error:  # the client gets no reply, so only the audit log shows this error
        raise RequestError("the client has left before its request had arrived") from error
    return b"".join(held)


async def whole_body(request: Request) -> bytes:
    """Receive the body of a request. The memory reserved for it is released when the call ends. Raises TooLarge, Busy
    or TooSlow. Raises RequestError if the client disconnects before the body has arrived."""
    held: HeldBody = request.scope[ROOM]
    length = request.headers.get("content-length")
    return await held.receive(None if length is None else int(length), request.stream())


def release_body(request: Request) -> None:
    """Release the memory reserved for the body of a request. Call this before a long wait, once the body is no longer
    needed. Otherwise the bodies of waiting calls would leave no memory for others."""
    held: HeldBody = request.scope[ROOM]
    held.release()
