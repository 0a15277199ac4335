"""Checks the results of a run, in which services and engines were broken at random. The checks compare the clients'
replies, the engine's log, and the store.

The rules are independent of the code that they judge: training rows are counted by their masks. The store is read
after the service has ended. Invariant: a run without a finding has lost and doubled nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np

from campaign.engine import END, Call, digest_of
from campaign.service import TOKENIZER
from outrider.errors import NotFound
from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.lifecycle import GroupState, StopReason
from outrider.schemas import EventView, GroupView
from outrider.store.rows import EventKind
from outrider.store.store import Store
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import (
    FinishReason,
    Ids,
    JoinKind,
    Sample,
    SessionResult,
    Turn,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)


class Harm(StrEnum):
    LOST = "lost"
    DOUBLED = "doubled"
    STALE_WRITE = "stale_writes"
    LEAKED = "leaked"
    WRONG_ZERO = "wrong_zeros"


class Finding(msgspec.Struct, frozen=True):
    harm: Harm
    what: str


class Told(msgspec.Struct, frozen=True):
    """The replies that the clients of a run received.

    `accepted` has the ids of the accepted groups by idempotency key, one id for each 2xx. `readers` has the groups
    returned to each reader. `with_callback` has the ids of the groups with a callback. `pushes` has the bodies of the
    pushes by group id, and `taken` the ids of the groups whose push the receiver accepted.
    """

    accepted: Mapping[str, Sequence[str]]
    readers: Mapping[str, Sequence[GroupView]]
    with_callback: frozenset[str]
    pushes: Mapping[str, Sequence[GroupView]]
    taken: frozenset[str]
    killed: frozenset[str] = frozenset()
    """Names of sandboxes in which a process was killed; each begins with the name of its attempt."""


def read_calls(log: Path) -> list[Call]:
    """Read the engine's log."""
    return [msgspec.json.decode(line, type=Call) for line in log.read_bytes().splitlines()]


async def judge(told: Told, calls: Sequence[Call], store: Store) -> list[Finding]:
    findings = judge_acceptance(told)
    groups = {ids[0] for ids in told.accepted.values() if ids}
    events = await all_events(store)
    findings += judge_events(events, groups)
    stored: dict[str, GroupView] = {}
    for name, views in told.readers.items():
        findings += judge_delivery(name, views, groups)
        stored.update({view.id: view for view in views})
    findings += judge_pushes(told, stored)
    for group in sorted(groups):
        findings += await judge_group(group, told, store)
    ledger = Ledger(calls)
    for group in sorted(groups & stored.keys()):
        samples: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in stored[group].samples or ():
            samples[sample.session_id].append(sample)
        for session in stored[group].sessions:
            try:
                turns = {number: await store.turns(session.id, number) for number in range(1, session.attempt + 1)}
            except NotFound:
                findings.append(Finding(Harm.LOST, f"{session.id} has a result that was read, and is not stored"))
                continue
            for number, of_attempt in turns.items():
                for turn in of_attempt:
                    findings += ledger.match(f"{session.id}-{number}", turn, of_attempt)
            if session.result is not None:
                findings += judge_session(session.result, turns.get(session.result.attempt, []), samples[session.id])
                findings += judge_reward(session.result, told.killed)
    return findings


def judge_acceptance(told: Told) -> list[Finding]:
    """Check that all submissions with the same idempotency key returned the same group."""
    findings = []
    for key, ids in told.accepted.items():
        if not ids:
            findings.append(Finding(Harm.LOST, f"{key} was never accepted"))
        if len(set(ids)) > 1:
            findings.append(Finding(Harm.DOUBLED, f"{key} was accepted as {sorted(set(ids))}"))
    return findings


async def all_events(store: Store) -> list[EventView]:
    events: list[EventView] = []
    while page := await store.events(after=events[-1].cursor if events else 0, limit=10_000):
        events += page
    return events


def judge_events(events: Iterable[EventView], groups: set[str]) -> list[Finding]:
    """Check that each session and group ends once, and that no attempt has an event after it has lost its session.
    While a successor waits in the queue, only the service itself may end the session."""
    findings = []
    newest: defaultdict[str, int] = defaultdict(int)
    lost: set[tuple[str, int]] = set()
    ended: Counter[str] = Counter()
    for event in events:
        # The event of a cancellation has no attempt.
        if event.session_id is not None and event.kind != EventKind.SESSION_CANCELLED:
            attempt = event.data["attempt"]
            if attempt < newest[event.session_id]:
                what = f"{event.session_id}: {event.kind} of attempt {attempt} after attempt {newest[event.session_id]}"
                findings.append(Finding(Harm.STALE_WRITE, what))
            elif (event.session_id, attempt) in lost and not _ended_in_queue(event):
                what = f"{event.session_id}: {event.kind} {event.data} of attempt {attempt}, which had ended"
                findings.append(Finding(Harm.STALE_WRITE, what))
            newest[event.session_id] = max(attempt, newest[event.session_id])
            if event.kind == EventKind.SESSION_RETRY:
                lost.add((event.session_id, attempt))
        if event.kind in (EventKind.SESSION_DONE, EventKind.GROUP_DONE):
            ended[event.session_id or event.group_id] += 1
        if event.kind == EventKind.GROUP_CREATED and event.group_id not in groups:
            findings.append(Finding(Harm.DOUBLED, f"{event.group_id} was stored, and nobody knows it"))
    findings += [Finding(Harm.DOUBLED, f"{name} ended {times} times") for name, times in ended.items() if times > 1]
    return findings


