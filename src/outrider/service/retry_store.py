"""Repeats a call of the store until it succeeds. So a failing database delays the scheduler and the deliveries, but no
result is lost.

With PostgreSQL, the store itself also repeats a call for `PATIENCE_SECONDS` if the server cannot be reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from outrider.concurrency.chores import Failures
from outrider.concurrency.retries import RetryPolicy
from outrider.errors import ServiceError

T = TypeVar("T")

PAUSES = RetryPolicy(first=0.1, longest=10.0)
NAME = "store"
"""The store's name in `Failures`."""


async def retry_store(work: Callable[[], Awaitable[T]], failures: Failures) -> T:
    """Call `work` until it succeeds, and return its result. Only a ServiceError leads to another call; all other errors
    are raised.

    A failed call may have taken effect, so `work` must be safe to repeat.
    """
    tries = 0
    while True:
        try:
            done = await work()
        except ServiceError as error:
            failures.note(NAME, error)
            await asyncio.sleep(PAUSES.wait(tries))
            tries += 1
        else:
            failures.note_success(NAME)
            return done
