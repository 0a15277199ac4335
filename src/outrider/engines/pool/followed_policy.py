"""The policy of a pool that follows another process's pool: the same version, and pauses at the same time.

Invariant: once this gate has reported that it has settled, no generation begins here until the leader opens its gate.
Generations still in flight can be cut off: they continue after the pause as new requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from outrider.engines.base import EngineHealth, HoldsBack
from outrider.engines.pool.policy import KnownPolicy, Policy
from outrider.engines.pool.sharing import EngineState, GateReport, PoolState
from outrider.errors import EngineError, EngineUnavailable

if TYPE_CHECKING:
    from outrider.engines.pool.affinity import EngineRecord


class Leader(Protocol):
    """The leading pool, for a following pool's reports: the state of its gate, and failures of engines in its
    process."""

    def settled(self, report: GateReport) -> None: ...
    def engine_failed(self, engine: str) -> None: ...


class FollowedPolicy(Policy):
    """The leader's policy. It sends engines no orders. It reports its gate to the leader after each change of the gate,
    and when a generation ends during a pause."""

    def __init__(
        self,
        members: Mapping[str, EngineRecord],
        *,
        lost: Callable[[EngineRecord, EngineError], None],
        found: Callable[[EngineRecord], None],
        leader: Leader,
    ) -> None:
        super().__init__(members, lost=lost, found=found, changed=self._tell_leader)
        self._leader = leader
        self._engines: dict[str, EngineState] = {}
        self._closings = 0
        """The leader's `closings` in the last state that was followed."""
        self._cut = 0
        """The leader's `closings` at the latest pause that cut generations off here."""

    def follow(self, state: PoolState) -> None:
        self._closings = state.closings
        self._engines = {engine.name: engine for engine in state.engines}
        self._known = None if state.policy_version is None else KnownPolicy(state.policy_version)
        if state.paused is None:
            for engine in self._holding():
                engine.release()
            self.gate.open()
        else:
            self.gate.close(state.paused)
        self._tell_leader()

    def _tell_leader(self) -> None:
        # Count the cut before the report: after the report the leader makes the engines cut off the generations in
        # flight.
        if self.gate.mode == "abort" and not self.gate.whole and self._cut != self._closings:
            self._cut = self._closings
            self.gate.cuts += 1
            for engine in self._holding():
                engine.hold_back()
        self._leader.settled(GateReport(closings=self._closings, in_flight=self.gate.in_flight, whole=self.gate.whole))

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
        """Do nothing: only the leader resumes engines."""
