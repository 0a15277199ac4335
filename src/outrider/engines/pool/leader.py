"""Functions of the leading pool. The service's pool leads the pools of other processes, which follow.

The leading pool manages the list of engines, probes the engines and changes their weights. The following pools
(`follower.py`) generate.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from outrider.engines.base import AnyRequest, ChatChunk, Chunk, GenerateRequest, chunks_of
from outrider.engines.pool.checks import check_ids, mistake_of
from outrider.engines.pool.placement import EngineUse, PoolState, state_of
from outrider.errors import EngineUnavailable, OutriderError

if TYPE_CHECKING:  # for annotations only: this module makes no pools
    from outrider.engines.pool.pool import EnginePool


def pool_state(pool: EnginePool) -> PoolState:
    gate, members = pool.policy.gate, pool.members.values()
    return PoolState(
        mode_changes=gate.mode_changes,
        paused=gate.mode,
        policy_version=pool.policy.known_version,
        engines=tuple(state_of(member) for member in members if not member.removed),
        leaving={member.name: member.removal_seconds for member in members if member.removed},
    )


def note_uses(pool: EnginePool, follower: str, uses: Mapping[str, EngineUse]) -> None:
    """Record a follower's current use of the engines, by engine name. If `uses` is empty, the follower is gone.

    If a follower reports a newer version of an engine, the engine is checked. The reported version is not adopted
    without this check: versions do not decrease, so a wrong report could not be corrected.
    """
    for name, member in pool.members.items():
        use = uses.get(name)
        member.note_use(follower, use)
        if use is not None and use.version > max(member.version, member.looked_for):
            member.looked_for = use.version
            pool.health.look(name)
        if use is not None and use.pace is not None and not member.pace.known:
            member.pace.take_over(use.pace)
            pool.changes.publish(None)


def loads_elsewhere(pool: EnginePool, followers: Sequence[str]) -> list[dict[str, float]]:
    """For each of the `followers`, return the load that all other followers together put on each engine, by engine
    name."""
    loads = {
        name: {follower: use.load for follower, use in member.uses.items()} for name, member in pool.members.items()
    }
    totals = {name: sum(by_follower.values()) for name, by_follower in loads.items()}
    return [{name: totals[name] - loads[name].get(follower, 0.0) for name in loads} for follower in followers]


async def forwarded(pool: EnginePool, name: str, request: AnyRequest) -> AsyncGenerator[Chunk | ChatChunk, None]:
    """Generate for a follower, on an engine that only the leader's process has. The follower checks the reply. Raises
    the engine's errors, the errors of `check_ids`, and EngineUnavailable if the engine was removed."""
    if (engine := pool.engine(name)) is None:
        raise EngineUnavailable(f"engine {name!r} was removed")
    if isinstance(request, GenerateRequest):  # the follower may not have checked the request
        check_ids(request, pool.vocabulary)
    try:
        async with aclosing(chunks_of(engine, request)) as chunks:
            async for chunk in chunks:
                yield chunk
    except OutriderError:
        raise
    except Exception as error:  # an engine's code may raise any error
        raise mistake_of(engine.name, error) from error
