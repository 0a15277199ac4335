"""The sampler under misuse: calls that overlap, stop, fail or come too late, versions raised at any moment, and a
service that loses replies, groups or all of its data. Every wait ends, and no prompt is lost or repeated."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import pytest
from bench.simulated_service import Played, SimulatedService

from outrider.client.client import patiently
from outrider.client.sampling import Batch, DynamicSampler, PendingPrompt, SamplerState
from outrider.errors import InvalidField, NotFound, ServiceError
from outrider.schemas import GroupView, ResultsPage
from support.simulated import Holding, Task, even, first, heavy_tailed, informative, run, task

SETTINGS: list[dict[str, Any]] = [
    {},
    {"surplus": "cancel"},
    {"refill": "synchronous"},
    {"refill": "static"},
    {"max_age": 0},
    {"max_age": 1},
]


def differing(task: Task, index: int, version: int) -> Played:
    """Every session takes a second, and every prompt is informative."""
    return Played(1.0, float(index % 2))


def slow(task: Task, index: int, version: int) -> Played:
    """Every prompt is informative. A session takes 1 to 60 s, with a heavy-tailed distribution."""
    draw = random.Random(f"{task['number']}/{index}")
    return Played(min(draw.paretovariate(0.7), 60.0), float(index % 2))


class Slow(SimulatedService):
    """A submission takes 0.4 s."""

    def __init__(self, play: Callable[[Task, int, int], Played]) -> None:
        super().__init__(play, slots=1000)

    async def submit(self, group: Task) -> GroupView:
        await asyncio.sleep(0.4)
        return await super().submit(group)


def failing(task: Task, index: int, version: int) -> Played:
    return Played(1.0, None)


def kept(state: SamplerState) -> SamplerState:
    """Return the state as it is after it was written to a checkpoint and read."""
    return msgspec.json.decode(msgspec.json.encode(state), type=SamplerState)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_calls_that_overlap_get_one_batch_after_the_other(settings: dict[str, Any]) -> None:
    async def main() -> None:
        service = SimulatedService(heavy_tailed, slots=24)
        async with DynamicSampler(service, first(60), n=4, target=4, **settings) as sampler:
            batches = [batch for batch in await asyncio.gather(*(sampler.batch() for _ in range(4))) if batch]
            assert [batch.number for batch in batches] == [0, 1, 2, 3]
            assert len({prompt for batch in batches for prompt in batch.prompts}) == 16

    run(main)


def test_a_batch_of_a_sampler_that_is_stopped_or_closed_ends() -> None:
    async def main() -> None:
        sampler = DynamicSampler(SimulatedService(heavy_tailed, slots=24), first(30), n=4, target=8)
        with pytest.raises(ServiceError, match="not open"):
            await sampler.batch()
        async with sampler:
            waiting = [asyncio.create_task(sampler.batch()) for _ in range(2)]
            await asyncio.sleep(0.5)
            await sampler.stop()
            for each in waiting:
                with pytest.raises(ServiceError, match="was stopped"):
                    await each
            assert await sampler.batch() is not None  # the sampler goes on
            late = asyncio.create_task(sampler.batch())
            await asyncio.sleep(0)
        for closed in (late, sampler.batch()):
            with pytest.raises(ServiceError, match="was closed"):
                await closed

    run(main)


def test_a_closed_sampler_gives_no_batch_even_if_one_is_full() -> None:
    async def main() -> None:
        sampler = DynamicSampler(SimulatedService(even, slots=24), first(30), n=4, target=2)
        async with sampler:
            assert await sampler.batch() is not None
            await asyncio.sleep(1000.0)  # virtual time, in which the groups of the next batch end
            full = sampler.state()
        with pytest.raises(ServiceError, match="was closed"):
            await sampler.batch()
        assert sampler.state() == full

    run(main)


def test_tasks_that_are_no_sequence_and_no_function_of_a_number_are_refused() -> None:
    service = SimulatedService(even, slots=8)
    for source in (iter([task(0)]), {"instruction": "one task"}, 3):
        with pytest.raises(InvalidField, match="the tasks are given as"):
            DynamicSampler(service, source, n=2, target=1)  # type: ignore[arg-type]

    async def main() -> None:
        tasks = iter([task(0), task(2)])
        async with DynamicSampler(service, lambda number: next(tasks), n=2, target=1) as sampler:
            assert await sampler.batch() is not None
            assert await sampler.batch() is not None
            with pytest.raises(InvalidField, match="StopIteration for the prompt 2"):
                await sampler.batch()

    run(main)


@pytest.mark.parametrize(
    "wrong",
    [
        {"inflight": 0},
        {"groups_per_version": 0},
        {"max_age": -1},
        {"retries": -1},
        {"refill": "sync"},
        {"surplus": "Cancel"},
        {"overdue": "stop"},
    ],
    ids=str,
)
def test_settings_without_a_meaning_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=next(iter(wrong))):
        DynamicSampler(SimulatedService(even, slots=1), task, n=2, target=1, **wrong)


@pytest.mark.parametrize(("prompts", "retries"), [(5, 0), (5, 2), (16, 0)])
def test_a_source_whose_prompts_all_failed_is_an_error_and_no_end(prompts: int, retries: int) -> None:
    async def main() -> None:
        service = SimulatedService(failing, slots=64)
        async with DynamicSampler(service, first(prompts), n=4, target=8, inflight=32, retries=retries) as sampler:
            with pytest.raises(ServiceError, match=f"{prompts} prompts in a row have failed.*simulated failure"):
                await sampler.batch()
            assert sampler.counts.given_up == prompts

    run(main)


@pytest.mark.parametrize("play", [failing, lambda task, index, version: Played(1.0, 1.0)], ids=["fails", "useless"])
def test_nothing_is_drawn_after_an_error(play: Any) -> None:
    async def main() -> None:
        service = SimulatedService(play, slots=64)
        async with DynamicSampler(service, task, n=4, target=2, retries=0) as sampler:
            with pytest.raises(ServiceError):
                await sampler.batch()
            submitted = len(service.submitted)
            await asyncio.sleep(1000)
            assert len(service.submitted) == submitted

    run(main)


def test_tokens_that_are_always_too_old_are_named() -> None:
    async def main() -> None:
        service = SimulatedService(differing, slots=64)  # its version stays 0
        async with DynamicSampler(service, task, n=4, target=2, max_age=0) as sampler:
            await sampler.set_version(3)
            with pytest.raises(ServiceError, match=r"0 of them are informative.* were too old") as caught:
                await sampler.batch()
            assert "older version than set_version" in str(caught.value.hint)

    run(main)


def test_a_group_that_is_gone_is_noticed_while_results_of_others_arrive() -> None:
    class Losing(SimulatedService):
        gone = ""

        async def group(self, group_id: str, *, wait: float = 0.0, samples: bool = False) -> GroupView:
            if group_id == self.gone:
                raise NotFound(f"no group {group_id}")
            return await super().group(group_id, wait=wait, samples=samples)

    async def main() -> None:
        service = Losing(
            lambda task, index, version: Played(1e6 if task["number"] == 0 else 1.0, float(index % 2)), slots=64
        )
        async with (
            DynamicSampler(service, task, n=2, target=2, max_age=1) as sampler,
            DynamicSampler(service, lambda number: task(number + 1), n=2, target=2) as other,
        ):
            waiting = asyncio.create_task(_train(sampler, service, 3))
            await asyncio.sleep(0.5)
            service.gone = "g-0"
            for _ in range(100):
                assert await other.batch() is not None
                await asyncio.sleep(1)
            assert waiting.done()
            with pytest.raises(ServiceError, match="does not know group g-0"):
                await waiting

    run(main)


async def _train(sampler: DynamicSampler, service: SimulatedService, batches: int) -> list[Batch]:
    """Take batches, and raise the version by one after each."""
    taken = []
    for _ in range(batches):
        batch = await sampler.batch()
        assert batch is not None
        taken.append(batch)
        service.version += 1
        await sampler.set_version(service.version)
    return taken


def test_a_service_that_begins_anew_while_nothing_runs_is_followed_from_its_beginning() -> None:
    class Renewed(SimulatedService):
        """`renew` loses all groups, and counts results from 1 again."""

        def renew(self) -> None:
            self._by_key.clear()
            self._done.clear()

        async def results(
            self, *, after: int = 0, wait: float = 0.0, limit: int = 100, samples: bool = False
        ) -> ResultsPage:
            page = await super().results(after=after, wait=wait, limit=limit, samples=samples)
            return page if page.groups else ResultsPage(groups=(), cursor=after)

    async def main() -> None:
        service = Renewed(differing, slots=64)
        async with DynamicSampler(service, first(400), n=2, target=8, max_age=0, surplus="cancel") as sampler:
            before = await _train(sampler, service, 10)
            await asyncio.sleep(100)
            service.renew()
            after = await _train(sampler, service, 3)
            given = [prompt for batch in before + after for prompt in batch.prompts]
            assert sorted(given) == list(range(104))

    run(main)


def test_nothing_runs_on_after_a_batch_whose_last_submissions_were_slow() -> None:
    async def main() -> None:
        service = Slow(differing)
        async with DynamicSampler(service, first(40), n=2, target=4, inflight=16, surplus="cancel") as sampler:
            batch = await sampler.batch()
            assert batch is not None
            submitted = len(service.submitted)
            await asyncio.sleep(0.5)
            assert len(service.submitted) <= submitted + 1  # one submission was under way
            assert all(group.cursor is not None for group in service._groups.values())
            given = [*batch.prompts, *[prompt async for later in sampler for prompt in later.prompts]]
        assert sorted(given) == list(range(40))

    run(main)


def test_a_checkpoint_while_surplus_groups_are_stopped_has_the_groups_of_the_batch() -> None:
    async def main() -> None:
        service = Holding(heavy_tailed, slots=64, holds=["cancel"])
        async with DynamicSampler(service, first(30), n=4, target=3, surplus="cancel") as sampler:
            waiting = asyncio.create_task(sampler.batch())
            await service.asked.wait()
            state = kept(sampler.state())
            waiting.cancel()  # the process is killed
        service.go.set()
        async with DynamicSampler(service, first(30), n=4, target=3, surplus="cancel", state=state) as sampler:
            given = [prompt async for batch in sampler for prompt in batch.prompts]
        assert sorted(given) == [number for number in range(30) if informative(number)]

    run(main)


def test_a_group_whose_cancellation_was_interrupted_is_stopped_by_the_next() -> None:
    async def main() -> None:
        service = Holding(
            lambda task, index, version: Played(1.0 if task["number"] == 0 else 500.0, float(index % 2)),
            slots=64,
            holds=["cancel"],
        )
        async with DynamicSampler(service, task, n=2, target=1, inflight=2, surplus="cancel") as sampler:
            waiting = asyncio.create_task(sampler.batch())
            await service.asked.wait()
            waiting.cancel()
            await asyncio.sleep(1)
            assert sampler.state().pending[1] == PendingPrompt(1, version=0)
            service.go.set()
            await sampler.stop()
            assert all(group.cursor is not None for group in service._groups.values())

    run(main)


def test_a_batch_that_is_held_for_long_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        service = SimulatedService(
            lambda task, index, version: Played(5000.0 if task["number"] == 1 else 1.0, float(index % 2)), slots=64
        )
        async with DynamicSampler(service, task, n=2, target=4, max_age=1) as sampler:
            assert [batch.held for batch in await _train(sampler, service, 2)] == [0.0, 4998.0]

    with caplog.at_level(logging.WARNING, "outrider.client.sampling"):
        run(main)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 4  # after 600, 1200, 2400 and 4800 seconds
    assert all("held" in message and "outrider show g-1" in message for message in messages)


ROOMY: list[dict[str, Any]] = [
    {"target": 1, "groups_per_version": 8, "max_age": 1, "inflight": 32},
    {"target": 3, "groups_per_version": 12, "max_age": 2, "inflight": 32},
    {"target": 4, "max_age": 2, "inflight": 6},
    {"target": 8, "groups_per_version": 4, "max_age": 3, "inflight": 32},
]
"""Settings, among them several batches per version and several versions per batch."""


@pytest.mark.parametrize("resume_every", [None, 1, 3])
@pytest.mark.parametrize("settings", ROOMY, ids=str)
def test_no_group_grows_too_old_if_the_version_rises_as_announced(
    settings: dict[str, Any], resume_every: int | None
) -> None:
    """The sampler may also be resumed in the middle of a version. All groups of the old versions fit into the
    batches."""

    async def main() -> None:
        service = SimulatedService(slow, slots=64)
        per_version = settings.get("groups_per_version", settings["target"])
        state: SamplerState | None = None
        given: list[int] = []
        while service.version < 20:
            async with DynamicSampler(service, task, n=4, state=state, **settings) as sampler:
                for _ in range(resume_every or 200):  # 200 batches are at least 20 versions with all settings
                    batch = await sampler.batch()
                    assert batch is not None
                    given += batch.prompts
                    service.version = len(given) // per_version
                    await sampler.set_version(service.version)
                    assert batch.counts.stale == sampler.counts.stale == 0
                state = kept(sampler.state())
        assert len(given) == len(set(given))

    run(main)


def test_a_resumed_sampler_begins_with_the_oldest_groups() -> None:
    """Otherwise newer groups would fill the batch before the oldest group is awaited."""

    async def main() -> None:
        service = Slow(lambda task, index, version: Played(200.0 if task["number"] == 0 else 1.0, float(index % 2)))
        settings: dict[str, Any] = {"n": 2, "target": 4, "max_age": 1, "inflight": 2}
        async with DynamicSampler(service, task, **settings) as sampler:
            await _train(sampler, service, 1)
            await asyncio.sleep(50)
            state = kept(sampler.state())
        assert state.pending[-1] == PendingPrompt(0, version=0)
        async with DynamicSampler(service, task, state=state, **settings) as sampler:
            [batch] = await _train(sampler, service, 1)
            assert 0 in batch.prompts
            assert sampler.counts.stale == 0

    run(main)


def test_a_group_whose_submission_took_too_long_is_not_awaited() -> None:
    async def main() -> None:
        begun = count()
        service = Holding(
            lambda task, index, version: Played(500.0 if next(begun) < 2 else 1.0, float(index % 2)),
            slots=64,
            holds=["submit"],
        )
        async with DynamicSampler(service, task, n=2, target=2, max_age=1) as sampler:
            waiting = asyncio.create_task(sampler.batch())
            await service.asked.wait()
            service.version = 5
            await sampler.set_version(5)
            service.go.set()
            batch = await waiting
            assert batch is not None
            assert (batch.waited, batch.counts.stale) == (1.0, 1)

    run(main)


def test_a_batch_is_filled_again_if_its_groups_grow_too_old_while_others_are_stopped() -> None:
    async def main() -> None:
        service = Holding(heavy_tailed, slots=64, holds=["cancel"])
        settings: dict[str, Any] = {"target": 4, "max_age": 0, "groups_per_version": 16, "surplus": "cancel"}
        async with DynamicSampler(service, task, n=4, inflight=16, **settings) as sampler:
            waiting = asyncio.create_task(sampler.batch())
            await service.asked.wait()
            service.version = 1
            raising = asyncio.create_task(sampler.set_version(1))
            await asyncio.sleep(0)
            service.go.set()
            await raising
            batch = await waiting
            assert batch is not None
            assert len(batch.groups) == 4
            assert {sample.min_version for sample in batch.samples} == {1}

    run(main)


def test_a_version_before_the_first_batch_and_while_a_batch_is_awaited() -> None:
    """The trainer requests a batch before it has trained on the last one."""

    async def main() -> None:
        service = SimulatedService(heavy_tailed, slots=24)
        service.version = 40
        draw = random.Random(0)
        given: list[int] = []
        async with DynamicSampler(service, task, n=4, target=8, max_age=1, inflight=24) as sampler:
            await sampler.set_version(40)
            waiting = asyncio.create_task(sampler.batch())
            for version in range(41, 70):
                batch = await waiting
                assert batch is not None
                assert batch.counts.stale == 0
                assert min(sample.min_version for sample in batch.samples) >= batch.version - 1
                given += batch.prompts
                waiting = asyncio.create_task(sampler.batch())
                await asyncio.sleep(30 * draw.random())
                service.version = version
                await sampler.set_version(version)
            waiting.cancel()
            state = sampler.state()
        drawn = set(range(state.next)) - {prompt.number for prompt in state.pending}
        assert sorted(given) == [number for number in sorted(drawn) if informative(number)]

    run(main)


class Unreliable(SimulatedService):
    """Replies take a while. A tenth of the calls cannot reach the service, and a tenth of the replies are lost."""

    def __init__(self, draw: random.Random, *, slots: int) -> None:
        super().__init__(heavy_tailed, slots=slots)
        self._draw = draw

    async def _way(self) -> None:
        await asyncio.sleep(self._draw.choice([0.0, 0.1, 1.0]) * self._draw.random())
        if self._draw.random() < 0.1:
            raise ServiceError("the connection is lost")

    async def submit(self, group: Task) -> GroupView:
        await self._way()
        made = await super().submit(group)
        await self._way()
        return made

    async def group(self, group_id: str, *, wait: float = 0.0, samples: bool = False) -> GroupView:
        await self._way()
        return await super().group(group_id, wait=wait, samples=samples)

    async def cancel(self, group_id: str) -> GroupView:
        await self._way()
        cancelled = await super().cancel(group_id)
        await self._way()
        return cancelled

    async def results(
        self, *, after: int = 0, wait: float = 0.0, limit: int = 100, samples: bool = False
    ) -> ResultsPage:
        await self._way()
        return await super().results(after=after, wait=wait, limit=limit, samples=samples)

    async def cancel_any(self) -> None:
        """Cancel a running group, as another user may do."""
        running = [group.id for group in self._groups.values() if group.cursor is None]
        if running:
            await patiently(lambda: self.cancel(self._draw.choice(running)))


class Trainer:
    """A trainer that is killed again and again. At random moments it cancels a call, stops the sampler, raises the
    version by 1 to 3, and stores a checkpoint. `delivered` has the prompts on which it has trained."""

    def __init__(self, seed: int, prompts: int) -> None:
        self.draw = random.Random(seed)
        self.service = Unreliable(self.draw, slots=self.draw.choice([8, 24, 64]))
        self.settings: dict[str, Any] = {
            "target": self.draw.choice([1, 3, 5]),
            "surplus": self.draw.choice(["carry", "cancel"]),
            "refill": self.draw.choice(["asynchronous", "asynchronous", "synchronous"]),
            "max_age": self.draw.choice([None, 0, 1, 3]),
            "overdue": self.draw.choice(["wait", "train"]),
            "inflight": self.draw.choice([None, 3, 12, 40]),
            "groups_per_version": self.draw.choice([None, 1, 4, 8]),
        }
        self.prompts = prompts
        self.delivered: list[int] = []
        self._checkpoint: tuple[SamplerState | None, tuple[int, ...]] = (None, ())
        self._patient = False

    async def train(self) -> None:
        for life in range(200):
            self._patient = life >= 100
            state, delivered = self._checkpoint
            self.delivered = list(delivered)
            async with DynamicSampler(self.service, first(self.prompts), n=4, state=state, **self.settings) as sampler:
                await sampler.set_version(max(self.service.version, sampler.version))
                for _ in range(self.draw.choice([1, 3, 10])):
                    if await self._step(sampler):
                        return
        raise AssertionError(f"no end with {self.settings}")

    async def _step(self, sampler: DynamicSampler) -> bool:
        """Take a batch, with disturbances. Returns True after the last batch."""
        waiting = asyncio.create_task(sampler.batch())
        if self._happens(0.2):
            await self._raise_version(sampler)
        if self._happens(0.1):
            await self.service.cancel_any()
        if self._happens(0.3) and not waiting.done():
            self._save(sampler)
        if self._happens(0.1):
            await self._while()
            await sampler.stop()
        if self._happens(0.2):
            await self._while()
            waiting.cancel()
        [batch] = await asyncio.gather(waiting, return_exceptions=True)
        if isinstance(batch, BaseException):
            assert isinstance(batch, asyncio.CancelledError) or "was stopped" in str(batch)
            return False
        if batch is None:
            return True
        self.delivered += batch.prompts
        if self._happens(0.7):
            await self._raise_version(sampler)
        if self._happens(0.7):
            self._save(sampler)
        return False

    def _happens(self, share: float) -> bool:
        return not self._patient and self.draw.random() < share

    async def _while(self) -> None:
        await asyncio.sleep(3 * self.draw.random())

    async def _raise_version(self, sampler: DynamicSampler) -> None:
        await self._while()
        self.service.version += self.draw.choice([1, 1, 2, 3])
        await sampler.set_version(self.service.version)

    def _save(self, sampler: DynamicSampler) -> None:
        self._checkpoint = (kept(sampler.state()), tuple(self.delivered))


@pytest.mark.parametrize("seed", range(30))
def test_every_prompt_is_trained_on_once_whatever_happens(seed: int) -> None:
    async def main() -> None:
        trainer = Trainer(seed, prompts=60)
        await trainer.train()
        wanted = Counter(number for number in range(60) if informative(number))
        assert Counter(trainer.delivered) == wanted, trainer.settings

    run(main)
