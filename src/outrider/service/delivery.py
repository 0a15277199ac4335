"""Pushes finished groups to their callback URLs, from the outbox, at least once.

It knows no session. The body is what `GET /v1/groups/{id}` answers; the header `Idempotency-Key` is the group's
id, by which a receiver drops what it has already had. Invariant: a row leaves the outbox only after a 2xx.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

import aiohttp

from outrider.concurrency.backoff import Backoff
from outrider.service.retry_store import insist
from outrider.service.views import Reader
from outrider.store.base import Delivery, Store

log = logging.getLogger("outrider.delivery")

TRY_SECONDS = 30.0
PAUSES = Backoff(first=1.0, longest=600.0)
"""Between the tries of one push; what is due is looked for at least as often as the first of them."""
AT_ONCE = 32
EACH = 8
"""Of those at once to one receiver: a slow one does not hold up the others."""
LOOK_AHEAD = 1000


class Deliverer:
    """`run` it in a task group; `wake` it when a group is done. A failed push is repeated after the first of
    `pauses`, then after the next, and so on."""

    def __init__(self, store: Store, reader: Reader, *, pauses: Backoff = PAUSES) -> None:
        self._store = store
        self._reader = reader
        self._pauses = pauses
        self._work = asyncio.Event()
        self._under_way: dict[str, str] = {}
        """Receivers by group id."""

    def wake(self) -> None:
        self._work.set()

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TRY_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:
            while True:
                self._work.clear()
                busy = set(self._under_way)  # what ends while we look may be read as still due
                due = await insist(lambda: self._store.deliveries(now=time.time(), limit=LOOK_AHEAD))
                for delivery in self._chosen([delivery for delivery in due if delivery.group_id not in busy]):
                    group.create_task(self._deliver(http, delivery), name=f"deliver {delivery.group_id}")
                await self._rest()

    def _chosen(self, due: Sequence[Delivery]) -> list[Delivery]:
        """Those to begin with now, noted as under way."""
        at_work = Counter(self._under_way.values())
        chosen = []
        for delivery in due:
            receiver = urlsplit(delivery.url).netloc
            if at_work.total() == AT_ONCE:
                break
            if at_work[receiver] < EACH:
                self._under_way[delivery.group_id] = receiver
                at_work[receiver] += 1
                chosen.append(delivery)
        return chosen

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(self._pauses.first):
                await self._work.wait()
        except TimeoutError:
            return

    async def _deliver(self, http: aiohttp.ClientSession, delivery: Delivery) -> None:
        try:
            await self._push(http, delivery)
        finally:
            del self._under_way[delivery.group_id]
            self._work.set()

    async def _push(self, http: aiohttp.ClientSession, delivery: Delivery) -> None:
        group_id = delivery.group_id
        view = await insist(lambda: self._reader.group(group_id, samples=True))
        if (fault := await _pushed(http, delivery.url, group_id, await self._reader.encoded(view))) is None:
            await insist(lambda: self._store.delivered(group_id))
            return
        pause = self._pauses.wait(delivery.tries)
        log.warning("callback of %s failed, again in %.0f s: %s", group_id, pause, fault)
        await insist(lambda: self._store.delivery_failed(group_id, next_try=time.time() + pause))


async def _pushed(http: aiohttp.ClientSession, url: str, group_id: str, body: bytes) -> str | None:
    """None once the receiver has said that it has it; else why not. A redirect is not followed: it would become a
    GET, whose answer says nothing about the group."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": group_id}
    try:
        async with http.post(url, data=body, headers=headers, allow_redirects=False) as reply:
            return None if 200 <= reply.status < 300 else f"it answered {reply.status} {reply.reason}"
    except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: of a URL that it cannot use
        return str(error) or type(error).__name__
