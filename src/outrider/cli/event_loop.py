"""The event loop that a service runs on, and interpreter settings that keep its pauses short."""

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
from outrider.file_descriptors import check_enough

T = TypeVar("T")


def run_service(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on uvloop where it is installed. Raises ServiceError where too few files may be open."""
    try:
        check_enough()  # uvloop does not clean up after itself where a descriptor is missing
        factory = importlib.import_module("uvloop").new_event_loop if importlib.util.find_spec("uvloop") else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.get_loop().set_default_executor(_started_threads())
            return runner.run(work)
    finally:
        work.close()  # of work that has not begun, because of Ctrl-C say


def _started_threads() -> ThreadPoolExecutor:
    """The threads for blocking calls, all of them started. Python would start each one when it is needed first; at a
    limit of threads that fails, and the call might still be made later, by another thread. Raises RuntimeError."""
    number = min(32, (os.cpu_count() or 1) + 4)  # as many as asyncio's own executor has
    threads = ThreadPoolExecutor(number, thread_name_prefix="outrider-blocking")
    all_started = threading.Barrier(number)
    try:
        for _ in range(number):
            threads.submit(all_started.wait)  # a thread that waits takes no second call, so that another one is started
    except RuntimeError:
        all_started.abort()  # those that wait would keep the process from ending
        raise
    return threads


@asynccontextmanager
async def short_pauses(idle: Callable[[], bool], failures: Failures) -> AsyncIterator[None]:
    """While the block runs, the garbage collector and other threads delay the event loop by little. Enter it when all
    is imported. `idle` and `failures`: see `concurrency/garbage.py`."""
    # A busy thread gives the interpreter back to the event loop after 1 ms; the default is 5 ms.
    sys.setswitchinterval(0.001)
    async with collected_in_pieces(idle, failures):
        yield
