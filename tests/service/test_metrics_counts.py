"""Counts of model calls, sessions and groups, and the bounds on their memory."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.concurrency.chores import Failures
from outrider.counts import SECONDS, CallFailures, Distribution, Histogram, NodeCounts, SandboxCounts, SandboxStarts
from outrider.errors import Boundary, ErrorRecord, known_codes
from outrider.lifecycle import SessionState, StopReason
from outrider.service.metrics_counts import LIMITS, CountLimits, ServiceCounts, common_length
from outrider.service.metrics_rates import RateHistory, Totals
from outrider.service.scheduler import SessionEnd
from outrider.store.rows import SessionRow
from outrider.store.store import AddedTurn
from outrider.trajectory import (
    FinishReason,
    ForkCause,
    JoinKind,
    LogprobKind,
    SessionResult,
    StageSeconds,
    TokenCounts,
    Turn,
    TurnTimings,
    Verdict,
    VersionSpan,
    pack_ids,
)

TRAINED = TokenCounts(sampled=3, trained=3)


def turn(index: int = 0, *, prompt: tuple[int, ...] = (1, 2, 3, 4), version: int = 0, **fields: Any) -> Turn:
    known: dict[str, Any] = {
        "index": index,
        "parent": index - 1 if index else None,
        "join": JoinKind.APPEND if index else JoinKind.ROOT,
        "prompt_length": len(prompt),
        "prompt_delta": pack_ids(prompt),
        "output_ids": pack_ids([7, 8, 9]),
        "logprobs": b"",
        "logprob_kind": LogprobKind.RAW,
        "versions": (VersionSpan(version, 0, 3),),
        "finish": FinishReason.STOP,
        "dialect": "chat",
        "engine": "e",
        "sampling": {},
        "timings": TurnTimings(received=100.0, first_token=100.2, finished=101.5),
    }
    return Turn(**known | fields)


def session(id: str) -> SessionRow:
    return SessionRow(
        id=id,
        group_id="g" + id[1:].rpartition("-")[0],
        sample_index=0,
        state=SessionState.RUNNING,
        attempt=1,
        node="n",
        lease_until=None,
        priority=0,
        created=0.0,
        updated=0.0,
        last_error=None,
        result=None,
    )


class Counting:
    """Counts of a service with the engines `e` and `d`, whose policy has the version `version`."""

    def __init__(self, limits: CountLimits = LIMITS) -> None:
        self.version = 0
        self.counts = ServiceCounts(
            ("chat", "gemini"),
            has_engine=lambda name: name in "ed",
            policy_version=lambda: self.version,
            limits=limits,
        )

    def add(self, session_id: str, *turns: Turn, attempt: int = 1, model: str | None = None) -> None:
        for each in turns:
            self.counts.note_turn(AddedTurn(session_id, attempt, each, model))

    def end(self, session_id: str, *, last: bool = False, n: int | None = 2, **fields: Any) -> None:
        row = session(session_id)
        known: dict[str, Any] = {
            "session_id": row.id,
            "group_id": row.group_id,
            "sample_index": 0,
            "attempt": 1,
            "stop_reason": StopReason.COMPLETED,
        }
        self.counts.note_session(SessionEnd(row, SessionResult(**known | fields), last, n))


@pytest.fixture
def counting() -> Counting:
    return Counting()


def test_a_histogram_has_each_value_in_one_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (-3.0, 1.0, 1.5, 99.0):
        histogram.add(value)
    assert histogram.read() == Distribution((2, 1, 1), 0.0 + 1.0 + 1.5 + 99.0)
    assert histogram.read().plus(Distribution()) == histogram.read() == Distribution().plus(histogram.read())
    assert histogram.read().plus(histogram.read()) == Distribution((4, 2, 2), 203.0)


def test_a_call_is_counted_by_its_dialect_and_engine(counting: Counting) -> None:
    late = TurnTimings(received=100.0, first_token=None, finished=100.5)
    counting.add("s-1-0", turn(cached_tokens=9), turn(1, engine="d", timings=late, finish=FinishReason.LENGTH))
    counting.add("s-1-0", turn(1, cause=ForkCause.SIBLING, drift_tokens=2, malformed_calls=1, dialect="made up"))
    counts = counting.counts
    assert [sum(counts.dialects[name].seconds.counts) for name in ("chat", "other", "gemini")] == [2, 1, 0]
    assert sum(counts.dialects["chat"].first_token.counts) == 1
    assert counts.dialects["chat"].seconds.total == pytest.approx(2.0)
    engine = counts.engines["e"]
    assert (engine.calls, engine.prompt_tokens, engine.reported_tokens, engine.cached_tokens) == (2, 8, 4, 4)
    assert counts.engines["d"].calls == 1
    assert (counts.forks[ForkCause.SIBLING], counts.drift_tokens, counts.malformed_calls) == (1, 2, 1)
    assert counts.calls["policy"] == {FinishReason.STOP: 2, FinishReason.LENGTH: 1, FinishReason.ABORT: 0}
    assert counts.sampled_tokens == {"policy": 9, "frozen": 0}


def test_a_frozen_models_call_is_no_call_of_the_policy(counting: Counting) -> None:
    counting.add("s-1-0", turn(cause=ForkCause.SIBLING, drift_tokens=2, version=5), model="judge")
    counts = counting.counts
    assert counts.sampled_tokens == {"policy": 0, "frozen": 3}
    assert (counts.forks[ForkCause.SIBLING], counts.drift_tokens, counts.first_prompt_tokens) == (0, 0, 0)
    counting.end("s-1-0", tokens=TRAINED)
    assert counts.trained_sessions == {"one": 0, "several": 0}


def test_engines_beyond_the_bound_and_unknown_ones_are_counted_together() -> None:
    counts = ServiceCounts(
        ("chat",),
        has_engine=lambda name: name.startswith("e"),
        policy_version=lambda: 0,
        limits=CountLimits(named=2),
    )
    for name in ("e1", "made up", "e2", "e3", "e1"):
        counts.note_turn(AddedTurn("s-1-0", 1, turn(engine=name), None))
    assert {name: engine.calls for name, engine in counts.engines.items()} == {"e1": 2, "e2": 1, "other": 2}


def test_a_session_is_counted_when_it_is_done(counting: Counting) -> None:
    error = ErrorRecord(boundary=Boundary.ENGINE, code="engine_silent", message="m")
    odd = ErrorRecord(boundary=Boundary.HARNESS, code="s-1-0 is odd", message="m")
    seconds = StageSeconds(queued=1.0, run=10.0)
    counting.end(
        "s-1-0",
        turns=3,
        samples=2,
        seconds=seconds,
        model_seconds=4.0,
        tokens=TokenCounts(sampled=9, trained=5, masked=4),
    )
    counting.end("s-2-0", stop_reason=StopReason.ERROR, error=error, turns=700)
    counting.end("s-3-0", stop_reason=StopReason.AGENT_TIMEOUT, seconds=StageSeconds(run=1.0), model_seconds=1.5)
    counting.counts.note_failed_attempt(odd)
    counts = counting.counts
    assert {reason.value: number for reason, number in counts.ended.items() if number} == {
        "completed": 1,
        "error": 1,
        "agent_timeout": 1,
    }
    assert (counts.done_sessions, counts.failed_sessions) == (3, 1)
    assert counts.errors == {(Boundary.ENGINE, "engine_silent"): 1}
    assert counts.failed_attempts == {(Boundary.HARNESS, "other"): 1}
    assert (counts.model_seconds, counts.tool_seconds, counts.stage_seconds["queued"]) == (5.5, 6.0, 1.0)
    assert (counts.trained_tokens, counts.masked_tokens, counts.dropped_tokens, counts.samples) == (5, 4, 0, 2)
    assert (sum(counts.turns.counts), counts.turns.counts[-1]) == (3, 1)


def test_the_tokens_of_a_run_that_is_graded_again_are_counted_once(counting: Counting) -> None:
    counting.end("s-1-0", turns=2, tokens=TRAINED, model_seconds=2.0, samples=1)
    counting.end("s-2-0", turns=2, tokens=TRAINED, model_seconds=2.0, samples=1, regrades="s-1-0")
    counts = counting.counts
    assert (sum(counts.turns.counts), counts.trained_tokens, counts.model_seconds) == (1, 3, 2.0)
    assert (counts.samples, counts.done_sessions) == (2, 2)


@pytest.mark.parametrize(
    ("rewards", "n", "spread"),
    [
        ((1.0, 1.0), 2, "zero"),
        ((-1.0, -1.0), 2, "zero"),
        ((0.0, 1.0), 2, "some"),
        ((1.0, None), 2, "unknown"),
        ((1.0,), 1, "unknown"),
        ((1.0, 1.0), 3, "unknown"),  # one session ended before the service started
        ((1.0, 1.0), None, "unknown"),
    ],
)
def test_the_spread_of_a_groups_rewards(
    counting: Counting, rewards: tuple[float | None, ...], n: int | None, spread: str
) -> None:
    for number, reward in enumerate(rewards):
        verdict = None if reward is None else Verdict(reward=reward)
        counting.end(f"s-1-{number}", last=number == len(rewards) - 1, n=n, verdict=verdict)
    assert counting.counts.groups == {"some": 0, "zero": 0, "unknown": 0} | {spread: 1}


def test_the_staleness_is_that_at_the_delivery_of_the_group(counting: Counting) -> None:
    counting.add("s-1-0", turn(version=3), turn(1, version=4))
    counting.add("s-1-1", turn(version=9))
    counting.add("s-1-1", turn(version=5), attempt=2)  # nothing of the first attempt is delivered
    counting.add("s-1-2", turn(version=1))
    counting.end("s-1-0", tokens=TRAINED)
    counting.end("s-1-2")  # has no trained tokens
    counting.version = 7
    counting.end("s-1-1", last=True, tokens=TRAINED)
    assert counting.counts.trained_sessions == {"one": 1, "several": 1}
    assert counting.counts.staleness.total == (7 - 3) + (7 - 5)


def test_tokens_that_siblings_share(counting: Counting) -> None:
    counting.add("s-1-0", turn(prompt=(1, 2, 3, 4)), turn(1, prompt=(1, 2)))
    counting.add("s-1-1", turn(prompt=(1, 2, 9)))
    counting.add("s-1-0", turn(prompt=(1, 2, 3, 4)), attempt=2)
    counting.add("s-2-0", turn(prompt=(1, 2, 3)))
    counts = counting.counts
    assert (counts.first_prompt_tokens, counts.shared_prompt_tokens) == (4 + 3 + 4 + 3, 2)


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2), (3, 2), 0), ((1, 2, 3), (1, 2, 4), 2)],
)
def test_the_common_beginning_of_two_prompts(first: tuple[int, ...], second: tuple[int, ...], length: int) -> None:
    assert (
        common_length(pack_ids(first), pack_ids(second)) == common_length(pack_ids(second), pack_ids(first)) == length
    )


def test_what_is_remembered_is_bounded() -> None:
    counting = Counting(CountLimits(remembered=3, prompt_bytes=40))
    for number in range(9):
        counting.add(f"s-{number}-0", turn())
        counting.end(f"s-{number}-1")
    counts = counting.counts
    assert (len(counts._versions), len(counts._groups), len(counts._prompts)) == (3, 3, 2)
    assert counts._prompt_bytes == sum(len(prompt) for _, prompt in counts._prompts.values())
    counting.add("s-a-0", turn(prompt=(1,) * 99))
    assert (len(counts._prompts), counts._prompt_bytes) == (0, 0)


def test_nothing_is_remembered_of_a_group_that_is_done(counting: Counting) -> None:
    counting.add("s-1-0", turn())
    counting.end("s-1-0", last=True, n=1, tokens=TRAINED)
    counts = counting.counts
    assert not counts._versions
    assert not counts._groups
    assert not counts._prompts


def test_a_nodes_counts_add_up() -> None:
    starts, failures = SandboxStarts({"memory": ""}), CallFailures()
    starts.note("memory", 0.2)
    starts.note("memory", None)
    starts.note("my.module:Sandbox", 3.0)
    failures.note("chat", "engine_silent")
    counts = NodeCounts(sandboxes=starts.read(), failed_calls=failures.read())
    assert counts.sandboxes.keys() == {"memory", "other"}
    assert counts.sandboxes["memory"] == SandboxCounts(
        started=Distribution((*tuple(int(bound == 0.25) for bound in SECONDS), 0), 0.2), failed=1
    )
    twice = counts.plus(counts)
    assert twice.sandboxes["other"].started.total == 6.0
    assert twice.failed_calls == {"chat": {"engine_silent": 2}}
    assert counts.plus(NodeCounts()) == counts == NodeCounts().plus(counts)
    assert counts.failed_calls == {"chat": {"engine_silent": 1}}  # unchanged by the sum


def test_every_code_has_its_boundary() -> None:
    assert known_codes()["engine_silent"] is Boundary.ENGINE
    assert known_codes()["expired"] is Boundary.SERVICE
    assert len(known_codes()) < 100


async def test_the_points_of_the_last_hour_have_what_happened_in_between() -> None:
    now, totals, states = 1000.0, Totals(), dict.fromkeys(SessionState, 0)
    failing = False

    async def read_states() -> dict[SessionState, int]:
        if failing:
            raise OSError("the store fails")
        return states

    rates = RateHistory(lambda: totals, read_states, Failures(), clock=lambda: now)
    states |= {SessionState.QUEUED: 5, SessionState.READY: 2, SessionState.RUNNING: 1, SessionState.DONE: 9}
    totals = Totals(sessions_done=2, calls=10, tokens_sampled=100)
    await rates.take()
    failing, totals = True, Totals(sessions_done=3, calls=15, tokens_sampled=170)
    with pytest.raises(OSError, match="the store fails"):
        await rates.take()
    failing, now = False, 1010.0
    await rates.take()
    first, second = rates.view().points
    assert (first.at, first.sessions_done, first.calls, first.queued, first.running) == (1000.0, 2, 10, 5, 3)
    assert (second.at, second.sessions_done, second.calls, second.tokens_sampled) == (1010.0, 1, 5, 70)
    for _ in range(1000):
        await rates.take()
    assert len(rates.view().points) == 720
