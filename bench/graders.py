"""What grading an outcome costs by kind of evaluator, warm: alone, and 32 at once.

Milliseconds of wall clock and of processor time, from `evaluate` to its verdict, without a session around it. The
processor time is that of this process and all that it started. Commands run in a sandbox of kind `process`. Kinds whose
library is not installed are left out. Answers differ from one verdict to the next, so that no cache helps.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.sandboxes import cpu_seconds
from outrider.errors import InvalidField
from outrider.evaluators.base import Evaluator, Outcome
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.base import HarnessOutcome
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role
from outrider.runtimes.base import SandboxContext
from outrider.runtimes.host_process.process import ProcessRuntime
from outrider.runtimes.node_host import Host
from outrider.spec import EvaluatorSpec, HarnessSpec, RuntimeSpec, TaskSpec

CONCURRENCY = (1, 32)
WARM = 5
FUNCTION = EvaluatorSpec(kind="callable", path="bench.graders:grade")
COMMAND = EvaluatorSpec(run="true")


class Plan(msgspec.Struct, frozen=True):
    """Verdicts of each kind, at each concurrency."""

    verdicts: int


FULL, QUICK = Plan(320), Plan(64)


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


def grade(outcome: Outcome) -> float:
    """The function of kind `callable`."""
    return 1.0


async def measure(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        async with Host(Path(folder)) as host:
            directory = host.folder / "sandbox"
            directory.mkdir()
            context = SandboxContext(
                session_id="bench",
                attempt=1,
                directory=directory,
                host=host,
                gateway_url="http://127.0.0.1:9",
                gateway_socket=host.folder / "gateway.sock",
            )
            runtime = ProcessRuntime.create(RuntimeSpec(kind="process"), context)
            await runtime.start()
            try:
                for name, (spec, replies) in kinds().items():
                    try:
                        evaluator = make_evaluator(spec)
                    except InvalidField:
                        continue
                    outcomes = (
                        Outcome(
                            task=TaskSpec(instruction="x", harness=HarnessSpec(command=["true"]), evaluator=spec),
                            runtime=runtime,
                            stop_reason=StopReason.COMPLETED,
                            harness=HarnessOutcome(),
                            transcript=(Message(role=Role.ASSISTANT, content=reply),),
                            turns=1,
                            host=host,
                        )
                        for reply in replies
                    )
                    await _milliseconds(evaluator, outcomes, WARM, 1)
                    found[name] = {
                        str(width): await _milliseconds(evaluator, outcomes, plan.verdicts, width)
                        for width in CONCURRENCY
                    }
            finally:
                await runtime.stop()
    return {"verdicts": plan.verdicts, "kinds": found}


def kinds() -> dict[str, tuple[EvaluatorSpec, Iterator[str]]]:
    """An evaluator of each kind, and replies for it without an end."""
    parts = {"one": {"kind": "callable", "path": FUNCTION.path}, "two": {"kind": "callable", "path": FUNCTION.path}}
    entry = {
        "question": "How much is 2 + 3?",
        "answer": "5",
        "metadata": {"source_dataset": "chain_sum"},
    }
    countdown = {
        "question": "Make 30 of 12, 8 and 10.",
        "answer": "12 + 8 + 10",
        "metadata": {"source_dataset": "countdown", "numbers": [12, 8, 10], "target": 30},
    }

    def counted(reply: Callable[[int], str]) -> Iterator[str]:
        return map(reply, itertools.count(3))

    return {
        "callable": (FUNCTION, itertools.repeat("")),
        "command": (COMMAND, itertools.repeat("")),
        "weighted: two callables": (EvaluatorSpec(kind="weighted", options={"parts": parts}), itertools.repeat("")),
        "math: fractions": (
            EvaluatorSpec(kind="math", options={"gold": "\\frac{1}{2}"}),
            counted(lambda number: f"So it is $\\boxed{{\\frac{{{number}}}{{{2 * number}}}}}$."),
        ),
        "math: polynomials": (
            EvaluatorSpec(kind="math", options={"gold": "x^2-1"}),
            counted(lambda number: f"So it is $\\boxed{{(x-1)(x+1)+{number}-{number}}}$."),
        ),
        "reasoning-gym: chain_sum": (
            EvaluatorSpec(kind="reasoning-gym", options={"entry": entry}),
            counted(lambda number: f"<answer>{number}</answer>"),
        ),
        "reasoning-gym: countdown": (
            EvaluatorSpec(kind="reasoning-gym", options={"entry": countdown}),
            counted(lambda number: f"<answer>12 + 8 + 10 + {number} - {number}</answer>"),
        ),
    }


async def _milliseconds(
    evaluator: Evaluator, outcomes: Iterator[Outcome], verdicts: int, width: int
) -> dict[str, float]:
    """Of `verdicts` verdicts, `width` at once."""
    spent: list[float] = []
    todo = iter(range(verdicts))

    async def work() -> None:
        for _ in todo:
            outcome = next(outcomes)
            begun = time.perf_counter()
            await evaluator.evaluate(outcome)
            spent.append(time.perf_counter() - begun)

    begun, used = time.perf_counter(), cpu_seconds()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(width):
            tasks.create_task(work())
    seconds = time.perf_counter() - begun
    cuts = statistics.quantiles(spent, n=20, method="inclusive")
    return {
        "p50_ms": 1000 * statistics.median(spent),
        "p95_ms": 1000 * cuts[-1],
        "per_second": verdicts / seconds,
        "cpu_ms": 1000 * (cpu_seconds() - used) / verdicts,
    }
