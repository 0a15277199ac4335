"""Messages between pools of several processes that work together: the service's pool leads, other pools follow.

The leading pool keeps the list of engines, probes them and changes their weights. Followers (`follower.py`) generate.
`outrider.nodes` connects the processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from outrider.constraint import ConstraintKind
from outrider.engines.base import EngineHealth, KnownVersions, RemembersVersions
from outrider.engines.pool.pace import PaceSummary
from outrider.schemas import PolicyPause
from outrider.trajectory import LogprobKind, TokenMode

if TYPE_CHECKING:
    from outrider.engines.pool.affinity import EngineRecord


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the leading pool. `spec` is the JSON of its EngineSpec if followers connect to the engine
    themselves, and None if only the leader's process has it. `versions` is the leader's value of
    `RemembersVersions.versions`."""

    name: str
    kind: str
    url: str | None
    spec: bytes | None
    mode: TokenMode
    logprob_kind: LogprobKind
    constraints: frozenset[ConstraintKind]
    health: EngineHealth
    ok: bool
    detail: str
    draining: bool
    version: int
    versions: KnownVersions | None
    awaits_workers: bool = False
    """See `AwaitsWorkers`."""
    pace: PaceSummary | None = None
    """The engine's pace, for followers that have not measured it yet."""


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """The leading pool's state for its followers. `closings` counts the changes of its gate, and `paused` is the gate's
    current mode. `policy_version` is None until a trainer has set a version. `leaving` maps each engine under removal
    to the seconds left for its generations to end."""

    closings: int
    paused: PolicyPause | None
    policy_version: int | None
    engines: tuple[EngineState, ...]
    leaving: dict[str, float] = {}


class GateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a follower's gate: the number of the leader's `closings` followed so far, and the follower's
    generations in flight. `whole` counts those that no engine can continue, so that they run to their end."""

    closings: Annotated[int, msgspec.Meta(ge=0)]
    in_flight: Annotated[int, msgspec.Meta(ge=0)]
    whole: Annotated[int, msgspec.Meta(ge=0)]


def state_of(member: EngineRecord) -> EngineState:
    engine, spec = member.engine, member.spec
    return EngineState(
        name=member.name,
        kind=member.kind,
        awaits_workers=member.awaits_workers,
        url=member.url,
        spec=spec.model_dump_json().encode() if spec is not None and spec.url else None,
        mode=engine.mode,
        logprob_kind=engine.logprob_kind,
        constraints=member.constraints,
        health=member.health,
        ok=member.ok,
        detail=member.detail,
        draining=member.draining,
        version=member.version,
        versions=engine.versions if isinstance(engine, RemembersVersions) else None,
        pace=member.known_pace(),
    )
