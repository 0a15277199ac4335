"""Checks for `/readyz` whether the service is ready. It is ready while its store accepts writes.

Invariant: for any number of callers, the store is checked at most once in FRESH_SECONDS, and no caller waits much
longer than STORE_SECONDS.
"""

from __future__ import annotations

import asyncio

from outrider.errors import OutriderError, StoreUnavailable
from outrider.store.store import Store

FRESH_SECONDS = 1.0
"""Seconds for which the result of a check is reused."""
STORE_SECONDS = 2.0
"""Time limit for a check of the store. It is short, because an orchestrator, such as Kubernetes, waits only a few
seconds for the reply of `/readyz`."""
HINT = "the service accepts nothing until the store is back; sessions under way wait for the store"


class StoreReadiness:
    """Checks whether a store accepts writes, and caches the result for `fresh` seconds. A check may take `seconds`."""

    def __init__(self, store: Store, *, seconds: float = STORE_SECONDS, fresh: float = FRESH_SECONDS) -> None:
        self._store = store
        self._seconds = seconds
        self._fresh = fresh
        self._probing = asyncio.Lock()
        self._answered = -1.0
        self._fault: str | None = None

    async def check(self) -> None:
        """Raise StoreUnavailable if the store accepts no writes."""
        clock = asyncio.get_running_loop().time
        async with self._probing:
            if self._answered < 0 or clock() - self._answered >= self._fresh:
                try:
                    async with asyncio.timeout(self._seconds):
                        await self._store.probe()
                    self._fault = None
                except TimeoutError:
                    self._fault = f"it does not answer within {self._seconds:g} s"
                except OutriderError as error:
                    self._fault = error.message
                self._answered = clock()
        if self._fault is not None:
            raise StoreUnavailable(f"the store cannot be used: {self._fault}", hint=HINT)
