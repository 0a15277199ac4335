"""Reads a run from the store and diagnoses it with `rules.py`. All results are read, but turns and timelines only for a
sample of sessions.

Results are read in pages, counted, and not kept. They are decoded in the offload thread, so that the event loop is
never blocked. Invariant: one diagnosis runs at a time, so the memory is limited for any number of callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from outrider.concurrency.cancellation import INLINE_BYTES, PIECE_BYTES, OffloadThread, Steps
from outrider.errors import UNREADABLE, NotFound
from outrider.schemas import RunDiagnosis, RunFinding
from outrider.service.diagnosis.evidence import RunEvidence
from outrider.service.diagnosis.rules import diagnose
from outrider.service.diagnosis.session_facts import FactsReader
from outrider.store.rows import GroupRow, PackedResult, result_from, turn_from
from outrider.store.store import Store
from outrider.timeline import Entry

GROUPS_READ = 100
"""Number of groups in one page of the store."""
RESULTS_READ = 500
"""Maximum number of results in one page of the store."""
MOST_SESSIONS = 200_000
"""Maximum number of sessions in a diagnosis. If a run has more sessions, only its newest groups are read."""
MOST_GROUPS = 100_000
"""Maximum number of groups that are examined, so that the search for a rare label does not read the whole history."""
MOST_TURNS = 200
"""Maximum number of turns that are read from one sampled session."""
MOST_PARTS = 200
"""Maximum number of timeline parts that are read from one sampled session."""
ENTRIES = msgspec.msgpack.Decoder(list[Entry])


class DoctorOfRuns:
    """Diagnoses runs. Only one diagnosis runs at a time; other callers wait."""

    def __init__(self, store: Store, offload: OffloadThread) -> None:
        self._store = store
        self._offload = offload
        self._one = asyncio.Lock()

    async def diagnose(
        self,
        *,
        labels: Mapping[str, str] = {},
        groups: Sequence[str] = (),
        since: float = 0.0,
        tenant: str | None = None,
        most_sessions: int = MOST_SESSIONS,
    ) -> RunDiagnosis:
        """Diagnose the groups whose ids are in `groups`, or all groups if `groups` is empty. Groups that lack one of
        `labels` or were created before `since` (seconds since the epoch) are left out.

        Raises NotFound for an unknown id in `groups` and, if `tenant` is given, for a group of another tenant."""
        async with self._one:
            evidence = RunEvidence()
            truncated = False
            rows = self._named(groups, tenant) if groups else self._all(since, tenant)
            looked_at = planned = 0
            async for page in rows:
                wanted = []
                for row in page:
                    truncated = truncated or planned >= most_sessions or looked_at >= MOST_GROUPS
                    looked_at += 1
                    if not truncated and labels.items() <= row.labels.items() and row.created >= since:
                        planned += row.n
                        wanted.append(row)
                for some in _parts(wanted):
                    await self._add_groups(evidence, some)
                if truncated:
                    break
            await self._add_sample(evidence)
            findings = await self._offload.run_steps(_findings(evidence))
        return RunDiagnosis(
            groups=evidence.groups,
            sessions=evidence.sessions,
            not_done=evidence.not_done,
            truncated=truncated,
            read_sessions=evidence.read_sessions,
            read_turns=evidence.read_turns,
            seconds=evidence.seconds,
            findings=tuple(findings),
        )

    async def _named(self, ids: Sequence[str], tenant: str | None) -> AsyncIterator[list[GroupRow]]:
        yield [await self._store.group(id, tenant=tenant) for id in dict.fromkeys(ids)]

    async def _all(self, since: float, tenant: str | None) -> AsyncIterator[list[GroupRow]]:
        """Yield pages of all groups, newest first."""
        before: str | None = None
        while True:
            try:
                page = await self._store.groups_before(before, limit=GROUPS_READ, since=since, tenant=tenant)
            except NotFound:  # the group `before` and all older groups were removed in the meantime
                return
            if not page:
                return
            yield page
            before = page[-1].id

    async def _add_groups(self, evidence: RunEvidence, rows: Sequence[GroupRow]) -> None:
        """Add groups to the evidence. `rows` has several small groups, whose results are read together, or one group of
        any size."""
        by_group: dict[str, list[bytes]] = {row.id: [] for row in rows}
        ids = list(by_group)
        if len(rows) > 1:
            for result in await self._store.packed_results(ids, 0, RESULTS_READ):
                by_group[result.group_id].append(result.packed)
            await self._offload.run_steps(_add(evidence, rows, by_group))
            return
        [row] = rows
        evidence.begin_group(row)
        for first in range(0, row.n, RESULTS_READ):
            found: list[PackedResult] = await self._store.packed_results(ids, first, RESULTS_READ)
            await self._offload.run_steps(_add_results(evidence, [result.packed for result in found]))
        evidence.end_group()

    async def _add_sample(self, evidence: RunEvidence) -> None:
        for group_id, sessions in evidence.to_read():
            for session_id, attempt in sessions:
                packed = await self._store.packed_turns(session_id, attempt, limit=MOST_TURNS)
                try:
                    _, parts = await self._store.timeline(session_id, attempt)
                except NotFound:  # the session was removed in the meantime
                    continue
                if packed:
                    reader = FactsReader(session_id)
                    await self._offload.run_steps(_read(reader, packed, parts[:MOST_PARTS]))
                    # In the offload thread, because comparing long prompts takes some time.
                    await self._offload.run(partial(evidence.add_facts, group_id, reader.facts))


def _parts(rows: Iterable[GroupRow]) -> Iterator[list[GroupRow]]:
    """Divide groups into parts of at most RESULTS_READ sessions. A larger group is a part by itself."""
    part: list[GroupRow] = []
    size = 0
    for row in rows:
        if part and size + row.n > RESULTS_READ:
            yield part
            part, size = [], 0
        part.append(row)
        size += row.n
    if part:
        yield part


def _add(evidence: RunEvidence, rows: Sequence[GroupRow], results: Mapping[str, Sequence[bytes]]) -> Steps[None]:
    size = 0
    for row in rows:
        own = results[row.id]
        size += sum(map(len, own))
        if size >= PIECE_BYTES:
            yield size
            size = 0
        evidence.begin_group(row)
        for packed in own:
            evidence.add_result(result_from(packed))
        evidence.end_group()


def _add_results(evidence: RunEvidence, results: Sequence[bytes]) -> Steps[None]:
    for piece in _pieces(results):
        yield sum(map(len, piece))
        for packed in piece:
            evidence.add_result(result_from(packed))


def _read(reader: FactsReader, turns: Sequence[bytes], timeline: Sequence[bytes]) -> Steps[None]:
    for piece in _pieces(turns):
        yield sum(map(len, piece))
        for packed in piece:
            reader.add(turn_from(packed))
    entries: list[Entry] = []
    for part in timeline:
        yield len(part)
        with suppress(*UNREADABLE):
            entries += ENTRIES.decode(part)
    reader.add_commands(entries)


def _pieces(packed: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Divide packed rows into pieces. The offload thread processes one piece per step. A piece has several rows,
    because switching threads takes longer than processing one row."""
    piece: list[bytes] = []
    size = 0
    for row in packed:
        if piece and size + len(row) > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(row)
        size += len(row)
    if piece:
        yield piece


def _findings(evidence: RunEvidence) -> Steps[list[RunFinding]]:
    # Apply the rules to the evidence, as one step of the offload thread. The yielded size is above INLINE_BYTES,
    # because a smaller step would run in the event loop, and the rules take some milliseconds.
    yield INLINE_BYTES + 1
    return diagnose(evidence)
