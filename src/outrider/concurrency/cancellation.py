"""Runs work to its end even if the caller is cancelled. Examples are teardown, steps that must not stop halfway, and
work in threads, which cannot be cancelled.

Invariants:
- When `shielded` returns or raises, its work has ended.
- `opened_in_thread` ends every object that it has made, even if the caller is cancelled.
- When a method of `OffloadThread` returns, raises or is cancelled, none of its work is still running.
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
"""A generator that runs a computation in pieces. Before each piece, the generator yields the number of input bytes of
the piece. At the end, the generator returns the result. A piece should have at most PIECE_BYTES bytes, unless a single
message or text is longer."""

INLINE_BYTES = 32 << 10
"""How many input bytes of a computation are processed on the event loop before the computation moves to a thread. For
an ordinary model call, the switch to the thread would cost more than the computation itself. 32 KiB take at most 20 ms,
even if they consist of many very short messages."""
PIECE_BYTES = 16 << 10
"""A piece of a computation ends after about this number of input bytes. Between two pieces, other computations can
run."""


async def shielded(work: Callable[[], Awaitable[T]], *, grace: float | None = None) -> T:
    """Await `work()` to its end, and return its result or raise its error.

    If the caller is cancelled meanwhile, the work still runs to its end, and CancelledError is raised afterwards. With
    `grace`, the work is cancelled, too, if it has not ended `grace` seconds after the caller's cancellation.
    """
    # Give the work its own task, because an asyncio.timeout() in the work cancels the task in which the work runs. This
    # function is called for every stored turn. So it uses a bare task and one future, which cost 8 us per call. A
    # TaskGroup would cost 13 us.
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
                waiter = loop.create_future()  # the callback reads `waiter` at the task's end, so it sets this future
    try:
        if cancelled is None:
            return task.result()
        if not task.cancelled():
            task.exception()  # marks the error as read; asyncio would log an unread error
        raise cancelled
    finally:
        # The traceback of an error references this frame. If the frame also referenced the error, both would stay in
        # memory until the next garbage collection, and so would all objects of the frame, such as request bodies of
        # megabytes.
        del cancelled, task


@asynccontextmanager
async def opened_in_thread(make: Callable[[], T], end: Callable[[T], object]) -> AsyncIterator[T]:
    """Yield the result of `make`, and call `end` with it when the block ends. Both functions run in threads, because
    they may block. If the caller is cancelled while `make` runs, `end` is called, too."""
    async with AsyncExitStack() as held:

        async def enter() -> T:
            made = await asyncio.to_thread(make)
            held.push_async_callback(shielded, partial(asyncio.to_thread, end, made))
            return made

        yield await shielded(enter)


class _Result(msgspec.Struct):
    value: object


class OffloadThread:
    """Runs long computations in one worker thread, so that they do not block the event loop. Each computation runs in
    pieces, and the pieces of several computations alternate. `close` waits for the piece that is running.

    Reading and rendering a request with tens of thousands of messages takes seconds. On the event loop, this work would
    stop every other session. Several threads would not be faster, because Python runs one thread at a time. With
    several threads, the event loop would also get fewer turns.
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
        """Run all pieces of a computation and return its result. The first INLINE_BYTES of input are processed on the
        event loop, the rest in the thread. After a cancellation, no further piece runs."""
        with closing(steps):
            size = 0
            step = _advance(steps)
            while not isinstance(step, _Result):
                size += step
                step = _advance(steps) if size <= INLINE_BYTES else await self.run(lambda: _advance(steps))
        result: T = step.value  # type: ignore[assignment]  # the generator's return value
        return result


def _advance(steps: Steps[object]) -> int | _Result:
    """Run the next piece of a computation. After the last piece, return the computation's result as a `_Result`. A
    StopIteration could not carry the result out of the thread, because a future cannot raise a StopIteration."""
    try:
        return next(steps)
    except StopIteration as end:
        return _Result(end.value)
