"""Long pure work done beside the event loop: in one thread, a piece at a time, so that works take turns.

A request with tens of thousands of messages takes seconds to read and render. Done on the event loop that would stop
every other session; done in a thread it only shares the interpreter with them. There is one thread, because more of
them would not be faster and would take the interpreter from the event loop more often.

It does not know what the work is. Invariant: when `run` or `finish` returns, raises or is cancelled, no piece of that
work is running any more.
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
"""Work in pieces. Each yield states the size of the piece that comes next, in bytes of what it works on; the result is
what the generator returns. Pieces that are not large in themselves should work on no more than PIECE."""

INLINE = 32 << 10
"""Bytes that are worked on at once, on the event loop: 20 ms at the worst, where messages have few bytes."""
PIECE = 16 << 10
"""Bytes after which work in a thread lets others have their turn."""


class _Finished(msgspec.Struct):
    """That the work is done, and what it came to."""

    result: object


class Aside:
    """The thread, and the queue for it: pieces are done in the order in which they come, so that long works take turns.
    The thread starts with the first work; `close` waits for the piece it is at."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-aside")
        self._queue = asyncio.Lock()

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives, called in the thread."""
        async with self._queue:
            return await shielded(lambda: asyncio.get_running_loop().run_in_executor(self._thread, work))

    async def finish(self, steps: Steps[T]) -> T:
        """What the steps come to: the first INLINE bytes of them at once, the others in the thread."""
        with closing(steps):
            size = 0
            step = _advance(steps)
            while not isinstance(step, _Finished):
                size += step
                step = _advance(steps) if size <= INLINE else await self.run(lambda: _advance(steps))
        result: T = step.result  # type: ignore[assignment]  # what the generator returned
        return result


def _advance(steps: Steps[object]) -> int | _Finished:
    """Do the next piece: the size of the one after it, or the end."""
    try:
        return next(steps)
    except StopIteration as end:
        return _Finished(end.value)


def whole(steps: Steps[T]) -> T:
    """All of the work, here and now."""
    while not isinstance(step := _advance(steps), _Finished):
        pass
    result: T = step.result  # type: ignore[assignment]  # what the generator returned
    return result
