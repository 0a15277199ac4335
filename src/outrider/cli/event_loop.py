"""Runs a service's coroutine on the fastest event loop there is, in an interpreter that does not hold it up."""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_service(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, on uvloop where it is installed."""
    factory = importlib.import_module("uvloop").new_event_loop if importlib.util.find_spec("uvloop") else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def calm_interpreter() -> None:
    """Keep the garbage collector and other threads from holding the event loop. To be called once all is loaded."""
    # What is there now stays: the collector would look at it again and again, for 60 ms and more each time. It is not
    # asked to collect first, which takes 100 ms; what little garbage loading has made stays, too.
    gc.freeze()
    # A pass over the second generation looks at 80,000 objects at most, which takes 10 ms; one over all is rare.
    gc.set_threshold(20_000, 4, 200)
    # A thread that works lets the event loop have the interpreter after so long; the default is five times that.
    sys.setswitchinterval(0.001)
