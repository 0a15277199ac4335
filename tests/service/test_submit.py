"""A submitted group is stored before the reply, once per idempotency key. Sessions run by priority."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from outrider.config import LanesConfig, QueueConfig
from outrider.errors import Conflict, InvalidField, QueueFull
from outrider.evaluators.base import Outcome
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.sandbox.runtimes.node_host import Host
from outrider.service.service import Ids
from outrider.spec import EvaluatorSpec
from outrider.store.sqlite import sqlite_store
from outrider.store.store import _spec_of
from outrider.trajectory import Verdict

from .conftest import MakeWorld
from .world import group, result_of

NARROW = LanesConfig(init=1, ready=1, run=1, eval=1)


async def test_a_group_is_in_the_database_before_submit_returns(world: MakeWorld, tmp_path: Path) -> None:
    async with world() as w:
        view = await w.submit("wait door", n=3, labels={"kind": "test"})
        async with sqlite_store(tmp_path / "data" / "outrider.sqlite3") as other:
            stored = await other.group(view.id)
            assert [session.id for session in await other.sessions(view.id)] == [s.id for s in view.sessions]
        assert (stored.n, stored.state, view.labels) == (3, GroupState.ACTIVE, {"kind": "test"})
        w.stage.open["door"].set()


CHECKED: list[str] = []


class Noting:
    """An evaluator that records each check of its spec."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._word = spec.options["word"]

    async def check_spec(self, host: Host) -> None:
        CHECKED.append(self._word)

    async def evaluate(self, outcome: Outcome) -> Verdict:
        return Verdict(reward=1.0)


async def test_a_group_that_is_not_accepted_has_no_evaluator_checked(world: MakeWorld) -> None:
    async with world(queue=QueueConfig(sessions=1), lanes=NARROW) as w:
        CHECKED.clear()
        await w.submit("wait door", n=8, evaluator={"kind": f"{__name__}:Noting", "options": {"word": "first"}})
        with pytest.raises(QueueFull):
            await w.submit("wait door", evaluator={"kind": f"{__name__}:Noting", "options": {"word": "second"}})
        assert CHECKED == ["first"]
        w.stage.open["door"].set()


async def test_a_finished_group_has_graded_token_exact_samples(world: MakeWorld) -> None:
    async with world() as w:
        submitted = await w.submit("ask", "ask", n=4, labels={"kind": "test"}, verdicts=[0.5])
        done = await w.done(submitted.id, samples=True)
        assert (done.state, done.cursor) == (GroupState.DONE, 1)
        assert [result_of(session).stop_reason for session in done.sessions] == [StopReason.COMPLETED] * 4
        assert [result_of(session).turns for session in done.sessions] == [2] * 4
        assert done.samples is not None
        assert [(sample.reward, sample.sample_index) for sample in done.samples] == [(0.5, n) for n in range(4)]
        assert {sample.labels["kind"] for sample in done.samples} == {"test"}
        asked = {tuple(request.input_ids.tolist()) for request in w.engine.requests}
        for sample, session in zip(done.samples, done.sessions, strict=True):
            assert sum(sample.loss_mask) == result_of(session).tokens.trained
            first, _ = sample.trained[0]
            assert tuple(sample.ids[:first].tolist()) in asked
        w.assert_quiet()


async def test_the_same_key_is_the_same_group(world: MakeWorld) -> None:
    async with world() as w:
        first = await w.submit("ask", n=2, idempotency_key="k")
        again = await w.submit("ask", n=2, idempotency_key="k")
        assert again.id == first.id
        with pytest.raises(Conflict) as refused:
            await w.submit("ask", "ask", n=2, idempotency_key="k")
        assert refused.value.field == "idempotency_key"
        done = await w.done(first.id)
        assert (await w.submit("ask", n=2, idempotency_key="k")).sessions == done.sessions
        assert len(await w.service.store.groups()) == 1


async def test_the_same_key_is_the_same_group_after_an_upgrade(world: MakeWorld) -> None:
    """An earlier version has stored the request without a field that it did not know."""
    async with world() as w:
        first = await w.submit("ask", n=2, idempotency_key="k")
        store = w.service.store
        spec = msgspec.json.decode(await store.spec(first.id))
        assert spec.pop("expires_seconds") is None
        sealed = store._key.seal(msgspec.json.encode(spec), _spec_of(first.id))
        await store._db.write(lambda tx: tx.execute("UPDATE groups SET spec = ?", (sealed,)))
        assert (await w.submit("ask", n=2, idempotency_key="k")).id == first.id
        for n, priority in ((3, 0), (2, 1)):
            with pytest.raises(Conflict):
                await w.submit("ask", n=n, priority=priority, idempotency_key="k")


async def test_what_this_machine_cannot_do_is_refused_before_it_is_stored(world: MakeWorld) -> None:
    async with world() as w:
        with pytest.raises(InvalidField) as refused:
            await w.service.submit(group("ask", runtime={"prepare": [{"upload": "none.txt", "to": "x"}]}))
        assert refused.value.field == "task.runtime.prepare.0.upload"
        assert await w.service.store.groups() == []


async def test_sessions_run_by_priority_then_age(world: MakeWorld) -> None:
    async with world(lanes=NARROW) as w:
        first = await w.submit("wait door", "ask", n=3)  # as many sessions as the lanes hold
        await w.state(first.sessions[2].id, SessionState.INITIALIZING)
        await w.stage.arrived["door"].wait()
        later = [
            await w.submit(f"note {name}", "ask", n=n, priority=priority)
            for name, priority, n in (("low", -5, 1), ("old", 0, 2), ("new", 0, 1), ("high", 7, 2))
        ]
        w.stage.open["door"].set()
        for view in later:
            await w.done(view.id)
        assert w.stage.order == ["high", "high", "old", "old", "new", "low"]
        w.assert_quiet()


def test_ids_of_a_burst_are_different_and_in_order() -> None:
    ids = Ids()
    made = [ids.next() for _ in range(50_000)]
    assert made == sorted(set(made))
    assert {len(one) for one in made} == {16}
