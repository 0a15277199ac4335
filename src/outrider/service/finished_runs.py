"""Shows a finished run without a service, from the data folder of a service that has ended, or from a file of samples.

Invariants: a run is never changed; for a data folder, this module shows what the service would show.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from outrider.concurrency.cancellation import OffloadThread
from outrider.config import Config
from outrider.errors import UNREADABLE, InvalidField, NotFound
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.messages import Image
from outrider.schemas import (
    ArtifactList,
    GroupSummary,
    GroupView,
    SampleList,
    SessionView,
    TimelineView,
    TurnList,
    TurnTokens,
    TurnView,
    reply_of,
)
from outrider.service.data_folder import DATABASE, open_store
from outrider.service.views import ViewReader, group_summary
from outrider.store.artifacts import ArtifactStore
from outrider.store.run_index.lists import SessionFilter
from outrider.store.store import Store
from outrider.store.task_key import KEY_BYTES, KEY_FILE
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import JsonSample, SessionResult, TokenCounts, TurnTimings, Verdict, VersionSpan

GROUPS_AT_ONCE = 100


class FinishedRun(Protocol):
    """A finished run that can be viewed. Every method raises NotFound for an unknown id, and for data that the run does
    not contain, such as timelines in a file of samples."""

    def check_filter(self, wanted: SessionFilter) -> None:
        """Raise InvalidField if a filter is about data that the run does not contain."""
        ...

    async def groups(self, after: str | None, *, harness: str | None = None) -> Sequence[GroupSummary]:
        """Return up to GROUPS_AT_ONCE groups of all harnesses or of one, newest first. `after` is the last group of
        the previous page."""
        ...

    async def group(self, group_id: str) -> GroupView: ...
    async def session(self, session_id: str) -> SessionView: ...
    async def turns(self, session_id: str, *, tokens: bool) -> bytes: ...
    async def samples(self, session_id: str) -> bytes: ...
    async def timeline(self, session_id: str, attempt: int | None) -> TimelineView: ...
    async def artifacts(self, session_id: str) -> ArtifactList: ...
    async def artifact(self, session_id: str, path: str) -> Path: ...
    async def image(self, digest: str) -> Image: ...


@asynccontextmanager
async def open_run(path: Path, tokenizer: Tokenizer | None) -> AsyncIterator[FinishedRun]:
    """Open a data folder, or a JSONL file of samples. Without the policy's `tokenizer`, tokens are shown as ids only.
    Raises InvalidField for any other path, and ServiceError for a data folder that a service is using."""
    settings = await asyncio.to_thread(_settings, path)
    if settings is not None:
        async with open_store(settings) as store:
            yield StoredRun(store, ArtifactStore(path / "artifacts"), tokenizer)
        return
    yield await asyncio.to_thread(SampleFileRun, path, tokenizer)


def _settings(path: Path) -> Config | None:
    """Return settings with which the store of a data folder can be opened, or None if `path` is a file."""
    if not path.is_dir():
        return None
    if not (path / DATABASE).is_file():
        raise InvalidField(
            f"{path} is no data folder: it has no {DATABASE}",
            field="path",
            hint="name the --data folder of a service, the --keep folder of a demo, or a file of samples",
        )
    # If the key is missing, a random key is used. Tasks, callback URLs and timeline entries then cannot be decrypted.
    # All other data can still be read, because it is not encrypted.
    has_key = (path / KEY_FILE).exists()
    key = None if has_key else base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()
    return Config(data=path, task_key=key)


class StoredRun:
    """A run in the data folder of a service that has ended."""

    def __init__(self, store: Store, artifacts: ArtifactStore, tokenizer: Tokenizer | None) -> None:
        self._store = store
        self._artifacts = artifacts
        self._reader = ViewReader(store, tokenizer, OffloadThread())

    def check_filter(self, wanted: SessionFilter) -> None:
        pass

    async def groups(self, after: str | None, *, harness: str | None = None) -> Sequence[GroupSummary]:
        rows = await self._store.groups_before(after, limit=GROUPS_AT_ONCE, harness=harness)
        return [group_summary(row) for row in rows]

    async def group(self, group_id: str) -> GroupView:
        return await self._reader.group(group_id)

    async def session(self, session_id: str) -> SessionView:
        return await self._reader.session(session_id)

    async def turns(self, session_id: str, *, tokens: bool) -> bytes:
        turns = await self._reader.turns(session_id, tokens=tokens, pieces=tokens)
        return await self._reader.encoded(TurnList(turns=turns))

    async def samples(self, session_id: str) -> bytes:
        return await self._reader.encoded(SampleList(samples=await self._reader.samples(session_id)))

    async def timeline(self, session_id: str, attempt: int | None) -> TimelineView:
        return await self._reader.timeline(session_id, attempt, whole_commands=True)

    async def artifacts(self, session_id: str) -> ArtifactList:
        session = await self._reader.session(session_id)
        return await asyncio.to_thread(self._artifacts.listed, session.id)

    async def artifact(self, session_id: str, path: str) -> Path:
        session = await self._reader.session(session_id)
        return await asyncio.to_thread(self._artifacts.file, session.id, path)

    async def image(self, digest: str) -> Image:
        return await self._store.image(digest)


class _Line(msgspec.Struct, frozen=True):
    """One row of the file of samples, with only the fields that `SampleFileRun` needs to list groups and sessions."""

    group_id: str
    session_id: str
    attempt: int
    sample_index: int
    row: int
    turns: tuple[int, ...]
    reward: float | None
    stop_reason: StopReason
    loss_mask: msgspec.Raw
    turn_spans: tuple[tuple[int, int], ...] = ()
    metrics: dict[str, float] = {}
    labels: dict[str, str] = {}


class _FileSession:
    """The rows of one session: their positions in the file, in bytes, and the data that the session's view needs."""

    def __init__(self, line: _Line) -> None:
        self.first = line
        self.places: list[int] = []
        self.reward: float | None = None
        self.sampled: dict[int, int] = {}
        self.trained = 0

    def add(self, line: _Line, place: int) -> None:
        self.places.append(place)
        self.sampled |= {turn: end - start for turn, (start, end) in zip(line.turns, line.turn_spans, strict=False)}
        self.trained += bytes(line.loss_mask).count(b"1")
        if self.reward is None:
            self.reward = line.reward


