"""The dynamic sampler with a real service over HTTP. tests/test_sampling.py tests the same with simulated rollouts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider.client.client import AsyncClient
from outrider.client.sampling import DynamicSampler, SamplerState, rewards_of
from outrider.lifecycle import GroupState, StopReason
from support.coin import coin_task
from support.service import running_service, say

N = 12
"""Samples per prompt. For one prompt in 2,048, all coins fall on the same side."""
SAYS = [say("heads or tails")] * 1000


def teaches(number: int) -> bool:
    return number % 2 == 0


def task(number: int) -> dict[str, Any]:
    return coin_task(number, teaches=teaches(number))


@pytest.mark.deep
async def test_batches_of_informative_groups_with_their_tokens(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=SAYS) as (_, url), AsyncClient(url) as client:
        before = await client.submit({"task": task(0), "n": 1})
        await client.wait([before.id])
        async with DynamicSampler(client, task, n=N, target=3) as sampler:
            for _ in range(2):
                batch = await sampler.batch()
                assert batch is not None
                assert len(batch.groups) == 3
                assert len(set(batch.prompts)) == 3
                assert before.id not in {group.id for group in batch.groups}
                assert all(teaches(number) for number in batch.prompts)
                assert len(batch.samples) == 3 * N
                assert all(sum(sample.loss_mask) and sample.reward is not None for sample in batch.samples)


@pytest.mark.deep
async def test_what_is_not_needed_is_stopped(tmp_path: Path) -> None:
    def slow(number: int) -> dict[str, Any]:
        return coin_task(number, teaches=True, seconds=0.0 if number < 2 else 60.0)

    async with (
        running_service(tmp_path=tmp_path, replies=SAYS) as (_, url),
        AsyncClient(url) as client,
        DynamicSampler(client, slow, n=N, target=2, inflight=4, surplus="cancel") as sampler,
    ):
        batch = await sampler.batch()
        assert batch is not None
        assert set(batch.prompts) == {0, 1}
        stopped = await client.wait([group.id for group in await client.groups() if group.cancelled])
        assert len(stopped) >= 2
        for group in stopped:
            reasons = {session.result.stop_reason for session in group.sessions if session.result}
            assert reasons == {StopReason.CANCELLED}
        await sampler.stop()


@pytest.mark.deep
async def test_a_restart_of_trainer_and_service_loses_nothing(tmp_path: Path) -> None:
    """The trainer ends with a batch that was not trained on, and the service with groups in flight."""
    prompts = 12

    def source(number: int) -> dict[str, Any]:
        if number >= prompts:
            raise IndexError(number)
        return coin_task(number, teaches=teaches(number), seconds=0.01 * number)

    given: list[int] = []
    state: SamplerState | None = None
    for life in range(3):
        async with (
            running_service(tmp_path=tmp_path, replies=SAYS) as (_, url),
            AsyncClient(url) as client,
            DynamicSampler(client, source, n=N, target=2, inflight=3, state=state) as sampler,
        ):
            while life < 2 and len(given) < 2 * (life + 1):
                batch = await sampler.batch()
                assert batch is not None
                given += batch.prompts
            state = sampler.state()
            async for batch in sampler:
                if life < 2:
                    break  # not trained on
                given += batch.prompts
    assert sorted(given) == [number for number in range(prompts) if teaches(number)]


@pytest.mark.deep
async def test_the_sampler_waits_for_a_service_that_is_restarted(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=SAYS) as (_, url):
        port = int(url.rsplit(":", 1)[1])
        client = AsyncClient(url)
        await client.__aenter__()
        sampler = DynamicSampler(client, task, n=N, target=3, inflight=3)
        await sampler.__aenter__()
        waiting = asyncio.create_task(sampler.batch())
        await asyncio.sleep(0.05)
    try:
        async with running_service(tmp_path=tmp_path, replies=SAYS, port=port):
            async with asyncio.timeout(60):
                batch = await waiting
            assert batch is not None
            assert len({group.id for group in batch.groups}) == 3
            assert all(group.state is GroupState.DONE and len(rewards_of(group)) == N for group in batch.groups)
            await sampler.__aexit__(None, None, None)
    finally:
        await client.__aexit__(None, None, None)


@pytest.mark.parametrize("number", [0, 1])
async def test_the_cursor_of_the_newest_result(tmp_path: Path, number: int) -> None:
    async with running_service(tmp_path=tmp_path, replies=SAYS) as (_, url), AsyncClient(url) as client:
        for _ in range(number):
            await client.wait([(await client.submit({"task": task(0)})).id])
        assert (await client.status()).cursor == number
