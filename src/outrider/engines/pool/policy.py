"""The policy that a pool's engines serve: its version, the pause in which its weights change, and who has them.

It knows no request. While the policy is paused no generation begins, and nothing is generated once `pause` has
returned. Engines are told in their own words; one that fails on the way is given up (`lost`) and catches up before it
serves again. Invariant: the version never goes back, and an engine that reports an older one serves nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.engines.base import ChatEngine, Engine, EngineHealth, LoadsWeights, SetsVersion, weights_loader
from outrider.errors import (
    Conflict,
    EngineError,
    EngineMisbehaved,
    EngineRejected,
    EngineUnavailable,
    InvalidField,
)
from outrider.schemas import PolicyEngine, PolicyPause, PolicyStatus

if TYPE_CHECKING:
    from outrider.engines.pool.affinity import Member

FAREWELL_SECONDS = 5.0
"""How long a pool that closes while paused, or gives up an engine, tries to have its engines go on."""


class PolicyGate:
    """Holds generations back while the policy is paused, and counts those in flight.

    `mode` is None while it is open. `cuts` counts the pauses that cut generations off. `whole` counts the generations
    in flight that no engine can go on with, so that they end by themselves in either mode.
    """

    def __init__(self) -> None:
        self.mode: PolicyPause | None = None
        self.cuts = 0
        self.in_flight = 0
        self.whole = 0
        self._changed = asyncio.Event()
        self._closed_at = 0.0
        self._closed_for = 0.0

    def enter(self, *, whole: bool) -> None:
        """A generation begins. Only while open."""
        self.in_flight += 1
        self.whole += whole

    def leave(self, *, whole: bool) -> None:
        """A generation has ended, however it did."""
        self.in_flight -= 1
        self.whole -= whole
        if self.mode is not None:
            self._notify()

    async def opened(self) -> None:
        while self.mode is not None:
            await self._changed.wait()

    def close(self, mode: PolicyPause) -> None:
        """Let no generation enter. A closed gate can become stricter ("abort"), and not milder."""
        if self.mode is None:
            self._closed_at = asyncio.get_running_loop().time()
        if self.mode != "abort":
            self.mode = mode
        self._notify()

    def open(self) -> None:
        if self.mode is not None:
            self._closed_for = self.paused_seconds()
            self.mode = None
            self._notify()

    async def settled(self) -> None:
        """Returns once nothing is in flight that the mode leaves to end by itself, or the gate was opened."""
        while (self.mode == "finish" and self.in_flight) or (self.mode == "abort" and self.whole):
            await self._changed.wait()

    def paused_seconds(self) -> float:
        """Seconds of the event loop's clock in all in which it was closed, until now."""
        if self.mode is None:
            return self._closed_for
        return self._closed_for + asyncio.get_running_loop().time() - self._closed_at

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Weights(msgspec.Struct, frozen=True):
    """Where the weights of a version are, as the engines were told."""

    path: str
    version: int


