"""Calls the store again until the database accepts the call, so that a failing database delays the scheduler and the
deliveries, but loses no result.

With PostgreSQL, the store itself retries a call for `PATIENCE_SECONDS` while the server cannot be reached. Invariant:
`retry_store` returns only after the work has succeeded.
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
"""Name of the store in the list of failures."""


async def retry_store(work: Callable[[], Awaitable[T]], failures: Failures) -> T:
    """Call `work` until it succeeds, and return the result. Only a ServiceError leads to another call; all other errors
    are raised.

    A failed call may have taken effect in part or as a whole, so `work` must be safe to repeat.
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
