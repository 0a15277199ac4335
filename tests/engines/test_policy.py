"""Pauses and updates of a pool's policy: the orders to engines, the continuation of cut generations, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.concurrency.retries import RetryPolicy
from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.base import Chunk, GenerateRequest, SamplingParams
from outrider.engines.pool.policy import KnownPolicy
from outrider.engines.pool.pool import EnginePool
from outrider.errors import Conflict, EngineRejected, EngineUnavailable, InvalidField
from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason, LogprobKind, VersionSpan
from support.stamping import StampingEngine
from support.tokenizer import write_tokenizer

AT_ONCE = RetryPolicy(first=0.0, longest=0.0)
NEVER = RetryPolicy(first=1e9, longest=1e9)
LENGTH = 20
PROMPT = np.array([1, 2, 3], dtype=np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@asynccontextmanager
async def pool_of(
    *engines: StampingEngine, probing: RetryPolicy = AT_ONCE, **options: Any
) -> AsyncIterator[EnginePool]:
    async with EnginePool(patience=5.0, probing=probing, **options) as pool:
        for engine in engines:
            await pool.add_engine(engine)
        yield pool


def request(session: str = "s", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="0" * 32,
        session_key=session,
        input_ids=PROMPT,
        sampling=SamplingParams(**{"max_tokens": 100} | sampling),
    )


async def read(pool: EnginePool, asked: GenerateRequest) -> list[Chunk]:
    async with aclosing(pool.calls.generate(asked)) as chunks:
        return [chunk async for chunk in chunks]


def check(engine: StampingEngine, chunks: list[Chunk], *, prompt: int = len(PROMPT), length: int = LENGTH) -> str:
    """The versions of a reply's tokens, one digit each. Checks that ids and spans agree, that no token is missing, and
    that each log-probability belongs to its position."""
    ids = [token for chunk in chunks for token in chunk.ids]
    logprobs = [value for chunk in chunks for value in chunk.logprobs]
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = chunks[-1]
    assert (last.finish, last.stop_match) == (FinishReason.STOP, engine.end)
    assert len(ids) == length + 1
    assert logprobs == [scripted_logprob(prompt + at, token) for at, token in enumerate(ids)]
    stamped = [version for span in last.versions for version in [span.version] * (span.end - span.start)]
    assert len(stamped) == len(ids)
    assert [engine.letters[version] for version in stamped[:-1]] == ids[:-1]
    assert all(one.version != other.version for one, other in zip(last.versions, last.versions[1:], strict=False))
    return "".join(map(str, stamped))


async def until_waiting() -> None:
    """Wait until every task is blocked."""
    for _ in range(50):
        await asyncio.sleep(0)


async def all_up(pool: EnginePool) -> None:
    """Return once every engine serves."""
    for _ in range(1000):
        if all(engine.ok for engine in pool.policy.status().engines):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(pool.status())


@pytest.mark.parametrize("labels", [True, False], ids=["spans of the engine", "no spans"])
async def test_an_aborted_generation_goes_on_with_the_new_weights(folder: Path, labels: bool) -> None:
    engine = StampingEngine(folder, labels=labels)
    async with pool_of(engine) as pool, asyncio.TaskGroup() as group:
        engine.hold(7)
        reply = group.create_task(read(pool, request(seed=5, min_tokens=9)))
        await engine.held.wait()
        await pool.policy.pause("abort")
        assert pool.policy.status().paused == "abort"
        engine.release()
        await until_waiting()
        assert engine.sampled == 7
        await pool.policy.resume(3)
        assert check(engine, await reply) == "0" * 7 + "3" * 14
        first, second = engine.requests
        assert second.input_ids.tolist() == [*PROMPT.tolist(), *[engine.letters[0]] * 7]
        assert (second.sampling.max_tokens, second.sampling.min_tokens) == (93, 2)
        assert second.sampling.seed not in (None, first.sampling.seed)
        assert len(second.request_id) == len(first.request_id)
        assert second.request_id != first.request_id


async def test_finishing_lets_generations_end_and_holds_new_ones_back(folder: Path) -> None:
    engine = StampingEngine(folder)
    async with pool_of(engine) as pool, asyncio.TaskGroup() as group:
        engine.hold(7)
        running = group.create_task(read(pool, request("running")))
        await engine.held.wait()
        paused = group.create_task(pool.policy.pause("finish"))
        new = group.create_task(read(pool, request("new")))
        await until_waiting()
        assert not paused.done()
        engine.release()
        await paused
        assert check(engine, await running) == "0" * 21
        await until_waiting()
        assert not new.done()
        assert len(engine.requests) == 1
        await pool.policy.resume(1)
        assert check(engine, await new) == "1" * 21


async def test_one_generation_over_many_updates(folder: Path) -> None:
    engine = StampingEngine(folder)
    async with pool_of(engine) as pool, asyncio.TaskGroup() as group:
        engine.hold(2)
        reply = group.create_task(read(pool, request()))
        for version in range(1, 9):
            await engine.held.wait()
            await pool.policy.pause("abort")
            engine.hold(2)
            await pool.policy.update(version, mode="abort", weights="weights")
        engine.release()
        assert check(engine, await reply) == "001122334455667788888"
        assert pool.policy.status().version == 8
        assert [status.version for status in pool.status()] == [8]


async def test_the_limit_on_tokens_holds_over_a_cut(folder: Path) -> None:
    engine = StampingEngine(folder)
    async with pool_of(engine) as pool, asyncio.TaskGroup() as group:
        engine.hold(4)
        reply = group.create_task(read(pool, request(max_tokens=6)))
        await engine.held.wait()
        await pool.policy.pause("abort")
        engine.release()
        await pool.policy.update(1, mode="abort")
        chunks = await reply
        assert sum(len(chunk.ids) for chunk in chunks) == 6
        assert chunks[-1].finish is FinishReason.LENGTH
        assert chunks[-1].versions == (VersionSpan(0, 0, 4), VersionSpan(1, 4, 6))


async def test_a_stop_string_that_spans_a_cut_is_found(folder: Path) -> None:
    """The reply has four letters of one version and two of the next, so no single request has the whole stop string
    `aaabb`."""
    engine = StampingEngine(folder)
    async with pool_of(engine, text=Tokenizer.load(folder).stream) as pool, asyncio.TaskGroup() as group:
        engine.hold(4)
        reply = group.create_task(read(pool, request(stop=("never", "aaabb"))))
        await engine.held.wait()
        await pool.policy.pause("abort")
        engine.release()
        await pool.policy.update(1, mode="abort")
        chunks = await reply
        assert [token for chunk in chunks for token in chunk.ids] == [engine.letters[0]] * 4 + [engine.letters[1]] * 2
        assert (chunks[-1].finish, chunks[-1].stop_match) == (FinishReason.STOP, "aaabb")
        assert chunks[-1].versions == (VersionSpan(0, 0, 4), VersionSpan(1, 4, 6))
        await until_waiting()
        assert [status.in_flight for status in pool.status()] == [0]


@pytest.mark.parametrize(
    "sampling",
    [
        {"constraint": Constraint(ConstraintKind.JSON_OBJECT)},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
async def test_what_no_engine_can_go_on_with_ends_before_the_rest_is_cut(folder: Path, sampling: Any) -> None:
    engine = StampingEngine(folder)
    async with pool_of(engine) as pool, asyncio.TaskGroup() as group:
        engine.hold(6)
        bound = group.create_task(read(pool, request("bound", **sampling)))
        free = group.create_task(read(pool, request("free", max_tokens=1000)))
        await engine.held.wait()
        paused = group.create_task(pool.policy.pause("abort"))
        await until_waiting()
        assert not paused.done()
        engine.release()
        await paused
        assert check(engine, await bound) == "0" * 21
        await pool.policy.resume(1)
        assert set(check(engine, await free)) <= {"0", "1"}
        assert len([asked for asked in engine.requests if asked.session_key == "bound"]) == 1


async def test_a_waiting_pause_becomes_stricter(folder: Path) -> None:
    engine = StampingEngine(folder)
    async with pool_of(engine) as pool, asyncio.TaskGroup() as group:
        engine.hold(5)
        reply = group.create_task(read(pool, request()))
        await engine.held.wait()
        patient = group.create_task(pool.policy.pause("finish"))
        await until_waiting()
        await pool.policy.pause("abort")
        await patient
        await pool.policy.pause("finish")  # a milder mode: nothing is in flight, and nothing changes
        assert pool.policy.status().paused == "abort"
        engine.release()
        await pool.policy.resume(2)
        assert check(engine, await reply) == "0" * 5 + "2" * 16


async def test_a_resume_ends_a_pause_that_still_waits(folder: Path) -> None:
    engine = StampingEngine(folder)
    async with pool_of(engine) as pool, asyncio.TaskGroup() as group:
        engine.hold(5)
        reply = group.create_task(read(pool, request()))
        await engine.held.wait()
        paused = asyncio.ensure_future(pool.policy.pause("finish"))
        await until_waiting()
        await pool.policy.resume()
        with pytest.raises(Conflict, match="resumed"):
            await paused
        assert pool.policy.status().paused is None
        engine.release()
        assert check(engine, await reply) == "0" * 21


async def test_a_client_that_leaves_while_paused_leaves_nothing(folder: Path) -> None:
    engine = StampingEngine(folder)
    async with pool_of(engine) as pool:
        engine.hold(5)
        reply = asyncio.ensure_future(read(pool, request()))
        await engine.held.wait()
        await pool.policy.pause("abort")
        await until_waiting()
        reply.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reply
        await pool.policy.resume(1)
        await until_waiting()
        assert len(engine.requests) == 1
        assert [status.in_flight for status in pool.status()] == [0]


async def test_a_version_never_goes_back(folder: Path) -> None:
    async with pool_of(StampingEngine(folder)) as pool:
        await pool.policy.update(5, mode="finish")
        await pool.policy.update(5, mode="abort")
        for attempt in (pool.policy.update(4, mode="finish"), pool.policy.resume(4)):
            with pytest.raises(Conflict, match="version 5"):
                await attempt
        assert pool.policy.status().paused is None


async def test_a_version_goes_back_where_that_is_asked_for(folder: Path) -> None:
    first, second = StampingEngine(folder), StampingEngine(folder, name="second")
    kept: list[KnownPolicy] = []

    async def keep(known: KnownPolicy) -> None:
        kept.append(known)

    async with pool_of(first, second, keep=keep) as pool:
        await pool.policy.update(5, mode="finish", weights="weights-5")
        await pool.policy.update((1 << 31) - 1, mode="finish")
        second.fails["set_version"] = EngineUnavailable("down")
        await pool.policy.resume(5, go_back=True)
        assert (pool.policy.version, first.version, kept[-1]) == (5, 5, KnownPolicy(5))
        # An engine that was away still reports the version that was undone, and serves nothing until it is updated.
        del second.fails["set_version"]
        assert second.version == (1 << 31) - 1
        await until_waiting()
        assert [engine.ok for engine in pool.policy.status().engines] == [True, False]
        # `go_back` is also allowed with a newer version.
        await pool.policy.update(6, mode="finish", weights="weights-6", go_back=True)
        await all_up(pool)
        assert (first.version, second.version) == (6, 6)
        with pytest.raises(Conflict, match="go back"):
            await pool.policy.resume(5)


async def test_an_engine_that_failed_before_the_newest_version_serves_no_undone_version(folder: Path) -> None:
    first, second = StampingEngine(folder), StampingEngine(folder, name="second")
    async with pool_of(first, second) as pool:
        await pool.policy.update(12, mode="finish")
        await pool.policy.update(100, mode="finish")
        second.fails["set_version"] = EngineUnavailable("down")
        await pool.policy.update(101, mode="finish")
        await pool.policy.resume(12, go_back=True)
        del second.fails["set_version"]
        assert (first.version, second.version) == (12, 100)
        await until_waiting()
        assert [engine.ok for engine in pool.policy.status().engines] == [True, False]
        await pool.policy.update(13, mode="finish")
        await all_up(pool)
        assert (first.version, second.version) == (13, 13)


async def test_weights_that_every_engine_refuses_change_nothing(folder: Path) -> None:
    engine = StampingEngine(folder)
    async with pool_of(engine) as pool, asyncio.TaskGroup() as group:
        engine.hold(5)
        reply = group.create_task(read(pool, request()))
        await engine.held.wait()
        engine.release()
        with pytest.raises(EngineRejected, match="no weights in nowhere"):
            await pool.policy.update(1, mode="abort", weights="nowhere")
        assert check(engine, await reply) == "0" * 21
        status = pool.policy.status()
        assert (status.version, status.paused, status.engines[0].ok) == (0, None, True)


async def test_a_refused_update_leaves_a_pause_of_the_trainer_in_force(folder: Path) -> None:
    async with pool_of(StampingEngine(folder)) as pool:
        await pool.policy.pause("finish")
        with pytest.raises(EngineRejected):
            await pool.policy.update(1, mode="finish", weights="nowhere")
        assert pool.policy.status().paused == "finish"


async def test_an_engine_that_refuses_to_cut_leaves_all_going_on(folder: Path) -> None:
    one, other = StampingEngine(folder, name="one"), StampingEngine(folder, name="other")
    other.fails["pause"] = EngineRejected("not in development mode")
    async with pool_of(one, other) as pool, asyncio.TaskGroup() as group:
        one.hold(3)
        reply = group.create_task(read(pool, request()))
        await one.held.wait()
        one.release()
        with pytest.raises(EngineRejected, match="development mode"):
            await pool.policy.pause("abort")
        assert check(one, await reply) == "0" * 21
        assert pool.policy.status().paused is None
        await pool.policy.pause("finish")  # with nothing in flight, no continuation is needed
        await pool.policy.resume(1)
        assert [engine.version for engine in pool.policy.status().engines] == [1, 1]


async def test_an_engine_that_fails_to_load_is_left_behind_and_catches_up(folder: Path) -> None:
    good, bad = StampingEngine(folder, name="good"), StampingEngine(folder, name="bad")
    bad.fails["update_weights"] = EngineRejected("the disk is not mounted yet")
    async with pool_of(good, bad, probing=RetryPolicy(first=0.01, longest=0.01)) as pool, asyncio.TaskGroup() as group:
        bad.hold(4)
        good.hold(4)
        replies = [group.create_task(read(pool, request(f"s{n}"))) for n in range(2)]
        await good.held.wait()
        await bad.held.wait()
        await pool.policy.pause("abort")
        bad.release()
        good.release()
        await pool.policy.update(1, mode="abort", weights="weights")
        engines = {engine.name: engine for engine in pool.policy.status().engines}
        assert (engines["good"].ok, engines["good"].version) == (True, 1)
        assert (engines["bad"].ok, engines["bad"].version) == (False, 0)
        for reply in replies:
            assert check(good, await reply) == "0" * 4 + "1" * 17
        del bad.fails["update_weights"]
        await all_up(pool)
        assert (bad.version, bad.loaded) == (1, ["weights"])


async def test_the_text_of_an_engines_mistake_has_a_bound(folder: Path) -> None:
    class Careless(StampingEngine):
        async def update_weights(self, weights: str, version: int) -> None:
            raise KeyError("x" * 100_000)

    async with pool_of(StampingEngine(folder, name="good"), Careless(folder, name="bad"), probing=NEVER) as pool:
        await pool.policy.update(1, mode="abort", weights="weights")
        detail = {status.name: status.detail for status in pool.status()}["bad"]
        assert "'bad' raised KeyError: 'xxx" in detail
        assert len(detail) < 2000


async def test_an_engine_that_dies_while_paused_loses_no_generation(folder: Path) -> None:
    one, other = StampingEngine(folder, name="one"), StampingEngine(folder, name="other")
    async with pool_of(one, other, probing=NEVER) as pool, asyncio.TaskGroup() as group:
        one.hold(4)
        other.hold(4)
        replies = [group.create_task(read(pool, request(f"s{n}"))) for n in range(2)]
        await one.held.wait()
        await other.held.wait()
        await pool.policy.pause("abort")
        one.kill()
        other.release()
        await pool.policy.resume(1)
        for reply in replies:
            assert check(other, await reply) == "0" * 4 + "1" * 17
        assert {engine.name: engine.ok for engine in pool.policy.status().engines} == {"one": False, "other": True}


async def test_an_engine_that_dies_in_the_middle_of_the_pause_loses_no_generation(folder: Path) -> None:
    """The engine's stream breaks instead of ending, but its tokens are kept."""
    one, other = StampingEngine(folder, name="one"), StampingEngine(folder, name="other")
    async with pool_of(one, other, probing=NEVER) as pool, asyncio.TaskGroup() as group:
        one.hold(4)
        reply = group.create_task(read(pool, request()))
        await one.held.wait()
        one.fails["pause"] = EngineUnavailable("the connection broke")
        await pool.policy.pause("abort")
        one.kill()
        await until_waiting()
        await pool.policy.resume(1)
        assert check(other, await reply) == "0" * 4 + "1" * 17


