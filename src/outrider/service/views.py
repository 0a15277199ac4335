"""Builds the replies of the control API from the store's rows: groups, sessions, turns, samples and pages of results.

Invariant: the cursor of a page is that of its last group, so the next page begins with the next group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from heapq import merge
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from outrider import sample_columns
from outrider.concurrency.cancellation import OffloadThread, Steps
from outrider.errors import NotFound, ServiceError
from outrider.redaction import without_keys
from outrider.schemas import (
    CallbackView,
    ChatList,
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
from outrider.service.timeline_view import timeline_view, with_short_commands
from outrider.store.rows import Delivery, GroupRow, StoredTurns
from outrider.store.store import Store
from outrider.tokens.branches.classify import is_one_conversation, lineages
from outrider.tokens.chat_rows import chat_rows
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.tokens.samples import build_samples, build_samples_of_conversation
from outrider.trajectory import ChatRow, Sample, SessionResult, Turn, sample_json, unpack_ids, unpack_logprobs

S = TypeVar("S", bound=GroupView | SampleList)
B = TypeVar("B")

BYTES_OF_A_POSITION = 32
"""Approximate size in bytes of the JSON for one token of a sample: its id, mask, log-probability and version."""

FROZEN = "frozen"
"""The `kind` that is shown for turns of frozen models. It is not one of the kinds of branches, because branches may be
trained, and turns of frozen models never are."""

SESSIONS_AT_ONCE = 16
"""Maximum number of sessions whose turns are in memory at once while training rows are built."""
PAGE_BYTES = 8 << 20
"""Size in bytes at which a page of results ends. The group that reaches this size stays on the page: its own size is
known only after its rows are built, and the next page would have to build these rows again."""


class ViewReader:
    """Reads groups, sessions, turns and samples by id, as views. Raises NotFound for unknown ids. If `tenant` is given,
    ids of other tenants count as unknown."""

    def __init__(
        self,
        store: Store,
        tokenizer: Tokenizer | None,
        offload: OffloadThread,
        *,
        frozen: Mapping[str, Tokenizer] = {},
    ) -> None:
        """`tokenizer` is the policy's tokenizer, or None if unknown. `frozen` has the tokenizers of frozen models by
        name."""
        self._store = store
        self._tokenizer = tokenizer
        self._frozen = frozen
        self._offload = offload

    async def group(self, group_id: str, *, samples: bool = False, tenant: str | None = None) -> GroupView:
        return await self.view(await self._store.group(group_id, tenant=tenant), samples=samples)

    async def view(self, row: GroupRow, *, samples: bool = False) -> GroupView:
        sessions = await self._store.sessions(row.id)
        rows = await self._samples([session.result for session in sessions]) if samples else None
        views = tuple(reply_of(SessionView, session) for session in sessions)
        return reply_of(GroupView, row, sessions=views, samples=rows)

    async def encoded(self, view: GroupView | SampleList | ChatList | TurnList) -> bytes:
        """Encode a view as JSON. A large view is encoded in a thread."""
        return await self._offload.run_steps(encoding(view))

    async def columns(self, view: GroupView | SampleList) -> list[bytes]:
        """Encode a view as an Arrow IPC stream (`sample_columns.py`). Returns the stream in pieces."""
        await self.prepare_columns()
        reply = await self.encoded(without_samples(view))
        return [sample_columns.head(reply), *await self.batches(view.samples or ()), sample_columns.END]

    async def prepare_columns(self) -> None:
        """Import the libraries for Arrow streams in a thread, because the event loop writes the head of a stream and
        must not wait for this import."""
        await self._offload.run(sample_columns.prepare)

    async def batches(self, samples: Sequence[Sample]) -> list[bytes]:
        """Encode samples as batches of an Arrow IPC stream, in pieces. Other work can use the thread between two
        batches."""
        pieces: list[bytes] = []
        for rows in sample_columns.rows_of_batches(samples):
            pieces += await self._offload.run(partial(sample_columns.batch, rows))
        return pieces

    async def session(self, session_id: str, *, tenant: str | None = None) -> SessionView:
        return reply_of(SessionView, await self._store.session(session_id, tenant=tenant))

    async def turns(
        self, session_id: str, *, tokens: bool = False, pieces: bool = False, tenant: str | None = None
    ) -> tuple[TurnView, ...]:
        """Return the turns of the session's newest attempt, including those of frozen models, in the order in which
        they finished. With `tokens`, the turns contain token ids, log-probabilities and messages, and with `pieces`
        also the text of each token."""
        turns = await self._store.turns(session_id, tenant=tenant)
        frozen = await self._store.frozen_turns(session_id, tenant=tenant)

        def views() -> tuple[TurnView, ...]:
            own = [
                _turn_view(turn, self._tokenizer, kind=lineage.kind.value, label=lineage.label, depth=lineage.depth)
                for turn, lineage in zip(turns, lineages(turns), strict=True)
            ]
            others = [
                [_turn_view(turn, self._frozen.get(model), kind=FROZEN, label="", model=model) for turn in found]
                for model, found in frozen.items()
            ]
            if tokens:
                own = _with_tokens(own, turns, self._tokenizer if pieces else None)
                others = [
                    _with_tokens(some, frozen[model], self._frozen.get(model) if pieces else None)
                    for some, model in zip(others, frozen, strict=True)
                ]
            return tuple(merge(own, *others, key=lambda view: view.timings.finished))

        return await self._offload.run(views)

    async def timeline(
        self, session_id: str, attempt: int | None = None, *, whole_commands: bool, tenant: str | None = None
    ) -> TimelineView:
        """Return the timeline of one attempt of a session, or of the newest if `attempt` is None. Without
        `whole_commands`, only the first word of each command is shown."""
        session = await self._store.session(session_id, tenant=tenant)
        number, parts = await self._store.timeline(session_id, attempt)
        if attempt is not None and not 0 < attempt <= session.attempt:
            raise NotFound(
                f"session {session_id} has no attempt {attempt}", hint=f"the newest attempt is {session.attempt}"
            )
        events = await self._store.session_events(session_id)
        turns, frozen = await self._store.turns(session_id, number), await self._store.frozen_turns(session_id, number)
        now = time.time()
        make = partial(timeline_view, session, number, parts, turns, frozen, events, now=now)
        view = await self._offload.run(make)
        return view if whole_commands else with_short_commands(view)

    async def samples(self, session_id: str, *, tenant: str | None = None) -> tuple[Sample, ...]:
        """Return the training rows of a session. Raises NotFound while the session is not done."""
        return await self._samples([await self._result(session_id, tenant)])

    async def chat_rows(self, session_id: str, *, tenant: str | None = None) -> tuple[ChatRow, ...]:
        """Return the training rows of a session as conversations. Raises NotFound while the session is not done."""
        result = await self._result(session_id, tenant)
        turns = await self._store.turns(session_id, result.attempt)
        return await self._offload.run(lambda: tuple(chat_rows(build_samples(turns, result), turns)))

    async def _result(self, session_id: str, tenant: str | None) -> SessionResult:
        session = await self._store.session(session_id, tenant=tenant)
        if session.result is None:
            raise NotFound(
                f"session {session_id} is {session.state.value}: it has no samples yet",
                hint="wait for its group in the results",
            )
        return session.result

    async def _samples(self, results: Iterable[SessionResult | None]) -> tuple[Sample, ...]:
        """Return the training rows of sessions."""
        built = await self._made([result for result in results if result is not None and result.turns], _samples_of)
        return tuple(sample for own in built for sample in own)

    async def built(
        self, results: Sequence[SessionResult], build: Callable[[Sequence[Turn], SessionResult], B]
    ) -> list[B]:
        """Call `build` with the turns and the result of each session. Returns the values of `build` in the order of
        `results`."""
        return await self._made(results, lambda stored, result: build(stored.turns(), result))

    async def _made(self, results: Sequence[SessionResult], make: Callable[[StoredTurns, SessionResult], B]) -> list[B]:
        """Call `make` with the stored turns and the result of each session. Returns the values of `make` in the order
        of `results`. The turns are decoded in the thread that uses them, because switching threads takes as long as
        building the rows of a session."""
        found: list[B] = []
        for some in (results[at : at + SESSIONS_AT_ONCE] for at in range(0, len(results), SESSIONS_AT_ONCE)):
            stored = await self._store.turns_of([(result.session_id, result.attempt) for result in some])
            found += await self._offload.run(partial(_each, stored, some, make))
        return found

    async def count_tokens(self, text: str) -> int:
        """Return the number of tokens in a text, by the policy's tokenizer."""
        if (tokenizer := self._tokenizer) is None:
            raise ServiceError("the policy's tokenizer is not known: tokens cannot be counted")
        return await self._offload.run(lambda: len(tokenizer.encode(text)))

    async def offload(self, work: Callable[[], B]) -> B:
        """Call `work` in the thread for long computations, and return its result."""
        return await self._offload.run(work)


