"""Runs work to its end even if the caller is cancelled: teardown, steps that must not stop halfway, and work in
threads, which cannot be cancelled.

Invariants: when `shielded` returns or raises, the work has ended; every object made by `opened_in_thread` is ended,
even if the caller is cancelled; when a method of `OffloadThread` returns, raises or is cancelled, no piece of its work
is still running.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from typing import TypeVar

import msgspec

T = TypeVar("T")

Steps = Generator[int, None, T]
"""A computation in pieces. Before each piece, the generator yields the size of the piece, in bytes of input. At the end
it returns the result. A piece should cover at most PIECE_BYTES. It may be larger only if a single message or text has
more bytes than this."""

INLINE_BYTES = 32 << 10
"""Number of bytes of an input that are processed on the event loop. The thread processes the rest. For an ordinary
call, a switch to the thread would cost more than the work itself. 32 KiB take at most 20 ms, if they are many very
short messages."""
PIECE_BYTES = 16 << 10
"""Bytes of input after which a computation in the thread lets the next computation run."""


async def shielded(work: Callable[[], Awaitable[T]], *, grace: float | None = None) -> T:
    """Await `work()` to its end and return the result or raise the error.

    If the caller is cancelled meanwhile, CancelledError is raised instead, but only once the work has ended. If `grace`
    is given, the work has `grace` seconds to end after the caller's cancellation, and is then cancelled, too.
    """
    # The work needs its own task: asyncio.timeout() inside the work cancels the current task. A bare task and one
    # future cost 8 us a call. A TaskGroup around the task costs 13 us, and every stored turn pays the difference.
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
                waiter = loop.create_future()  # the task's callback wakes the current `waiter`
    try:
        if cancelled is None:
            return task.result()
        if not task.cancelled():
            task.exception()  # reads the error, because asyncio logs errors that are never read
        raise cancelled
    finally:
        # An error's traceback references this frame. If the frame also referenced the error, the cycle would keep both
        # alive until a garbage collection, with everything that they reference, such as request bodies of megabytes.
        del cancelled, task


@asynccontextmanager
async def opened_in_thread(make: Callable[[], T], end: Callable[[T], object]) -> AsyncIterator[T]:
    """Yield the result of `make`, and call `end` with the result when the block ends. Both functions run in threads,
    because they may block. `end` is also called when the caller is cancelled while `make` runs."""
    async with AsyncExitStack() as held:

        async def enter() -> T:
            made = await asyncio.to_thread(make)
            held.push_async_callback(shielded, partial(asyncio.to_thread, end, made))
            return made

        yield await shielded(enter)


class _Result(msgspec.Struct):
    value: object


class OffloadThread:
    """Runs long pure computations in one worker thread, in pieces, so that they do not block the event loop. Pieces run
    in order of arrival, so that long computations alternate. The first piece starts the thread. `close` waits for the
    running piece.

    Reading and rendering a request with tens of thousands of messages takes seconds. On the event loop, this work would
    stop every other session. More threads would not be faster, because Python runs one thread at a time, and would
    leave the event loop fewer turns.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-offload")
        self._queue = asyncio.Lock()

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)

    async def run(self, work: Callable[[], T]) -> T:
        """Call `work` in the thread and return its result."""
        async with self._queue:
            return await shielded(lambda: asyncio.get_running_loop().run_in_executor(self._thread, work))

    async def run_steps(self, steps: Steps[T]) -> T:
        """Run all steps and return their result: the first INLINE_BYTES on the event loop, the rest in the thread. If
        the caller is cancelled, the computation ends after the running piece."""
        with closing(steps):
            size = 0
            step = _advance(steps)
            while not isinstance(step, _Result):
                size += step
                step = _advance(steps) if size <= INLINE_BYTES else await self.run(lambda: _advance(steps))
        result: T = step.value  # type: ignore[assignment]  # the generator's return value
        return result


def _advance(steps: Steps[object]) -> int | _Result:
    """Run the next piece. Returns the generator's end as a `_Result`, because a future cannot raise StopIteration."""
    try:
        return next(steps)
    except StopIteration as end:
        return _Result(end.value)
