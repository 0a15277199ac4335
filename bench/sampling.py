"""Batches per hour of a sampler that replaces useless groups at once, compared with samplers that wait: simulated and
real.

Rollout times are drawn from a Pareto distribution, like those of agents: most are short, a few take a hundred times as
long. A fraction of the prompts teaches nothing and is filtered out. All ways get the same slots and the same draws, and
differ only in the time at which they submit groups. `asynchronous` submits as soon as a group is done. `synchronous`
submits in waves (of one batch, and of three), when all groups of the last wave are done and the batch is not full.
`static` submits one unfiltered batch. The trainer takes no time, which favours the ways that wait.

The simulated part runs on a simulated clock, without real waits. The real part is the whole service with sandboxes in
memory and an agent that sleeps. All draws are seeded.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.corpus import Corpus
from bench.simulated_service import Played, SimulatedService, in_virtual_time
from outrider.api.server import serving
from outrider.client.client import AsyncClient
from outrider.client.sampling import DynamicSampler, Overdue, Refill, Surplus, Task
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
    """A way to sample. `refill` is the rule by which groups are submitted, and `batches_running` is the number of
    groups that run at once, in batches. `max_age` is the bound on the age of tokens, and `overdue` the treatment of
    groups beyond this bound. `surplus` is the treatment of groups that still run when a batch is full."""

    name: str
    refill: Refill
    batches_running: int
    max_age: int | None = None
    overdue: Overdue = "wait"
    surplus: Surplus = "carry"


STATIC = Way("static, unfiltered", "static", 1)
WAVES = Way("synchronous, waves of 3 batches", "synchronous", 3)
UNBOUNDED = Way("asynchronous, 3 batches running", "asynchronous", 3)
WAYS = (
    STATIC,
    Way("synchronous, waves of 1 batch", "synchronous", 1),
    WAVES,
    Way("asynchronous, 1 batch running", "asynchronous", 1),
    UNBOUNDED,
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


FULL = Plan(60, 32, (0.3, 0.5, 0.7), 24, 4, 0.03)
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
    return [simulated_row(plan.batches, plan.target, useless, way) for useless in plan.useless for way in WAYS]


def simulated_row(
    batches: int,
    target: int,
    useless: float,
    way: Way,
    *,
    raising: bool = False,
    duration: Callable[[random.Random], float] = rollout_time,
    training: float = 0.0,
) -> dict[str, Any]:
    """Return the figures of `batches` simulated batches of `target` groups. The trainer takes `training` for each, and
    then raises the policy version if `raising`. Times are in the units of `duration`.

    `per_batch` is the time of a batch, and `idle` the part of the slots' time in which they ran nothing. `trained` is
    the part of the slots' busy time that was spent on groups of the batches. `oldest` is the age of the oldest token in
    a batch, in versions, and `overdue` the part of the groups with a token older than the bound.
    """

    def seconds_of(number: int) -> list[float]:
        return [duration(random.Random(f"{number}/{index}")) for index in range(N)]

    def play(task: Mapping[str, Any], index: int, version: int) -> Played:
        number = task["number"]
        return Played(seconds_of(number)[index], float(index % 2 and teaches(number, useless)))

    async def simulate() -> dict[str, Any]:
        slots = target * N
        service = SimulatedService(play, slots=slots)
        sampler = simulated_sampler(service, lambda number: {"number": number}, target, way)
        trained = 0.0
        oldest = overdue = 0
        async with sampler:
            for version in range(1, batches + 1):
                batch = await sampler.batch()
                assert batch is not None
                trained += sum(sum(seconds_of(number)) for number in batch.prompts)
                oldest = max(oldest, *(batch.version - sample.min_version for sample in batch.samples))
                overdue += batch.counts.overdue
                await asyncio.sleep(training)
                if raising:
                    service.version = version
                    await sampler.set_version(version)
            seconds = asyncio.get_running_loop().time()
        return {
            "useless": useless,
            "way": way.name,
            "per_batch": seconds / batches,
            "idle": 1 - service.busy / (slots * seconds),
            "trained": trained / service.busy,
            "oldest": oldest,
            "overdue": overdue / (batches * target),
        }

    return in_virtual_time(simulate())


def simulated_sampler(service: SimulatedService, task: Callable[[int], Task], target: int, way: Way) -> DynamicSampler:
    return DynamicSampler(
        service,
        task,
        n=N,
        target=target,
        inflight=way.batches_running * target,
        refill=way.refill,
        surplus=way.surplus,
        max_age=way.max_age,
        overdue=way.overdue,
    )


async def _real(plan: Plan) -> list[dict[str, Any]]:
    found = []
    useless = 0.5
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        corpus = await asyncio.to_thread(Corpus.make, Path(folder))
        for way in WAYS:
            _begun.clear()
            _graded.clear()
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
        "harness": {"agent": "bench.sampling:Sleeper", "options": {"number": number, "seconds": seconds}},
        "runtime": {"kind": "memory"},
        "evaluator": {
            "kind": "callable",
            "path": "bench.sampling:grade",
            "options": {"number": number, "teaches": teaches(number, useless)},
        },
    }


_begun: Counter[int] = Counter()
_graded: Counter[int] = Counter()
"""Numbers of sessions that have begun, and of sessions that were graded, by prompt. The numbers select the draws, so
that each way has the same draws."""


class Sleeper:
    """An agent that calls its model once and sleeps for a rollout's time."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._number = int(options["number"])
        self._seconds = float(options["seconds"])

    async def init(self, context: HarnessContext) -> None:
        pass

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        await context.model.chat([Message(role=Role.USER, content=context.task.instruction)])
        draw = random.Random(f"{self._number}/{_begun[self._number] % N}")
        _begun[self._number] += 1
        await asyncio.sleep(self._seconds * rollout_time(draw))
        return HarnessOutcome()


def grade(outcome: Outcome) -> float:
    """Grade every second session of a prompt that teaches something with 0, and all others with 1."""
    options = outcome.task.evaluator.options
    _graded[options["number"]] += 1
    return float(_graded[options["number"]] % 2 or not options["teaches"])


async def _seconds(sampler: DynamicSampler, batches: int) -> float:
    """Return the seconds until the sampler has returned `batches` batches, by the event loop's clock."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    for _ in range(batches):
        if await sampler.batch() is None:
            raise RuntimeError("the sampler has no more batches")
    return clock() - begun
