"""Sends finished groups to their callback URLs, at least once. The outbox, a table of the store, lists the groups to
send.

The request's body is the reply to `GET /v1/groups/{id}`. A group submitted through another system's API
(`GroupRow.translator`) is sent in that system's format instead. The header `Idempotency-Key` is the group's id, so that
receivers can recognise repeated requests.

Invariant: a delivery leaves the outbox only after a 2xx reply, or when an admin discards the delivery. A delivery that
is given up stays in the outbox as a dead letter.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from email.utils import parsedate_to_datetime
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from outrider.callbacks import signed_headers
from outrider.concurrency.chores import Chores, Failures
from outrider.concurrency.events import wait_for_event
from outrider.concurrency.retries import RetryPolicy
from outrider.errors import NotFound, ServiceError, described, storable
from outrider.service.allow_lists import AllowLists
from outrider.service.retry_store import retry_store
from outrider.service.views import ViewReader
from outrider.store.rows import Delivery, GroupRow
from outrider.store.store import Store

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("outrider.delivery")

TRY_SECONDS = 30.0
"""Time limit of one request to a receiver, in seconds."""
PAUSES = RetryPolicy(first=1.0, longest=600.0)
"""Waits between the attempts of a delivery. The outbox is read at least every `first` seconds."""
LONGEST_PAUSE = 3600.0
"""Maximum wait in seconds that a receiver can request with `Retry-After`."""
MIN_TRIES = 10
"""A delivery that the receiver refuses is given up after this many attempts. They take about ten minutes, which is
enough time to start a receiver. After other failures, such as a timeout, a delivery is given up only if it has also
been due for PATIENCE seconds."""
PATIENCE = 3 * 86400.0
MAX_PUSHES = 32
"""Maximum number of requests to receivers at once."""
MAX_PUSHES_EACH = 8
"""Maximum number of requests to one receiver at once, so that a slow receiver does not delay others. After a failure,
the receiver gets one request at a time until one succeeds."""
MAX_PUSHES_OF_TENANT = 16
"""Maximum number of requests at once for the groups of one tenant. A tenant chooses its receivers, so it could
otherwise occupy all requests with many slow receivers, and delay the callbacks of other tenants."""
MAX_FAILING = 1000
"""Maximum number of failing receivers that are remembered. A receiver that was forgotten may again get several requests
at the same time, until one of these requests fails."""
LOOK_AHEAD = 1000
"""Maximum number of outbox rows read at a time. It is much larger than MAX_PUSHES, because the first rows may all be
for one slow receiver."""
MAX_DESCRIPTION = 300
"""Maximum number of characters of a stored failure description."""
Translate = Callable[[GroupRow], Awaitable[bytes]]
"""Type of a function that returns the callback body for a finished group. It raises NotFound if the group was
removed."""
NOT_REFUSED = frozenset({408, 425, 429})
"""HTTP statuses from 400 to 499 that do not count as a refusal, because a later attempt may succeed."""


class Failure(msgspec.Struct, frozen=True):
    """Why a delivery attempt failed. `refused` is True if another attempt is unlikely to succeed, for example because
    the URL is wrong. `wait` is the pause in seconds that the receiver requests."""

    description: str
    refused: bool = False
    wait: float = 0.0


class Deliverer:
    """Sends finished groups to their receivers. Start `run` in a task group, and call `wake` when a group is done.

    allow_lists: restrict the addresses of receivers.
    secret: signs the requests if it is given.
    pauses: the waits between the attempts of a delivery.
    patience: a delivery that is not refused is attempted for at least this many seconds."""

    def __init__(
        self,
        store: Store,
        reader: ViewReader,
        *,
        allow_lists: AllowLists,
        secret: str | None = None,
        pauses: RetryPolicy = PAUSES,
        patience: float = PATIENCE,
        failures: Failures | None = None,
    ) -> None:
        self._store = store
        self._failures = failures or Failures()
        self._reader = reader
        self._allow_lists = allow_lists
        self._secret = secret
        self._pauses = pauses
        self._patience = patience
        self._http: aiohttp.ClientSession | None = None
        """The HTTP session. It is opened before the first delivery."""
        self._work = asyncio.Event()
        self._under_way: dict[str, Delivery] = {}
        """The deliveries that are being attempted, by group id."""
        self._failing: dict[str, None] = {}
        """Receivers whose last request failed. The latest failure is the last entry."""
        self._translators: dict[str, Translate] = {}

    def translate(self, system: str, translate: Translate) -> None:
        """Use the function `translate` for the callback bodies of groups submitted through the API of `system`."""
        self._translators[system] = translate

    def wake(self) -> None:
        self._work.set()

    async def run(self) -> None:
        """Send deliveries until cancelled."""
        async with AsyncExitStack() as sessions, Chores(self._failures) as chores:
            await chores.begin("callbacks", partial(self._push_due, sessions, chores))

    async def _push_due(self, sessions: AsyncExitStack, chores: Chores) -> None:
        """Start the deliveries that are due, and wait until more may be due. The exit stack `sessions` closes the HTTP
        session."""
        self._work.clear()
        # A delivery that ends while the outbox is read may still be listed as due, but must not be sent again.
        busy = set(self._under_way)
        due = await retry_store(self._due, self._failures)
        if due and self._http is None:
            self._http = await self._session(sessions)
        admitted = self._admit(delivery for delivery in due if delivery.group_id not in busy)
        for delivery in admitted:
            chores.create_task(self._deliver(delivery), name=f"deliver {delivery.group_id}", chore="a callback")
        # If LOOK_AHEAD rows were read, the outbox may have more rows for other receivers. So if at least one delivery
        # could be started, read on without waiting.
        if len(due) < LOOK_AHEAD or not admitted:
            await wait_for_event(self._work, self._pauses.first)

    async def _session(self, sessions: AsyncExitStack) -> aiohttp.ClientSession:
        """Open the HTTP session, which `sessions` closes."""
        # aiohttp is imported only before the first delivery, because a service without callbacks does not need it, and
        # the import takes a seventh of the processor time of a service's start. The import runs in a thread, so that it
        # does not block the event loop.
        await asyncio.to_thread(import_module, "outrider.service.callback_resolver")
        import aiohttp

        from outrider.service.callback_resolver import ThreadResolver

        resolver = ThreadResolver(MAX_PUSHES)
        sessions.push_async_callback(resolver.close)
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TRY_SECONDS),
            # Cookies are not kept, because one receiver's cookies must not be sent to another.
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(resolver=resolver, socket_factory=self._allow_lists.socket),
        )
        return await sessions.enter_async_context(session)

    async def _due(self) -> list[Delivery]:
        """Return the deliveries that are due. Left out are those to receivers that already get their maximum number of
        requests, and those of tenants that already have their maximum number of requests."""
        now, receivers, tenants = time.time(), self._pushes_by_receiver(), self._pushes_by_tenant()
        return await self._store.deliveries(
            now=now,
            limit=LOOK_AHEAD,
            latest=now + max(self._pauses.longest, LONGEST_PAUSE),
            busy=[receiver for receiver, count in receivers.items() if count >= self._most(receiver)],
            busy_tenants=[tenant for tenant, count in tenants.items() if count >= MAX_PUSHES_OF_TENANT],
        )

    def _pushes_by_receiver(self) -> Counter[str]:
        return Counter(delivery.receiver for delivery in self._under_way.values())

    def _pushes_by_tenant(self) -> Counter[str]:
        return Counter(delivery.tenant for delivery in self._under_way.values())

    def _most(self, receiver: str) -> int:
        return 1 if receiver in self._failing else MAX_PUSHES_EACH

    def _admit(self, due: Iterable[Delivery]) -> list[Delivery]:
        """Select the deliveries to start now, within MAX_PUSHES, MAX_PUSHES_EACH and MAX_PUSHES_OF_TENANT, and record
        them as running."""
        receivers, tenants = self._pushes_by_receiver(), self._pushes_by_tenant()
        admitted = []
        for delivery in due:
            receiver, tenant = delivery.receiver, delivery.tenant
            if len(self._under_way) == MAX_PUSHES:
                break
            if receivers[receiver] < self._most(receiver) and tenants[tenant] < MAX_PUSHES_OF_TENANT:
                self._under_way[delivery.group_id] = delivery
                receivers[receiver] += 1
                tenants[tenant] += 1
                admitted.append(delivery)
        return admitted

    async def _deliver(self, delivery: Delivery) -> None:
        """Attempt a delivery once, and record the outcome in the outbox."""
        group_id = delivery.group_id
        try:
            try:
                failure = await self._push(delivery, await self._body(group_id))
            except NotFound:
                raise
            except Exception as error:  # for example MemoryError for a large group; a later attempt may succeed
                failure = Failure(described(error)[:MAX_DESCRIPTION])
            if failure is None:
                self._failing.pop(delivery.receiver, None)
                await retry_store(lambda: self._store.delivered(group_id), self._failures)
            else:
                if delivery.url:  # without a URL no request was sent to the receiver
                    self._note_failed(delivery.receiver)
                await self._put_off(delivery, failure)
        except NotFound as error:
            log.info("the callback of %s is not wanted any more: %s", group_id, error)
        finally:
            del self._under_way[group_id]
            self._work.set()

    async def _body(self, group_id: str) -> bytes:
        row = await retry_store(lambda: self._store.group(group_id), self._failures)
        if row.translator is None:
            view = await retry_store(lambda: self._reader.view(row, samples=True), self._failures)
            return await self._reader.encoded(view)
        translate = self._translators.get(row.translator)
        if translate is None:
            raise ServiceError(
                f"the group is of a client of {row.translator!r}, whose form is not served now: serve with"
                f" --compat {row.translator}"
            )
        return await retry_store(lambda: translate(row), self._failures)

    def _note_failed(self, receiver: str) -> None:
        self._failing.pop(receiver, None)
        self._failing[receiver] = None
        if len(self._failing) > MAX_FAILING:
            del self._failing[next(iter(self._failing))]

    async def _put_off(self, delivery: Delivery, failure: Failure) -> None:
        group_id, tries, now = delivery.group_id, delivery.tries + 1, time.time()
        # A delivery is given up only after enough attempts and enough time. The time alone is not enough, because the
        # clock may have been set forward by days.
        if tries >= MIN_TRIES and (failure.refused or now - delivery.since >= self._patience):
            log.error("callback of %s given up after %d tries: %s", group_id, tries, failure.description)
            await retry_store(lambda: self._store.give_up_delivery(group_id, fault=failure.description), self._failures)
            return
        pause = max(self._pauses.wait(delivery.tries), failure.wait)
        log.warning("callback of %s failed, next try in %.0f s: %s", group_id, pause, failure.description)
        await retry_store(
            lambda: self._store.delivery_failed(group_id, next_try=now + pause, fault=failure.description),
            self._failures,
        )

    async def _push(self, delivery: Delivery, body: bytes) -> Failure | None:
        """Send one request. Returns None after a 2xx reply, otherwise the failure. The reply's body is not read."""
        import aiohttp  # imported late: see `_session`

        assert self._http is not None  # opened before the first delivery
        if not delivery.url:
            return Failure("the callback URL was encrypted with a key that the service does not have now", refused=True)
        headers = {"Content-Type": "application/json", "Idempotency-Key": delivery.group_id}
        if self._secret is not None:
            headers |= signed_headers(self._secret, delivery.group_id, body, now=time.time())
        try:
            # A redirect is not followed. Following it would turn the POST into a GET, and a reply to a GET does not
            # prove that the receiver got the group.
            async with self._http.post(delivery.url, data=body, headers=headers, allow_redirects=False) as reply:
                if 200 <= reply.status < 300:
                    return None
                return Failure(
                    storable(f"the receiver answered {reply.status} {reply.reason or ''}".rstrip()[:MAX_DESCRIPTION]),
                    refused=reply.status < 500 and reply.status not in NOT_REFUSED,
                    wait=_wait_asked(reply.headers.get("Retry-After", "")),
                )
        except TimeoutError:
            return Failure(f"the receiver did not answer within {TRY_SECONDS:.0f} s")
        except (aiohttp.InvalidURL, ValueError):
            # aiohttp raises these errors for an invalid URL. Their text is left out, because it may contain a secret.
            return Failure("the callback URL cannot be used", refused=True)
        except aiohttp.ClientResponseError as error:
            # The text of this error contains the whole URL, which may contain a secret. Its message does not.
            return Failure(storable(f"the receiver's reply is not valid HTTP: {error.message}"[:MAX_DESCRIPTION]))
        except (aiohttp.ClientError, OSError) as error:
            return Failure(storable((str(error) or type(error).__name__)[:MAX_DESCRIPTION]))


def _wait_asked(header: str) -> float:
    """Return the seconds to wait that a Retry-After header requests, at most LONGEST_PAUSE. A value that is neither a
    number nor a date counts as 0."""
    try:
        seconds = float(header) if header.isdecimal() else parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_PAUSE)
