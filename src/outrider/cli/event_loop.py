"""The event loop of a service, and the interpreter settings that keep its pauses short."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from outrider.concurrency.chores import Failures
from outrider.concurrency.garbage import collected_in_pieces
from outrider.wire.file_descriptors import check_enough

T = TypeVar("T")


def run_service(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, on uvloop if it is installed. Raises ServiceError if the limit of open
    files is too low."""
    try:
        check_enough()  # checked first, because uvloop leaks its resources if it fails to open a descriptor
        factory = importlib.import_module("uvloop").new_event_loop if importlib.util.find_spec("uvloop") else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.get_loop().set_default_executor(_started_threads())
            return runner.run(work)
    finally:
        work.close()  # the coroutine may never have been started, for instance because of Ctrl-C


def _started_threads() -> ThreadPoolExecutor:
    """Return the thread pool for blocking calls, with all threads started. Python would start each thread for the first
    call that needs it. If the machine has no room for another thread, such a start fails, although the call is already
    queued and another thread may still run it later. Raises RuntimeError if a thread cannot be started."""
    number = min(32, (os.cpu_count() or 1) + 4)  # the number of threads in asyncio's own executor
    threads = ThreadPoolExecutor(number, thread_name_prefix="outrider-blocking")
    all_started = threading.Barrier(number)
    try:
        for _ in range(number):
            threads.submit(all_started.wait)  # a waiting thread takes no second call, so the pool starts another one
    except RuntimeError:
        all_started.abort()  # waiting threads would keep the process from exiting
        raise
    return threads


@asynccontextmanager
async def short_pauses(idle: Callable[[], bool], failures: Failures) -> AsyncIterator[None]:
    """While the block runs, shorten the delays of the event loop that the garbage collector and other threads cause.
    Enter the block after all imports. For `idle` and `failures` see `concurrency/garbage.py`."""
    # A busy thread gives the interpreter back to the event loop after 1 ms; the default is 5 ms.
    sys.setswitchinterval(0.001)
    async with collected_in_pieces(idle, failures):
        yield
