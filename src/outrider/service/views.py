"""The store's rows as the control API shows them. Reads only."""

from __future__ import annotations

import msgspec

from outrider.concurrency.offload import OffloadThread, Steps
from outrider.errors import NotFound
from outrider.schemas import GroupSummary, GroupView, SampleList, SessionView, TurnList, TurnView
from outrider.store.base import GroupRow, SessionRow, Store
from outrider.tokens.branches.classify import Lineage, lineages
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.tokens.samples import build_samples
from outrider.trajectory import Sample, Turn, unpack_ids

BYTES_OF_A_POSITION = 32
"""What the JSON of a sample's id, mask, log-probability and version takes."""


class Reader:
    """Groups, sessions, turns and samples, by id. Unknown ids raise NotFound."""

    def __init__(self, store: Store, tokenizer: Tokenizer, offload: OffloadThread) -> None:
        self._store = store
        self._tokenizer = tokenizer
        self._offload = offload

    async def group(self, group_id: str, *, samples: bool = False) -> GroupView:
        return await self.view(await self._store.group(group_id), samples=samples)

    async def view(self, row: GroupRow, *, samples: bool = False) -> GroupView:
        sessions = await self._store.sessions(row.id)
        rows = [sample for session in sessions for sample in await self._samples(session)] if samples else None
        return GroupView(
            id=row.id,
            state=row.state,
            cancelled=row.cancelled,
            n=row.n,
            priority=row.priority,
            created=row.created,
            finished=row.finished,
            cursor=row.cursor,
            labels=row.labels,
            sessions=tuple(map(session_view, sessions)),
            samples=None if rows is None else tuple(rows),
        )

    async def encoded(self, view: GroupView | SampleList | TurnList) -> bytes:
        """As JSON."""
        return await self._offload.run_steps(encoding(view))

    async def session(self, session_id: str) -> SessionView:
        return session_view(await self._store.session(session_id))

    async def turns(self, session_id: str) -> tuple[TurnView, ...]:
        turns = await self._store.turns(session_id)
        return await self._offload.run(lambda: tuple(map(self._turn_view, turns, lineages(turns))))

    async def samples(self, session_id: str) -> tuple[Sample, ...]:
        session = await self._store.session(session_id)
        if session.result is None:
            raise NotFound(
                f"session {session_id} is {session.state.value}: it has no samples yet",
                hint="wait for its group in the results",
            )
        return await self._samples(session)

    async def _samples(self, session: SessionRow) -> tuple[Sample, ...]:
        result = session.result
        if result is None or result.turns == 0:
            return ()
        turns = await self._store.turns(session.id, result.attempt)
        return await self._offload.run(lambda: tuple(build_samples(turns, result)))

    def _turn_view(self, turn: Turn, lineage: Lineage) -> TurnView:
        return TurnView(
            index=turn.index,
            parent=turn.parent,
            join=turn.join.value,
            cause=turn.cause.value if turn.cause else None,
            forked_from=turn.forked_from,
            kind=lineage.kind.value,
            label=lineage.label,
            depth=lineage.depth,
            prompt_tokens=turn.prompt_length,
            output_tokens=len(turn.output_ids) // 4,
            context=self._tokenizer.decode(unpack_ids(turn.prompt_delta).tolist()),
            sampled=self._tokenizer.decode(unpack_ids(turn.output_ids).tolist()) or _text(turn),
            finish=turn.finish.value,
            mode=turn.mode.value,
            dialect=turn.dialect,
            engine=turn.engine,
            tool_calls=len(turn.reply.tool_calls) if turn.reply else 0,
            malformed_calls=turn.malformed_calls,
            cached_tokens=turn.cached_tokens,
            drift_tokens=turn.drift_tokens,
            versions=turn.versions,
            sampling=turn.sampling,
            altered=turn.altered,
            ignored=turn.ignored,
            timings=turn.timings,
        )


def encoding(view: GroupView | SampleList | TurnList) -> Steps[bytes]:
    """A view as JSON, its rows one by one: those of a large group together take seconds."""
    field = "turns" if isinstance(view, TurnList) else "samples"
    rows: list[msgspec.Raw] = []
    for row in getattr(view, field) or ():
        yield len(row.ids) * BYTES_OF_A_POSITION if isinstance(row, Sample) else len(row.context)
        rows.append(msgspec.Raw(msgspec.json.encode(row)))
    if not rows:
        return msgspec.json.encode(view)
    return msgspec.json.encode(msgspec.structs.replace(view, **{field: rows}))


def _text(turn: Turn) -> str:
    """What a turn without ids said."""
    return turn.reply.content if turn.reply else ""


def group_summary(row: GroupRow) -> GroupSummary:
    return GroupSummary(
        id=row.id,
        state=row.state,
        cancelled=row.cancelled,
        n=row.n,
        priority=row.priority,
        created=row.created,
        finished=row.finished,
        cursor=row.cursor,
        labels=row.labels,
        done=row.done,
        errors=row.errors,
        mean_reward=row.reward_total / row.rewarded if row.rewarded else None,
    )


def session_view(row: SessionRow) -> SessionView:
    return SessionView(
        id=row.id,
        group_id=row.group_id,
        sample_index=row.sample_index,
        state=row.state,
        attempt=row.attempt,
        node=row.node,
        created=row.created,
        updated=row.updated,
        last_error=row.last_error,
        result=row.result,
    )
