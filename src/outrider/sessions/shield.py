"""Work that must run to its end whatever happens to the one who waits for it: teardown."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_to_end(owner: asyncio.TaskGroup, work: Coroutine[Any, Any, None], *, name: str) -> None:
    """Await `work` in a task of `owner`. A cancellation of the caller is delivered after the work is done; an
    error of the work reaches the caller and not the owner's other tasks."""
    task = owner.create_task(_caught(work), name=name)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    if cancelled is not None:
        raise cancelled
    if (failure := task.result()) is not None:
        raise failure


async def _caught(work: Coroutine[Any, Any, None]) -> Exception | None:
    try:
        await work
    except Exception as error:  # handed to the one who waits, so that it does not end the owner's group
        return error
    return None
