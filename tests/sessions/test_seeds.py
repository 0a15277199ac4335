"""Every call of every sample has its own seed, and the same task gets the same seeds again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outrider.dialects.base import RequestedSampling
from outrider.sessions.calls.request_settings import seed_for
from outrider.spec import SamplingSpec

from .world import a_world

USER = {"role": "user", "content": "hello there"}
SEEDED = SamplingSpec(seed=(1 << 63) - 1)


async def seeds(folder: Path, *asked: int | None, sample_index: int = 0, sampling: SamplingSpec = SEEDED) -> list[Any]:
    """Return the seeds of a session's calls as the engine received them, one per entry of `asked`. Checks that the
    turns have the same seeds."""
    async with a_world(folder, ["hi<|im_end|>"], sampling=sampling, sample_index=sample_index) as world:
        for seed in asked:
            await world.ask(USER, **({} if seed is None else {"seed": seed}))
        given = [request.sampling.seed for request in world.engine.requests]
        assert [turn.sampling["seed"] for turn in world.turns] == given
        return given


async def test_each_call_of_each_sample_has_its_own(tmp_path: Path) -> None:
    of_samples = [await seeds(tmp_path, None, None, None, sample_index=index) for index in range(3)]
    assert len({seed for given in of_samples for seed in given}) == 9
    assert await seeds(tmp_path, None, None, None, sample_index=1) == of_samples[1]
    assert await seeds(tmp_path, None, sampling=SamplingSpec(seed=1)) != of_samples[0][:1]


async def test_calls_side_by_side_have_their_own(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["hi<|im_end|>"], sampling=SEEDED) as world:
        await asyncio.gather(*(world.ask(USER) for _ in range(16)))
        assert len({request.sampling.seed for request in world.engine.requests}) == 16


async def test_the_tasks_seed_wins_and_without_one_the_clients_is_each_samples_own(tmp_path: Path) -> None:
    assert await seeds(tmp_path, 7, 7) == await seeds(tmp_path, None, None)
    silent = SamplingSpec()
    one, two, negative = await seeds(tmp_path, 7, 7, -(1 << 63), sampling=silent)
    assert one == two != negative
    assert one not in await seeds(tmp_path, 7, sampling=silent, sample_index=1)
    assert await seeds(tmp_path, None, sampling=silent) == [None]


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 4096), st.integers(1, 10_000))
def test_every_engine_takes_it(seed: int, sample: int, call: int) -> None:
    by_client = seed_for(SamplingSpec(), RequestedSampling(seed=seed), sample=sample, call=call)
    by_task = seed_for(SamplingSpec(seed=seed % (1 << 63)), RequestedSampling(), sample=sample, call=call)
    for made in (by_client, by_task):
        assert made is not None
        assert 0 <= made < 1 << 31


def test_it_stays_what_it_is() -> None:
    """A client that submits the same task to a later version gets the same seeds."""
    one = seed_for(SamplingSpec(seed=0), RequestedSampling(), sample=0, call=1)
    other = seed_for(SamplingSpec(seed=42), RequestedSampling(), sample=3, call=2)
    assert [one, other] == [99209766, 358580291]