async def test_an_engine_with_older_weights_serves_nobody(folder: Path) -> None:
    """The trainer changes weights by its own means, so the service cannot load them."""
    engine = StampingEngine(folder)
    async with pool_of(engine, probing=RetryPolicy(first=0.01, longest=0.01)) as pool:
        await pool.policy.update(4, mode="finish")
        late = StampingEngine(folder, name="late")
        added = await pool.add_engine(late)
        assert (added.ok, "version 0, the policy is at 4" in added.detail) == (False, True)
        for n in range(3):
            await read(pool, request(f"s{n}"))
        assert late.requests == []
        await pool.policy.resume(4)
        assert late.version == 4
        assert [each.ok for each in pool.policy.status().engines] == [True, True]


async def test_an_engine_that_gets_its_weights_from_the_trainer_serves_then(folder: Path) -> None:
    engine, late = StampingEngine(folder), StampingEngine(folder, name="late")
    async with pool_of(engine, probing=RetryPolicy(first=0.01, longest=0.01)) as pool:
        await pool.policy.update(4, mode="finish")
        await pool.add_engine(late)
        late.version = 4  # the trainer has set its label
        await all_up(pool)


async def test_an_engine_that_joins_later_loads_the_weights_of_the_last_update(folder: Path) -> None:
    engine, late = StampingEngine(folder), StampingEngine(folder, name="late")
    async with pool_of(engine, probing=RetryPolicy(first=0.01, longest=0.01)) as pool:
        await pool.policy.update(4, mode="finish", weights="weights-4")
        await pool.add_engine(late)
        await all_up(pool)
        assert (late.loaded, late.version) == (["weights-4"], 4)


