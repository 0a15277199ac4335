"""Evaluations: their figures, their failures, and their separation from the groups that train."""

from __future__ import annotations

import asyncio
import math
import random
import time
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.client.client import AsyncClient
from outrider.client.estimates import pass_at
from outrider.client.pass_rate import PRIORITY, evaluate
from outrider.client.sampling import DynamicSampler
from outrider.config import ModelConfig
from outrider.errors import InvalidField, ServiceError
from outrider.lab.demo.dialogue import POLICY, RENDERER
from outrider.lab.demo.task import group_spec, make_task
from outrider.schemas import GroupView
from outrider.spec import EVALUATION_LABEL, EngineSpec, TaskSpec
from support.coin import coin_task
from support.scribe import scribe_task
from support.service import running_service, scripted_engine
from support.waiting import until


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_pass(passes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passes)))
    draws = [any(draw) for draw in combinations(passes, k)]
    assert pass_at(k, sum(passes), len(passes)) == pytest.approx(fmean(draws))


@given(st.integers(1, 300), st.data())
def test_pass_at_k_is_the_quotient_of_binomial_coefficients(samples: int, data: st.DataObject) -> None:
    k, passes = data.draw(st.integers(1, samples)), data.draw(st.integers(0, samples))
    exact = 1.0 - math.comb(samples - passes, k) / math.comb(samples, k)
    assert pass_at(k, passes, samples) == pytest.approx(exact, abs=1e-12)


def test_pass_at_k_of_very_many_samples_does_not_stop_the_other_threads() -> None:
    """Python runs no other thread while it computes a binomial coefficient, whose digits grow with the samples."""
    began = time.thread_time()
    assert pass_at(1_000_000, 1, 2_000_000) == pytest.approx(0.5)
    assert time.thread_time() - began < 2.0


def told(task: dict[str, Any]) -> dict[str, Any]:
    return task | {"instruction": "go"}


async def have_begun(client: AsyncClient, sessions: int) -> None:
    """Wait until this number of sessions have entered the state `running` since the service began."""
    async for event in client.events():
        sessions -= event.kind == "session.state" and event.data["state"] == "running"
        if not sessions:
            return


async def test_failures_are_counted_apart_and_are_no_zeros(tmp_path: Path) -> None:
    tasks = [
        told(scribe_task("eval a", rewards=[1.0, 0.0, 0.0, 0.0])),
        told(scribe_task("eval b", rewards=[1.0], fails=[1, 2])),
        told(scribe_task("eval c", fails=[0, 1, 2, 3])),
    ]
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        found = await evaluate(client, tasks, samples=4, seed=7, name="held out")
        trained = await client.submit({"task": told(scribe_task("train", rewards=[1.0]))})
        # A trainer that follows the results gets only the groups that train. Evaluations are delivered on request only.
        assert (await anext(client.follow(consumer="trainer"))).id == trained.id
        assert (await anext(client.follow(evaluations=True))).id in {group.id for group in found.groups}
    assert (found.graded, found.failures) == (6, {"harness_error": 6})
    reward = found.reward
    assert (reward.mean, reward.tasks, reward.samples) == ((0.25 + 1.0) / 2, 2, 6)
    assert reward.standard_error == pytest.approx(0.375)  # 0.53, the spread of 0.25 and 1.0, over the root of 2
    # Only two samples of the second task are left, so this task does not count for pass@4.
    assert reward.pass_at == pytest.approx({1: (0.25 + 1.0) / 2, 2: (0.5 + 1.0) / 2, 4: 1.0})
    assert found.metrics["number"].mean == pytest.approx(((0 + 1 + 2 + 3) / 4 + (0 + 3) / 2) / 2)
    assert found.versions == (0, 0)
    # Stored groups contain the literal, and so do filters that users have written.
    assert EVALUATION_LABEL == "outrider.evaluation"
    assert [group.labels[EVALUATION_LABEL] for group in found.groups] == ["held out"] * 3
    assert [(group.n, group.priority) for group in found.groups] == [(4, PRIORITY)] * 3
    figures = found.figures()
    assert (figures["held out/reward/mean"], figures["held out/failed"]) == (0.625, 6.0)
    assert figures["held out/number/pass@1"] == found.metrics["number"].pass_at[1]


