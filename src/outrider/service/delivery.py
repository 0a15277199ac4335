"""Pushes finished groups from the outbox to their callback URLs, at least once.

It knows no session. The body of a push is the reply to `GET /v1/groups/{id}`; the header `Idempotency-Key` is the
group's id, by which a receiver recognises a repeated push. Invariant: a row leaves the outbox only after a 2xx.
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
from outrider.concurrency.events import wait_for_event
from outrider.service.permits import Permits
from outrider.service.retry_store import retry_store
from outrider.service.views import ViewReader
from outrider.store.rows import Delivery
from outrider.store.store import Store

log = logging.getLogger("outrider.delivery")

TRY_SECONDS = 30.0
"""Maximum duration of one push."""
PAUSES = Backoff(first=1.0, longest=600.0)
"""Waits between the tries of one push. The outbox is read at least every `first` seconds."""
MAX_PUSHES = 32
"""Pushes under way at once."""
MAX_PUSHES_EACH = 8
"""Pushes under way at once to one host, so that a slow receiver does not hold up the others."""
LOOK_AHEAD = 1000
"""Outbox rows read at a time: many more than can be pushed, in case the first ones all go to one slow receiver."""


class Deliverer:
    """Run `run` in a task group; call `wake` when a group is done. `permits` say where a push may go; `pauses` are the
    waits between tries of a push."""

    def __init__(self, store: Store, reader: ViewReader, permits: Permits, *, pauses: Backoff = PAUSES) -> None:
        self._store = store
        self._reader = reader
        self._permits = permits
        self._pauses = pauses
        self._work = asyncio.Event()
        self._under_way: dict[str, str] = {}
        """Receivers (host and port) by group id."""

    def wake(self) -> None:
        self._work.set()

    async def run(self) -> None:
        """Push until cancelled."""
        timeout = aiohttp.ClientTimeout(total=TRY_SECONDS)
        connector = aiohttp.TCPConnector(socket_factory=self._permits.socket)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http, asyncio.TaskGroup() as group:
            while True:
                self._work.clear()
                # A push that ends while the outbox is read may still be listed as due. It must not be sent again.
                busy = set(self._under_way)
                due = await retry_store(lambda: self._store.deliveries(now=time.time(), limit=LOOK_AHEAD))
                for delivery in self._admit([delivery for delivery in due if delivery.group_id not in busy]):
                    group.create_task(self._deliver(http, delivery), name=f"deliver {delivery.group_id}")
                await wait_for_event(self._work, self._pauses.first)

    def _admit(self, due: Sequence[Delivery]) -> list[Delivery]:
        """The deliveries to start now, within the limits; they are noted as under way."""
        pushes = Counter(self._under_way.values())
        admitted = []
        for delivery in due:
            receiver = urlsplit(delivery.url).netloc
            if pushes.total() == MAX_PUSHES:
                break
            if pushes[receiver] < MAX_PUSHES_EACH:
                self._under_way[delivery.group_id] = receiver
                pushes[receiver] += 1
                admitted.append(delivery)
        return admitted

    async def _deliver(self, http: aiohttp.ClientSession, delivery: Delivery) -> None:
        """Try one delivery once, and note in the outbox how it went."""
        group_id = delivery.group_id
        try:
            view = await retry_store(lambda: self._reader.group(group_id, samples=True))
            fault = await _push(http, delivery.url, group_id, await self._reader.encoded(view))
            if fault is None:
                await retry_store(lambda: self._store.delivered(group_id))
            else:
                pause = self._pauses.wait(delivery.tries)
                log.warning("callback of %s failed, next try in %.0f s: %s", group_id, pause, fault)
                await retry_store(lambda: self._store.delivery_failed(group_id, next_try=time.time() + pause))
        finally:
            del self._under_way[group_id]
            self._work.set()


async def _push(http: aiohttp.ClientSession, url: str, group_id: str, body: bytes) -> str | None:
    """None if the receiver answered with a 2xx, else what went wrong."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": group_id}
    try:
        # A redirect is not followed: the POST would become a GET, whose answer says nothing about the group.
        async with http.post(url, data=body, headers=headers, allow_redirects=False) as reply:
            return None if 200 <= reply.status < 300 else f"it answered {reply.status} {reply.reason}"
    except (aiohttp.ClientError, OSError, ValueError) as error:  # aiohttp raises ValueError for an unusable URL
        return str(error) or type(error).__name__
