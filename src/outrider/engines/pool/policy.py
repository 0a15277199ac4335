"""The policy that a pool's engines serve: its version, the pauses for new weights, and which engines have the weights.

The module handles no requests. While the policy is paused no generation begins, and none runs once `pause` has
returned. Each engine's adapter translates the orders for its server. An engine that fails during an operation is given
up (`lost`) and catches up before serving again. Invariants: the version goes back only on request. An engine with an
older version serves no session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, Literal, NamedTuple, cast

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.events import wait_for_event
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
from outrider.engines.pool.checks import mistake_of
from outrider.engines.pool.record import EngineRecord
from outrider.errors import (
    Conflict,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    InvalidField,
)
from outrider.schemas import PolicyEngine, PolicyPause, PolicyStatus

log = logging.getLogger("outrider.engine")

FAREWELL_SECONDS = 5.0
"""Timeout for resuming a paused engine that is removed, or whose pool closes."""
ANSWER_SECONDS = 30.0
"""Seconds in which a follower has to report that its gate is closed, so that it begins no more generations."""
SETTLE_SECONDS = 1800.0
"""Seconds for a follower's generations to end if a pause does not cut them off. The number is an agent's default time
limit."""


class GateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a follower's gate: the number of the leader's `closings` followed so far, and the follower's
    generations in flight. `whole` counts those that no engine can continue, so that they run to their end."""

    closings: Annotated[int, msgspec.Meta(ge=0)]
    in_flight: Annotated[int, msgspec.Meta(ge=0)]
    whole: Annotated[int, msgspec.Meta(ge=0)]


class _Follower:
    """A process with a following gate. `since`: time of the latest closing, or of the follower's arrival if later.
    `report`: the follower's latest report."""

    def __init__(self, since: float, lost: Callable[[str], None]) -> None:
        self.since = since
        self.lost = lost
        self.report: GateReport | None = None

    def unsettled(self, closings: int, which: Literal["in_flight", "whole"]) -> bool:
        report = self.report
        return report is None or report.closings != closings or bool(getattr(report, which))


