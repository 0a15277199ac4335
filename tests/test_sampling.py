"""The sampler on simulated rollouts and virtual time: which prompts it keeps, replaces and resumes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
import pytest
from bench.simulated_service import Played, SimulatedService

from outrider.client.sampling import (
    FAILED_IN_A_ROW,
    Batch,
    Choice,
    DynamicSampler,
    PendingPrompt,
    Refill,
    SamplerState,
    Surplus,
    group_advantages,
    rewards_differ,
    rewards_of,
)
from outrider.errors import InvalidField, NotFound, ServiceError
from outrider.schemas import GroupView
from support.simulated import Holding, Task, even, first, heavy_tailed, informative, run, task


def failing(task: Task, index: int, version: int) -> Played:
    return Played(1.0, None)


def test_advantages_of_a_group() -> None:
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


@pytest.mark.parametrize("surplus", ["carry", "cancel"])
@pytest.mark.parametrize("refill", ["asynchronous", "synchronous"])
def test_no_informative_prompt_is_lost_or_given_out_twice(refill: Refill, surplus: Surplus) -> None:
    """The filter alone decides which prompts are trained on, also if groups are slow or stopped."""

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


BOUNDS: list[dict[str, Any]] = [
    {},
    {"surplus": "cancel"},
    {"refill": "synchronous", "inflight": 24},
    {"max_age": 0},
    {"max_age": 1},
    {"max_age": 1, "inflight": 24},
    {"max_age": 2, "refill": "synchronous"},
    {"max_age": 4, "inflight": 40},
    {"max_age": 1, "overdue": "train"},
    {"max_age": 1, "target": 1, "groups_per_version": 8},
]
"""Settings with which the sampler must not prefer any prompts."""


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("slow", ["odd prompts", "right answers", "wrong answers", "late samples"])
def test_the_filter_alone_decides_which_groups_are_kept(bounds: dict[str, Any], slow: str) -> None:
    """A prompt that was drawn is kept if and only if its first group is informative, whether or not the group is slow.
    The version is raised after each batch."""

    def right(number: int, index: int) -> bool:
        return random.Random(f"{number}/{index}").random() < 0.3 + 0.4 * (number % 2)

    def play(task: Task, index: int, version: int) -> Played:
        number = task["number"]
        waits = {
            "odd prompts": number % 2 == 1,
            "right answers": right(number, index),
            "wrong answers": not right(number, index),
            "late samples": index == 3,
        }
        return Played(30.0 if waits[slow] else 1.0, float(right(number, index)))

    def first_group_is_informative(number: int) -> bool:
        return len({right(number, index) for index in range(4)}) == 2

    async def main() -> None:
        settings: dict[str, Any] = {"target": 8} | bounds
        groups: int = settings.get("groups_per_version", settings["target"])
        max_age = settings.get("max_age") if settings.get("overdue") != "train" else None
        service = SimulatedService(play, slots=24)
        delivered: list[int] = []
        async with DynamicSampler(service, task, n=4, **settings) as sampler:
            for version in range(1, 16):
                for _ in range(groups // settings["target"]):
                    batch = await sampler.batch()
                    assert batch is not None
                    assert batch.counts.stale == 0
                    delivered += batch.prompts
                    if max_age is not None:
                        assert min(sample.min_version for sample in batch.samples) >= batch.version - max_age
                service.version = version
                await sampler.set_version(version)
            state = sampler.state()
        assert len(delivered) == len(set(delivered)) == 15 * groups
        if settings.get("surplus") != "cancel":  # a stopped group is sampled again, here with the same draws
            assert len(service.submitted) <= state.next
        open_prompts = {prompt.number for prompt in state.pending}
        for number in range(state.next):
            if number not in open_prompts:
                assert (number in delivered) == first_group_is_informative(number)

    run(main)


def test_a_batch_waits_for_groups_that_would_be_too_old_and_says_how_long() -> None:
    async def main() -> None:
        def play(task: Task, index: int, version: int) -> Played:
            return Played(50.0 if task["number"] == 1 else 1.0, float(index % 2))

        service = SimulatedService(play, slots=64)
        async with DynamicSampler(service, task, n=2, target=4, max_age=1) as sampler:
            first = await sampler.batch()
            assert first is not None
            assert (first.waited, first.held) == (1.0, 0.0)
            service.version = 1
            await sampler.set_version(1)
            second = await sampler.batch()
            assert second is not None
            assert 1 in second.prompts
            assert (second.waited, second.held) == (49.0, 48.0)

    run(main)


def test_slow_groups_may_be_trained_late() -> None:
    async def main() -> None:
        def play(task: Task, index: int, version: int) -> Played:
            return Played(5.5 if task["number"] == 1 else 1.0, float(index % 2))

        service = SimulatedService(play, slots=64)
        late = {}
        async with DynamicSampler(service, task, n=2, target=4, max_age=1, overdue="train") as sampler:
            for version in range(1, 12):
                batch = await sampler.batch()
                assert batch is not None
                assert batch.held == 0.0
                if batch.counts.overdue:
                    late[batch.version] = batch.counts.overdue
                    assert 1 in batch.prompts
                service.version = version
                await sampler.set_version(version)
        assert late == {5: 1}

    run(main)


def test_a_trainer_that_does_not_raise_the_version_is_not_kept_waiting_for_ever() -> None:
    async def main() -> None:
        service = SimulatedService(heavy_tailed, slots=24)
        async with DynamicSampler(service, task, n=4, target=4, max_age=1) as sampler:
            for _ in range(20):
                assert await sampler.batch() is not None

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


def test_groups_are_sampled_again_if_the_version_jumps() -> None:
    async def main() -> None:
        service = SimulatedService(heavy_tailed, slots=24)
        async with DynamicSampler(service, task, n=4, target=4, max_age=1) as sampler:
            stale = 0
            for version in range(3, 90, 3):
                batch = await sampler.batch()
                assert batch is not None
                assert all(sample.min_version >= batch.version - 1 for sample in batch.samples)
                stale += batch.counts.stale
                service.version = version
                await sampler.set_version(version)
                await asyncio.sleep(5.0)
            assert stale > 0

    run(main)


def test_min_usable_and_expiry_reach_the_service() -> None:
    async def main() -> None:
        service = SimulatedService(even, slots=8)
        async with DynamicSampler(service, task, n=4, target=1, min_usable=3, expires_seconds=60.0) as sampler:
            await sampler.batch()
        assert {(group["min_usable"], group["expires_seconds"]) for group in service.submitted} == {(3, 60.0)}

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
                # A checkpoint stores the state as JSON.
                state = msgspec.json.decode(msgspec.json.encode(sampler.state()), type=SamplerState)
                if restart % 3 == 0:
                    await sampler.batch()  # the trainer dies while it trains on this batch; it is given out again
        assert sorted(given) == [number for number in range(prompts) if informative(number)]

    run(main)


def test_a_trainer_that_gives_up_waiting_loses_no_prompt() -> None:
    """The trainer is cancelled when its batch is full and surplus groups are being stopped."""

    async def main() -> None:
        service = Holding(heavy_tailed, slots=64, holds=["cancel"])
        async with DynamicSampler(service, first(30), n=4, target=3, surplus="cancel") as sampler:
            waiting = asyncio.create_task(sampler.batch())
            await service.asked.wait()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            service.go.set()
            given = [prompt async for batch in sampler for prompt in batch.prompts]
        assert sorted(given) == [number for number in range(30) if informative(number)]

    run(main)


def test_a_sampler_that_is_stopped_submits_nothing_more() -> None:
    """Each cancellation takes a while, and so does a submission that is under way. Groups end in the meantime."""

    class Slow(SimulatedService):
        async def submit(self, group: Task) -> GroupView:
            await asyncio.sleep(0.3)
            return await super().submit(group)

        async def cancel(self, group_id: str) -> GroupView:
            await asyncio.sleep(0.1)
            return await super().cancel(group_id)

    async def main() -> None:
        service = Slow(heavy_tailed, slots=64)
        async with DynamicSampler(service, first(40), n=4, target=2, inflight=8) as sampler:
            batch = await sampler.batch()
            assert batch is not None
            await sampler.stop()
            submitted = len(service.submitted)
            await asyncio.sleep(1)
            assert len(service.submitted) == submitted
            assert all(group.cursor is not None for group in service._groups.values())
            given = [*batch.prompts, *[prompt async for later in sampler for prompt in later.prompts]]
        assert sorted(given) == [number for number in range(40) if informative(number)]

    run(main)


def test_a_sampler_that_is_closed_while_it_submits_keeps_the_prompt() -> None:
    async def main() -> None:
        service = Holding(even, slots=64, holds=["submit"])
        async with DynamicSampler(service, task, n=4, target=2) as sampler:
            waiting = asyncio.create_task(sampler.batch())
            await service.asked.wait()
            waiting.cancel()
        assert sampler.state().pending == (PendingPrompt(0, version=0),)
        service.go.set()
        async with DynamicSampler(service, first(6), n=4, target=2, state=sampler.state()) as sampler:
            given = [prompt async for batch in sampler for prompt in batch.prompts]
        assert sorted(given) == [0, 2, 3, 5]
        assert len(service.submitted) == 6

    run(main)


def test_groups_that_somebody_else_cancels_are_submitted_again() -> None:
    """An update of the policy cancels groups that are too old in the same way. No prompt is lost, and no group counts
    as failed."""

    async def main() -> None:
        service = SimulatedService(lambda task, index, version: Played(1.0, float(index % 2)), slots=1000)
        async with DynamicSampler(service, first(40), n=4, target=20, inflight=40) as sampler:
            waiting = asyncio.create_task(sampler.batch())
            await asyncio.sleep(0.5)
            for number in range(30):
                await service.cancel(f"g-{number}")
            batch = await waiting
            assert batch is not None
            assert (batch.counts.stopped, batch.counts.retried) == (30, 0)
            given = [*batch.prompts, *[prompt async for later in sampler for prompt in later.prompts]]
        assert sorted(given) == list(range(40))

    run(main)


def test_a_group_that_was_done_before_it_was_stopped_is_kept_over_a_restart() -> None:
    async def main() -> None:
        service = Holding(lambda task, index, version: Played(1.0, float(index % 2)), slots=64, holds=["group g-1"])
        async with DynamicSampler(service, task, n=2, target=1, inflight=2, surplus="cancel") as sampler:
            assert await sampler.batch() is not None
            assert sampler.state().pending == (PendingPrompt(1, attempt=1),)
            service.go.set()
            await asyncio.sleep(0.5)
            assert sampler.state().pending == (PendingPrompt(1, version=0),)

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
            assert batch.counts.retried > 0
            assert set(batch.counts.reasons) == {"engine_unavailable"}
            assert all(prompt % 4 for prompt in batch.prompts)
        async with DynamicSampler(SimulatedService(failing, slots=64), task, n=4, target=6) as sampler:
            with pytest.raises(ServiceError, match=f"{FAILED_IN_A_ROW} prompts in a row.*simulated failure"):
                await sampler.batch()

    run(main)


class Flaky:
    """The sessions with the indices `sessions` fail, in the first `failures` groups of every third prompt."""

    def __init__(self, failures: int, *, sessions: Collection[int] = range(4)) -> None:
        self.failures = failures
        self.sessions = sessions
        self.begun: Counter[int] = Counter()

    def __call__(self, task: Task, index: int, version: int) -> Played:
        number = task["number"]
        self.begun[number] += index == 0
        fails = number % 3 == 0 and self.begun[number] <= self.failures and index in self.sessions
        return Played(1.0, None if fails else float(index % 2))


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_prompts_that_fail_more_often_are_trained_on_as_often(failures: int) -> None:
    """Above the bound of failures, a prompt is given up. All retries and given-up prompts are counted."""

    async def main() -> None:
        play = Flaky(failures)
        counts: Counter[str] = Counter()
        given: list[int] = []
        async with DynamicSampler(SimulatedService(play, slots=64), first(30), n=4, target=5) as sampler:
            async for batch in sampler:
                given += batch.prompts
                counts.update(batch.counts.flat())
            counts.update(sampler._counts.flat())  # the groups after the last batch
        flaky = [number for number in range(30) if number % 3 == 0]
        kept = [number for number in range(30) if failures <= 2 or number % 3]
        assert sorted(given) == kept
        assert counts["retried"] == min(failures, 2) * len(flaky)
        assert counts["given_up"] == 30 - len(kept)
        assert counts["reason_engine_unavailable"] == counts["retried"] + counts["given_up"]
        assert counts["submitted"] == counts["informative"] + counts["retried"] + counts["given_up"]

    run(main)


def test_a_few_broken_tasks_in_a_row_do_not_end_the_training() -> None:
    """Each broken task fails in all its tries. Only FAILED_IN_A_ROW broken tasks in a row end the training."""

    async def main() -> None:
        broken = FAILED_IN_A_ROW - 1
        service = SimulatedService(
            lambda task, index, version: Played(1.0, None if task["number"] < broken else float(index % 2)), slots=64
        )
        async with DynamicSampler(service, first(broken + 6), n=4, target=3, inflight=4) as sampler:
            given = [prompt async for batch in sampler for prompt in batch.prompts]
        assert sorted(given) == list(range(broken, broken + 6))
        assert len(service.submitted) == 3 * broken + 6

    run(main)


def test_a_trainer_may_give_failed_prompts_up_at_once_or_want_all_graded() -> None:
    async def main() -> None:
        async with DynamicSampler(SimulatedService(Flaky(1), slots=64), first(9), n=4, target=3, retries=0) as sampler:
            given = [prompt async for batch in sampler for prompt in batch.prompts]
        assert sorted(given) == [1, 2, 4, 5, 7, 8]

        def complete(group: GroupView) -> Choice:
            whole = len(rewards_of(group)) == group.n
            return np.bool_(rewards_differ(group)) if whole else "again"  # type: ignore[return-value]  # users do this

        service = SimulatedService(Flaky(1, sessions={3}), slots=64)
        async with DynamicSampler(service, first(3), n=4, target=3, informative=complete) as sampler:
            batch = await sampler.batch()
        assert batch is not None
        assert sorted(batch.prompts) == [0, 1, 2]
        assert [len(rewards_of(group)) for group in batch.groups] == [4, 4, 4]
        assert (batch.counts.retried, batch.counts.reasons) == (1, {"engine_unavailable": 1})

    run(main)


@pytest.mark.parametrize("moment", ["before it has failed", "between failure and retry", "while it runs again"])
def test_a_checkpoint_around_a_failure_loses_nothing_and_counts_it_once(moment: str) -> None:
    async def main() -> None:
        service = Holding(Flaky(2), slots=64, holds=[])
        async with DynamicSampler(service, first(1), n=4, target=1) as sampler:
            waiting = asyncio.create_task(sampler.batch())
            await asyncio.sleep(0.5)
            if moment == "between failure and retry":
                service.holds = frozenset({"submit"})
                await service.asked.wait()
            elif moment == "while it runs again":
                await asyncio.sleep(1)
            failures = 0 if moment == "before it has failed" else 1
            state = msgspec.json.decode(msgspec.json.encode(sampler.state()), type=SamplerState)
            assert state.pending == (PendingPrompt(0, failures, failures, version=0),)
            waiting.cancel()
        service.go.set()
        await asyncio.sleep(10)  # running groups end in the meantime
        async with DynamicSampler(service, first(1), n=4, target=1, state=state) as sampler:
            batches = [batch async for batch in sampler]
        assert [batch.prompts for batch in batches] == [(0,)]
        assert len(service.submitted) == 3

    run(main)


def test_a_checkpoint_of_an_earlier_version_is_read() -> None:
    state = b'{"run": "r", "next": 3, "pending": [[1, 2], [2, 0]], "version": 4, "batches": 5}'
    read = msgspec.json.decode(state, type=SamplerState)
    assert read.pending == (PendingPrompt(1, 2, 0), PendingPrompt(2))


def test_tasks_that_teach_nothing_are_an_error_and_no_endless_wait() -> None:
    async def main() -> None:
        service = SimulatedService(lambda task, index, version: Played(1.0, 1.0), slots=64)
        async with DynamicSampler(service, task, n=4, target=6) as sampler:
            with pytest.raises(ServiceError, match="0 of them are informative; the mean of their rewards is 1"):
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
    # A group of several samples is kept only if two of them were graded.
    for wrong in ({"n": 0}, {"target": 0}, {"inflight": -1}, {"groups_per_version": -1}, {"min_usable": 1}):
        with pytest.raises(InvalidField):
            DynamicSampler(service, task, **{"n": 4, "target": 6} | wrong)  # type: ignore[arg-type]
    DynamicSampler(service, task, n=1, target=6, min_usable=1)
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
        total: Counter[str] = Counter()
        for batch in batches:
            total.update(batch.counts.flat())
        settled = sum(value for name, value in total.items() if name not in ("submitted", "overdue"))
        assert total["informative"] >= 66
        assert 0 <= total["submitted"] - settled <= running

    run(main)
