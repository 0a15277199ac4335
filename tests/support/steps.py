"""Runs all steps of a stepwise computation at once."""

from __future__ import annotations

from typing import TypeVar

from outrider.concurrency.cancellation import Steps

T = TypeVar("T")


def run_inline(steps: Steps[T]) -> T:
    """Run all steps in this thread and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
