"""A stand-in for Tinker's sampling client, and a service whose groups the cookbook runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import tinker
from tinker_cookbook.rl.rollouts import do_group_rollout_and_filter_constant_reward
from tinker_cookbook.rl.types import TrajectoryGroup

from outrider.service.service import Service
from outrider.spec import EngineSpec
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trainers.tinker import ServiceRollouts, TaskGroup
from outrider.trajectory import Sample
from support.service import running_service, say
from support.tokenizer import write_tokenizer

MAX_TOKENS = 64


class SamplingStandIn:
    """Has the interface of `tinker.SamplingClient.sample`, gives the replies in order and repeats the last. The
    log-probability of a token is -1 / (1 + its place). The first call sets `called`. Replies wait until `held` is set.
    `error` is raised instead of a reply."""

    def __init__(self, tokenizer: Tokenizer, replies: Sequence[str], *, name: str = "stand-in") -> None:
        self.name = name
        self.asked: list[tuple[list[int], tinker.SamplingParams]] = []
        self.called = threading.Event()
        self.held = threading.Event()
        self.held.set()
        self.error: Exception | None = None
        self._replies = [tokenizer.encode(reply) for reply in replies]

    async def sample(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams
    ) -> tinker.SampleResponse:
        assert num_samples == 1
        number = len(self.asked)
        self.asked.append((prompt.to_ints(), sampling_params))
        self.called.set()
        await asyncio.to_thread(self.held.wait, 30)  # another thread sets it
        if self.error is not None:
            raise self.error
        tokens = self._replies[min(number, len(self._replies) - 1)]
        sequence = tinker.SampledSequence(
            stop_reason="stop",
            sequence_id=f"{self.name}-{number}",
            _tokens_list=tokens,
            _logprobs_list=[-1 / (1 + place) for place in range(len(tokens))],
        )
        return tinker.SampleResponse(sequences=[sequence], prompt_cache_hit_tokens=number)


class World:
    """A running service, whose relay engine waits for the trainer, and clients for it."""

    def __init__(self, service: Service, url: str, tokenizer: Tokenizer) -> None:
        self.service = service
        self.url = url
        self.tokenizer = tokenizer
        self._opened: list[ServiceRollouts] = []

    def client(self, *replies: str, **options: Any) -> SamplingStandIn:
        return SamplingStandIn(self.tokenizer, [say(reply) for reply in replies or ("hello",)], **options)

    def strategy(self, **settings: Any) -> ServiceRollouts:
        made = ServiceRollouts({"url": self.url, **settings})
        self._opened.append(made)
        return made

    async def samples(self) -> dict[str, list[Sample]]:
        """Return the rows of each session."""
        page = await self.service.results(after=0, wait=0, limit=100, samples=True)
        found: dict[str, list[Sample]] = {}
        for group in page.groups:
            for sample in group.samples or ():
                found.setdefault(sample.session_id, []).append(sample)
        return found

    async def called(self, client: SamplingStandIn) -> None:
        """Wait for the first call of a client, which happens in another thread."""
        assert await asyncio.to_thread(client.called.wait, 20)

    async def close(self) -> None:
        for strategy in self._opened:
            await asyncio.to_thread(strategy.close)


@asynccontextmanager
async def tinker_world(tmp_path: Path, **settings: Any) -> AsyncIterator[World]:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer"))
    engines = {"engines": (EngineSpec(kind="relay", name="tinker"),)}
    async with running_service(tmp_path=tmp_path, **engines | settings) as (service, url):
        world = World(service, url, tokenizer)
        try:
            yield world
        finally:
            await world.close()


async def rolled_out(
    client: Any,
    task: dict[str, Any],
    strategy: ServiceRollouts,
    n: int = 2,
    *,
    evaluating: bool = False,
    temperature: float = 1.0,
) -> TrajectoryGroup | None:
    """Run a group as the cookbook's training loops do."""
    builder = TaskGroup({"prompt": "say hello", "task": task}, n, evaluating=evaluating)
    return await do_group_rollout_and_filter_constant_reward(
        client, builder, MAX_TOKENS, temperature, do_remove_constant_reward_groups=False, strategy=strategy
    )