class Policy:
    """The policy of the engines in `members`.

    `lost` gives an engine no more work until it is back: it is called with each engine that fails, and what it failed
    with. `found` is called with one that serves again. Operations follow one another; only a pause that still waits
    for generations is overtaken, by a stricter one or by a resume.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        *,
        lost: Callable[[Member, EngineError], None],
        found: Callable[[Member], None],
    ) -> None:
        self.gate = PolicyGate()
        self._members = members
        self._lost = lost
        self._found = found
        self._told: int | None = None
        """The version that a trainer has set; None while it is only what engines report."""
        self._weights: _Weights | None = None
        self._draining = False
        self._lock = asyncio.Lock()

    @property
    def version(self) -> int:
        """As a trainer has set it, else the highest that an engine reports."""
        if self._told is not None:
            return self._told
        return max((member.version for member in self._members.values()), default=0)

    def status(self) -> PolicyStatus:
        engines = (
            PolicyEngine(name=member.name, version=member.version, ok=member.ok) for member in self._members.values()
        )
        return PolicyStatus(version=self.version, paused=self.gate.mode, engines=tuple(engines))

    def version_of(self, engine: Engine | ChatEngine, health: EngineHealth) -> int:
        """The version of an engine that has just reported its health. One that cannot be told serves the policy's."""
        return health.version if isinstance(engine, SetsVersion) else max(health.version, self._told or 0)

    def outdated(self, engine: Engine | ChatEngine, health: EngineHealth) -> EngineUnavailable | None:
        """Why an engine that has just reported its health may not serve: its weights are older than the policy."""
        if self._told is None or health.version >= self._told or not isinstance(engine, SetsVersion):
            return None
        return EngineUnavailable(
            f"engine {engine.name!r} serves policy version {health.version}, the policy is at {self._told}",
            hint="it takes part in the next update; if it has the weights: outrider policy resume N",
        )

    async def pause(self, mode: PolicyPause) -> None:
        """Returns when nothing of the policy is being generated any more; generations that come wait.

        "finish" lets those in flight end. "abort" cuts them off, except those that no engine can go on with. Raises
        EngineRejected, with nothing paused, where an engine refuses to cut; Conflict where a resume came first.
        """
        async with self._closed(mode):
            await self._halt()

    async def resume(self, version: int | None = None) -> None:
        """Have the engines told the version, where one is given, and generate again; also those that somebody else has
        paused. Raises Conflict for a version that goes back."""
        self._check_forward(version)
        if self._draining:
            self.gate.open()
        async with self._lock:
            self._check_forward(version)
            await self._go_on(version)

    async def update(
        self,
        version: int,
        *,
        mode: PolicyPause,
        weights: str | None = None,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Pause, have every engine load `weights` in place where they are given, set the version, and resume.
        `meanwhile` is awaited between: the weights are loaded then, and nothing is generated yet.

        Engines that fail while others do not are left behind, and catch up. Raises Conflict for a version that goes
        back, InvalidField where engines cannot load weights, and, with everything as it was before, what the engines
        raise if none of them took the weights.
        """
        self._check_forward(version)
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
            self._check_forward(version)
            await self._halt()
            loaded = None if weights is None else await self._load(_Weights(weights, version))
            try:
                if meanwhile is not None:
                    await meanwhile()
            finally:  # the engines have the weights, whatever fails now
                await shielded(lambda: self._go_on(version, loaded))

    async def catch_up(self, member: Member, health: EngineHealth) -> int:
        """Bring an engine that is back to where the policy is; its version. Raises EngineError where it is not."""
        engine = member.engine
        async with self._lock:
            if member.ok:  # an operation that came first has found it
                return member.version
            version = self.version_of(engine, health)
            if (outdated := self.outdated(engine, health)) is not None:
                weights, load = self._weights, weights_loader(engine)
                if (
                    weights is None
                    or weights.version != self._told
                    or load is None
                    or member.in_flight  # begun before it was given up, and out of reach of the pause
                ):
                    member.behind = True
                    raise outdated
                await _said(engine, load(weights.path, weights.version))
                version = weights.version
            if member.paused and self.gate.mode is None:
                await _said(engine, cast(Engine, engine).resume())
                member.paused = False
            return version

    async def leave(self, members: Sequence[Member]) -> None:
        """Have engines that are given up go on without us; nothing is raised, and it takes a few seconds at most."""

        async def go_on(member: Member) -> None:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await cast(Engine, member.engine).resume()

        await self._tell([member for member in members if member.paused], go_on)

    def _check_forward(self, version: int | None) -> None:
        if version is not None and version < self.version:
            raise Conflict(
                f"the policy is at version {self.version}: it cannot go back to {version}",
                hint="GET /v1/policy has the version; count on from it",
                field="version",
            )

    def _reached(self) -> list[Member]:
        """The engines that answer, also those that are behind."""
        return [member for member in self._members.values() if not member.removed and (member.ok or member.behind)]

    async def _halt(self) -> None:
        """Wait for what has to end by itself, and stop the engines. Raises as `pause`."""
        self._draining = True
        try:
            await self.gate.settled()
        finally:
            self._draining = False
        if (mode := self.gate.mode) is None:
            raise Conflict("the policy was resumed before it had come to rest", hint="pause it again")
        if mode == "abort":
            self.gate.cuts += 1

        async def stop(member: Member) -> None:
            member.paused = True  # before the answer: one that is lost may be paused when it is back
            await cast(Engine, member.engine).pause(mode)

        # Also where no request goes any more: what was begun there may still run.
        running = [member for member in self._members.values() if member.in_flight]
        members = dict.fromkeys([*self._reached(), *running])
        failures = await self._tell([member for member in members if member.takes_tokens], stop)
        for failure in failures:
            if isinstance(failure.error, EngineRejected):
                failure.member.paused = False
                # With nothing in flight, an engine that cannot pause generates nothing either.
                if mode == "abort":
                    raise failure.error
            else:
                self._lost(failure.member, failure.error)

    async def _load(self, weights: _Weights) -> list[Member]:
        """Have the engines load the weights; those that did. Raises what they raise if none of them did."""

        async def load(member: Member) -> None:
            await cast(LoadsWeights, member.engine).update_weights(weights.path, weights.version)

        reached = self._reached()
        failures = await self._tell(reached, load)
        if len(failures) == len(reached):
            if failures:
                raise failures[0].error
            raise EngineUnavailable("no engine is left to load the weights", hint="see GET /v1/engines")
        self._weights = weights
        for failure in failures:
            failure.member.behind = False
            self._lost(failure.member, failure.error)
        failed = {failure.member for failure in failures}
        return [member for member in reached if member not in failed]

    async def _go_on(self, version: int | None, loaded: Sequence[Member] | None = None) -> None:
        """Set the version, where one is given, and have all engines generate again. An engine that fails is lost, and
        so is one that is not among those that have `loaded` the version's weights: it has joined meanwhile."""
        if version is not None:
            self._told = version

        async def go_on(member: Member) -> None:
            if loaded is not None and member not in loaded:
                raise EngineUnavailable(f"engine {member.name!r} has not loaded version {version}")
            if version is not None and isinstance(member.engine, SetsVersion):
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
            for failure in await self._tell(self._reached(), go_on):
                self._lost(failure.member, failure.error)
        finally:
            self.gate.open()

    @asynccontextmanager
    async def _closed(self, mode: PolicyPause) -> AsyncGenerator[None, None]:
        """One operation with the gate closed, at once: the operations before it may open it once more until its turn
        has come. Whatever fails in the block, or before, cancellation included, leaves the policy paused only if it
        was before."""
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
                await shielded(lambda: self._go_on(None))
            raise
        finally:
            self._lock.release()

    async def _tell(
        self, members: Sequence[Member], say: Callable[[Member], Coroutine[Any, Any, None]]
    ) -> list[_Failure]:
        """Say it to all of them at once; what failed."""

        async def failure(member: Member) -> _Failure | None:
            try:
                await _said(member.engine, say(member))
            except EngineError as error:
                return _Failure(member, error)
            return None

        outcomes = await asyncio.gather(*map(failure, members))
        return [outcome for outcome in outcomes if outcome is not None]


class _Failure(NamedTuple):
    member: Member
    error: EngineError


async def _said(engine: Engine | ChatEngine, words: Awaitable[None]) -> None:
    """Await an order to an engine. Raises EngineError, whatever the engine raises."""
    try:
        await words
    except EngineError:
        raise
    except Exception as error:  # an engine may be anybody's code
        raise EngineMisbehaved(f"engine {engine.name!r} raised {type(error).__name__}: {error}") from error
