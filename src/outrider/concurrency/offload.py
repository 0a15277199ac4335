"""Runs long pure computations in one worker thread, in pieces, so that they do not block the event loop.

Reading and rendering a request with tens of thousands of messages takes seconds. On the event loop this work would stop
every other session. In a thread the work only competes with the event loop for the interpreter. There is only one
thread. Several threads would not be faster, because Python runs one thread at a time, and would leave the event loop
fewer turns.

Invariant: when `run` or `run_steps` returns, raises or is cancelled, no piece of the computation is still running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import msgspec

from outrider.concurrency.cancellation import shielded

T = TypeVar("T")

Steps = Generator[int, None, T]
"""A computation in pieces. The generator yields the size of each next piece, in bytes of input, and returns the result.
A piece should cover at most PIECE_BYTES, unless a single message or text is larger."""

INLINE_BYTES = 32 << 10
"""Bytes of input that are processed on the event loop. The rest is processed in the thread. For an ordinary call, a
switch to the thread would cost more than the work itself. 32 KiB take 20 ms in the worst case, which is many very short
messages."""
PIECE_BYTES = 16 << 10
"""Bytes of input after which a computation in the thread lets the next computation run."""


class _Result(msgspec.Struct):
    value: object


class OffloadThread:
    """The worker thread and its queue. Pieces run in order of arrival, so that long computations alternate. The first
    piece starts the thread. `close` waits for the running piece."""

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
