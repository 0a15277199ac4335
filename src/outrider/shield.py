"""Work that runs to its end whatever happens to the one who waits for it: teardown, and what must not be done by half.

It does not know what the work is. Invariant: when `shielded` returns or raises, the work has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
    if cancelled is not None:
        raise cancelled
    result = task.result()
    if isinstance(result, _Failure):
        raise result.error
    return result


class _Failure:
    def __init__(self, error: Exception) -> None:
        self.error = error


async def _outcome(work: Callable[[], Awaitable[T]]) -> T | _Failure:
    try:
        return await work()
    except Exception as error:  # handed to the one who waits, as it was raised: a task group would wrap it
        return _Failure(error)
