"""Work that runs to its end whatever happens to the one who waits for it: teardown, and what must not be done by half.

It does not know what the work is. Invariants: when `shielded` returns or raises, the work has ended; and what `opened`
has made is ended, whoever is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def shielded(work: Callable[[], Awaitable[T]]) -> T:
    """The outcome of `work`, which may be an error. A cancellation of the caller meanwhile is raised instead, once the
    work has ended."""
    cancelled: asyncio.CancelledError | None = None
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_outcome(work))
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
    result = task.result()
    try:
        if cancelled is not None:
            raise cancelled
        if isinstance(result, _Failure):
            raise result.error
        return result
    finally:
        # The traceback of an error holds this frame. If the frame held the error, too, both would stay until the
        # garbage collector finds them, with all that the frames of the traceback hold: bodies of megabytes.
        del cancelled, result, task


@asynccontextmanager
async def opened(make: Callable[[], T], end: Callable[[T], object]) -> AsyncIterator[T]:
    """What `make` gives, until `end` is called with it: both may block, and run in threads. It is ended also when the
    caller is cancelled while it is made."""
    async with AsyncExitStack() as held:

        async def enter() -> T:
            made = await asyncio.to_thread(make)
            held.push_async_callback(shielded, partial(asyncio.to_thread, end, made))
            return made

        yield await shielded(enter)


class _Failure:
    def __init__(self, error: Exception) -> None:
        self.error = error


async def _outcome(work: Callable[[], Awaitable[T]]) -> T | _Failure:
    try:
        return await work()
    except Exception as error:  # handed to the one who waits, as it was raised: a task group would wrap it
        return _Failure(error)
