"""The doctor of runs on stored runs finds each planted fault and reports nothing for sound runs."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from math import exp

import msgspec
import pytest
import pytest_asyncio

from outrider.concurrency.cancellation import OffloadThread
from outrider.concurrency.watchdog import Watchdog
from outrider.errors import NotFound
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role
from outrider.schemas import EVALUATION_LABEL, RunDiagnosis
from outrider.service.diagnosis.doctor_of_runs import RESULTS_READ, DoctorOfRuns
from outrider.service.diagnosis.evidence import SAMPLED_SESSIONS, count_of_tests
from outrider.service.diagnosis.rules import diagnose
from outrider.store.database import Connection
from outrider.store.rows import pack
from outrider.store.sqlite import SqliteDatabase
from outrider.store.store import Store
from outrider.trajectory import FinishReason, ForkCause, JoinKind, TokenCounts, VersionSpan

from .ailing import (
    FAILURE,
    LABELS,
    PAIRS,
    START,
    Place,
    Plan,
    Planned,
    a_turn,
    conversation,
    ending,
    equal_rewards,
    evidence_of,
    planned,
    put_run,
    results_of,
    stale,
    tokens,
    trend,
    uneven,
)


class Ward:
    """A store, and a doctor of its runs."""

    def __init__(self, database: SqliteDatabase, store: Store, offload: OffloadThread) -> None:
        self.database = database
        self.store = store
        self.doctor = DoctorOfRuns(store, offload)

    async def diagnosed(self, plan: Plan, **shape: int) -> RunDiagnosis:
        await put_run(self.store, plan, **shape)
        return await self.doctor.diagnose(labels=LABELS)


@pytest_asyncio.fixture
async def ward() -> AsyncIterator[Ward]:
    offload = OffloadThread()
    database = SqliteDatabase(None)
    async with Store(database) as store:
        yield Ward(database, store, offload)
    await offload.close()


CONSEQUENCES = {"errors": {"tokens without a reward"}}
"""Faults that follow from another fault."""
LARGE = {"errors": 0.5, "malformed calls": 0.1, "tools that never work": 1.0, "drift": 0.5, "stale sessions": 0.6}


@pytest.mark.parametrize("name", PAIRS)
async def test_a_planted_fault_is_found_and_nothing_else(ward: Ward, name: str) -> None:
    pair = PAIRS[name]
    size = LARGE.get(name, min(pair.most, 1.3 * pair.fault if pair.fault < 1 else pair.fault))
    found = await ward.diagnosed(pair.plan(size), groups=32, n=4)
    assert {finding.rule for finding in found.findings} == {name} | CONSEQUENCES.get(name, set())
    finding = next(finding for finding in found.findings if finding.rule == name)
    assert (found.groups, found.sessions, found.read_sessions, found.truncated) == (32, 128, 128, False)
    for session_id in finding.sessions:
        await ward.store.session(session_id)


def easy(place: Place) -> Planned:
    """All sessions succeed, and there are few groups and samples."""
    return planned(place, reward=1.0)


def long_answers(place: Place) -> Planned:
    """Lengths vary by a factor of ten. One session in twenty-five has replies that are cut off, and reaches its token
    limit."""
    count = round(4000 * exp(place.chance.gauss(0, 1.0)))
    finish = FinishReason.LENGTH if place.among(0.04) else FinishReason.STOP
    reason = StopReason.MAX_TOKENS if place.among(0.04) else StopReason.COMPLETED
    counts = TokenCounts(sampled=count, trained=count)
    return planned(place, tokens=counts, stop_reason=reason, turns=conversation(finish=finish))


def several_agents(place: Place) -> Planned:
    """A main agent with a sub-agent, a call for a title, and a reviewer that takes over the history: other prompts,
    forks, and some dropped tokens."""
    main = conversation()
    others = [
        a_turn(
            2 + at,
            parent=None,
            join=JoinKind.ROOT,
            conversation=1 + at,
            messages=(Message(role=Role.SYSTEM, content=prompt), Message(role=Role.USER, content="Look around.")),
            reply=Message(role=Role.ASSISTANT, content="done"),
        )
        for at, prompt in enumerate(("You explore repositories.\nReply briefly.", "Write a title."))
    ]
    handover = a_turn(
        4,
        parent=None,
        join=JoinKind.FORK,
        cause=ForkCause.SYSTEM_CHANGED,
        forked_from=1,
        messages=(Message(role=Role.SYSTEM, content="You review what others did.\nBe strict."), *main[0].messages[1:]),
        reply=Message(role=Role.ASSISTANT, content="it is right"),
    )
    counts = TokenCounts(sampled=1000, trained=880, dropped=120)
    forks = {ForkCause.SYSTEM_CHANGED.value: 1, ForkCause.SIBLING.value: 1}
    return planned(place, turns=[*main, *others, handover], tokens=counts, turns_made=5, forks=forks)


def shorter_maths(place: Place) -> Planned:
    """The reward rises and answers get shorter by two thirds, while the number of tests stays the same."""
    left = (1 - 0.67 * place.late) * exp(place.chance.gauss(0, 0.1))
    counts = TokenCounts(sampled=round(5000 * left), trained=round(5000 * left))
    reward = 1.0 if place.chance.random() < 0.2 + 0.6 * place.late else 0.0
    return planned(place, reward=reward, metrics={"tests": 12.0, "answered": 1.0}, tokens=counts)


def more_concise(place: Place) -> Planned:
    """The reward rises and answers get shorter by a third; nothing counts tests."""
    left = (1 - 0.35 * place.late) * exp(place.chance.gauss(0, 0.3))
    counts = TokenCounts(sampled=round(5000 * left), trained=round(5000 * left))
    reward = 1.0 if place.chance.random() < 0.2 + 0.6 * place.late else 0.0
    return planned(place, reward=reward, metrics={"answered": 1.0}, tokens=counts)


def half_without_spread(place: Place) -> Planned:
    return equal_rewards(0.5)(place)


def asynchronous(place: Place) -> Planned:
    """Weights are updated while sessions run: their tokens are up to three versions old."""
    return stale(0.8, lag=place.number % 4)(place)


def two_engines(place: Place) -> Planned:
    return uneven(0.36)(place)


def a_few_failures(place: Place) -> Planned:
    """Three sessions in a hundred end with an error, and some tool results are failures."""
    made = planned(place, turns=conversation(result="[exit code 1]" if place.among(0.3) else "ok"))
    if place.among(0.03):
        return made._replace(result=made.result | {"error": FAILURE, "stop_reason": StopReason.ERROR, "verdict": None})
    return made


SOUND: dict[str, tuple[Plan, dict[str, int]]] = {
    "easy": (easy, {"groups": 8, "n": 2}),
    "long answers": (long_answers, {"groups": 40, "n": 4}),
    "several agents": (several_agents, {"groups": 30, "n": 4}),
    "shorter maths": (shorter_maths, {"groups": 60, "n": 4}),
    "more concise": (more_concise, {"groups": 60, "n": 4}),
    "half without spread": (half_without_spread, {"groups": 60, "n": 4}),
    "asynchronous": (asynchronous, {"groups": 40, "n": 4}),
    "two engines": (two_engines, {"groups": 40, "n": 4}),
    "a few failures": (a_few_failures, {"groups": 40, "n": 4}),
}


@pytest.mark.parametrize("name", SOUND)
async def test_nothing_is_said_about_a_sound_run(ward: Ward, name: str) -> None:
    plan, shape = SOUND[name]
    found = await ward.diagnosed(plan, **shape)
    assert found.sessions == shape["groups"] * shape["n"]
    assert found.findings == ()


async def test_nothing_is_said_about_retries_that_recovered(ward: Ward) -> None:
    groups = results_of(planned, groups=20, n=4)
    for row, sessions in groups:
        await ward.store.create_group(row, b"{}", [made.result.session_id for made in sessions])
        for result, turns, _ in sessions:
            for _ in range(2):
                attempt = await ward.store.start_attempt(result.session_id, node="node", lease_until=1e12)
                await ward.store.add_turn(result.session_id, attempt, turns[0])
                await ward.store.requeue(result.session_id, attempt, FAILURE)
            attempt = await ward.store.start_attempt(result.session_id, node="node", lease_until=1e12)
            for turn in turns:
                await ward.store.add_turn(result.session_id, attempt, turn)
            await ward.store.finish(result.session_id, attempt, msgspec.structs.replace(result, attempt=attempt))
    found = await ward.doctor.diagnose(labels=LABELS)
    assert found.findings == ()
    assert (found.sessions, found.read_turns) == (80, 160)


@pytest.mark.parametrize("plan", [planned, long_answers, more_concise, two_engines, half_without_spread])
def test_chance_is_no_fault(plan: Plan) -> None:
    """None of twenty random runs has a finding."""
    for seed in range(20):
        assert diagnose(evidence_of(plan, groups=30, seed=seed)) == []


async def test_a_run_is_named_by_labels_groups_and_time(ward: Ward) -> None:
    await put_run(ward.store, equal_rewards(1.0), groups=40, n=2)
    doctor = ward.doctor
    assert (await doctor.diagnose()).groups == 40
    assert (await doctor.diagnose(labels={"run": "wednesday"})).groups == 0
    assert (await doctor.diagnose(since=START + 10 * 35)).groups == 5
    named = await doctor.diagnose(groups=["g-00003", "g-00007", "g-00003"])
    assert (named.groups, named.sessions, named.findings) == (2, 4, ())
    with pytest.raises(NotFound, match="no group 'g-x'"):
        await doctor.diagnose(groups=["g-00003", "g-x"])


async def test_one_group_can_have_a_fault(ward: Ward) -> None:
    await put_run(ward.store, PAIRS["tools that never work"].plan(1.0), groups=1, n=16)
    found = await ward.doctor.diagnose(groups=["g-00000"])
    assert [finding.rule for finding in found.findings] == ["tools that never work"]


async def test_a_tenant_sees_its_own_runs_only(ward: Ward) -> None:
    await put_run(ward.store, equal_rewards(1.0), groups=30, n=2, tenant="alice")
    await put_run(ward.store, planned, groups=5, n=2, tenant="bob", first=100)
    alice, bob = [await ward.doctor.diagnose(tenant=name) for name in ("alice", "bob")]
    assert (alice.groups, bob.groups) == (30, 5)
    assert [finding.rule for finding in alice.findings] == ["equal rewards"]
    assert bob.findings == ()
    with pytest.raises(NotFound):
        await ward.doctor.diagnose(groups=["g-00000"], tenant="bob")


async def test_trends_are_those_of_one_run(ward: Ward) -> None:
    """A trend is measured within one run. Two runs show no trend, although the second has shorter sessions and higher
    rewards."""

    def plan(reward: float, sampled: int) -> Plan:
        counts = TokenCounts(sampled=sampled, trained=sampled)
        return lambda place: planned(place, reward=reward + place.chance.gauss(0, 0.1), tokens=counts)

    await put_run(ward.store, plan(0.2, 9000), groups=40, n=2, labels={"run": "a"})
    await put_run(ward.store, plan(0.8, 900), groups=40, n=2, labels={"run": "b"}, first=100)
    assert (await ward.doctor.diagnose()).findings == ()
    await put_run(ward.store, trend("tokens")(0.8), groups=40, n=2, labels={"run": "c"}, first=200)
    [finding] = (await ward.doctor.diagnose()).findings
    assert (finding.rule, finding.subject) == ("shorter answers, more reward", "operator run=c")
    assert finding.text.startswith("rewards of operator run=c rise from 0.3")


async def test_evaluations_are_not_judged_as_training(ward: Ward) -> None:
    await put_run(ward.store, equal_rewards(1.0), groups=40, n=2, labels={EVALUATION_LABEL: "held-out"})
    assert (await ward.doctor.diagnose()).findings == ()


async def test_a_large_run_is_read_in_part(ward: Ward) -> None:
    await put_run(ward.store, planned, groups=40, n=2)
    found = await ward.doctor.diagnose(most_sessions=30)
    assert found.truncated
    assert found.sessions == 30
    whole = await ward.doctor.diagnose(most_sessions=80)
    assert (whole.truncated, whole.sessions) == (False, 80)


async def test_sessions_that_are_not_done_are_counted_apart(ward: Ward) -> None:
    [(row, sessions)] = results_of(planned, groups=1, n=3)
    await ward.store.create_group(row, b"{}", [made.result.session_id for made in sessions])
    result = sessions[0].result
    await ward.store.start_attempt(result.session_id, node="node", lease_until=1e12)
    await ward.store.finish(result.session_id, 1, result)
    found = await ward.doctor.diagnose()
    assert (found.groups, found.sessions, found.not_done) == (1, 1, 2)


async def put_many(ward: Ward, plan: Plan, *, groups: int, n: int) -> None:
    """Store results without turns, in a few statements."""
    rows = results_of(plan, groups=groups, n=n)
    [(like, sessions)] = results_of(plan, groups=1, n=1)
    like = msgspec.structs.replace(like, id="g-like")
    await ward.store.create_group(like, b"{}", ["s-like"])
    await ward.store.start_attempt("s-like", node="node", lease_until=1e12)
    await ward.store.finish("s-like", 1, msgspec.structs.replace(sessions[0].result, session_id="s-like"))

    async def body(tx: Connection) -> None:
        for table, values in (
            ("groups", [{"id": row.id, "n": row.n, "created": row.created, "cursor": None} for row, _ in rows]),
            (
                "sessions",
                [
                    {
                        "id": result.session_id,
                        "group_id": row.id,
                        "sample_index": result.sample_index,
                        "result": pack(result),
                    }
                    for row, made in rows
                    for result, *_ in made
                ],
            ),
        ):
            columns = [name for _, name, *_ in await tx.fetch(f"PRAGMA table_info({table})")]
            given = ", ".join("?" if name in values[0] else name for name in columns)
            names = [name for name in columns if name in values[0]]
            sql = f"INSERT INTO {table} ({', '.join(columns)}) SELECT {given} FROM {table} WHERE id = ?"
            last = "g-like" if table == "groups" else "s-like"
            await tx.execute_many(sql, [(*(value[name] for name in names), last) for value in values])

    await ward.database.write(body)


async def test_a_group_with_many_sessions_is_read_in_parts(ward: Ward) -> None:
    n = 2 * RESULTS_READ + 7
    await put_many(ward, ending(StopReason.ERROR, error=FAILURE, reward=None)(0.5), groups=1, n=n)
    found = await ward.doctor.diagnose(groups=["g-00000"])
    assert found.sessions == n
    [finding] = [finding for finding in found.findings if finding.rule == "errors"]
    assert finding.numbers["sessions"] == n


@pytest.mark.deep
@pytest.mark.usefixtures("others_objects_set_aside")
async def test_a_large_run_takes_little_memory_and_does_not_hold_the_loop(ward: Ward) -> None:
    """Twice the sessions take less than 1.6 times the memory, and the event loop is never held for 0.05 s."""
    await put_many(ward, tokens("unsure")(0.3), groups=2500, n=8)
    peaks = []
    for most in (10_000, 20_000):
        tracemalloc.start()
        async with Watchdog() as watchdog:
            found = await ward.doctor.diagnose(most_sessions=most)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert watchdog.stalls.held < 0.05
    assert found.sessions == 20_001
    assert [finding.rule for finding in found.findings] == ["unsure branches"]
    assert peaks[1] < 12 << 20
    assert peaks[1] < 1.6 * peaks[0]


async def test_the_sample_has_a_bound(ward: Ward) -> None:
    def small(place: Place) -> Planned:
        return planned(place, turns=[a_turn(0)], turns_made=1)

    found = await ward.diagnosed(small, groups=110, n=5)
    assert found.sessions == 550
    assert found.read_sessions == found.read_turns == SAMPLED_SESSIONS
    again = await ward.doctor.diagnose(labels=LABELS)
    assert again == found


async def test_callers_at_once_get_the_same_diagnosis(ward: Ward) -> None:
    await put_run(ward.store, planned, groups=10, n=2)
    found = await asyncio.gather(*(ward.doctor.diagnose() for _ in range(4)))
    assert len(set(map(msgspec.json.encode, found))) == 1


async def test_a_version_span_without_tokens_does_not_count(ward: Ward) -> None:
    def plan(place: Place) -> Planned:
        spans = (VersionSpan(1, 0, 0), VersionSpan(90, 0, 10))
        return planned(place, turns=conversation(versions=spans))

    assert (await ward.diagnosed(plan, groups=20, n=4)).findings == ()


def test_test_counts_of_evaluators_are_found() -> None:
    assert count_of_tests({"cases": 4.0, "passed": 2.0}) == 4
    assert count_of_tests({"unit.tests_run": 3.0}) == 3
    assert count_of_tests({"tests": 7.0, "cases": 4.0}) == 7
    assert count_of_tests({"protests": 7.0, "contests": 1.0}) is None
    assert count_of_tests({}) is None