def _ended_in_queue(event: EventView) -> bool:
    """Return whether the session was cancelled, or was given up because its node died too often."""
    return event.kind == EventKind.SESSION_DONE and (
        event.data["stop_reason"] == StopReason.CANCELLED or event.data["error"] == "lease_expired"
    )


def judge_delivery(name: str, views: Sequence[GroupView], groups: set[str]) -> list[Finding]:
    """Check that a consumer got each group once, in the order of the cursors."""
    times = Counter(view.id for view in views)
    findings = [Finding(Harm.LOST, f"{name} was not given {group}") for group in sorted(groups - times.keys())]
    findings += [Finding(Harm.DOUBLED, f"{name} was given {group} {n} times") for group, n in times.items() if n > 1]
    cursors = [view.cursor for view in views]
    if cursors != list(range(1, len(views) + 1)):
        findings.append(Finding(Harm.LOST, f"{name} was given the cursors {cursors}"))
    return findings


def judge_pushes(told: Told, stored: Mapping[str, GroupView]) -> list[Finding]:
    """Check that each group with a callback was pushed until the receiver accepted a push, and that each push equals
    the stored results."""
    findings = [Finding(Harm.LOST, f"{group} was not pushed") for group in sorted(told.with_callback - told.taken)]
    for key, pushes in told.pushes.items():
        if key not in told.with_callback:
            findings.append(Finding(Harm.DOUBLED, f"{key} was pushed, and has no callback"))
        for pushed in pushes:
            if pushed.id != key or (key in stored and pushed != stored[key]):
                findings.append(Finding(Harm.LOST, f"{key} was pushed as something else"))
    return findings


async def judge_group(group: str, told: Told, store: Store) -> list[Finding]:
    """Check that the group is done, and that every reader got the group as the store has it."""
    try:
        row = await store.group(group)
        sessions = await store.sessions(group)
    except NotFound:
        return [Finding(Harm.LOST, f"{group} is not in the store")]
    findings = []
    if row.state is not GroupState.DONE:
        states = ", ".join(f"{session.id} {session.state}" for session in sessions)
        findings.append(Finding(Harm.LOST, f"{group} is not done: {states}"))
    for name, views in told.readers.items():
        for view in views:
            if view.id != group:
                continue
            if view.cursor != row.cursor:
                findings.append(
                    Finding(Harm.DOUBLED, f"{group} was given to {name} at {view.cursor}, is at {row.cursor}")
                )
            for given, session in zip(view.sessions, sessions, strict=True):
                if given.result != session.result:
                    findings.append(Finding(Harm.DOUBLED, f"{session.id}: {name} was given another result"))
    for session in sessions:
        if session.result is not None and session.result.attempt != session.attempt:
            what = f"{session.id} has the result of attempt {session.result.attempt} of {session.attempt}"
            findings.append(Finding(Harm.STALE_WRITE, what))
    return findings