async def test_an_engine_that_restarts_while_paused_is_not_left_paused(folder: Path) -> None:
    engine, spare = StampingEngine(folder), StampingEngine(folder, name="spare")
    engine.fails["resume"] = EngineUnavailable("the connection broke")
    async with pool_of(engine, spare, probing=RetryPolicy(first=0.01, longest=0.01)) as pool:
        await pool.policy.pause("finish")
        await pool.policy.resume(1)
        assert [each.ok for each in pool.policy.status().engines] == [False, True]
        del engine.fails["resume"]
        await all_up(pool)
        assert engine.told[-1] == "resume"


async def test_a_pool_that_closes_while_paused_has_its_engines_go_on(folder: Path) -> None:
    engine = StampingEngine(folder)
    async with pool_of(engine) as pool:
        await pool.policy.pause("abort")
    assert engine.told[-1] == "resume"


async def test_an_engine_that_is_removed_while_paused_goes_on(folder: Path) -> None:
    engine = StampingEngine(folder)
    async with pool_of(engine) as pool:
        await pool.policy.pause("abort")
        await pool.remove(engine.name)
        assert engine.told[-1] == "resume"


async def test_a_cancelled_update_leaves_nothing_paused(folder: Path) -> None:
    engine = StampingEngine(folder)
    async with pool_of(engine) as pool, asyncio.TaskGroup() as group:
        engine.hold(5)
        reply = group.create_task(read(pool, request()))
        await engine.held.wait()
        update = asyncio.ensure_future(pool.policy.update(1, mode="finish"))
        await until_waiting()
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert pool.policy.status().paused is None
        engine.release()
        assert check(engine, await reply) == "0" * 21


