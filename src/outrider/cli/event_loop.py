"""The event loop that a service runs on, and interpreter settings that keep its pauses short."""

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
    """`asyncio.run`, on uvloop where it is installed."""
    factory = importlib.import_module("uvloop").new_event_loop if importlib.util.find_spec("uvloop") else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def shorten_pauses() -> None:
    """Keep the garbage collector and other threads from delaying the event loop. Call it when all is imported."""
    # Objects that exist now stay for good. Without this every full collection looks at them again, for 60 ms and more.
    # A collection before the freeze would take 100 ms, which the little garbage of importing is not worth.
    gc.freeze()
    # A collection of the second generation then looks at 80,000 objects at most (10 ms); a full one is rare.
    gc.set_threshold(20_000, 4, 200)
    # A busy thread gives the interpreter back to the event loop after 1 ms; the default is 5 ms.
    sys.setswitchinterval(0.001)
