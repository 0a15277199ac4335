"""The order of the queue: by tenant, then priority, then bucket, then age. Also the expiry of queued sessions, and the
stored drains of nodes and paces of engines."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from outrider.errors import Conflict
from outrider.lifecycle import StopReason
from outrider.spec import EVALUATION_LABEL, OPERATOR_TENANT, tenant_of
from outrider.store.queue import MOST_SKIPPED_BUCKETS, QueueKind, bucket_of
from outrider.store.rows import QueueLength, SessionRow
from outrider.store.sqlite import SqliteDatabase, sqlite_store
from outrider.store.store import MOST_PACES, Store

from .conftest import NOW
from .world import FAILURE, group_row, result, session_ids, start

T = TypeVar("T")


async def put(
    store: Store,
    id: str,
    n: int = 2,
    *,
    expires: float | None = None,
    labels: Mapping[str, str] = {},
    tenant: str = OPERATOR_TENANT,
    **row: Any,
) -> None:
    group = msgspec.structs.replace(group_row(id, n, **row), labels=dict(labels), tenant=tenant)
    await store.create_group(group, b"{}", session_ids(group), expires=expires)


async def order(store: Store, limit: int = 100, **which: Any) -> list[str]:
    return [row.id for row in await store.queued(limit, **which)]


def run(name: str) -> dict[str, str]:
    return {"run": name}


def own_bucket(labels: Mapping[str, str], tenant: str = OPERATOR_TENANT) -> str:
    return bucket_of(tenant, labels)


async def test_buckets_of_one_priority_take_turns(store: Store) -> None:
    await put(store, "old", 3, created=1.0, labels=run("a"))
    await put(store, "young", 2, created=2.0, labels=run("b"))
    await put(store, "last", 1, created=3.0, labels={"user": "b"})
    await put(store, "low", 2, created=0.0, labels=run("c"), priority=-1)
    assert await order(store) == ["old.0", "young.0", "last.0", "old.1", "young.1", "old.2", "low.0", "low.1"]
    assert await order(store, 4) == ["old.0", "young.0", "last.0", "old.1"]


async def test_who_has_the_least_under_way_goes_first_then_who_was_served_longest_ago(store: Store) -> None:
    for number, name in enumerate("abc"):
        await put(store, name, 4, created=float(number), labels=run(name))
    a, b, c = (own_bucket(run(name)) for name in "abc")
    assert await order(store, 5, under_way={a: 2, b: 1}) == ["c.0", "b.0", "c.1", "a.0", "b.1"]
    await start(store, "a.0")
    await start(store, "b.0")
    assert await order(store, 3) == ["c.0", "a.1", "b.1"]
    await start(store, "c.0")
    assert await order(store, 3, under_way={c: 1}) == ["a.1", "b.1", "c.1"]


@pytest.mark.parametrize(
    ("labels", "others"),
    [
        ({"run": "x", "user": "me"}, [{"run": "x", "user": "you"}, {"run": "x"}]),
        ({"user": "me"}, [{"user": "me", "run": ""}]),
        ({}, [{"colour": "red"}, {"run": "", "user": ""}]),
        ({"run": "x", EVALUATION_LABEL: "e"}, [{"run": "x", EVALUATION_LABEL: "another"}]),
    ],
)
def test_groups_share_a_bucket(labels: dict[str, str], others: list[dict[str, str]]) -> None:
    assert {own_bucket(each) for each in others} == {own_bucket(labels)}


def test_other_groups_do_not() -> None:
    odd = ["x", "X", " x", "x\0", "\0x", "\ud800", "é", "e\u0301", "x" * (1 << 20), "'; DROP TABLE sessions; --"]
    labels = [{}, {"user": "x"}, {EVALUATION_LABEL: ""}, {EVALUATION_LABEL: "", "user": "x"}, *map(run, odd)]
    buckets = [own_bucket(each) for each in labels]
    assert len(set(buckets)) == len(labels)
    assert all(len(bucket) <= len(OPERATOR_TENANT) + 33 and bucket.isascii() for bucket in buckets)
    assert len({own_bucket(each, tenant) for each in labels for tenant in ("a", "b")}) == 2 * len(labels)


async def test_tenants_take_turns_before_their_runs_do(store: Store) -> None:
    """A client that uses a new run for each group gets no more turns than other clients."""
    for number in range(4):
        await put(store, f"many{number}", 1, created=float(number), labels=run(str(number)), tenant="a")
    await put(store, "one", 4, created=9.0, labels=run("0"), tenant="b")
    in_turn = ["many0.0", "one.0", "many1.0", "one.1", "many2.0", "one.2", "many3.0", "one.3"]
    assert await order(store) == in_turn
    assert await order(store, 2, under_way={own_bucket(run("x"), "a"): 2}) == ["one.0", "one.1"]
    await start(store, "many0.0")
    await start(store, "one.0")
    assert await order(store, 3) == ["many1.0", "one.1", "many2.0"]


async def test_a_priority_orders_the_groups_of_one_tenant_alone(store: Store) -> None:
    await put(store, "loud", 3, created=0.0, tenant="a", priority=1000)
    await put(store, "louder", 3, created=1.0, labels=run("other"), tenant="a", priority=1000)
    await put(store, "later", 1, created=2.0, tenant="b", priority=-1000)
    await put(store, "sooner", 2, created=3.0, tenant="b", priority=-999)
    in_turn = ["loud.0", "sooner.0", "louder.0", "sooner.1", "loud.1", "later.0", "louder.1", "loud.2", "louder.2"]
    assert await order(store) == in_turn
    assert await order(store, 3, under_way={own_bucket({}, "a"): 9}) == ["sooner.0", "sooner.1", "later.0"]


async def test_a_tenant_with_many_runs_that_find_no_room_is_passed_over_as_a_whole(store: Store) -> None:
    for number in range(MOST_SKIPPED_BUCKETS + 2):
        await put(store, f"large{number:02}", 1, created=float(number), labels=run(str(number)), tenant="a")
    await put(store, "small", 1, created=1e6, tenant="b")
    passed = {own_bucket(run(str(number)), "a") for number in range(MOST_SKIPPED_BUCKETS - 1)}
    assert sorted(await order(store, skip=passed)) == ["large63.0", "large64.0", "large65.0", "small.0"]
    assert await order(store, skip=passed | {own_bucket(run("63"), "a")}) == ["small.0"]


async def test_labels_and_priorities_may_be_anything(store: Store) -> None:
    names = ["\0", "\U0001f600", "x" * 100_000, "%s ? {blob}"]
    for name in names:
        await put(store, f"g{names.index(name)}", 1, labels=run(name), created=float(names.index(name)))
    await put(store, "first", 1, priority=1000)
    await put(store, "last", 1, priority=-1000)
    assert await order(store) == ["first.0", "g0.0", "g1.0", "g2.0", "g3.0", "last.0"]


async def test_evaluations_can_be_asked_for_alone(store: Store) -> None:
    await put(store, "train", 2, labels=run("a"), priority=9)
    await put(store, "eval", 2, labels={**run("a"), EVALUATION_LABEL: "held out"}, priority=-9)
    assert await order(store, kind=QueueKind.EVALUATION) == ["eval.0", "eval.1"]
    assert await order(store) == ["train.0", "train.1", "eval.0", "eval.1"]


async def test_buckets_can_be_passed_over(store: Store) -> None:
    for name in "ab":
        await put(store, name, 2, labels=run(name))
    assert await order(store, skip={own_bucket(run("a"))}) == ["b.0", "b.1"]


async def test_a_bucket_that_was_emptied_comes_back_behind_those_served_before_it(store: Store) -> None:
    for name in "ab":
        await put(store, name, 1, labels=run(name))
    await start(store, "b.0")
    await start(store, "a.0")
    assert await order(store) == []
    assert await store.queue_length() == QueueLength(0, 0, 0)
    await store.requeue("a.0", 1, FAILURE, due=NOW + 5)
    assert await order(store, now=NOW) == []
    await put(store, "b2", 1, labels=run("b"))
    assert await order(store, now=NOW + 5) == ["b2.0", "a.0"]
    assert await store.queue_length() == QueueLength(2, 2, 1)


async def test_a_session_is_not_held_back_by_a_clock_that_was_set_back(store: Store) -> None:
    await put(store, "g", 1)
    await start(store, "g.0")
    await store.requeue("g.0", 1, FAILURE, due=NOW + 60)
    assert await order(store, now=NOW, latest=NOW + 60) == []
    assert await order(store, now=NOW - 1, latest=NOW + 59) == ["g.0"]


async def test_nor_by_one_that_was_right_again_when_it_was_stored(store: Store) -> None:
    """`due` was computed when the clock was a day ahead, and the clock was corrected before the store wrote it."""
    await put(store, "g", 1)
    await start(store, "g.0", lease_until=NOW - 1)
    await store.recover(now=NOW, due=NOW + 86_400)
    assert await order(store, now=NOW, latest=NOW + 60) == ["g.0"]


async def test_the_queue_is_counted_by_bucket(store: Store) -> None:
    await put(store, "a", 5, labels=run("a"))
    await put(store, "a2", 5, labels=run("a"), priority=3)
    await put(store, "b", 1)
    await put(store, "c", 1, labels=run("a"), tenant="other")
    assert await store.queue_length() == QueueLength(12, 3, 2)
    assert await store.waiting(OPERATOR_TENANT, run("a"), most=100) == 10
    assert await store.waiting(OPERATOR_TENANT, run("a"), most=7) == 7
    assert await store.waiting(OPERATOR_TENANT, run("c"), most=7) == 0
    assert [await store.waiting(tenant, most=100) for tenant in (OPERATOR_TENANT, "other", "no")] == [11, 1, 0]
    assert await store.waiting(OPERATOR_TENANT, most=7) == 7


async def test_sessions_expire_until_their_first_start(store: Store) -> None:
    await put(store, "g", 3, expires=NOW + 10)
    await put(store, "h", 1, expires=NOW + 20)
    await put(store, "patient", 1)
    assert await store.next_due(after=NOW) == NOW + 10
    assert not await store.expire(now=NOW + 9)
    await start(store, "g.0")
    await store.requeue("g.0", 1, FAILURE)
    await start(store, "g.1")
    assert await store.expire(now=NOW + 10)
    assert [(row.id, row.ending) for row in await store.to_end()] == [("g.2", StopReason.EXPIRED)]
    assert await order(store) == ["g.0", "h.0", "patient.0"]
    with pytest.raises(Conflict, match="to end: expired"):
        await start(store, "g.2")
    assert await store.next_due(after=NOW + 10) == NOW + 20
    await store.finish("g.2", 0, result("g.2", 0, reason=StopReason.EXPIRED, reward=None))
    assert not await store.expire(now=NOW + 10)


async def test_drained_nodes_are_remembered(tmp_path: Path) -> None:
    for _ in range(2):
        async with sqlite_store(tmp_path / "outrider.db") as store:
            await store.set_drained("a", True)
            await store.set_drained("b", True)
            await store.set_drained("c", False)
    async with sqlite_store(tmp_path / "outrider.db") as store:
        assert await store.drained_nodes() == {"a", "b"}
        await store.set_drained("a", False)
        assert await store.drained_nodes() == {"b"}


async def test_paces_of_engines_are_remembered(tmp_path: Path) -> None:
    now = itertools.count()
    async with Store(SqliteDatabase(tmp_path / "outrider.db"), clock=lambda: float(next(now))) as store:
        await store.keep_engine_paces({"a": "1", "b": "1"})
        await store.keep_engine_paces({"b": "2"})
        assert await store.engine_paces() == {"a": "1", "b": "2"}
        newest = {f"c{number}": "3" for number in range(MOST_PACES - 1)}
        await store.keep_engine_paces(newest)
        assert await store.engine_paces() == {"b": "2"} | newest


@pytest.mark.deep
async def test_a_placement_reads_little_however_long_the_queue_and_many_the_buckets() -> None:
    """The cost is counted in steps of SQLite's virtual machine, which do not depend on time."""
    steps = {}
    for buckets, each in ((10, 10), (1000, 10), (10, 1000)):
        async with sqlite_store(None) as store:
            for number in range(buckets):
                await put(store, f"g{number:04}", each, created=float(number), labels=run(str(number)))
            for number in range(5, 8):  # tenants with more work under way, whose turn comes later
                await put(store, f"h{number:04}", each, labels=run(str(number)), tenant=f"other{number}")
            under_way = {own_bucket(run(str(number))): 3 for number in range(5)}
            under_way |= {own_bucket({}, f"other{number}"): 20 for number in range(5, 8)}
            counted = Counter[str]()

            async def count(tx: Any, counted: Counter[str] = counted) -> None:
                def step() -> int:
                    counted["steps"] += 1
                    return 0

                tx._raw.set_progress_handler(step, 1)

            await store._db.read(count)
            assert await order(store, 1, under_way=under_way) == ["g0005.0"]
            steps[buckets, each] = counted["steps"]
    assert max(steps.values()) < 1.5 * steps[10, 10]