async def test_engines_that_cannot_load_are_named(folder: Path) -> None:
    class Plain(StampingEngine):
        update_weights = None  # type: ignore[assignment]

    async with pool_of(StampingEngine(folder), Plain(folder, name="plain")) as pool:
        with pytest.raises(InvalidField, match="plain") as caught:
            await pool.policy.update(1, mode="finish", weights="weights")
        assert caught.value.field == "weights"
        assert pool.policy.status().paused is None


async def test_a_reply_goes_on_only_with_log_probabilities_of_its_kind(folder: Path) -> None:
    class Raw(StampingEngine):
        logprob_kind = LogprobKind.RAW

    one, other = StampingEngine(folder, name="one"), Raw(folder, name="raw")
    async with pool_of(one, other, probing=NEVER) as pool:
        one.hold(4)
        reply = asyncio.ensure_future(read(pool, request()))
        await one.held.wait()
        await pool.policy.pause("abort")
        one.kill()
        await pool.policy.resume(1)
        with pytest.raises(EngineUnavailable, match="another kind"):
            await reply


async def test_patience_is_not_spent_while_paused(folder: Path) -> None:
    engine = StampingEngine(folder)
    async with (
        EnginePool(patience=0.05, probing=RetryPolicy(first=0.01, longest=0.01)) as pool,
        asyncio.TaskGroup() as group,
    ):
        await pool.add_engine(engine)
        engine.kill()
        with pytest.raises(EngineUnavailable):
            await read(pool, request())
        await pool.policy.pause("finish")
        reply = group.create_task(read(pool, request()))
        await asyncio.sleep(0.2)
        assert not reply.done()
        engine.restart()
        await all_up(pool)
        await pool.policy.resume(0)
        assert check(engine, await reply) == "0" * 21