class SampleFileRun:
    """A run in a JSONL file of samples that `outrider export` or the demo has written. The file has token ids and no
    messages, so texts are decoded from the ids. A row is read when it is needed; only the positions of the rows are
    kept in memory."""

    def __init__(self, path: Path, tokenizer: Tokenizer | None) -> None:
        """Read the whole file once. Raises InvalidField if it cannot be read, or if its rows are not samples."""
        self._path = path
        self._tokenizer = tokenizer
        self._sessions: dict[str, _FileSession] = {}
        self._groups: dict[str, list[str]] = {}
        number = place = 0
        try:
            self._at = path.stat().st_mtime
            with path.open("rb") as file:
                for text in file:
                    number += 1
                    if text.strip():
                        self._add(msgspec.json.decode(text, type=_Line), place)
                    place += len(text)
        except OSError as error:
            raise InvalidField(f"cannot read {path}: {error.strerror}", field="path") from error
        except UNREADABLE as error:
            raise InvalidField(
                f"line {number} of {path} is no row of samples: {error}",
                field="path",
                hint="the format is that of `outrider export -o FILE.jsonl`",
            ) from error
        if not self._sessions:
            raise InvalidField(
                f"{path} has no rows", field="path", hint="name a file that `outrider export` has written"
            )

    def _add(self, line: _Line, place: int) -> None:
        known = self._sessions.get(line.session_id)
        if known is None:
            known = self._sessions[line.session_id] = _FileSession(line)
            self._groups.setdefault(line.group_id, []).append(line.session_id)
        known.add(line, place)

    def check_filter(self, wanted: SessionFilter) -> None:
        for field in ("harness", "error", "text", "since", "until"):
            if getattr(wanted, field) is not None:
                raise InvalidField(
                    f"a file of samples cannot be filtered by {field!r}: it has no such data", field=field
                )

    async def groups(self, after: str | None, *, harness: str | None = None) -> Sequence[GroupSummary]:
        names = list(reversed(self._groups))
        start = names.index(after) + 1 if after in self._groups else 0
        return [self._summary(name) for name in names[start : start + GROUPS_AT_ONCE]]

    async def group(self, group_id: str) -> GroupView:
        if group_id not in self._groups:
            raise NotFound(f"no group {group_id!r} has a row in {self._path.name}")
        sessions = sorted((self._view(name) for name in self._groups[group_id]), key=lambda each: each.sample_index)
        summary = self._summary(group_id)
        return reply_of(GroupView, summary, sessions=tuple(sessions), samples=None)

    async def session(self, session_id: str) -> SessionView:
        self._known(session_id)
        return self._view(session_id)

    async def turns(self, session_id: str, *, tokens: bool) -> bytes:
        rows = await self._rows(session_id)
        return await asyncio.to_thread(lambda: msgspec.json.encode(TurnList(turns=_turns(rows, self._tokenizer))))

    async def samples(self, session_id: str) -> bytes:
        return msgspec.json.encode({"samples": await self._rows(session_id)})

    async def timeline(self, session_id: str, attempt: int | None) -> TimelineView:
        raise NotFound(f"{self._path.name} is not served here with times: a file of samples has none")

    async def artifacts(self, session_id: str) -> ArtifactList:
        return ArtifactList(session_id=session_id, attempt=None, artifacts=(), left_out=())

    async def artifact(self, session_id: str, path: str) -> Path:
        raise NotFound("a file of samples has no artifacts")

    async def image(self, digest: str) -> Image:
        raise NotFound("a file of samples has no images")

    def _known(self, session_id: str) -> _FileSession:
        found = self._sessions.get(session_id)
        if found is None:
            raise NotFound(f"no session {session_id!r} has a row in {self._path.name}")
        return found

    def _view(self, session_id: str) -> SessionView:
        known = self._sessions[session_id]
        line, sampled = known.first, sum(known.sampled.values())
        verdict = None if known.reward is None else Verdict(reward=known.reward, metrics=line.metrics)
        result = SessionResult(
            session_id=session_id,
            group_id=line.group_id,
            sample_index=line.sample_index,
            attempt=line.attempt,
            stop_reason=line.stop_reason,
            verdict=verdict,
            turns=len(known.sampled),
            # `dropped` stays 0, because the file has no rows for dropped turns.
            tokens=TokenCounts(sampled=sampled, trained=known.trained, masked=max(0, sampled - known.trained)),
            samples=len(known.places),
            labels=line.labels,
        )
        return SessionView(
            id=session_id,
            group_id=line.group_id,
            sample_index=line.sample_index,
            state=SessionState.DONE,
            attempt=line.attempt,
            node=None,
            created=self._at,
            updated=self._at,
            last_error=None,
            result=result,
        )

    def _summary(self, group_id: str) -> GroupSummary:
        sessions = [self._sessions[name] for name in self._groups[group_id]]
        rewards = [each.reward for each in sessions if each.reward is not None]
        return GroupSummary(
            id=group_id,
            state=GroupState.DONE,
            cancelled=False,
            n=len(sessions),
            priority=0,
            created=self._at,
            finished=self._at,
            cursor=None,
            labels=sessions[0].first.labels,
            done=len(sessions),
            errors=0,
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
        )

    async def _rows(self, session_id: str) -> list[JsonSample]:
        places = self._known(session_id).places

        def read() -> list[JsonSample]:
            with self._path.open("rb") as file:
                rows = []
                for place in places:
                    file.seek(place)
                    rows.append(msgspec.json.decode(file.readline(), type=JsonSample))
                return rows

        return await asyncio.to_thread(read)


