"""A pool that follows the pool of another process (the leader). The follower has the leader's engines and policy, and
generates on the engines directly.

The leading pool sends its `PoolState`. Only the leader checks new engines, and orders engines to pause, to load weights
and to resume. `outrider.nodes` connects the processes. Invariants:

- Once this pool has reported a pause to the leader, no generation begins here until the leader resumes the policy.
  Generations still in flight can be cut off, and continue after the pause as new requests.
- A generation begins only on an engine that the leader uses, according to the last applied state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, cast

from outrider.concurrency.chores import Chores, Failures
from outrider.engines.base import AnyEngine, EngineHealth, HoldsBack, RemembersVersions
from outrider.engines.gates import GateReport
from outrider.engines.pool.placement import EngineRecord, EngineState, EngineUse, PoolState, use_of
from outrider.engines.pool.policy import KnownPolicy, Policy
from outrider.engines.pool.pool import REMOVAL_SECONDS, EnginePool
from outrider.errors import EngineError, EngineUnavailable
from outrider.spec import EngineSpec

log = logging.getLogger("outrider.engine")


ADOPT_SECONDS = 30.0
"""Maximum seconds for starting an engine in this process and applying the leader's state to it."""
AGAIN_SECONDS = 1.0
"""How long to wait before an engine that could not be started is tried again."""


class Leader(Protocol):
    """The leader, as a following pool sees it. `settled` reports the state of the follower's gate. `engine_failed`
    reports an engine that has failed in the follower's process."""

    def settled(self, report: GateReport) -> None: ...
    def engine_failed(self, engine: str) -> None: ...


class FollowedPolicy(Policy):
    """The follower's copy of the leader's policy. It sends no orders to engines. It reports the state of its gate to
    the leader after each change, and when a generation ends during a pause."""

    def __init__(
        self,
        members: Mapping[str, EngineRecord],
        *,
        lost: Callable[[EngineRecord, EngineError], None],
        found: Callable[[EngineRecord], None],
        leader: Leader,
    ) -> None:
        super().__init__(members, lost=lost, found=found, changed=self._report)
        self._leader = leader
        self._engines: dict[str, EngineState] = {}
        self._mode_changes = 0
        """The leader's `mode_changes` in the last state passed to `follow`."""
        self._cut = 0
        """The leader's `mode_changes` at the latest pause that has cut off generations in this process."""

    def follow(self, state: PoolState) -> None:
        self._mode_changes = state.mode_changes
        self._engines = {engine.name: engine for engine in state.engines}
        self._known = None if state.policy_version is None else KnownPolicy(state.policy_version)
        if state.paused is None:
            for engine in self._holding():
                engine.release()
            self.gate.open()
        else:
            self.gate.close(state.paused)
        self._report()

    def _report(self) -> None:
        # Count the pause in `gate.cuts` before the report. As soon as the leader has the report, the leader may order
        # the engines to abort the generations. The count must then already show that a pause has cut these generations
        # off.
        if self.gate.mode == "abort" and not self.gate.whole and self._cut != self._mode_changes:
            self._cut = self._mode_changes
            self.gate.cuts += 1
            for engine in self._holding():
                engine.hold_back()
        self._leader.settled(
            GateReport(mode_changes=self._mode_changes, in_flight=self.gate.in_flight, whole=self.gate.whole)
        )

    def _holding(self) -> list[HoldsBack]:
        return [member.engine for member in self._members.values() if isinstance(member.engine, HoldsBack)]

    def note_failure(self, member: EngineRecord) -> None:
        self._leader.engine_failed(member.name)

    async def catch_up(self, member: EngineRecord, health: EngineHealth) -> int:
        """Return the version of an engine that responds again. Raises EngineUnavailable if the leader does not use the
        engine now, or if the engine's weights are outdated."""
        engine = self._engines.get(member.name)
        if engine is None or not engine.ok:
            raise EngineUnavailable(
                f"engine {member.name!r} is not used by the service: {engine.detail if engine else 'it was removed'}"
            )
        if (outdated := self.outdated(member.engine, health)) is not None:
            raise outdated
        return max(self.version_of(member.engine, health), engine.version)

    async def leave(self, members: Sequence[EngineRecord]) -> None:
        """Do nothing, because only the leader resumes engines."""


class Forwarded(Protocol):
    """A follower's stand-in for an engine that only the leader's process has. `apply_state` receives the leader's state
    of the engine."""

    def apply_state(self, state: EngineState) -> None: ...


