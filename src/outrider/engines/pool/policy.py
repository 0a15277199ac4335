"""Manages the policy that a pool's engines serve: its version, the pauses for new weights, and the engines that have
the weights.

The module handles no requests. While the policy is paused, no generation begins. Once `pause` has returned, none runs.
An engine that fails during an operation is marked as failed (`lost`), and must get the current weights before it serves
again. Invariants: the version decreases only on request; an engine with an older version serves no session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.engines.base import (
    AnyEngine,
    Capability,
    Engine,
    EngineHealth,
    LoadsWeights,
    SetsVersion,
    capabilities_of,
    weights_loader,
)
from outrider.engines.gates import PolicyGate
from outrider.engines.pool.checks import mistake_of
from outrider.engines.pool.placement import EngineRecord
from outrider.errors import (
    Conflict,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    InvalidField,
)
from outrider.schemas import PolicyEngine, PolicyStatus
from outrider.spec import PolicyPause

log = logging.getLogger("outrider.engine")

FAREWELL_SECONDS = 5.0
"""Timeout in seconds for resuming a paused engine when the engine is removed or the pool closes."""


class KnownPolicy(msgspec.Struct, frozen=True):
    """The version that a trainer has set. `weights` is the path from which the engines have loaded this version's
    weights, None if the trainer has changed the weights itself."""

    version: int
    weights: str | None = None


class Policy:
    """The policy of the engines in `members`.

    - `lost`: called with each engine that fails and its error. It must give the engine no more work until the engine
      works again.
    - `found`: called with each engine that serves again.
    - `known`: the policy that an earlier service has stored.
    - `keep`: stores each new policy. It is awaited before the policy generates anything.
    - `changed`: called after each change of the gate or of the version.

    Operations run one after another. The exception is a pause that still waits for generations: a stricter pause or a
    resume takes effect at once.
    """

    def __init__(
        self,
        members: Mapping[str, EngineRecord],
        *,
        lost: Callable[[EngineRecord, EngineError], None],
        found: Callable[[EngineRecord], None],
        known: KnownPolicy | None = None,
        keep: Callable[[KnownPolicy], Awaitable[None]] | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.gate = PolicyGate(changed)
        self._changed = changed
        self._members = members
        self._lost = lost
        self._found = found
        self._known = known
        """The policy that a trainer has set, None if none was set."""
        self._undone: set[int] = set()
        """Versions that were undone by setting a lower version. An engine that still reports one of these versions has
        missed this order."""
        self._keep = keep
        self._draining = False
        self._warned: set[str] = set()
        """Names of engines for which the warning about old keys and values was logged."""
        self._lock = asyncio.Lock()

    @property
    def known_version(self) -> int | None:
        """The version that a trainer has set, None if none was set."""
        return None if self._known is None else self._known.version

    @property
    def version(self) -> int:
        """The version that a trainer has set. If none was set, this is the highest version of the engines, or 0 without
        engines."""
        if self._known is not None:
            return self._known.version
        return max((member.version for member in self._members.values()), default=0)

    def note_failure(self, member: EngineRecord) -> None:
        """Report to the leader that an engine has failed in this process. Does nothing if the policy follows no
        leader."""

    def status(self) -> PolicyStatus:
        engines = (
            PolicyEngine(name=member.name, version=member.version, ok=member.ok) for member in self._members.values()
        )
        return PolicyStatus(version=self.version, paused=self.gate.mode, engines=tuple(engines))

    def version_of(self, engine: AnyEngine, health: EngineHealth) -> int:
        """Return the version of an engine, given its latest health report. An engine whose version cannot be set is
        assumed to have at least the policy's version."""
        known = 0 if self._known is None else self._known.version
        return health.version if isinstance(engine, SetsVersion) else max(health.version, known)

    def outdated(self, engine: AnyEngine, health: EngineHealth) -> EngineUnavailable | None:
        """Return an error if the health report shows that the engine's weights are older than the policy, or have a
        version that was undone by going back. Returns None if the engine may serve."""
        if self._known is None or not isinstance(engine, SetsVersion):
            return None
        if health.version == self._known.version:
            return None
        if health.version > self._known.version and health.version not in self._undone:
            return None
        return EngineUnavailable(
            f"engine {engine.name!r} serves policy version {health.version}, the policy is at {self._known.version}",
            hint="it takes part in the next update; if it has the weights: outrider policy resume N",
        )

    async def pause(self, mode: PolicyPause) -> None:
        """Pause generation. Returns when no generation of the policy is in flight. New generations wait.

        "finish" lets generations in flight end. "abort" cuts generations off, except generations that no engine can
        continue. Raises EngineRejected if an engine refuses to abort. This call then pauses nothing. Raises Conflict if
        the policy is resumed before the pause is complete.
        """
        async with self._closed(mode):
            await self._halt()

    async def resume(self, version: int | None = None, *, go_back: bool = False) -> None:
        """Set the version on the engines, if `version` is given, and resume generation on all engines, including
        engines that were not paused by this pool. Raises Conflict if `version` is lower than the current version and
        `go_back` is not set."""
        self._check_forward(version, go_back)
        if self._draining:
            self.gate.open()
        async with self._lock:
            self._check_forward(version, go_back)
            known = None if version is None else self._at(version)
            await self._remember(known)
            await self._resume_engines(known)

    async def update(
        self,
        version: int,
        *,
        mode: PolicyPause,
        weights: str | None = None,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
        go_back: bool = False,
    ) -> None:
        """Pause, load `weights` in place on every engine if `weights` is given, set the version, and resume.
        `meanwhile` is awaited after the weights are loaded and before generation resumes.

        If only some engines fail, these engines stop serving, and catch up later. Raises Conflict if `version` is lower
        than the current version and `go_back` is not set, and InvalidField if engines cannot load weights. If no engine
        has loaded the weights, raises an engine's error, and the policy stays unchanged.
        """
        self._check_forward(version, go_back)
        if weights is not None:
            unable = [member.name for member in self._reached() if weights_loader(member.engine) is None]
            if unable:
                raise InvalidField(
                    f"weights cannot be loaded from here by {', '.join(unable)}",
                    field="weights",
                    hint="POST /v1/policy/pause, change the weights yourself, then POST /v1/policy/resume with the"
                    " version",
                )
            if not self._reached():
                raise EngineUnavailable("no engine is there to load the weights", hint="see GET /v1/engines")
        async with self._closed(mode):
            self._check_forward(version, go_back)
            await self._halt()
            known = self._at(version, weights)
            loaded = None if weights is None else await self._load(weights, version)
            try:
                await self._remember(known)
                if meanwhile is not None:
                    await meanwhile()
            finally:  # even after an error: the engines have the new weights, and must resume with the new version
                await shielded(lambda: self._resume_engines(known, loaded))

    async def catch_up(self, member: EngineRecord, health: EngineHealth) -> int:
        """Bring a returning engine up to date, and return its version: load the current weights if its weights are
        outdated, and resume it unless the policy is paused. Raises EngineError if the engine cannot serve."""
        engine = member.engine
        async with self._lock:
            if member.ok:  # an earlier operation has already brought the engine up to date
                return member.version
            version = self.version_of(engine, health)
            if (outdated := self.outdated(engine, health)) is not None:
                member.behind = True  # marked for the next update, in case the load below fails
                known, load = self._known, weights_loader(engine)
                # A returning engine that is busy still runs generations from before its failure, which a pause may not
                # have stopped. So it must not load weights.
                if known is None or known.weights is None or load is None or member.busy:
                    raise outdated
                await _await_order(engine, load(known.weights, known.version))
                version = known.version
            if member.paused and self.gate.mode is None:
                await _await_order(engine, cast(Engine, engine).resume())
                member.paused = False
            return version

    async def leave(self, members: Sequence[EngineRecord]) -> None:
        """Resume the paused engines among `members`, which leave the pool. Each engine has `FAREWELL_SECONDS`. Errors
        are ignored."""

        async def go_on(member: EngineRecord) -> None:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await cast(Engine, member.engine).resume()

        await self._order_all([member for member in members if member.paused], go_on)

    def _check_forward(self, version: int | None, go_back: bool) -> None:
        if version is not None and version < self.version and not go_back:
            raise Conflict(
                f"the policy is at version {self.version}: it cannot go back to {version}",
                hint="GET /v1/policy has the version; count on from it, or train another policy with a data folder of"
                " its own: outrider serve --data DIR. To undo a version that was set by mistake: go_back, --go-back",
                field="version",
            )

    def _at(self, version: int, weights: str | None = None) -> KnownPolicy:
        """Return the policy with this version and path of weights. If the current version is set again without weights,
        the policy keeps its known path."""
        known = self._known
        if weights is None and known is not None and known.version == version:
            return known
        return KnownPolicy(version, weights)

    async def _remember(self, known: KnownPolicy | None) -> None:
        if known is not None and self._keep is not None:
            await self._keep(known)

    def _reached(self) -> list[EngineRecord]:
        """Return all engines that respond, including engines with outdated weights."""
        return [member for member in self._members.values() if not member.removed and (member.ok or member.behind)]

    async def _halt(self) -> None:
        """Wait for the generations that are not cut off, then pause the engines. Raises the errors of `pause`."""
        self._draining = True
        try:
            await self.gate.settled()
        finally:
            self._draining = False
        if (mode := self.gate.mode) is None:
            raise Conflict("the policy was resumed before the pause was complete", hint="pause it again")
        if mode == "abort":
            self.gate.cuts += 1

        async def stop(member: EngineRecord) -> None:
            # `paused` is set before the order, because an engine that fails during the order may be paused.
            member.paused = True
            await cast(Engine, member.engine).pause(mode)

        # Include failed and removed engines, because generations may still run there.
        running = [member for member in self._members.values() if member.busy]
        members = dict.fromkeys([*self._reached(), *running])
        failures = await self._order_all([member for member in members if member.takes_tokens], stop)
        for failure in failures:
            if isinstance(failure.error, EngineRejected):
                failure.member.paused = False
                # In mode "finish" a refusal is harmless, because all generations have ended.
                if mode == "abort":
                    raise failure.error
            else:
                self._lost(failure.member, failure.error)

    async def _load(self, weights: str, version: int) -> list[EngineRecord]:
        """Load the weights on all engines. Returns the engines that have loaded the weights. Raises an engine's error
        if all engines fail."""

        async def load(member: EngineRecord) -> None:
            await cast(LoadsWeights, member.engine).update_weights(weights, version)

        reached = self._reached()
        failures = await self._order_all(reached, load)
        if len(failures) == len(reached):
            for failure in failures:
                # An engine that has refused the weights still has its old weights, so it is not marked as failed.
                if isinstance(failure.error, EngineUnavailable):
                    self._lost(failure.member, failure.error)
            if failures:
                raise failures[0].error
            raise EngineUnavailable("no engine is left to load the weights", hint="see GET /v1/engines")
        for failure in failures:
            failure.member.behind = False
            self._lost(failure.member, failure.error)
        failed = {failure.member for failure in failures}
        return [member for member in reached if member not in failed]

    async def _resume_engines(self, known: KnownPolicy | None, loaded: Sequence[EngineRecord] | None = None) -> None:
        """Set the version if `known` is given, and resume the engines that respond. Engines that must first load the
        current weights in `catch_up` are left out. Engines that fail are marked as failed. `loaded`, if given, are the
        engines that have loaded the weights. Any other engine has joined later, and is also marked as failed."""
        if known is not None and known.version < self.version:
            self._undone.add(self.version)
        self._known = known or self._known
        version = None if known is None else known.version

        def catches_up(member: EngineRecord) -> bool:
            """Return True if the engine has outdated weights and can load the current weights in `catch_up`. Until then
            the engine must not get the new version."""
            return member.behind and loaded is None and bool(known and known.weights and weights_loader(member.engine))

        async def go_on(member: EngineRecord) -> None:
            if loaded is not None and member not in loaded:
                raise EngineUnavailable(f"engine {member.name!r} has not loaded version {version}")
            if version is not None and isinstance(member.engine, SetsVersion):
                if loaded is None and version != member.version:
                    self._warn_of_old_keys(member)
                await member.engine.set_version(version)
            if member.takes_tokens:
                try:
                    await cast(Engine, member.engine).resume()
                except EngineRejected:
                    if member.paused:
                        raise
            member.paused = False
            if version is not None:
                member.version = version
                if member.behind:
                    self._found(member)

        try:
            members = [member for member in self._reached() if not catches_up(member)]
            for failure in await self._order_all(members, go_on):
                self._lost(failure.member, failure.error)
        finally:
            self.gate.open()
            self._changed()  # published even if the gate was already open, because the version may be new

    def _warn_of_old_keys(self, member: EngineRecord) -> None:
        """Log a warning that the engine may reuse keys and values of the old weights, once for each engine. Called when
        the trainer has changed the weights itself."""
        if member.name not in self._warned and Capability.VERSIONED_CACHE not in capabilities_of(member.engine):
            self._warned.add(member.name)
            log.warning(
                "engine %s may reuse keys and values of an older policy version: clear its prefix cache when you change"
                " its weights, or list Capability.VERSIONED_CACHE in its capabilities",
                member.name,
            )

    @asynccontextmanager
    async def _closed(self, mode: PolicyPause) -> AsyncGenerator[None, None]:
        """Run one operation with the gate closed, after all earlier operations. The gate closes immediately, and closes
        again if an earlier operation has opened it. If the operation fails or is cancelled, even while it waits for
        earlier operations, the gate opens again if it was open before."""
        was_open = self.gate.mode is None
        self.gate.close(mode)
        try:
            await self._lock.acquire()
        except BaseException:
            if was_open:
                self.gate.open()
            raise
        if self.gate.mode is None:
            was_open = True
            self.gate.close(mode)
        try:
            yield
        except BaseException:
            if was_open and self.gate.mode is not None:
                await shielded(lambda: self._resume_engines(None))
            raise
        finally:
            self._lock.release()

    async def _order_all(
        self, members: Sequence[EngineRecord], say: Callable[[EngineRecord], Coroutine[Any, Any, None]]
    ) -> list[_Failure]:
        """Send one order to all engines concurrently. Returns the failures."""

        async def failure(member: EngineRecord) -> _Failure | None:
            try:
                await _await_order(member.engine, say(member))
            except EngineError as error:
                return _Failure(member, error)
            return None

        outcomes = await asyncio.gather(*map(failure, members))
        return [outcome for outcome in outcomes if outcome is not None]


class _Failure(NamedTuple):
    member: EngineRecord
    error: EngineError


async def _await_order(engine: AnyEngine, words: Awaitable[None]) -> None:
    """Await an order to an engine. Any exception of the engine's code is raised as an EngineError."""
    try:
        await words
    except EngineError:
        raise
    except Exception as error:  # an engine's code may raise any error
        raise mistake_of(engine.name, error) from error
