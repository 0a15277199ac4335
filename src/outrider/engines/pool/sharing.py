"""What pools in several processes tell one another, so that they work as one: the service's pool leads, others follow.

The leading pool has the list of engines, probes them and changes their weights; followers (`follower.py`) generate.
It knows nothing of how the processes are connected.
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
    from outrider.engines.pool.affinity import Member


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the leading pool. `spec` is the JSON of its EngineSpec where followers connect to it themselves;
    None where only the leader's process has it. `versions` is what the leader's `RemembersVersions` remembers."""

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
    """For followers that do not know it yet."""


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """All that followers must know of the leading pool. `closings` counts how often its gate has changed, and `paused`
    is how it stands now; `policy_version` is None while it is only what engines report. `leaving` are engines that are
    being removed, with the seconds that their generations have to end."""

    closings: int
    paused: PolicyPause | None
    policy_version: int | None
    engines: tuple[EngineState, ...]
    leaving: dict[str, float] = {}


class GateReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a follower's gate stands: the `closings` that it has seen, and its generations in flight, of which `whole`
    ones end by themselves."""

    closings: Annotated[int, msgspec.Meta(ge=0)]
    in_flight: Annotated[int, msgspec.Meta(ge=0)]
    whole: Annotated[int, msgspec.Meta(ge=0)]


def state_of(member: Member) -> EngineState:
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
