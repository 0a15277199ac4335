"""Groups, turns and results for tests of the store, and short forms of the store's calls."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import Boundary, ErrorRecord
from outrider.lifecycle import SessionState, StopReason
from outrider.messages import Message, Role
from outrider.store.rows import GroupRow
from outrider.store.store import Store
from outrider.trajectory import (
    FinishReason,
    JoinKind,
    LogprobKind,
    SessionResult,
    Turn,
    TurnTimings,
    Verdict,
    VersionSpan,
    pack_ids,
    pack_logprobs,
)

LEASE = 1e12
FAILURE = ErrorRecord(boundary=Boundary.RUNTIME, code="runtime_failure", message="gone", retryable=True)
AFTER_START = (SessionState.READY, SessionState.RUNNING, SessionState.EVALUATING)
STARTED = (SessionState.INITIALIZING, *AFTER_START)


def group_row(
    id: str = "g",
    n: int = 2,
    *,
    priority: int = 0,
    created: float = 100.0,
    key: str | None = None,
    callback_url: str | None = None,
    min_usable: int | None = None,
) -> GroupRow:
    return GroupRow(
        id=id,
        n=n,
        priority=priority,
        idempotency_key=key,
        callback_url=callback_url,
        created=created,
        min_usable=min_usable,
    )


def session_ids(group: GroupRow) -> list[str]:
    return [f"{group.id}.{index}" for index in range(group.n)]


async def submit(store: Store, group: GroupRow, spec: bytes = b"{}") -> GroupRow:
    return await store.create_group(group, spec, session_ids(group))


async def start(
    store: Store, session_id: str, *, node: str = "node", lease_until: float = LEASE, continues_turns: bool = False
) -> int:
    return await store.start_attempt(session_id, node=node, lease_until=lease_until, continues_turns=continues_turns)


async def advance(store: Store, session_id: str, attempt: int, states: Sequence[SessionState] = AFTER_START) -> None:
    for state in states:
        await store.set_state(session_id, attempt, state)


async def kinds(store: Store) -> list[str]:
    return [event.kind for event in await store.events(after=0, limit=1000)]


def turn(index: int = 0, *, text: str = "hi") -> Turn:
    return Turn(
        index=index,
        parent=index - 1 if index else None,
        join=JoinKind.APPEND if index else JoinKind.ROOT,
        prompt_length=3,
        prompt_delta=pack_ids([1, 2, 3]),
        output_ids=pack_ids([4, 5]),
        logprobs=pack_logprobs([-0.1, -2.5]),
        logprob_kind=LogprobKind.RAW,
        versions=(VersionSpan(version=7, start=0, end=2),),
        finish=FinishReason.STOP,
        stop_match=5,
        dialect="chat",
        engine="scripted",
        sampling={"temperature": 1.0, "stop": ["x"]},
        reply=Message(role=Role.ASSISTANT, content=text),
        timings=TurnTimings(received=1.0, first_token=2.0, finished=3.0),
    )


def result(
    session_id: str, attempt: int, *, reason: StopReason = StopReason.COMPLETED, reward: float | None = 1.0
) -> SessionResult:
    group_id, _, index = session_id.rpartition(".")
    return SessionResult(
        session_id=session_id,
        group_id=group_id,
        sample_index=int(index),
        attempt=attempt,
        stop_reason=reason,
        verdict=None if reward is None else Verdict(reward=reward, metrics={"steps": 2.0}),
        forks={"sibling": 1},
        labels={"set": "train"},
    )
