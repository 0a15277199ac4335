"""The cost of a bound on the age of tokens (`max_age` of the sampler), and the bias of its batches: simulated.

The policy version is raised after each batch. The first table has the heavy-tailed durations of the benchmark
`sampling` and a trainer that takes no time. The second table has the durations and the trainer of published
asynchronous trainers: durations with a moderate tail, every prompt trained on, and training that takes as long as
sampling with all slots busy. The third table has the mean reward of the groups in the batches if right answers take
long with a heavy tail and wrong answers are short, or the reverse.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from bench.sampling import (
    STATIC,
    UNBOUNDED,
    WAVES,
    N,
    Way,
    rollout_time,
    simulated_row,
    simulated_sampler,
)
from bench.simulated_service import Played, SimulatedService, in_virtual_time
from outrider.client.sampling import Task

SPREAD = 0.8
"""The standard deviation of the logarithm of durations with a moderate tail."""

AWAITED = {age: Way(f"age {age}, slow groups awaited", "asynchronous", 3, age) for age in (8, 4, 1, 0)}
LATE = {age: Way(f"age {age}, slow groups trained late", "asynchronous", 3, age, "train") for age in (4, 1)}
"""The ways to sample with a bound on the age of tokens, by the bound."""
BOUNDED = (*AWAITED.values(), *LATE.values())
STOPPED = Way("3 batches running, surplus stopped", "asynchronous", 3, surplus="cancel")
COMPARED = (UNBOUNDED, AWAITED[1], LATE[1], STOPPED)
WITH_TRAINER = (STATIC, AWAITED[1], LATE[1], AWAITED[4], UNBOUNDED)


class Plan(msgspec.Struct, frozen=True):
    """`target` is the number of groups in a batch; there are as many slots as one batch has sessions."""

    batches: int
    target: int


FULL = Plan(60, 32)
QUICK = Plan(20, 8)


async def run(quick: bool) -> dict[str, Any]:
    return await asyncio.to_thread(measure, QUICK if quick else FULL)


def measure(plan: Plan) -> dict[str, Any]:
    # With all slots busy, a batch takes one mean duration. The trainer takes equally long.
    mean = sum(moderate_time(random.Random(number)) for number in range(10_000)) / 10_000
    size = (plan.batches, plan.target)
    return {
        "n": N,
        "target": plan.target,
        "bounded": [simulated_row(*size, 0.5, way, raising=True) for way in (WAVES, UNBOUNDED, *BOUNDED)],
        "with_trainer": [
            simulated_row(*size, 0.0, way, raising=True, duration=moderate_time, training=mean) for way in WITH_TRAINER
        ],
        "bias": [_bias(plan, way) for way in COMPARED],
    }


def moderate_time(draw: random.Random) -> float:
    """Draw a rollout's duration from a log-normal distribution, in units of the median duration."""
    return draw.lognormvariate(0.0, SPREAD)


def _bias(plan: Plan, way: Way) -> dict[str, Any]:
    means = {slow: in_virtual_time(_mean_reward(plan, way, slow == "right")) for slow in ("right", "wrong")}
    return {"way": way.name, **means}


async def _mean_reward(plan: Plan, way: Way, right_is_slow: bool) -> float:
    """Return the mean reward of the groups in the batches. Half of all answers are right, so the mean without a bias is
    0.5. Durations of answers that are right (or wrong) have a heavy tail; the other answers have the shortest."""

    def play(task: Mapping[str, Any], index: int, version: int) -> Played:
        draw = random.Random(f"{task['number']}/{task['attempt']}/{index}")
        right = draw.random() < 0.5
        return Played(rollout_time(draw) if right is right_is_slow else 1.0, float(right))

    attempts: Counter[int] = Counter()

    def task_of(number: int) -> Task:
        attempts[number] += 1
        return {"number": number, "attempt": attempts[number]}

    service = SimulatedService(play, slots=plan.target * N)
    sampler = simulated_sampler(service, task_of, plan.target, way)
    total, graded = 0.0, 0
    async with sampler:
        for version in range(1, plan.batches + 1):
            batch = await sampler.batch()
            assert batch is not None
            total += sum(sample.reward or 0.0 for sample in batch.samples)
            graded += len(batch.samples)
            service.version = version
            await sampler.set_version(version)
    return total / graded