def _turns(rows: Sequence[JsonSample], tokenizer: Tokenizer | None) -> tuple[TurnView, ...]:
    """Build the turns of a session from its rows. If several rows contain a turn, the row in which the turn is trained
    is used."""
    found: dict[int, TurnView] = {}
    for row in rows:
        for place, index in enumerate(row.turns):
            start, end = row.turn_spans[place] if place < len(row.turn_spans) else (0, 0)
            trains = any(row.loss_mask[start:end])
            if index not in found or trains:
                found[index] = _turn(row, place, index, tokenizer, trains=trains)
    return tuple(found[index] for index in sorted(found))


def _turn(row: JsonSample, place: int, index: int, tokenizer: Tokenizer | None, *, trains: bool) -> TurnView:
    start, end = row.turn_spans[place]
    before = row.turn_spans[place - 1][1] if place else 0
    prompt, output = row.ids[before:start], row.ids[start:end]
    fields: Mapping[str, Any] = {"kind": row.kind.value, "label": row.label, "depth": row.depth, "mode": row.mode.value}
    return TurnView(
        index=index,
        parent=row.turns[place - 1] if place else None,
        join="append" if place else "root",
        cause=None,
        forked_from=None,
        prompt_tokens=start,
        output_tokens=len(output),
        context=tokenizer.decode(prompt) if tokenizer is not None else "",
        sampled=tokenizer.decode(output) if tokenizer is not None else "",
        finish="",
        dialect="",
        engine="",
        tool_calls=0,
        malformed_calls=0,
        cached_tokens=None,
        drift_tokens=0,
        versions=_versions(row.versions[start:end]) if trains else (),
        sampling={},
        timings=TurnTimings(received=0.0, first_token=None, finished=0.0),
        tokens=TurnTokens(
            prompt_delta=prompt,
            output_ids=output,
            logprobs=row.logprobs[start:end] if trains else [],
            messages=(),
            reply=None,
            prompt_pieces=tokenizer.pieces(prompt) if tokenizer is not None else None,
            output_pieces=tokenizer.pieces(output) if tokenizer is not None else None,
        ),
        **fields,
    )


def _versions(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    for at, version in enumerate(versions):
        if version < 0:
            continue
        if spans and (spans[-1].version, spans[-1].end) == (version, at):
            spans[-1] = VersionSpan(version, spans[-1].start, at + 1)
        else:
            spans.append(VersionSpan(version, at, at + 1))
    return tuple(spans)
