"""The sampler on simulated rollouts and a clock that does not wait: which prompts it keeps, replaces and resumes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import pytest

from outrider.errors import InvalidField, NotFound, ServiceError
from outrider.sampling import (
    FAILED_IN_A_ROW,
    Batch,
    DynamicSampler,
    Refill,
    SamplerState,
    Surplus,
    group_advantages,
    rewards_of,
)
from outrider.schemas import GroupView
from outrider.testing.simulated_service import Played, SimulatedService, VirtualLoop

Task = Mapping[str, Any]


def run(main: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def work() -> None:
            await main()

        runner.run(work())


def task(number: int) -> Task:
    return {"number": number}


def informative(number: int) -> bool:
    """Which prompts teach something: two thirds of them."""
    return number % 3 != 1


def even(task: Task, index: int, version: int) -> Played:
    """Every session takes a second; samples of an informative prompt differ."""
    return Played(1.0, float(index % 2 and informative(task["number"])))


def heavy_tailed(task: Task, index: int, version: int) -> Played:
    """Most take a second or two, some a hundred times as long, whether the prompt is informative or not."""
    draw = random.Random(f"{task['number']}/{index}")
    return Played(min(draw.paretovariate(1.1), 200.0), float(index % 2 and informative(task["number"])))


def failing(task: Task, index: int, version: int) -> Played:
    return Played(1.0, None)


async def test_advantages_of_a_group() -> None:
    assert group_advantages([1.0, 0.0], "mean") == [0.5, -0.5]
    assert group_advantages([1.0, 0.0], "leave_one_out") == [1.0, -1.0]
    assert group_advantages([1.0, 0.0], "grpo", epsilon=0.0) == [1.0, -1.0]
    assert group_advantages([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]
    assert group_advantages([3.0], "leave_one_out") == [0.0]
    assert sum(group_advantages([0.0, 0.5, 2.0, 1.0])) == pytest.approx(0.0)


@pytest.mark.parametrize("refill", ["asynchronous", "synchronous"])
def test_a_batch_has_informative_groups_only(refill: Refill) -> None:
    async def main() -> None:
        service = SimulatedService(even, slots=32)
        async with DynamicSampler(service, task, n=4, target=6, refill=refill) as sampler:
            for number in range(3):
                batch = await sampler.batch()
                assert batch is not None
                assert batch.number == number
                assert len(batch.groups) == 6
                assert all(informative(prompt) for prompt in batch.prompts)
                assert {frozenset(rewards_of(group)) for group in batch.groups} == {frozenset({0.0, 1.0})}
                assert len(batch.samples) == 24
                assert batch.counts.uninformative > 0

    run(main)


def test_no_tasks_are_refused() -> None:
    with pytest.raises(InvalidField, match="there are no tasks"):
        DynamicSampler(SimulatedService(even, slots=1), [], n=2, target=1)


def test_a_service_that_has_lost_its_groups_is_not_waited_for() -> None:
    class Forgetful(SimulatedService):
        async def group(self, group_id: str, *, wait: float = 0.0, samples: bool = False) -> GroupView:
            raise NotFound(f"no group {group_id}")

    async def main() -> None:
        service = Forgetful(lambda task, index, version: Played(1e6, 1.0), slots=8)
        async with DynamicSampler(service, task, n=2, target=1) as sampler:
            with pytest.raises(ServiceError, match=r"does not know group .* any more"):
                await sampler.batch()

    run(main)


def test_a_static_batch_is_what_was_submitted() -> None:
    async def main() -> None:
        service = SimulatedService(even, slots=32)
        async with DynamicSampler(service, task, n=4, target=6, refill="static") as sampler:
            first, second = await sampler.batch(), await sampler.batch()
            assert first is not None
            assert second is not None
            assert sorted(first.prompts) == list(range(6))
            assert sorted(second.prompts) == list(range(6, 12))
            assert len(service.submitted) == 12

    run(main)


@pytest.mark.parametrize("surplus", ["carry", "finished", "cancel"])
@pytest.mark.parametrize("refill", ["asynchronous", "synchronous"])
def test_no_informative_prompt_is_lost_or_given_out_twice(refill: Refill, surplus: Surplus) -> None:
    """Whatever takes long, or is stopped: the filter alone decides which prompts are trained on."""

    async def main() -> None:
        prompts = 120

        def source(number: int) -> Task:
            if number >= prompts:
                raise IndexError(number)
            return task(number)

        service = SimulatedService(heavy_tailed, slots=24)
        async with DynamicSampler(
            service, source, n=4, target=8, refill=refill, surplus=surplus, inflight=12
        ) as sampler:
            given = [prompt async for batch in sampler for prompt in batch.prompts]
        assert sorted(given) == [number for number in range(prompts) if informative(number)]

    run(main)


def test_slow_prompts_are_kept_as_often_as_fast_ones() -> None:
    """Of prompts that differ in their time alone, stopping those that are not done must not pick the fast ones."""

    async def main() -> None:
        def play(task: Task, index: int, version: int) -> Played:
            return Played(30.0 if task["number"] % 2 else 1.0, float(index % 2))

        service = SimulatedService(play, slots=16)
        seen: Counter[int] = Counter()
        async with DynamicSampler(service, task, n=2, target=8, surplus="cancel") as sampler:
            for _ in range(100):
                batch = await sampler.batch()
                assert batch is not None
                seen.update(prompt % 2 for prompt in batch.prompts)
        assert abs(seen[0] - seen[1]) <= 16  # what one batch and the groups in flight may hold

    run(main)


def test_no_group_is_begun_only_to_be_stopped() -> None:
    async def main() -> None:
        service = SimulatedService(
            lambda task, index, version: Played(1.0 + task["number"], float(index % 2)), slots=64
        )
        async with DynamicSampler(service, task, n=2, target=8, inflight=8, max_age=0, surplus="cancel") as sampler:
            for number in range(1, 4):
                assert await sampler.batch() is not None
                assert len(service.submitted) == 8 * number

    run(main)


def test_a_finished_part_of_a_stopped_group_is_used() -> None:
    async def main() -> None:
        def play(task: Task, index: int, version: int) -> Played:
            slow = task["number"] == 1 and index == 3
            return Played(1000.0 if slow else 1.0 + task["number"], float(index % 2))

        service = SimulatedService(play, slots=64)
        async with DynamicSampler(service, task, n=4, target=2, inflight=3, surplus="finished") as sampler:
            first = await sampler.batch()
            second = await sampler.batch()
            assert first is not None
            assert second is not None
            assert first.prompts == (0, 2)
            assert second.prompts[0] == 1
            assert rewards_of(second.groups[0]) == [0.0, 1.0, 0.0]

    run(main)


def test_old_groups_are_sampled_again() -> None:
    async def main() -> None:
        service = SimulatedService(heavy_tailed, slots=24)
        async with DynamicSampler(service, task, n=4, target=4, max_age=1) as sampler:
            stale = 0
            for version in range(1, 30):
                batch = await sampler.batch()
                assert batch is not None
                assert all(sample.min_version >= batch.version - 1 for sample in batch.samples)
                stale += batch.counts.stale
                service.version = version
                await sampler.set_version(version)
                await asyncio.sleep(5.0)
            assert stale > 0

    run(main)


def test_nothing_runs_while_the_trainer_trains_on_policy() -> None:
    async def main() -> None:
        service = SimulatedService(even, slots=64)
        async with DynamicSampler(service, task, n=4, target=6, max_age=0, surplus="cancel") as sampler:
            for version in range(1, 5):
                batch = await sampler.batch()
                assert batch is not None
                assert {sample.min_version for sample in batch.samples} == {version - 1}
                before = len(service.submitted)
                await asyncio.sleep(100.0)
                assert len(service.submitted) == before
                service.version = version
                await sampler.set_version(version)

    run(main)


@pytest.mark.parametrize("surplus", ["carry", "cancel"])
def test_a_restart_loses_nothing_and_repeats_nothing(surplus: Surplus) -> None:
    async def main() -> None:
        prompts = 90

        def source(number: int) -> Task:
            if number >= prompts:
                raise IndexError(number)
            return task(number)

        service = SimulatedService(heavy_tailed, slots=24)
        state: SamplerState | None = None
        given: list[int] = []
        for restart in range(100):
            async with DynamicSampler(service, source, n=4, target=5, surplus=surplus, state=state) as sampler:
                batch = await sampler.batch()
                if batch is None:
                    break
                given += batch.prompts
                await asyncio.sleep(restart % 7)
                # Through JSON, as a checkpoint would keep it.
                state = msgspec.json.decode(msgspec.json.encode(sampler.state()), type=SamplerState)
                if restart % 3 == 0:
                    await sampler.batch()  # the trainer dies while it trains on this one: it is given out again
        assert sorted(given) == [number for number in range(prompts) if informative(number)]

    run(main)


def test_a_sequence_is_gone_through_again() -> None:
    async def main() -> None:
        service = SimulatedService(lambda task, index, version: Played(1.0, float(index)), slots=64)
        async with DynamicSampler(service, [task(0), task(1), task(2)], n=2, target=5, inflight=5) as sampler:
            batch = await sampler.batch()
            assert batch is not None
            assert [group["task"]["number"] for group in service.submitted[:5]] == [0, 1, 2, 0, 1]

    run(main)


def test_groups_of_others_are_left_alone() -> None:
    async def main() -> None:
        service = SimulatedService(even, slots=64)
        async with (
            DynamicSampler(service, task, n=4, target=4) as one,
            DynamicSampler(service, task, n=4, target=4) as other,
        ):
            batches = await asyncio.gather(one.batch(), other.batch())
            ids = [group.id for batch in batches if batch is not None for group in batch.groups]
            assert len(ids) == len(set(ids)) == 8

    run(main)


def test_failures_are_replaced_until_everything_fails() -> None:
    async def main() -> None:
        def play(task: Task, index: int, version: int) -> Played:
            return Played(1.0, None if task["number"] % 4 == 0 else float(index % 2))

        service = SimulatedService(play, slots=64)
        async with DynamicSampler(service, task, n=4, target=6) as sampler:
            batch = await sampler.batch()
            assert batch is not None
            assert batch.counts.failed > 0
            assert all(prompt % 4 for prompt in batch.prompts)
        async with DynamicSampler(SimulatedService(failing, slots=64), task, n=4, target=6) as sampler:
            with pytest.raises(ServiceError, match=f"{FAILED_IN_A_ROW} groups in a row.*simulated failure"):
                await sampler.batch()

    run(main)


def test_tasks_that_teach_nothing_are_an_error_and_no_endless_wait() -> None:
    async def main() -> None:
        service = SimulatedService(lambda task, index, version: Played(1.0, 1.0), slots=64)
        async with DynamicSampler(service, task, n=4, target=6) as sampler:
            with pytest.raises(ServiceError, match="0 of them are informative"):
                await sampler.batch()

    run(main)


def test_an_error_of_the_source_reaches_the_trainer() -> None:
    async def main() -> None:
        def source(number: int) -> Task:
            raise KeyError("no column 'question'")

        async with DynamicSampler(SimulatedService(even, slots=8), source, n=4, target=6) as sampler:
            with pytest.raises(KeyError, match="question"):
                await sampler.batch()

    run(main)


async def test_wrong_settings_are_refused() -> None:
    service = SimulatedService(even, slots=8)
    for wrong in ({"n": 0}, {"target": 0}, {"inflight": -1}):
        with pytest.raises(InvalidField):
            DynamicSampler(service, task, **{"n": 4, "target": 6} | wrong)  # type: ignore[arg-type]
    async with DynamicSampler(service, task, n=4, target=6) as sampler:
        await sampler.set_version(3)
        with pytest.raises(InvalidField, match="older"):
            await sampler.set_version(2)


def test_every_group_is_accounted_for() -> None:
    async def main() -> None:
        service = SimulatedService(heavy_tailed, slots=24)
        batches: list[Batch] = []
        async with DynamicSampler(service, task, n=4, target=6, max_age=2, surplus="cancel") as sampler:
            for version in range(1, 12):
                batch = await sampler.batch()
                assert batch is not None
                batches.append(batch)
                service.version = version
                await sampler.set_version(version)
            running = len(sampler.state().pending)
        total = {
            name: sum(getattr(batch.counts, name) for batch in batches) for name in batches[0].counts.__struct_fields__
        }
        settled = sum(value for name, value in total.items() if name != "submitted")
        assert total["informative"] >= 66
        assert 0 <= total["submitted"] - settled <= running

    run(main)