def judge_session(result: SessionResult, turns: Sequence[Turn], samples: Sequence[Sample]) -> list[Finding]:
    """Check that each sampled token is in exactly one row, that a turn is left out of the rows only as a whole and for
    a valid reason, and that each reply that the agent has read is stored as a turn."""
    name = f"{result.session_id}-{result.attempt}"
    findings = []
    trained: Counter[int] = Counter()
    rows = Counter(sample.row for sample in samples)
    if len(turns) != result.turns or len(samples) != result.samples or any(n > 1 for n in rows.values()):
        what = f"{name}: {len(turns)} turns of {result.turns}, {len(samples)} rows of {result.samples}"
        findings.append(Finding(Harm.LOST, what))
    for sample in samples:
        if sample.attempt != result.attempt:
            findings.append(Finding(Harm.STALE_WRITE, f"{name}: a row of attempt {sample.attempt}"))
        for index, (start, end) in zip(sample.turns, sample.turn_spans, strict=True):
            masks = set(sample.loss_mask[start:end].tolist())
            if index >= len(turns) or sample.packed_ids[4 * start : 4 * end] != turns[index].output_ids:
                findings.append(Finding(Harm.LOST, f"{name}: row {sample.row} has other tokens than turn {index}"))
            elif masks == {1}:
                trained[index] += 1
                if pack_logprobs(sample.logprobs[start:end]) != turns[index].logprobs:
                    findings.append(Finding(Harm.LOST, f"{name}: row {sample.row} has other numbers than turn {index}"))
            elif masks == {0, 1}:
                findings.append(Finding(Harm.LOST, f"{name}: row {sample.row} trains a part of turn {index}"))
    for turn in turns:
        if trained[turn.index] > 1:
            findings.append(Finding(Harm.DOUBLED, f"{name}: turn {turn.index} trains in {trained[turn.index]} rows"))
        if turn.output_ids and not trained[turn.index] and not _set_aside(turn, turns):
            findings.append(Finding(Harm.LOST, f"{name}: turn {turn.index} trains in no row"))
    sampled = sum(len(turn.output_ids) // 4 for turn in turns)
    counted = sum(len(turns[index].output_ids) // 4 for index in trained)
    if (result.tokens.sampled, result.tokens.trained) != (sampled, counted):
        findings.append(Finding(Harm.LOST, f"{name}: {result.tokens} of {sampled} tokens, {counted} trained"))
    told = Counter((result.verdict.reason or "").split() if result.verdict else ())
    for missing in (told - Counter(map(_text, turns))).elements():
        findings.append(Finding(Harm.LOST, f"{name}: the agent was told {missing!r}, which is no turn"))
    return findings


def judge_reward(result: SessionResult, killed: Collection[str]) -> list[Finding]:
    """Check that a graded attempt has a reward of 1, because agents are honest. Attempts with a killed process in
    the sandbox are exempt: the grader cannot distinguish a kill from an act of the agent."""
    name = f"{result.session_id}-{result.attempt}"
    was_killed = any(sandbox == name or sandbox.startswith(f"{name}-") for sandbox in killed)
    if result.verdict is None or result.verdict.reward == 1 or was_killed:
        return []
    what = f"{name} has the reward {result.verdict.reward:g} after {result.stop_reason} ({result.turns} turns)"
    return [Finding(Harm.WRONG_ZERO, what)]


def _set_aside(turn: Turn, turns: Sequence[Turn]) -> bool:
    """Return whether the turn may be in no row, because it was cut off, or because the agent did not use the reply and
    repeated the request."""
    again = (other for other in turns if other.index != turn.index and other.parent == turn.parent)
    return turn.finish is FinishReason.ABORT or any(
        JoinKind.RETRY in (turn.join, other.join) and other.prompt_delta == turn.prompt_delta for other in again
    )


_TOKENIZER = Tokenizer.load(TOKENIZER)


def _text(turn: Turn) -> str:
    return _TOKENIZER.decode(unpack_ids(turn.output_ids).tolist()).removesuffix(END)


class Ledger:
    """The engine's calls. Each call may become at most one turn."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls: defaultdict[tuple[str, str], list[Call]] = defaultdict(list)
        for call in calls:
            self._calls[call.session, call.prompt].append(call)
        self._turns: Counter[tuple[int, ...]] = Counter()

    def match(self, attempt: str, turn: Turn, turns: Sequence[Turn]) -> list[Finding]:
        """Check that a turn has the tokens of a call of its attempt with the same prompt: all tokens of the call,
        unless the turn was cut off."""
        prompt = np.concatenate([unpack_ids(part) for part in _prompt(turn, turns)])
        ids = unpack_ids(turn.output_ids).tolist()
        if not ids:
            return []
        fitting = self._fitting(attempt, prompt, ids, whole=turn.finish is not FinishReason.ABORT)
        if not fitting:
            return [Finding(Harm.LOST, f"{attempt}: turn {turn.index} has tokens that the engine did not sample")]
        findings = []
        expected = [scripted_logprob(len(prompt) + at, token) for at, token in enumerate(ids)]
        if unpack_logprobs(turn.logprobs).tolist() != expected:
            findings.append(Finding(Harm.LOST, f"{attempt}: turn {turn.index} has other numbers than the engine's"))
        for call in fitting:
            self._turns[key := tuple(call.ids)] += 1
            if self._turns[key] > 1:
                findings.append(Finding(Harm.DOUBLED, f"{attempt}: turn {turn.index} has the tokens of another turn"))
        return findings

    def _fitting(self, attempt: str, prompt: Ids, ids: list[int], *, whole: bool) -> list[Call]:
        """Return the calls that gave these tokens: one call, or several if a reply was continued after a cut. If the
        reply is `whole`, all tokens of the last call must be in it. Empty if no calls match."""
        for call in self._calls[attempt, digest_of(prompt)]:
            shared = next((at for at, (a, b) in enumerate(zip(call.ids, ids, strict=False)) if a != b), None)
            given = min(len(call.ids), len(ids)) if shared is None else shared
            if given == len(ids) and (not whole or given == len(call.ids)):
                return [call]
            for cut in range(given, 0, -1):
                if cut < len(ids):
                    longer = np.concatenate((prompt, np.asarray(ids[:cut], dtype=np.int32)))
                    if rest := self._fitting(attempt, longer, ids[cut:], whole=whole):
                        return [call, *rest]
        return []


def _prompt(turn: Turn, turns: Sequence[Turn]) -> list[bytes]:
    """Return the pieces of a turn's prompt, beginning with the root turn."""
    pieces = [turn.prompt_delta]
    while turn.parent is not None:
        turn = turns[turn.parent]
        pieces += [turn.output_ids, turn.prompt_delta]
    return pieces[::-1]