async def test_nothing_graded_is_an_error_that_says_why(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        with pytest.raises(ServiceError, match=r"none of the 2 sessions .* \(2 harness_error\): .* fell ill"):
            await evaluate(client, [told(scribe_task("eval ill", fails=[0, 1]))], samples=2)
        with pytest.raises(InvalidField, match="a task and a sample"):
            await evaluate(client, [])


async def test_the_version_is_held_to_what_was_asked_for(tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, ["hello<|im_end|>"])
    task = TaskSpec.model_validate(coin_task(0, reward=1.0))
    async with running_service(tmp_path=tmp_path, engine=engine) as (_, url), AsyncClient(url) as client:
        with pytest.raises(InvalidField, match="has version 0, not 3"):
            await evaluate(client, [task], policy_version=3)
        await client.update_policy(3)
        found = await evaluate(client, [task], policy_version=3)
        assert (found.versions, found.reward.mean, found.reward.standard_error) == ((3, 3), 1.0, None)

        slow = coin_task(0, reward=1.0, seconds=0.3)
        async with asyncio.TaskGroup() as tasks:
            changed = tasks.create_task(failing(client, [slow]))
            await have_begun(client, 2)
            await client.update_policy(4)
        assert "changed from version 3 to 4" in changed.result()


async def failing(client: AsyncClient, tasks: list[Any]) -> str:
    with pytest.raises(ServiceError) as raised:
        await evaluate(client, tasks, policy_version=3)
    return raised.value.message


async def test_an_evaluation_that_is_given_up_leaves_nothing_running(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        work = asyncio.ensure_future(evaluate(client, [coin_task(0, seconds=60.0)], samples=2))
        await have_begun(client, 2)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        [summary] = await client.groups()
        assert summary.cancelled


class Slow(AsyncClient):
    """A client that has submitted a group when `stored` is set, and gets the reply half a second later."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.stored = asyncio.Event()

    async def submit(self, *asked: Any, **options: Any) -> GroupView:
        group = await super().submit(*asked, **options)
        self.stored.set()
        await asyncio.sleep(0.5)
        return group


async def test_a_service_that_is_gone_is_not_waited_for_once_for_each_group(tmp_path: Path) -> None:
    class Gone(AsyncClient):
        cancels = 0

        async def cancel(self, group_id: str) -> GroupView:
            self.cancels += 1
            raise ServiceError("cannot reach the service")

    async with running_service(tmp_path=tmp_path) as (_, url), Gone(url) as client:

        async def submitted() -> bool:
            return len(await client.groups()) == 3

        work = asyncio.create_task(evaluate(client, [coin_task(number, seconds=60.0) for number in range(3)]))
        await until(submitted)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert client.cancels == 1


async def test_a_group_whose_submission_is_cut_off_is_cancelled_too(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), Slow(url) as client, asyncio.timeout(60):
        work = asyncio.create_task(evaluate(client, [coin_task(0, seconds=60.0)]))
        await client.stored.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert [group.cancelled for group in await client.groups()] == [True]


def episode(name: str) -> dict[str, Any]:
    task: dict[str, Any] = group_spec(make_task(random.Random(name)), 1, runtime="memory")["task"]
    return task


@pytest.mark.deep
async def test_the_same_seeds_give_the_same_sessions_while_other_groups_train(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model": ModelConfig(tokenizer=str(POLICY), renderer=RENDERER, name="demo-policy"),
        "engines": (EngineSpec(kind="embedded", model=str(POLICY), options={"slots": 16}),),
    }
    held_out = [episode(f"held out {number}") for number in range(4)]
    async with running_service(tmp_path=tmp_path, **settings) as (_, url), AsyncClient(url) as client:
        alone = await evaluate(client, held_out, samples=2, seed=11)
        other = await evaluate(client, held_out, samples=2, seed=12)
        training = [episode(f"train {number}") for number in range(64)]
        async with DynamicSampler(
            client, training, n=2, target=8, inflight=8, informative=lambda group: True
        ) as sampler:
            batch = asyncio.ensure_future(sampler.batch())
            await have_begun(client, 16 + 8)
            beside = await evaluate(client, held_out, samples=2, seed=11)
            trained = await batch
            await sampler.stop()
        assert trained is not None
        said = [await tokens(client, found) for found in (alone, other, beside)]
        training_ids = {group.id for group in trained.groups}
    assert said[0] == said[2] != said[1]
    assert alone.reward == beside.reward
    assert len(training_ids) == 8
    assert not training_ids & {group.id for group in (*alone.groups, *other.groups, *beside.groups)}
    assert all(EVALUATION_LABEL not in group.labels for group in trained.groups)


async def tokens(client: AsyncClient, found: Any) -> list[list[int]]:
    """Return the token ids of all samples of the evaluation, in the order of its groups."""
    return [
        sample.ids.tolist()
        for group in found.groups
        for session in group.sessions
        for sample in await client.samples(session.id)
    ]
