"""The client of an E2B service. All sandboxes of a node share it.

Invariants:

- A sandbox of this node is added to `_ours` before its creation is requested, and stays there until `remove` has ended.
- `sweep` finds sandboxes by their label. It removes this node's sandboxes that are not in `_ours`, and all sandboxes of
  dead nodes.
- A node extends the terms of its sandboxes. A sandbox that nobody removes ends TERM_SECONDS after the last extension.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any, Self

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.retries import RetryPolicy
from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.runtimes.e2b.api import CALL_SECONDS, E2BApi, E2BError, E2BSettings, MadeSandbox
from outrider.sandbox.runtimes.e2b.envd import failure
from outrider.sandbox.runtimes.e2b.programs import ProgramArchives
from outrider.sandbox.runtimes.node_host import Host, remove_all
from outrider.sandbox.runtimes.remote import NODE_LABEL, QueueClock, StartQueue, is_orphan, node_label

START_LABEL = "outrider.start"
"""The name of a label. Its value is random, and identifies one request to create a sandbox. If the reply to this
request is lost, the sandbox is found by the label."""
TERM_SECONDS = 300
EXTEND_SECONDS = 60.0
REMOVE_SECONDS = 60.0
ROOM_SECONDS = 3600.0
"""Maximum seconds that the start of a sandbox waits until the service has room for it."""
REFUSALS = (400, 401, 403, 404, 422, 429)
"""HTTP statuses with which the service refuses to create a sandbox. After any other failure, the sandbox may exist."""
CREATE = RetryPolicy(first=1.0, longest=10.0, attempts=3)
ROOM = RetryPolicy(first=2.0, longest=60.0)
REMOVE = RetryPolicy(first=0.5, longest=5.0)

log = logging.getLogger("outrider.runtime")


class E2BService:
    """Makes the E2B sandboxes of a node. All sandboxes of the node share this object (see node_host.py). `call_seconds`
    is the time limit of each API call."""

    def __init__(self, host: Host, *, call_seconds: float = CALL_SECONDS) -> None:
        self._call_seconds = call_seconds
        self.node = node_label(host)
        self._queue = StartQueue(host.starts_per_second)
        self._no_room = host.no_room
        self._ours: set[str] = set()
        self.archives = ProgramArchives(host.folder)

    async def __aenter__(self) -> Self:
        """Connect to the service, and remove sandboxes that dead nodes left (see `sweep`). A sandbox that cannot be
        removed is logged. Raises RuntimeUnavailable and RuntimeFailure."""
        self.api = E2BApi(E2BSettings.read(), seconds=self._call_seconds)
        try:
            left = await self._left()
            try:
                await remove_all(self._remove_left, left)
            except RuntimeFailure as problem:  # a sandbox that cannot be removed must not keep new ones from starting
                log.warning("an E2B sandbox of a dead node is left: %s", problem)
        except BaseException:  # BaseException includes CancelledError
            await shielded(self.api.close)
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self.sweep()
        except RuntimeFailure as problem:
            log.warning("E2B sandboxes may be left for the next node to remove: %s", problem)
        finally:
            await self.api.close()

    async def create(
        self, start: Start, template: str, labels: Mapping[str, str], queued: QueueClock, *, ahead: bool = False
    ) -> MadeSandbox:
        """Create a sandbox when the node's queue reaches this start and the service has room. The caller must then call
        `remove`, even if this method raises or is cancelled.

        The session's time limits do not count the waits and the time that the service takes. A sandbox made `ahead`
        does not wait for room. Raises RuntimeFailure, or RuntimeUnavailable if the service refuses the key or the
        template."""
        failures = waits = 0
        while True:
            self._begin(start)
            try:
                with queued.waiting():
                    await self._queue.turn()
                    return await shielded(lambda: self._request(start, template, labels))
            except E2BError as error:
                start.requested = error.status not in REFUSALS
                if error.status == 429:
                    if ahead or queued.seconds() > ROOM_SECONDS:
                        raise failure("make room for a sandbox", error) from error
                    self._no_room.publish("e2b")
                    self._queue.hold(ROOM.wait(waits, error.wait))
                    waits += 1
                    continue
                if error.status in (401, 403):
                    raise RuntimeUnavailable(
                        f"the E2B service refuses the key: {error}", hint="check E2B_API_KEY and E2B_DOMAIN"
                    ) from error
                if error.status in (400, 404, 422):
                    raise RuntimeUnavailable(
                        f"the E2B service makes no sandbox of template {template!r}: {error}",
                        field="task.runtime.image",
                        hint="name a template of the key's team",
                    ) from error
                failures += 1
                if failures >= (CREATE.attempts or 1):
                    raise failure("create a sandbox", error) from error
                # The service may have created the sandbox, although its reply was lost.
                await self._forget(start)
                await asyncio.sleep(CREATE.wait(failures))

    def _begin(self, start: Start) -> None:
        self._ours.discard(start.key)
        start.key = secrets.token_hex(16)
        self._ours.add(start.key)

    async def _request(self, start: Start, template: str, labels: Mapping[str, str]) -> MadeSandbox:
        """Send one request to create a sandbox. Even a cancelled caller waits for the reply, because only the reply
        shows whether there is a sandbox to remove."""
        start.requested = True
        made = await self.api.create(
            template,
            {**labels, NODE_LABEL: self.node, START_LABEL: start.key},
            seconds=TERM_SECONDS,
            key=start.key,
        )
        start.sandbox = made.sandbox_id
        return made

    async def _forget(self, start: Start) -> None:
        """Remove the sandbox that a request may have created before its reply was lost. Raises RuntimeFailure if this
        fails. A sweep then removes the sandbox."""
        try:
            for one in await self.api.labelled(START_LABEL, start.key):
                await self.api.delete(one.id)
        except E2BError as error:
            raise failure("find the sandbox of a lost reply", error) from error

    async def extend(self, start: Start) -> None:
        """Let the service keep the sandbox for another TERM_SECONDS. Raises RuntimeFailure."""
        try:
            await self.api.extend(start.sandbox, TERM_SECONDS)
        except E2BError as error:
            if error.status != 404:  # 404: the sandbox is gone, which the tool server's client also notices
                raise failure("extend the term of a sandbox", error) from error

    async def exists(self, start: Start) -> bool | None:
        """Return whether the service still has the sandbox, or None if the service does not respond."""
        try:
            return await self.api.exists(start.sandbox)
        except E2BError:
            return None

    async def remove(self, start: Start) -> None:
        """Kill the sandbox, and wait until the service has removed it. Raises RuntimeFailure if this fails. The next
        sweep then tries again."""
        try:
            if start.sandbox:
                await self._delete(start.sandbox)
            elif start.requested:
                await self._forget(start)
        finally:
            self._ours.discard(start.key)

    async def _delete(self, sandbox: str) -> None:
        waits, confirmed = 0, False
        try:
            async with asyncio.timeout(REMOVE_SECONDS):
                while True:
                    wait = confirmed
                    try:
                        if not await self.api.delete(sandbox):
                            return
                        confirmed = True
                    except E2BError as error:
                        log.debug("the E2B service does not yet remove %s: %s", sandbox, error)
                        wait = True
                    # After the first confirmation, the service usually replies at once that the sandbox is gone.
                    if wait:
                        await asyncio.sleep(REMOVE.wait(waits))
                        waits += 1
        except TimeoutError as error:
            raise RuntimeFailure(
                f"the E2B service did not remove sandbox {sandbox} within {REMOVE_SECONDS:.0f} s",
                hint=f"its next sweep tries again; the sandbox ends by itself after {TERM_SECONDS} s",
            ) from error

    async def sweep(self) -> int:
        """Remove the sandboxes of dead nodes, and those of this node that nothing uses any more. Returns the number of
        removed sandboxes. Raises RuntimeFailure if the service does not respond, or does not remove a sandbox."""
        left = await self._left()
        await remove_all(self._remove_left, left)
        return len(left)

    async def _left(self) -> list[str]:
        """Return the ids of the sandboxes that `sweep` removes."""
        try:
            listed = await self.api.labelled(NODE_LABEL)
        except E2BError as error:
            raise failure("list its sandboxes", error) from error
        return [one.id for one in listed if self._is_left(one.metadata or {})]

    async def _remove_left(self, sandbox: str) -> None:
        try:
            await self.api.delete(sandbox)
        except E2BError as error:
            raise failure("remove a sandbox", error) from error

    def _is_left(self, labels: Mapping[str, str]) -> bool:
        if labels[NODE_LABEL] == self.node:
            return labels.get(START_LABEL) not in self._ours
        return is_orphan(labels[NODE_LABEL])


class Start:
    """The start of one sandbox.

    - `key` is the random name of the last request to create it.
    - `requested` is True if this request may have created a sandbox.
    - `sandbox` is the sandbox's id, or "" before the service's reply."""

    def __init__(self) -> None:
        self.key = ""
        self.requested = False
        self.sandbox = ""