class QueueMachine(RuleBasedStateMachine):
    """Compares the queue with a list that is searched from end to end."""

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.store = sqlite_store(None)
        self.call(self.store.__aenter__())
        self.waiting: list[SessionRow] = []
        self.running: list[SessionRow] = []
        self.served: dict[tuple[int, str], int] = {}
        self.since: dict[tuple[int, str], int] = {}
        self.groups = 0

    def teardown(self) -> None:
        self.call(self.store.__aexit__(None, None, None))
        self.runner.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @property
    def under_way(self) -> Counter[str]:
        return Counter(row.bucket for row in self.running)

    @rule(
        n=st.integers(1, 4),
        priority=st.integers(-1, 1),
        name=st.sampled_from(["", "a", "b", "c"]),
        tenant=st.sampled_from(["x", "y", "z"]),
    )
    def submit(self, n: int, priority: int, name: str, tenant: str) -> None:
        id = f"g{self.groups:03}"
        self.call(
            put(self.store, id, n, priority=priority, created=float(self.groups), labels=run(name), tenant=tenant)
        )
        self.waiting += self.call(self.store.sessions(id))
        self.since.setdefault((priority, own_bucket(run(name), tenant)), self.groups)
        self.groups += 1

    def expected(self) -> SessionRow:
        under_way = self.under_way
        work = Counter(tenant_of(row.bucket) for row in self.running)
        served: dict[str, int] = {}
        for (_, bucket), number in self.served.items():
            served[tenant_of(bucket)] = max(served.get(tenant_of(bucket), 0), number)

        def place(row: SessionRow) -> tuple[Any, ...]:
            share, tenant = (row.priority, row.bucket), tenant_of(row.bucket)
            tenants = work[tenant], served.get(tenant, 0), tenant
            turn = under_way[row.bucket], self.served.get(share, 0), self.since[share]
            return *tenants, -row.priority, *turn, row.created, row.sample_index

        return min(self.waiting, key=place)

    @rule()
    def start_next(self) -> None:
        found = self.call(self.store.queued(1, under_way=self.under_way))
        assert [row.id for row in found] == [self.expected().id] if self.waiting else not found
        for row in found:
            attempt = self.call(start(self.store, row.id))
            self.waiting = [each for each in self.waiting if each.id != row.id]
            self.running.append(msgspec.structs.replace(row, attempt=attempt))
            self.served[row.priority, row.bucket] = max(self.served.values(), default=0) + 1

    @rule(limit=st.integers(2, 12))
    def look(self, limit: int) -> None:
        """Each session in the queue's order belongs to a tenant with the least work under way. Among this tenant's
        sessions of the highest priority, it belongs to a bucket with the least work under way, and is the oldest of the
        bucket."""
        under_way = self.under_way
        work = Counter(tenant_of(row.bucket) for row in self.running)
        left = {row.id: row for row in self.waiting}
        found = self.call(self.store.queued(limit, under_way=under_way))
        assert len(found) == min(limit, len(left))
        for row in found:
            tenant = tenant_of(row.bucket)
            assert work[tenant] == min(work[tenant_of(each.bucket)] for each in left.values())
            others = [each for each in left.values() if tenant_of(each.bucket) == tenant]
            rivals = [each for each in others if each.priority == max(each.priority for each in others)]
            assert row.id in {each.id for each in rivals}
            assert under_way[row.bucket] == min(under_way[each.bucket] for each in rivals)
            own = [each for each in rivals if each.bucket == row.bucket]
            assert row.id == min(own, key=lambda each: (each.created, each.sample_index)).id
            under_way[row.bucket] += 1
            work[tenant] += 1
            del left[row.id]

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99), again=st.booleans())
    def end(self, number: int, again: bool) -> None:
        row = self.running.pop(number % len(self.running))
        if again:
            self.call(self.store.requeue(row.id, row.attempt, FAILURE))
            self.waiting.append(row)
        else:
            self.call(self.store.finish(row.id, row.attempt, result(row.id, row.attempt)))

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        row = self.waiting.pop(number % len(self.waiting))
        self.call(self.store.cancel_session(row.id))

    @rule()
    def count(self) -> None:
        assert self.call(self.store.queue_length()).sessions == len(self.waiting)


QueueMachine.TestCase.settings = settings(
    stateful_step_count=40,
    max_examples=40,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
TestQueueAgainstList = pytest.mark.deep(QueueMachine.TestCase)
