"""The increase of a service's session rate with the number of processes that run sessions (`outrider serve
--processes`).

Each session is three model calls over HTTP to an engine's server, with waits between the calls. The waits stand for the
time of a real engine and a real agent, and keep two cores from being the limit. Each process has the same number of
slots. All slots are kept full: n processes should finish n times as many sessions as one process in the same time. The
engine is a separate process.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.corpus import Corpus
from bench.parked import CONTEXT_TOKENS
from bench.processes import upstream
from outrider.api.server import serving
from outrider.config import Config, LanesConfig, ModelConfig, PluginsConfig
from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role
from outrider.service.assembly import open_service
from outrider.service.service import Service
from outrider.spec import EngineSpec, GroupSpec

SLOTS = 16
"""Number of sessions that a process runs at once."""
CALLS = 3
SECONDS = 0.7
"""Length of the wait after each call, in seconds."""
REPLY_TOKENS = 16
GROUP_SIZE = 8
PAGE_SECONDS = 60.0


class Plan(msgspec.Struct, frozen=True):
    """The numbers of processes that are compared, and the number of times that each process fills its slots."""

    processes: tuple[int, ...]
    waves: int


FULL = Plan(processes=(1, 2, 4, 8), waves=6)
QUICK = Plan(processes=(1, 2), waves=2)


class WaitingAgent:
    """An agent that calls its model and then waits, several times."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._seconds = float(options["seconds"])

    async def init(self, context: HarnessContext) -> None:
        """Do nothing: there is nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        messages = [Message(role=Role.USER, content=context.task.instruction)]
        for _ in range(CALLS):
            messages += [await context.model.chat(messages), Message(role=Role.USER, content="Go on.")]
            await asyncio.sleep(self._seconds)
        return HarnessOutcome()


def grade(outcome: Outcome) -> float:
    """Grade with 1 if every call got its reply."""
    return float(outcome.turns == CALLS)


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan, *, seconds: float = SECONDS) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as name:
        corpus = await asyncio.to_thread(Corpus.make, Path(name))
        async with upstream(corpus, reply_tokens=REPLY_TOKENS) as engine:
            url = engine.urls[0]
            rates = {number: await _rate(corpus, url, number, plan.waves, seconds) for number in plan.processes}
    fewest = min(rates)
    return {
        "slots_each": SLOTS,
        "session_seconds": CALLS * seconds,
        "points": [
            {
                "processes": number,
                "sessions_per_second": rate,
                "efficiency": rate / number / (rates[fewest] / fewest),
                "of_the_possible": rate * CALLS * seconds / (SLOTS * number),
            }
            for number, rate in rates.items()
        ],
    }


async def _rate(corpus: Corpus, engine: str, processes: int, waves: int, seconds: float) -> float:
    """Measure the sessions per second, from the end of the first wave to the end of the last, so that the start is not
    counted."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as data:
        slots = SLOTS * processes
        config = Config(
            port=0,
            processes=processes,
            data=Path(data),
            plugins=PluginsConfig(allow=("*",)),
            model=ModelConfig(tokenizer=str(corpus.folder), renderer="qwen3", context_tokens=CONTEXT_TOKENS),
            lanes=LanesConfig(init=slots, run=slots, eval=slots),
            engines=(EngineSpec(kind="vllm", url=engine),),
        )
        async with open_service(config) as opened, serving(*opened):
            for _ in range(slots * (waves + 1) // GROUP_SIZE):
                await opened.service.submit(_group(seconds))
            ends = await _ends(opened.service, slots * (waves + 1) // GROUP_SIZE)
            return slots * waves / (ends[-1] - ends[slots // GROUP_SIZE - 1])


async def _ends(service: Service, groups: int) -> list[float]:
    """Wait for this many groups to end and return the times of their ends, in order. Raises RuntimeError if a session
    failed."""
    ends: list[float] = []
    after = 0
    while len(ends) < groups:
        page = await service.results(after=after, wait=PAGE_SECONDS, limit=100, samples=False)
        if not page.groups:
            raise RuntimeError(f"no group was done within {PAGE_SECONDS:g} s")
        after = page.cursor
        for group in page.groups:
            ends.append(group.finished or 0.0)
            for session in group.sessions:
                result = session.result
                if result is None or result.error is not None or result.verdict is None or result.verdict.reward != 1.0:
                    raise RuntimeError(f"session {session.id}: {result and (result.error or result.verdict)}")
    return sorted(ends)


def _group(seconds: float) -> GroupSpec:
    task = {
        "instruction": "Count to three.",
        "harness": {"agent": "bench.scaling:WaitingAgent", "options": {"seconds": seconds}},
        "runtime": {"kind": "memory"},
        "evaluator": {"kind": "callable", "path": "bench.scaling:grade"},
    }
    return GroupSpec.model_validate({"task": task, "n": GROUP_SIZE})
