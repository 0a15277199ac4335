"""Batches per hour of a sampler that replaces useless groups at once, compared with samplers that wait: simulated and
real.

Rollout times are drawn from a Pareto distribution, like those of agents: most are short, a few take a hundred times as
long. A fraction of the prompts teaches nothing and is filtered out. All ways get the same slots and the same draws, and
differ only in the time at which they submit groups: `asynchronous` submits as soon as a group is done; `synchronous` in
waves (of one batch, and of three), when all groups of the last wave are done and the batch is not full; `static` one
unfiltered batch. The trainer takes no time, which favours the ways that wait. The simulated part runs on a simulated
clock, without real waits. The real part is the whole service with sandboxes in memory and an agent that sleeps.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.corpus import Corpus
from bench.simulated_service import Played, SimulatedService, VirtualLoop
from outrider.api.server import serving
from outrider.client.client import AsyncClient
from outrider.client.sampling import DynamicSampler, Refill, Task
from outrider.config import Config, LanesConfig, ModelConfig, PluginsConfig
from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role
from outrider.service.assembly import open_service
from outrider.spec import EngineSpec

N = 8
"""Number of samples of each prompt."""
TAIL = 1.2
"""The exponent of the Pareto distribution. Below 2 the variance of an unbounded distribution is infinite."""
LONGEST = 120.0
"""The longest rollout, in units of the shortest."""


class Way(msgspec.Struct, frozen=True):
    """The rule by which a sampler submits groups, and the number of groups that run at once, in batches."""

    name: str
    refill: Refill
    batches_running: int


WAYS = (
    Way("static, unfiltered", "static", 1),
    Way("synchronous, waves of 1 batch", "synchronous", 1),
    Way("synchronous, waves of 3 batches", "synchronous", 3),
    Way("asynchronous, 1 batch running", "asynchronous", 1),
    Way("asynchronous, 3 batches running", "asynchronous", 3),
)


class Plan(msgspec.Struct, frozen=True):
    """`target` is the number of groups in a batch; there are as many slots as one batch has sessions. `useless` are the
    measured fractions of useless prompts."""

    batches: int
    target: int
    useless: tuple[float, ...]
    real_batches: int
    real_target: int
    real_seconds: float
    """Duration of the shortest rollout in the real part, in seconds."""


FULL = Plan(60, 32, (0.3, 0.5, 0.7), 8, 4, 0.05)
QUICK = Plan(20, 16, (0.5,), 2, 2, 0.02)


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    simulated = await asyncio.to_thread(_simulated, plan)
    return {"n": N, "target": plan.target, "simulated": simulated, "real": await _real(plan)}


def teaches(number: int, useless: float) -> bool:
    return random.Random(f"teaches {number}").random() >= useless


def rollout_time(draw: random.Random) -> float:
    """Draw a rollout's duration, in units of the shortest duration."""
    return min(draw.paretovariate(TAIL), LONGEST)


def _simulated(plan: Plan) -> list[dict[str, Any]]:
    found = []
    for useless in plan.useless:
        for way in WAYS:
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                found.append({"useless": useless, "way": way.name, **runner.run(_simulate(plan, useless, way))})
    return found


async def _simulate(plan: Plan, useless: float, way: Way) -> dict[str, float]:
    def play(task: Mapping[str, Any], index: int, version: int) -> Played:
        number = task["number"]
        seconds = rollout_time(random.Random(f"{number}/{index}"))
        return Played(seconds, float(index % 2 and teaches(number, useless)))

    slots = plan.target * N
    service = SimulatedService(play, slots=slots)
    sampler = DynamicSampler(
        service,
        lambda number: {"number": number},
        n=N,
        target=plan.target,
        inflight=way.batches_running * plan.target,
        refill=way.refill,
    )
    async with sampler:
        seconds = await _seconds(sampler, plan.batches)
        return {"per_batch": seconds / plan.batches, "idle": 1 - service.busy / (slots * seconds)}


async def _real(plan: Plan) -> list[dict[str, Any]]:
    found = []
    useless = 0.5
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        corpus = await asyncio.to_thread(Corpus.make, Path(folder))
        for way in WAYS:
            with tempfile.TemporaryDirectory(prefix="outrider-bench-") as data:
                slots = plan.real_target * N
                config = Config(
                    port=0,
                    data=Path(data),
                    plugins=PluginsConfig(allow=("*",)),
                    model=ModelConfig(tokenizer=str(corpus.folder), renderer="qwen3"),
                    lanes=LanesConfig(init=slots, run=slots, eval=slots),
                    engines=(EngineSpec(kind="scripted", options={"replies": ["Done.<|im_end|>"]}),),
                )
                async with open_service(config) as opened, serving(*opened) as url, AsyncClient(url) as client:
                    sampler = DynamicSampler(
                        client,
                        lambda number: _task(number, useless, plan.real_seconds),
                        n=N,
                        target=plan.real_target,
                        inflight=way.batches_running * plan.real_target,
                        refill=way.refill,
                    )
                    async with sampler:
                        seconds = await _seconds(sampler, plan.real_batches)
                        await sampler.stop()
                    ran = sum(
                        session.result.seconds.run
                        for group in (await client.results(limit=1000)).groups
                        for session in group.sessions
                        if session.result
                    )
                found.append(
                    {
                        "useless": useless,
                        "way": way.name,
                        "per_batch": seconds / plan.real_batches,
                        "idle": max(0.0, 1 - ran / (slots * seconds)),
                    }
                )
    return found


def _task(number: int, useless: float, seconds: float) -> Task:
    return {
        "instruction": "Take your time.",
        "harness": {"agent": "bench.sampling:Sleeper", "options": {"seconds": seconds}},
        "runtime": {"kind": "memory"},
        "evaluator": {
            "kind": "callable",
            "path": "bench.sampling:grade",
            "options": {"teaches": teaches(number, useless)},
        },
    }


class Sleeper:
    """An agent that calls its model once and sleeps for a rollout's time."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._seconds = float(options["seconds"])

    async def init(self, context: HarnessContext) -> None:
        pass

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        await context.model.chat([Message(role=Role.USER, content=context.task.instruction)])
        await asyncio.sleep(self._seconds * rollout_time(random.Random()))
        return HarnessOutcome()


def grade(outcome: Outcome) -> float:
    """Grade with 0 or 1 at random for prompts that teach something, and with 1 for useless prompts."""
    return float(random.random() < 0.5 or not outcome.task.evaluator.options["teaches"])


async def _seconds(sampler: DynamicSampler, batches: int) -> float:
    """Return the seconds until the sampler has returned `batches` batches, by the event loop's clock."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    for _ in range(batches):
        if await sampler.batch() is None:
            raise RuntimeError("the sampler has no more batches")
    return clock() - begun