def _each(
    stored: Sequence[StoredTurns],
    results: Sequence[SessionResult],
    make: Callable[[StoredTurns, SessionResult], B],
) -> list[B]:
    return [make(own, result) for own, result in zip(stored, results, strict=True)]


def _samples_of(stored: StoredTurns, result: SessionResult) -> list[Sample]:
    """Return the training rows of a session. The messages of its turns are decoded only if the kinds of the turns
    depend on them."""
    outlines = stored.outlines()
    if is_one_conversation(outlines):
        return build_samples_of_conversation(outlines, result)
    return build_samples(stored.turns(), result)


def _turn_view(
    turn: Turn, tokenizer: Tokenizer | None, *, kind: str, label: str, depth: int = 0, model: str | None = None
) -> TurnView:
    """Return the view of a turn. `tokenizer` is None if it is unknown, for example because the turn's frozen model is
    no longer in the settings."""
    return reply_of(
        TurnView,
        turn,
        model=model,
        kind=kind,
        label=label,
        depth=depth,
        prompt_tokens=turn.prompt_length,
        output_tokens=len(turn.output_ids) // 4,
        context=_text(turn.prompt_delta, tokenizer, "\n".join(f"{one.role}: {one.content}" for one in turn.messages)),
        sampled=_text(turn.output_ids, tokenizer, turn.reply.content if turn.reply else ""),
        tokens=None,
        tool_calls=len(turn.reply.tool_calls) if turn.reply else 0,
    )