class PolicyGate:
    """Holds generations back while the policy is paused, and counts the generations in flight.

    `mode` is None while the gate is open. `cuts` counts the pauses with mode "abort", which cut generations off.
    `whole` counts the generations in flight that no engine can continue: they run to their end in either mode.
    `closings` counts the changes of `mode`. `changed` is called after each change, and at the end of a generation while
    the gate is closed.

    Gates of other processes may follow this gate. This gate has settled only when its followers have settled, too.
    `report` records the state of a follower's gate, and `forget` removes a follower. A follower has `answer_seconds` to
    report its closing, and `settle_seconds` for its generations to end. A follower that takes longer is removed, and
    its `lost` callback is called (`expect`).
    """

    answer_seconds = ANSWER_SECONDS
    settle_seconds = SETTLE_SECONDS

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.mode: PolicyPause | None = None
        self.cuts = 0
        self.in_flight = 0
        self.whole = 0
        self.closings = 0
        self._order_all = changed
        self._followers: dict[str, _Follower] = {}
        self._changed = asyncio.Event()
        self._closed_at = 0.0
        self._closed_for = 0.0
        self._clocks: set[asyncio.Timeout] = set()

    def enter(self, *, whole: bool) -> None:
        """Count a generation that begins. Call this only while the gate is open."""
        self.in_flight += 1
        self.whole += whole

    def leave(self, *, whole: bool) -> None:
        """Count the end of a generation, successful or not."""
        self.in_flight -= 1
        self.whole -= whole
        if self.mode is not None:
            self._notify()

    @contextmanager
    def ended_by_closing(self, clock: asyncio.Timeout) -> Iterator[None]:
        """Let the timeout expire when the gate closes, so that no pause waits for the work in this block."""
        self._clocks.add(clock)
        try:
            yield
        finally:
            self._clocks.discard(clock)

    async def opened(self) -> None:
        while self.mode is not None:
            await self._changed.wait()

    def close(self, mode: PolicyPause) -> None:
        """Admit no more generations. A closed gate can become stricter ("abort") but not milder."""
        if self.mode is None:
            self._closed_at = asyncio.get_running_loop().time()
            for clock in self._clocks:
                if not clock.expired():
                    clock.reschedule(self._closed_at)
        if self.mode not in (mode, "abort"):
            self.mode = mode
            self.closings += 1
            for follower in self._followers.values():
                follower.since = asyncio.get_running_loop().time()
        self._notify()

    def open(self) -> None:
        if self.mode is not None:
            self._closed_for = self.paused_seconds()
            self.mode = None
            self.closings += 1
            self._notify()

    async def settled(self) -> None:
        """Wait until the generations that the mode lets run to their end have ended, or until the gate is opened."""
        while (self.mode == "finish" and self._flying("in_flight")) or (self.mode == "abort" and self._flying("whole")):
            await wait_for_event(self._changed, self._lose_overdue("in_flight" if self.mode == "finish" else "whole"))

    def expect(self, follower: str, lost: Callable[[str], None] = lambda why: None) -> None:
        """Add a follower, which counts as unsettled until its first report. `lost` is called with the reason if the
        follower takes too long and is removed. `lost` must give the follower up, because its generations may run on
        through the pause."""
        self._followers[follower] = _Follower(asyncio.get_running_loop().time(), lost)

    def expects(self, follower: str) -> bool:
        return follower in self._followers

    def report(self, follower: str, report: GateReport) -> None:
        """Record the state of an expected follower's gate. Raises ValueError for an impossible report: a closing that
        has not happened, more `whole` generations than generations, or generations that begin behind a closed gate."""
        if (known := self._followers.get(follower)) is None:
            return
        before = known.report
        if report.closings > self.closings or report.whole > report.in_flight:
            raise ValueError(f"a gate that was closed {report.closings} times, with {report.in_flight} in flight")
        settling = self.mode is not None and before is not None and before.closings == report.closings == self.closings
        if settling and before and (report.in_flight > before.in_flight or report.whole > before.whole):
            raise ValueError("generations that begin behind a closed gate")
        known.report = report
        self._wake()

    def forget(self, follower: str) -> None:
        """Remove a follower that is gone, with all its generations."""
        self._followers.pop(follower, None)
        self._wake()

    def _flying(self, which: Literal["in_flight", "whole"]) -> bool:
        """Return True if any process has generations in flight, as counted in the field `which`, or if a follower has
        not yet reported this closing."""
        return bool(getattr(self, which)) or any(
            follower.unsettled(self.closings, which) for follower in self._followers.values()
        )

    def _lose_overdue(self, which: Literal["in_flight", "whole"]) -> float | None:
        """Remove the followers that take too long. Returns the seconds until the next follower may be overdue."""
        now, waits = asyncio.get_running_loop().time(), []
        for name, follower in list(self._followers.items()):
            if not follower.unsettled(self.closings, which):
                continue
            answered = follower.report is not None and follower.report.closings == self.closings
            seconds = self.settle_seconds if answered else self.answer_seconds
            if (left := follower.since + seconds - now) > 0:
                waits.append(left)
                continue
            what = "had its generations end" if answered else "answered"
            self.forget(name)
            follower.lost(f"it has not {what} within {seconds:g} s of a pause of the policy")
        return min(waits, default=None)

    def paused_seconds(self) -> float:
        """Return the total seconds for which the gate has been closed until now, by the event loop's clock."""
        if self.mode is None:
            return self._closed_for
        return self._closed_for + asyncio.get_running_loop().time() - self._closed_at

    def _notify(self) -> None:
        self._wake()
        self._order_all()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class KnownPolicy(msgspec.Struct, frozen=True):
    """The version that a trainer has set, and the location of this version's weights if the engines have loaded the
    weights from there."""

    version: int
    weights: str | None = None


