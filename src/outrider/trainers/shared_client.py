"""A client of the control API that all concurrent rollouts of an event loop share.

Some trainers make a new object for each trajectory, and none of their objects lives long enough to hold a client. So
the first rollout opens the shared client, and the last rollout closes it. Invariants:

- An event loop has at most one open client for each service and token.
- At most one request at a time polls for finished groups, no matter how many rollouts wait.
- Cancelling a rollout cancels its group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from outrider.client.client import LONG_POLL, AsyncClient, check_known, patiently
from outrider.concurrency.cancellation import shielded
from outrider.concurrency.events import Broadcast
from outrider.errors import OutriderError
from outrider.lifecycle import GroupState
from outrider.schemas import GroupView
from outrider.trainers.shared_settings import BridgeSettings
from outrider.trainers.trajectories import Trajectory, trajectories_of

T = TypeVar("T")

FIRST_PATIENCE = 10.0
"""Until a service has replied for the first time, failed requests are repeated for this number of seconds. The number
is small, because the address may be wrong."""


class SharedClientLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the waits for the service, in seconds.

    - `first_patience`: how long the first request of a client is repeated.
    - `long_poll`: how long one request waits for groups to finish. The service allows at most 60.
    """

    first_patience: float = FIRST_PATIENCE
    long_poll: float = LONG_POLL


LIMITS = SharedClientLimits()


class SharedClient:
    """Runs groups on a service. Use `shared_client` to get a SharedClient.

    The methods raise the errors that the service returns, and ServiceError if the service remains unreachable.
    """

    _open: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str | None], SharedClient]]] = (
        WeakKeyDictionary()
    )
    """The open clients of each event loop, by URL and token. The clients are in a class attribute, because no object of
    the trainer lives long enough to hold a client."""

    def __init__(self, url: str, token: str | None, limits: SharedClientLimits) -> None:
        self._limits = limits
        self.users = 0
        self.client = AsyncClient(url, token=token)
        self._cursor: int | None = None
        self._first = asyncio.Lock()
        self._no_answer: OutriderError | None = None
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._following = False
        self._check_at = asyncio.get_running_loop().time() + limits.long_poll
        """The time from which `_check_oldest` checks a group again."""
        self._changed = Broadcast()

    async def run(
        self, group: Mapping[str, Any], *, submitted: Callable[[GroupView], object] | None = None
    ) -> GroupView:
        """Submit a group, wait until it is done, and return it with its samples. `group` needs an idempotency key,
        because the submission is repeated if no reply arrives. `submitted` is a function that is called with the reply
        to the submission."""
        failed_before = self._no_answer
        async with self._first:
            if self._no_answer is not None and self._no_answer is not failed_before:
                # Another rollout's request failed while this rollout waited for the lock. Raise the error of the other
                # rollout, because a new attempt would only wait for the service again.
                raise self._no_answer
            # Read the cursor before the submission. The cursor is a position in the service's results, and the group's
            # result must come after this position.
            if self._cursor is None:
                try:
                    self._cursor = (await patiently(self.client.status, self._limits.first_patience)).cursor
                except OutriderError as error:
                    self._no_answer = error
                    raise
        ids: list[str] = []

        async def submit() -> None:
            view = await patiently(partial(self.client.submit, group))
            ids.append(view.id)
            if submitted is not None:
                submitted(view)

        try:
            # The submission is shielded, so that the reply is not lost if this task is cancelled. The reply has the
            # group's id, which is needed to cancel the group.
            await shielded(submit)
            return await self._result(ids[0])
        except asyncio.CancelledError:
            for group_id in ids:
                with suppress(OutriderError):
                    await shielded(partial(self.client.cancel, group_id))
            raise

    async def _result(self, group_id: str) -> GroupView:
        done = self._waiting[group_id] = asyncio.get_running_loop().create_future()
        try:
            # The group may have finished before its id was in `_waiting`, so check its state once before waiting.
            if (await patiently(partial(self.client.group, group_id))).state is not GroupState.DONE:
                while not done.done():
                    changed = self._changed.next()
                    if self._following:
                        await changed.wait()
                    else:
                        await self._follow()
                done.result()
        finally:
            del self._waiting[group_id]
        return await patiently(partial(self.client.group, group_id, samples=True))

    async def run_all(self, groups: Iterable[Mapping[str, Any]]) -> list[GroupView]:
        """Run groups concurrently, and return them in the order given. At the first error, the other groups are
        cancelled and the error is raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self.run(group)) for group in groups]
        except ExceptionGroup as errors:  # trainers expect the error itself, not an ExceptionGroup
            raise errors.exceptions[0] from None
        return [task.result() for task in running]

    async def _follow(self) -> None:
        """Request one page of finished groups, and wake the rollouts that wait for them. If the request fails, all
        waiting rollouts raise its error."""
        self._following = True
        try:
            page = await patiently(partial(self.client.results, after=self._cursor or 0, wait=self._limits.long_poll))
            self._cursor = page.cursor
            for group in page.groups:
                waiting = self._waiting.get(group.id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)
            await self._check_oldest()
        except OutriderError as error:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(error)
        finally:
            self._following = False
            # Wake the other rollouts. If this rollout has its result, another rollout must request the next page.
            self._changed.send()

    async def _check_oldest(self) -> None:
        """Check the oldest group that is waited for, at most once in `long_poll` seconds. Raises ServiceError if the
        service has lost the group."""
        clock = asyncio.get_running_loop().time
        oldest = next((group_id for group_id, waiting in self._waiting.items() if not waiting.done()), None)
        if oldest is None or clock() < self._check_at:
            return
        self._check_at = clock() + self._limits.long_poll
        group = await check_known(self.client.group, oldest)
        if group.cursor is not None and self._cursor is not None:
            # Go back to the group's result. If the service restarts without its old data, its cursors start from the
            # beginning, and the cursor of the group's result may be lower than this client's cursor.
            self._cursor = min(self._cursor, group.cursor - 1)


@asynccontextmanager
async def shared_client(
    url: str, token: str | None, *, limits: SharedClientLimits = LIMITS
) -> AsyncIterator[SharedClient]:
    """Use the client of the running event loop for this service. The first user opens the client with its `limits`, and
    the last user closes it."""
    clients = SharedClient._open.setdefault(asyncio.get_running_loop(), {})
    shared = clients.get((url, token))
    if shared is None:
        shared = clients[url, token] = SharedClient(url, token, limits)
        # This call does not yield to the event loop, so no other rollout can get a half-open client.
        await shared.client.__aenter__()
    shared.users += 1
    try:
        yield shared
    finally:
        shared.users -= 1
        if not shared.users:
            del clients[url, token]
            await shielded(partial(shared.client.__aexit__, None, None, None))


async def run_group(
    settings: BridgeSettings, group: Mapping[str, Any], *, logprobs: bool, images: bool = False
) -> list[Trajectory]:
    """Run a group made by `shared_settings.group_of`, and return its sessions in order. For `logprobs` and `images`,
    see `trajectories_of`."""
    async with shared_client(settings.url, settings.token) as client:
        return trajectories_of(await client.run(group), settings, logprobs=logprobs, images=images)