class PoolFollower:
    """Applies the states of the leader to a following pool, inside `async with PoolFollower(...)`.

    `forwarded` creates the stand-in (`Forwarded`) for an engine that only the leader's process has. The owner must pass
    each state from the leader to `follow`.
    """

    def __init__(
        self, pool: EnginePool, forwarded: Callable[[EngineState], AnyEngine], failures: Failures | None = None
    ) -> None:
        assert isinstance(pool.policy, FollowedPolicy)
        self.pool = pool
        self._policy = pool.policy
        self._forwarded = forwarded
        self._state: PoolState | None = None
        self._followed: dict[str, EngineState] = {}
        """The last applied state of each engine, by engine name."""
        self._unusable: set[str] = set()
        """Names of engines that the last attempt could not use. `Failures` lists them as failing work."""
        self._work = asyncio.Event()
        self._tasks = Chores(failures or Failures())

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.begin("follow engines", self._keep_up)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(None, None, None)

    def uses(self) -> dict[str, EngineUse]:
        """Return how this process uses each engine, by engine name."""
        return {name: use_of(member) for name, member in self.pool.members.items()}

    def set_loads(self, loads: Mapping[str, float]) -> None:
        """Record the load that other processes put on each engine."""
        for name, load in loads.items():
            if (member := self.pool.members.get(name)) is not None:
                member.load_elsewhere = load
                self.pool.placement.refresh(member)

    def follow(self, state: PoolState) -> None:
        """Apply a new state of the leader: a pause at once, everything else in the background."""
        self._state = state
        if state.paused is not None:
            self._policy.follow(state)
        self._work.set()

    async def _keep_up(self) -> None:
        await self._work.wait()
        self._work.clear()
        state = self._state
        assert state is not None
        failures = self._tasks.failures
        for engine in state.engines:
            name = f"use engine {engine.name}"
            try:
                async with asyncio.timeout(ADOPT_SECONDS):
                    await self._follow_engine(engine, state)
            except Exception as error:  # an engine's code may raise any error, or may work only in the leader's process
                failures.note(name, error)
                self._unusable.add(engine.name)
                asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._work.set)
            else:
                failures.note_success(name)
                self._unusable.discard(engine.name)
        listed = {engine.name for engine in state.engines}
        for name in self._unusable - listed:  # nothing fails any more, because the engine was removed
            failures.drop(f"use engine {name}")
        self._unusable &= listed
        for name in self._followed.keys() - listed:
            self._leave_engine(name, state)
        # Open the gate last, as the leader does: before any generation begins, the engines must have the new version.
        if state is self._state and state.paused is None:
            self._policy.follow(state)

    async def _follow_engine(self, engine: EngineState, state: PoolState) -> None:
        known = self._followed.get(engine.name)
        if known is not None and (known.kind, known.spec) != (engine.kind, engine.spec):
            self._leave_engine(engine.name, state)
            known = None
        if known is None:
            spec = None if engine.spec is None else EngineSpec.model_validate_json(engine.spec)
            await self.pool.adopt(engine, spec or self._forwarded(engine))
        self._followed[engine.name] = engine
        if engine.spec is None:
            cast(Forwarded, self.pool.engine(engine.name)).apply_state(engine)
        # Take over the leader's versions only if they have changed. If they have not changed, this process may have
        # newer ones.
        if engine.versions is not None and (known is None or known.versions != engine.versions):
            own: object = self.pool.engine(engine.name)
            if isinstance(own, RemembersVersions):
                own.versions = engine.versions
        apply_state(self.pool, engine, known)

    def _leave_engine(self, name: str, state: PoolState) -> None:
        del self._followed[name]
        seconds = state.leaving.get(name, REMOVAL_SECONDS)

        async def leave() -> None:
            try:
                await self.pool.remove(name, seconds=seconds)
            except Exception:  # an engine's code may raise any error
                log.exception("engine %s cannot be closed", name)
            self._work.set()  # now an engine of the same name can join

        self._tasks.create_task(leave(), name=f"removal of {name}")


def apply_state(pool: EnginePool, state: EngineState, known: EngineState | None = None) -> None:
    """Apply the leader's state of an engine to the engine of the same name in this pool. `known` is the state applied
    before, or None."""
    member = pool.members[state.name]
    member.health, member.draining = state.health, state.draining
    # This process may know a newer version than the leader does. It keeps the newer one, unless the leader has gone
    # back to an older version.
    gone_back = known is not None and state.version < known.version
    member.version = state.version if gone_back else max(member.version, state.version)
    if state.pace is not None and not member.pace.known:
        member.pace.take_over(state.pace)
    if state.ok and not member.ok:
        member.probe_now.set()
    elif member.ok and not state.ok:
        member.detail = state.detail
        pool.health.keep_out(member)
    pool.placement.refresh(member)
