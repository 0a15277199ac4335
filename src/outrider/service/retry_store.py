"""Work on the store that must be done however long it takes: repeated until the database does it.

It knows no table. A database that fails for a while costs the service time, never what it runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeVar

from outrider.concurrency.backoff import Backoff
from outrider.errors import ServiceError

log = logging.getLogger("outrider.store")

T = TypeVar("T")

PAUSES = Backoff(first=0.1, longest=10.0)


async def insist(work: Callable[[], Awaitable[T]], *, pauses: Backoff = PAUSES) -> T:
    """What `work` gives, once it does not raise ServiceError. It may have been done in part, or in full, before."""
    for tries in count():
        try:
            return await work()
        except ServiceError as error:
            log.error("the store failed, and is tried again: %s", error)
            await asyncio.sleep(pauses.wait(tries))
    raise AssertionError("there is always another try")
