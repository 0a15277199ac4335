"""Manages the policy that the engines of a pool serve: its version, the pauses for new weights, and which engines have
the new weights.

The module handles no requests. While the policy is paused, no generation begins. Once `pause` has returned, no
generation is running. An engine that fails during an operation is marked as failed (`lost`), and must get the current
weights before it serves again. Invariants: the version decreases only on request. An engine with an older version
serves no session.
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
"""Maximum seconds for resuming a paused engine that is removed or whose pool closes."""


class KnownPolicy(msgspec.Struct, frozen=True):
    """The version that a trainer has set. `weights` is the path from which the engines have loaded the weights of this
    version, or None if the trainer itself has changed the weights."""

    version: int
    weights: str | None = None


class Policy:
    """The policy of the engines in `members`.

    - `lost`: called with an engine that fails, and its error. Must give the engine no more work until it works again.
    - `found`: called with an engine that serves again.
    - `known`: the policy that an earlier service has stored.
    - `keep`: stores each new policy, before the policy generates anything.
    - `changed`: called after each change of the gate or of the version.

    Operations run one after another. There is one exception: while a pause still waits for generations, a stricter
    pause or a resume takes effect at once.
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
        """The policy that a trainer has set, or None."""
        self._undone: set[int] = set()
        """Versions that were undone by setting a lower version. An engine that still reports one of these versions has
        missed the order to go back."""
        self._keep = keep
        self._draining = False
        self._warned: set[str] = set()
        """Names of engines for which the warning about old keys and values was logged."""
        self._lock = asyncio.Lock()

    @property
    def known_version(self) -> int | None:
        """The version that a trainer has set, or None."""
        return None if self._known is None else self._known.version

    @property
    def version(self) -> int:
        """The version that a trainer has set. If no trainer has set a version: the highest version of the engines, or 0
        if there are no engines."""
        if self._known is not None:
            return self._known.version
        return max((member.version for member in self._members.values()), default=0)

    def note_failure(self, member: EngineRecord) -> None:
        """Called when an engine has failed in this process. A follower's policy reports this to its leader; this class
        does nothing."""

    def status(self) -> PolicyStatus:
        engines = (
            PolicyEngine(name=member.name, version=member.version, ok=member.ok) for member in self._members.values()
        )
        return PolicyStatus(version=self.version, paused=self.gate.mode, engines=tuple(engines))

    def version_of(self, engine: AnyEngine, health: EngineHealth) -> int:
        """Return the version of an engine from its latest health report. An engine whose version cannot be set is
        assumed to have at least the policy's version."""
        known = 0 if self._known is None else self._known.version
        return health.version if isinstance(engine, SetsVersion) else max(health.version, known)

    def outdated(self, engine: AnyEngine, health: EngineHealth) -> EngineUnavailable | None:
        """Return an error if the health report shows that the engine's weights are outdated, otherwise None. Weights
        are outdated if their version is lower than the policy's, or if the version was undone when the policy went back
        to a lower version."""
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
        """Pause generation, and return when no generation of the policy is in flight. New generations wait.

        "finish" lets generations in flight end. "abort" cuts them off, except those that no engine could continue. If
        an engine refuses to abort, raises EngineRejected and pauses nothing. Raises Conflict if the policy is resumed
        before the pause is complete.
        """
        async with self._closed(mode):
            await self._halt()

    async def resume(self, version: int | None = None, *, go_back: bool = False) -> None:
        """Resume generation on all engines, also on engines that this pool has not paused. If `version` is given, set
        it on the engines first. Raises Conflict if `version` is lower than the current version, unless `go_back` is
        set."""
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
        """Pause, load `weights` (if given) in place on every engine, set the version, and resume. `meanwhile` is
        awaited between the loading and the resume.

        If only some engines fail, they stop serving and catch up later. If no engine has loaded the weights, raises an
        error of one of the engines, and the policy stays as it was. Raises Conflict if `version` is lower than the
        current version, unless `go_back` is set. Raises InvalidField if engines cannot load weights.
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
        """Bring a returning engine up to date, and return its version. If the engine's weights are outdated, the engine
        loads the current ones. The engine is resumed, unless the policy is paused. Raises EngineError if the engine
        cannot serve."""
        engine = member.engine
        async with self._lock:
            if member.ok:  # an earlier operation has already brought it up to date
                return member.version
            version = self.version_of(engine, health)
            if (outdated := self.outdated(engine, health)) is not None:
                member.behind = True  # so that the next update includes it, in case the load below fails
                known, load = self._known, weights_loader(engine)
                # A busy engine still runs generations that began before its failure. A pause may not have stopped these
                # generations, so the engine must not load weights.
                if known is None or known.weights is None or load is None or member.busy:
                    raise outdated
                await _await_order(engine, load(known.weights, known.version))
                version = known.version
            if member.paused and self.gate.mode is None:
                await _await_order(engine, cast(Engine, engine).resume())
                member.paused = False
            return version

    async def leave(self, members: Sequence[EngineRecord]) -> None:
        """Resume the paused engines among `members`, because they leave the pool. Each has FAREWELL_SECONDS. Errors are
        ignored."""

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
        """Return the policy with this version and path of weights. If the current version is set again without a path,
        keep the known path."""
        known = self._known
        if weights is None and known is not None and known.version == version:
            return known
        return KnownPolicy(version, weights)

    async def _remember(self, known: KnownPolicy | None) -> None:
        if known is not None and self._keep is not None:
            await self._keep(known)

    def _reached(self) -> list[EngineRecord]:
        """Return all engines that respond, also those with outdated weights."""
        return [member for member in self._members.values() if not member.removed and (member.ok or member.behind)]

    async def _halt(self) -> None:
        """Wait for the generations that this pause does not cut off, and then pause the engines. Raises the errors of
        `pause`."""
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
            # Set `paused` before the order, because an engine may be paused even if the order fails.
            member.paused = True
            await cast(Engine, member.engine).pause(mode)

        # Include failed and removed engines, because they may still run generations.
        running = [member for member in self._members.values() if member.busy]
        members = dict.fromkeys([*self._reached(), *running])
        failures = await self._order_all([member for member in members if member.takes_tokens], stop)
        for failure in failures:
            if isinstance(failure.error, EngineRejected):
                failure.member.paused = False
                # In mode "finish" a refusal does no harm, because all generations have ended.
                if mode == "abort":
                    raise failure.error
            else:
                self._lost(failure.member, failure.error)

    async def _load(self, weights: str, version: int) -> list[EngineRecord]:
        """Load the weights on all engines, and return the engines that have loaded them. If all engines fail, raises
        the error of one of them. Raises EngineUnavailable if there are no engines."""

        async def load(member: EngineRecord) -> None:
            await cast(LoadsWeights, member.engine).update_weights(weights, version)

        reached = self._reached()
        failures = await self._order_all(reached, load)
        if len(failures) == len(reached):
            for failure in failures:
                # An engine that has refused the weights still has its old ones, so it is not marked as failed.
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
        """Set the version if `known` is given, and resume the engines that respond. Engines that fail are marked as
        failed. Engines that must first load the current weights in `catch_up` are left out. `loaded` is None if there
        were no weights to load. Otherwise it has the engines that have just loaded them. In this case, any other engine
        has joined the pool since the loading, and is marked as failed, too."""
        if known is not None and known.version < self.version:
            # Not only the policy's version is undone: an engine that has failed may still have another version above
            # the new one.
            versions = (self.version, *(member.version for member in self._members.values()))
            self._undone |= {version for version in versions if version > known.version}
        self._known = known or self._known
        version = None if known is None else known.version

        def catches_up(member: EngineRecord) -> bool:
            """Return True if the engine has outdated weights, and can load the current ones in `catch_up`. Before that,
            it must not get the new version."""
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
            self._changed()  # even if the gate was open already, because the version may be new

    def _warn_of_old_keys(self, member: EngineRecord) -> None:
        """Log a warning, once for each engine: the engine may reuse keys and values of the old weights. Called when the
        trainer itself has changed the weights."""
        if member.name not in self._warned and Capability.VERSIONED_CACHE not in capabilities_of(member.engine):
            self._warned.add(member.name)
            log.warning(
                "engine %s may reuse keys and values of an older policy version: clear its prefix cache when you change"
                " its weights, or list Capability.VERSIONED_CACHE in its capabilities",
                member.name,
            )

    @asynccontextmanager
    async def _closed(self, mode: PolicyPause) -> AsyncGenerator[None, None]:
        """Run an operation with the gate closed, after all earlier operations. The gate closes at once, and again if an
        earlier operation has opened it. If the operation fails or is cancelled, even before its turn, the gate opens
        again if it was open before."""
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
        """Send an order to all engines concurrently. Returns the failures."""

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
    """Await an order to an engine. An unexpected exception of the engine's code is raised as an EngineError."""
    try:
        await words
    except EngineError:
        raise
    except Exception as error:  # an engine's code may raise any error
        raise mistake_of(engine.name, error) from error
