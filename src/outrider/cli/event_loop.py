"""Runs a service's event loop, with interpreter settings that keep the pauses of the loop short."""

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
    """Run a coroutine as `asyncio.run` does, on uvloop if it is installed. Raises ServiceError if this process may open
    too few files."""
    try:
        check_enough()  # first, because uvloop leaks resources if it cannot open a descriptor
        factory = importlib.import_module("uvloop").new_event_loop if importlib.util.find_spec("uvloop") else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.get_loop().set_default_executor(_started_threads())
            return runner.run(work)
    finally:
        work.close()  # Python warns about a coroutine that is neither started nor closed, such as after an early Ctrl-C


def _started_threads() -> ThreadPoolExecutor:
    """Return a thread pool for blocking calls, with all its threads already started. Raises RuntimeError if a thread
    cannot be started.

    By default, a pool starts a thread only when a call needs one. If the thread cannot be started, `submit` raises an
    error, although the call is already queued and may still run later.
    """
    number = min(32, (os.cpu_count() or 1) + 4)  # the size of asyncio's default thread pool
    threads = ThreadPoolExecutor(number, thread_name_prefix="outrider-blocking")
    all_started = threading.Barrier(number)
    try:
        for _ in range(number):
            # `wait` blocks its thread until all threads have started, so the pool must start a new thread for each
            # call.
            threads.submit(all_started.wait)
    except RuntimeError:
        all_started.abort()  # waiting threads would keep the process from exiting
        raise
    return threads


@asynccontextmanager
async def short_pauses(idle: Callable[[], bool], failures: Failures) -> AsyncIterator[None]:
    """While the block runs, keep the garbage collector and busy threads from blocking the event loop for long. Enter
    the block after all imports. `idle` returns True if no caller waits for this process. Failures of garbage
    collections are recorded in `failures`."""
    # A busy thread lets the event loop run again after 1 ms. Python's default is 5 ms.
    sys.setswitchinterval(0.001)
    async with collected_in_pieces(idle, failures):
        yield
