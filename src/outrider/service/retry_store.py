"""Repeats work on the store until the database accepts it, so that a failing database delays sessions, but ends none.

It knows no table. Invariant: `retry_store` returns only after the work has succeeded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from outrider.concurrency.backoff import Backoff
from outrider.errors import ServiceError

log = logging.getLogger("outrider.store")

T = TypeVar("T")

PAUSES = Backoff(first=0.1, longest=10.0)


async def retry_store(work: Callable[[], Awaitable[T]]) -> T:
    """Call `work` until it does not raise ServiceError; its result. All other errors are raised.

    A call that failed may have taken effect in part or as a whole, so `work` must be safe to repeat.
    """
    tries = 0
    while True:
        try:
            return await work()
        except ServiceError as error:
            log.error("the store failed; trying again: %s", error)
            await asyncio.sleep(PAUSES.wait(tries))
            tries += 1