async def test_a_pause_that_is_cancelled_before_its_turn_leaves_nothing_paused(folder: Path) -> None:
    """Another operation is running: a resume on a slow engine."""

    class Slow(StampingEngine):
        asked = asyncio.Event()
        answers = asyncio.Event()

        async def set_version(self, version: int) -> None:
            self.asked.set()
            await self.answers.wait()

    engine = Slow(folder)
    async with pool_of(engine) as pool, asyncio.TaskGroup() as group:
        resumed = group.create_task(pool.policy.resume(1))
        await engine.asked.wait()
        paused = asyncio.ensure_future(pool.policy.pause("finish"))
        await until_waiting()
        paused.cancel()
        with pytest.raises(asyncio.CancelledError):
            await paused
        assert pool.policy.status().paused is None
        engine.answers.set()
        await resumed


async def test_a_second_update_follows_the_first(folder: Path) -> None:
    """Both are requested while a generation runs, and so is a later pause."""
    engine = StampingEngine(folder)
    async with pool_of(engine) as pool, asyncio.TaskGroup() as group:
        engine.hold(5)
        reply = group.create_task(read(pool, request()))
        await engine.held.wait()
        updates = [group.create_task(pool.policy.update(version, mode="finish")) for version in (1, 2)]
        paused = group.create_task(pool.policy.pause("finish"))
        await until_waiting()
        engine.release()
        for update in updates:
            await update
        await paused
        assert check(engine, await reply) == "0" * 21
        assert (pool.policy.version, pool.policy.status().paused) == (2, "finish")
        await pool.policy.resume()
        assert check(engine, await read(pool, request())) == "2" * 21