class Policy:
    """The policy of the engines in `members`.

    `lost` is called with each engine that fails and the error: the engine gets no more work until it is back. `found`
    is called with each engine that serves again. `known` is the policy stored by an earlier service. `keep` is awaited
    with each new policy before anything is generated by that policy. `changed` is called after each change of the gate
    or of the version. Operations run one after another. Only a pause that still waits for generations can be overtaken,
    by a stricter pause or by a resume.
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
        """None until a trainer has set a version."""
        self._undone: set[int] = set()
        """Versions from which the policy went back. An engine that still reports one of these versions has missed the
        order to go back."""
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
        """The version that a trainer has set, else the highest version that an engine reports."""
        if self._known is not None:
            return self._known.version
        return max((member.version for member in self._members.values()), default=0)

    def note_failure(self, member: EngineRecord) -> None:
        """Report to the leader that an engine has failed in this process. Does nothing unless the policy follows a
        leader."""

    def status(self) -> PolicyStatus:
        engines = (
            PolicyEngine(name=member.name, version=member.version, ok=member.ok) for member in self._members.values()
        )
        return PolicyStatus(version=self.version, paused=self.gate.mode, engines=tuple(engines))

    def version_of(self, engine: AnyEngine, health: EngineHealth) -> int:
        """Return the version of an engine, from its latest health report. An engine whose version cannot be set is
        taken to have at least the policy's version."""
        known = 0 if self._known is None else self._known.version
        return health.version if isinstance(engine, SetsVersion) else max(health.version, known)

    def outdated(self, engine: AnyEngine, health: EngineHealth) -> EngineUnavailable | None:
        """Return None if the engine may serve, else an error. An engine may not serve if, by its latest health report,
        its weights are older than the policy or have a version that was undone."""
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
        """Pause generation, and return when nothing of the policy is being generated. New generations wait.

        "finish" lets generations in flight end. "abort" cuts them off, except those that no engine can continue. Raises
        EngineRejected, with nothing paused, if an engine refuses to cut, and Conflict if a resume came first.
        """
        async with self._closed(mode):
            await self._halt()

    async def resume(self, version: int | None = None, *, go_back: bool = False) -> None:
        """Set the version on the engines, if one is given, and resume generation, also on engines that somebody else
        has paused. Raises Conflict for a version that goes back, unless `go_back` is set."""
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
        """Pause, have every engine load `weights` in place if they are given, set the version, and resume. `meanwhile`
        is awaited after the weights are loaded and before generation resumes.

        If only some engines fail, they are left behind, and catch up later. Raises Conflict for a version that goes
        back unless `go_back` is set, InvalidField if engines cannot load weights, and an engine's error, with
        everything as before, if no engine has loaded the weights.
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
            finally:  # whatever fails now, the engines have the weights, and resume with their version
                await shielded(lambda: self._resume_engines(known, loaded))

    async def catch_up(self, member: EngineRecord, health: EngineHealth) -> int:
        """Bring a returning engine to the current policy, and return its version. Raises EngineError on failure."""
        engine = member.engine
        async with self._lock:
            if member.ok:  # an earlier operation has brought the engine back
                return member.version
            version = self.version_of(engine, health)
            if (outdated := self.outdated(engine, health)) is not None:
                member.behind = True  # so the next update reaches the engine, even if it cannot load these weights
                known, load = self._known, weights_loader(engine)
                # A busy engine must load nothing: its generations began before the engine was given up, and the pause
                # may not have reached them.
                if known is None or known.weights is None or load is None or member.busy:
                    raise outdated
                await _await_order(engine, load(known.weights, known.version))
                version = known.version
            if member.paused and self.gate.mode is None:
                await _await_order(engine, cast(Engine, engine).resume())
                member.paused = False
            return version

    async def leave(self, members: Sequence[EngineRecord]) -> None:
        """Resume the paused engines among `members`, because the pool gives them up. Each engine has
        `FAREWELL_SECONDS`, and errors are dropped."""

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
        """Return the policy at a version. If the current version is set again without weights, it keeps its weights."""
        known = self._known
        if weights is None and known is not None and known.version == version:
            return known
        return KnownPolicy(version, weights)

    async def _remember(self, known: KnownPolicy | None) -> None:
        if known is not None and self._keep is not None:
            await self._keep(known)

    def _reached(self) -> list[EngineRecord]:
        """Return all engines that respond, also engines that are behind."""
        return [member for member in self._members.values() if not member.removed and (member.ok or member.behind)]

    async def _halt(self) -> None:
        """Wait for the generations that run to their end, and pause the engines. Raises the errors of `pause`."""
        self._draining = True
        try:
            await self.gate.settled()
        finally:
            self._draining = False
        if (mode := self.gate.mode) is None:
            raise Conflict("the policy was resumed before it had come to rest", hint="pause it again")
        if mode == "abort":
            self.gate.cuts += 1

        async def stop(member: EngineRecord) -> None:
            member.paused = True  # set before the order: an engine that is lost now may be paused when it is back
            await cast(Engine, member.engine).pause(mode)

        # Include engines that get no more requests: generations begun there may still run.
        running = [member for member in self._members.values() if member.busy]
        members = dict.fromkeys([*self._reached(), *running])
        failures = await self._order_all([member for member in members if member.takes_tokens], stop)
        for failure in failures:
            if isinstance(failure.error, EngineRejected):
                failure.member.paused = False
                # In mode "finish" nothing is in flight any more, so an engine that cannot pause generates nothing.
                if mode == "abort":
                    raise failure.error
            else:
                self._lost(failure.member, failure.error)

    async def _load(self, weights: str, version: int) -> list[EngineRecord]:
        """Load the weights on all engines, and return the engines that have loaded them. Raises an engine's error if
        all fail."""

        async def load(member: EngineRecord) -> None:
            await cast(LoadsWeights, member.engine).update_weights(weights, version)

        reached = self._reached()
        failures = await self._order_all(reached, load)
        if len(failures) == len(reached):
            for failure in failures:
                if isinstance(failure.error, EngineUnavailable):  # the engine may be gone for good
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
        """Set the version, if there is a new one, and resume all engines. An engine that fails is given up. `loaded`,
        if given, are the engines with the version's weights. Any other engine has joined meanwhile, and is given up,
        too."""
        if known is not None and known.version < self.version:
            self._undone.add(self.version)
        self._known = known or self._known
        version = None if known is None else known.version

        def catches_up(member: EngineRecord) -> bool:
            """Return True if the engine is behind and loads the weights only when it catches up. Until then the version
            set by the trainer does not apply to the engine."""
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
            self._changed()  # called also if the gate was open: the version may be new

    def _warn_of_old_keys(self, member: EngineRecord) -> None:
        """Warn, once for each engine, that the engine may reuse keys and values of the old weights. Called if the
        trainer has changed the weights itself."""
        if member.name not in self._warned and Capability.VERSIONED_CACHE not in capabilities_of(member.engine):
            self._warned.add(member.name)
            log.warning(
                "engine %s does not say that it keeps the keys and values of each policy version apart: have it forget"
                " its prefix cache when you change its weights, or list Capability.VERSIONED_CACHE in its capabilities",
                member.name,
            )

    @asynccontextmanager
    async def _closed(self, mode: PolicyPause) -> AsyncGenerator[None, None]:
        """Run one operation with the gate closed. The gate closes at once, but earlier operations may open it again
        before this operation's turn. If the block, or the wait for the turn, fails or is cancelled, the policy stays
        paused only if it was paused before."""
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
    """Await an order to an engine. Raises EngineError for any error of the engine."""
    try:
        await words
    except EngineError:
        raise
    except Exception as error:  # an engine's code may raise any error
        raise mistake_of(engine.name, error) from error
