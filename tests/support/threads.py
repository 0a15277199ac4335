"""Thread pools that report finished work late: the work is done, but the code that awaits it has not resumed yet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Late(ThreadPoolExecutor):
    """A pool that reports the completion of the `number`th piece of work only after `go` is set. `done` is set when
    that work is done."""

    def __init__(self, number: int) -> None:
        super().__init__(2)
        self.done = asyncio.Event()
        self.go = threading.Event()
        self._number = number
        self._loop = asyncio.get_running_loop()

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._number -= 1
        return super().submit(self._late if self._number == 0 else _at_once, work, args, kwargs)

    def _late(self, *call: Any) -> Any:
        try:
            return _at_once(*call)
        finally:
            self._loop.call_soon_threadsafe(self.done.set)
            self.go.wait()


def _at_once(work: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return work(*args, **kwargs)


async def cancelled_late(work: Coroutine[Any, Any, object], *, number: int = 1) -> bool:
    """Run `work`, and cancel it when its `number`th call in a thread is done but not yet reported. Returns True if
    `work` was cancelled."""
    loop, late = asyncio.get_running_loop(), Late(number)
    loop.set_default_executor(late)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        await late.done.wait()
        task.cancel()
        await asyncio.sleep(0)
        late.go.set()
    late.shutdown()
    loop.set_default_executor(ThreadPoolExecutor())
    return task.cancelled()
