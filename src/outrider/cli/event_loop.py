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
        check_enough()  # first, because uvloop leaks resources if it cannot open a descriptor
        factory = importlib.import_module("uvloop").new_event_loop if importlib.util.find_spec("uvloop") else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.get_loop().set_default_executor(_started_threads())
            return runner.run(work)
    finally:
        work.close()  # Python warns about a coroutine that is neither started nor closed, for instance after Ctrl-C


def _started_threads() -> ThreadPoolExecutor:
    """Return a thread pool for blocking calls, with all its threads started. Raises RuntimeError if one cannot be
    started.

    By default, Python starts a thread when a call needs it. If the machine has no room for the thread, the call raises
    an error, although it is already queued and may still run later.
    """
    number = min(32, (os.cpu_count() or 1) + 4)  # as many as in asyncio's default executor
    threads = ThreadPoolExecutor(number, thread_name_prefix="outrider-blocking")
    all_started = threading.Barrier(number)
    try:
        for _ in range(number):
            # Each call blocks its thread, so the pool starts another thread for the next call.
            threads.submit(all_started.wait)
    except RuntimeError:
        all_started.abort()  # waiting threads would keep the process from exiting
        raise
    return threads


@asynccontextmanager
async def short_pauses(idle: Callable[[], bool], failures: Failures) -> AsyncIterator[None]:
    """Keep the garbage collector and busy threads from blocking the event loop for long while the block runs. Enter the
    block after all imports. For `idle` and `failures` see `concurrency/garbage.py`."""
    # A busy thread gives the interpreter back to the event loop after 1 ms; the default is 5 ms.
    sys.setswitchinterval(0.001)
    async with collected_in_pieces(idle, failures):
        yield