async def test_an_engine_that_joins_in_the_middle_of_an_update_has_its_weights_before_it_serves(folder: Path) -> None:
    engine, late = StampingEngine(folder), StampingEngine(folder, name="late")

    async def join() -> None:
        await pool.add_engine(late)

    async with pool_of(engine, probing=RetryPolicy(first=0.01, longest=0.01)) as pool:
        await pool.policy.update(4, mode="finish", weights="weights-4", meanwhile=join)
        await all_up(pool)
        assert (late.loaded, late.version) == (["weights-4"], 4)


async def test_what_runs_on_an_engine_that_is_given_up_is_cut_too(folder: Path) -> None:
    """One request to the engine has failed, so the engine gets no more requests. Another request still runs on it."""
    engine = StampingEngine(folder)
    async with pool_of(engine, probing=NEVER) as pool, asyncio.TaskGroup() as group:
        engine.hold(5)
        reply = group.create_task(read(pool, request()))
        await engine.held.wait()
        engine.fails["generate"] = EngineUnavailable("no more connections")
        failing = asyncio.ensure_future(read(pool, request("other")))
        await until_waiting()
        assert not pool.policy.status().engines[0].ok
        await pool.policy.pause("abort")
        engine.release()
        await until_waiting()
        assert engine.sampled == 5
        del engine.fails["generate"]
        engine.version = 1
        await pool.policy.resume(1)
        pool.probe_now(engine.name)
        assert check(engine, await reply) == "0" * 5 + "1" * 16
        assert check(engine, await failing) == "1" * 21


async def test_what_runs_on_an_engine_that_is_being_removed_is_cut_too(folder: Path) -> None:
    one, other = StampingEngine(folder, name="one"), StampingEngine(folder, name="other")
    async with pool_of(one, other, probing=NEVER) as pool, asyncio.TaskGroup() as group:
        one.hold(5)
        reply = group.create_task(read(pool, request()))
        await one.held.wait()
        removed = group.create_task(pool.remove("one"))
        await until_waiting()
        await pool.policy.pause("abort")
        one.release()
        await removed
        assert (one.sampled, one.told[-1]) == (5, "resume")
        await pool.policy.resume(1)
        assert check(other, await reply) == "0" * 5 + "1" * 16


