"""Runs a computation that comes in pieces, all of it at once."""

from __future__ import annotations

from typing import TypeVar

from outrider.concurrency.offload import Steps

T = TypeVar("T")


def run_inline(steps: Steps[T]) -> T:
    """The result of all steps, run in this thread."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