def _with_tokens(views: Sequence[TurnView], turns: Sequence[Turn], tokenizer: Tokenizer | None) -> list[TurnView]:
    """Add the tokens to the views of one model's turns, which must be in the order of their index. With a `tokenizer`,
    also add the text of each token."""
    return [
        msgspec.structs.replace(
            view,
            tokens=TurnTokens(
                prompt_delta=unpack_ids(turn.prompt_delta).tolist(),
                output_ids=unpack_ids(turn.output_ids).tolist(),
                logprobs=unpack_logprobs(turn.logprobs).tolist(),
                messages=turn.messages,
                reply=turn.reply,
                prompt_pieces=_pieces(turn.prompt_delta, tokenizer),
                output_pieces=_pieces(turn.output_ids, tokenizer),
            ),
        )
        for view, turn in zip(views, turns, strict=True)
    ]


def _pieces(ids: bytes, tokenizer: Tokenizer | None) -> list[str] | None:
    return None if tokenizer is None else tokenizer.pieces(unpack_ids(ids).tolist())


def _text(ids: bytes, tokenizer: Tokenizer | None, words: str) -> str:
    """Return the token ids as text, or `words` if there is no tokenizer or there are no ids (as in the turns of a text
    engine). Session keys are removed, because readers must not be able to make model calls of a running session."""
    return without_keys(tokenizer.decode(unpack_ids(ids).tolist()) if ids and tokenizer is not None else words)


def encoding(view: GroupView | SampleList | ChatList | TurnList) -> Steps[bytes]:
    """Encode a view row by row, in several steps, because encoding all rows of a large group at once would block the
    event loop for seconds."""
    field = {TurnList: "turns", ChatList: "rows"}.get(type(view), "samples")
    rows: list[msgspec.Raw] = []
    for row in getattr(view, field) or ():
        match row:
            case Sample():
                yield len(row) * BYTES_OF_A_POSITION
                rows.append(msgspec.Raw(sample_json(row)))
                continue
            case ChatRow():
                yield sum(len(message["content"]) for message in row.messages)
            case _:
                tokens = row.tokens
                yield len(row.context) + (0 if tokens is None else 8 * len(tokens.prompt_delta))
        rows.append(msgspec.Raw(msgspec.json.encode(row)))
    if not rows:
        return msgspec.json.encode(view)
    return msgspec.json.encode(msgspec.structs.replace(view, **{field: rows}))


def without_samples(view: S) -> S:
    """Return a view without its samples, because the batches of an Arrow stream contain them."""
    return msgspec.structs.replace(view, samples=() if view.samples else view.samples)


class Page:
    """A page of results. Groups are encoded when they are added, so the size of the page is always known.

    `full` is True once the page has `page_bytes`. `cursor` is that of the last group, or `after` if the page has no
    group. With `columns`, the samples are in batches of an Arrow stream instead of the JSON.
    """

    def __init__(self, after: int, *, columns: bool = False, page_bytes: int = PAGE_BYTES) -> None:
        self.groups: list[GroupView] = []
        self.cursor = after
        self._columns = columns
        self._page_bytes = page_bytes
        self._bodies: list[bytes] = []
        self._batches: list[bytes] = []
        self._size = 0

    @property
    def full(self) -> bool:
        return self._size >= self._page_bytes

    async def add(self, group: GroupView, reader: ViewReader) -> None:
        batches: list[bytes] = []
        if self._columns:
            batches = await reader.batches(group.samples or ())
            group = without_samples(group)
        body = await reader.encoded(group)
        self.groups.append(group)
        self._bodies.append(body)
        self._batches += batches
        self._size += len(body) + sum(map(len, batches))
        self.cursor = group.cursor or self.cursor

    def pieces(self) -> list[bytes]:
        """Return the page in pieces: as the JSON of a `schemas.ResultsPage`, or as an Arrow stream."""
        reply = b'{"groups":[%s],"cursor":%d}' % (b",".join(self._bodies), self.cursor)
        return [sample_columns.head(reply), *self._batches, sample_columns.END] if self._columns else [reply]


def group_summary(row: GroupRow) -> GroupSummary:
    return reply_of(GroupSummary, row, mean_reward=row.reward_total / row.rewarded if row.rewarded else None)


def callback_view(row: Delivery) -> CallbackView:
    url = urlsplit(row.url)
    shown = f"{url.scheme}://{row.receiver}{url.path}" if row.url else row.receiver
    return reply_of(CallbackView, row, url=shown, given_up=row.given_up or 0.0, fault=row.fault or "")