async def test_no_weights_are_loaded_while_an_engine_generates(folder: Path) -> None:
    """The order to pause failed, so the engine's generation continues. The engine is updated after the generation has
    ended."""
    engine, spare = StampingEngine(folder), StampingEngine(folder, name="spare")
    async with (
        pool_of(engine, spare, probing=RetryPolicy(first=0.01, longest=0.01)) as pool,
        asyncio.TaskGroup() as group,
    ):
        engine.hold(5)
        reply = group.create_task(read(pool, request()))
        await engine.held.wait()
        engine.fails["pause"] = EngineUnavailable("the connection broke")
        await pool.policy.update(1, mode="abort", weights="weights")
        del engine.fails["pause"]
        await asyncio.sleep(0.1)
        assert engine.loaded == []
        engine.release()
        assert check(engine, await reply) == "0" * 21
        await all_up(pool)
        assert engine.loaded == ["weights"]


async def test_an_engine_without_versions_joins_at_the_policys(folder: Path) -> None:
    class Plain(StampingEngine):
        set_version = None  # type: ignore[assignment]
        update_weights = None  # type: ignore[assignment]

    async with pool_of(StampingEngine(folder)) as pool:
        await pool.policy.update(4, mode="finish")
        await pool.add_engine(Plain(folder, name="plain"))
        assert [(each.ok, each.version) for each in pool.policy.status().engines] == [(True, 4)] * 2


async def test_a_policy_goes_on_where_an_earlier_service_left_it(folder: Path) -> None:
    """The policy is restored before the first engine joins. An engine with the weights serves at once; another engine
    loads them first."""
    known = KnownPolicy(3, "weights-3")
    fresh, kept = StampingEngine(folder, name="fresh"), StampingEngine(folder, name="kept")
    kept.version = 3
    async with pool_of(fresh, kept, probing=RetryPolicy(first=0.01, longest=0.01), known=known) as pool:
        status = pool.policy.status()
        assert (status.version, [engine.ok for engine in status.engines]) == (3, [False, True])
        with pytest.raises(Conflict, match="version 3"):
            await pool.policy.update(2, mode="finish")
        await all_up(pool)
        assert (fresh.loaded, kept.loaded) == (["weights-3"], [])
        assert check(fresh, await read(pool, request())) == "3" * 21


async def test_each_new_version_is_kept_before_anything_is_sampled_by_it(folder: Path) -> None:
    engine = StampingEngine(folder)
    kept: list[KnownPolicy] = []

    async def keep(known: KnownPolicy) -> None:
        assert pool.policy.status().paused
        kept.append(known)

    async with pool_of(engine, keep=keep) as pool:
        await pool.policy.update(1, mode="finish", weights="weights-1")
        await pool.policy.update(1, mode="finish")  # a repetition: the weights are at the same path
        with pytest.raises(EngineRejected):
            await pool.policy.update(2, mode="finish", weights="nowhere")
        await pool.policy.pause("finish")
        await pool.policy.resume(3)
        await pool.policy.pause("finish")
        await pool.policy.resume()
    assert kept == [KnownPolicy(1, "weights-1")] * 2 + [KnownPolicy(3)]


async def test_an_engine_whose_weights_are_gone_takes_part_in_the_next_update(folder: Path) -> None:
    """The folder of the last update is gone after a restart, so no engine serves until the trainer gives new
    weights."""
    engine = StampingEngine(folder)
    probing = RetryPolicy(first=0.01, longest=0.01)
    async with pool_of(engine, probing=probing, known=KnownPolicy(3, "nowhere")) as pool:
        while engine.told.count("update_weights") < 2:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0)
        await pool.policy.resume(3)  # the trainer's report does not make the weights loadable
        assert (engine.version, pool.policy.status().engines[0].ok) == (0, False)
        await pool.policy.update(4, mode="finish", weights="weights-4")
        assert (engine.version, pool.policy.status().engines[0].ok) == (4, True)
        assert check(engine, await read(pool, request())) == "4" * 21
