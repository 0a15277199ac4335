"""Work that runs to its end although its caller is cancelled: teardown, and steps that must not be left half done.

It does not know what the work is. Invariants: when `shielded` returns or raises, the work has ended; and what
`opened_in_thread` has made is ended, whoever is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def shielded(work: Callable[[], Awaitable[T]], *, grace: float | None = None) -> T:
    """Await `work()` to its end and return its result or raise its error.

    If the caller is cancelled meanwhile, CancelledError is raised instead, but only once the work has ended. With
    `grace`, the work itself is cancelled that many seconds after the caller.
    """
    # The work needs a task of its own: asyncio.timeout() inside it cancels the task that it runs in. A bare task and
    # one future cost 8 us a call; a TaskGroup around the task costs 13 us, and every stored turn pays for it.
    task = asyncio.ensure_future(work())
    cancelled: asyncio.CancelledError | None = None
    if not task.done():
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        task.add_done_callback(lambda _: None if waiter.done() else waiter.set_result(None))
        while not task.done():
            try:
                await waiter
            except asyncio.CancelledError as error:
                if cancelled is None and grace is not None:
                    loop.call_later(grace, task.cancel)
                cancelled = error
                waiter = loop.create_future()  # the callback reads the variable, so it wakes the new one
    try:
        if cancelled is None:
            return task.result()
        if not task.cancelled():
            task.exception()  # asyncio logs an error that nobody has asked for
        raise cancelled
    finally:
        # The traceback of an error holds this frame. If the frame held the error, too, both would stay until the
        # garbage collector finds them, with all that the frames of the traceback hold: bodies of megabytes.
        del cancelled, task


@asynccontextmanager
async def opened_in_thread(make: Callable[[], T], end: Callable[[T], object]) -> AsyncIterator[T]:
    """What `make` returns, until `end` is called with it: both may block, and run in threads. `end` is also called
    when the caller is cancelled while `make` runs."""
    async with AsyncExitStack() as held:

        async def enter() -> T:
            made = await asyncio.to_thread(make)
            held.push_async_callback(shielded, partial(asyncio.to_thread, end, made))
            return made

        yield await shielded(enter)
