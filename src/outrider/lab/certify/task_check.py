"""Checks tasks without a model. Each task is tried twice with its known solution, which must earn the reward 1, and
twice with an agent that does nothing, which must earn 0.

Invariant: when `check_tasks` returns, the service has ended and its data have been removed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from outrider.api.server import serving
from outrider.client.client import AsyncClient
from outrider.config import Config, GraderConfig, LanesConfig, ModelConfig, NetworkConfig, PluginsConfig
from outrider.errors import OutriderError
from outrider.lab.certify.users_paths import allowing, uploads
from outrider.lab.demo.dialogue import POLICY
from outrider.schemas import GroupView
from outrider.service.admission import validate_group
from outrider.service.assembly import open_service
from outrider.spec import EngineSpec, TaskSpec
from outrider.tasks.examples import Example, Gold

TIMES = 2
"""Number of tries with the known solution, and also without it. Two tries can reveal a reward that depends on
chance."""
NOTHING = "I have done nothing."
AGENT = "outrider.lab.certify.gold_agent:GoldAgent"
END = "<|im_end|>"
RIGHT, WRONG = 1.0, 0.0
NO_SOLUTION = "it has no solution to try: give it a table [gold] with `run`, `patch` or `reply`"


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking one task. `gold` and `nothing` have the rewards of the tries with and without the known
    solution, with None for a try that got no reward. A task without `problems` is good."""

    id: str
    gold: tuple[float | None, ...] = ()
    nothing: tuple[float | None, ...] = ()
    problems: tuple[str, ...] = ()


async def check_tasks(
    examples: Sequence[Example],
    *,
    folder: Path,
    graders: Sequence[GraderConfig] = (),
    network: NetworkConfig | None = None,
    at_once: int = 4,
    watch: Callable[[TaskReport], None] = lambda _: None,
) -> list[TaskReport]:
    """Check the examples (tasks with known solutions) in a temporary service.

    - `folder`: the folder with the files of `upload` steps.
    - `graders`: the graders that the tasks may name.
    - `network`: the destinations that the tasks may reach, by default none.
    - `at_once`: the maximum number of concurrent sandboxes.
    - `watch`: called with each task's report as soon as it is known.
    """
    replies: list[Any] = [NOTHING + END]
    replies += [
        {"when": asked(number, step), "reply": (gold.reply or NOTHING) + END}
        for number, example in enumerate(examples)
        for step, gold in enumerate(solutions(example))
    ]
    bodies = [checked_task(example, number, "nothing") for number, example in enumerate(examples)]
    tasks: list[TaskSpec] = []
    for body in bodies:
        with suppress(OutriderError):  # an invalid task is reported below, when its submission is refused
            tasks.append(validate_group({"task": body, "n": 1}).task)
    with tempfile.TemporaryDirectory(prefix="outrider-check-") as data:
        config = Config(
            port=0,
            data=Path(data),
            files=folder if any(map(uploads, tasks)) else None,
            model=ModelConfig(tokenizer=str(POLICY), renderer="qwen3"),
            lanes=LanesConfig(init=at_once, run=at_once, eval=at_once),
            # The user starts this service only for these tasks, so the tasks may run any Python and read the files that
            # they name.
            plugins=PluginsConfig(allow=("*",)),
            graders=tuple(graders),
            network=network or NetworkConfig(),
            engines=(EngineSpec(kind="scripted", options={"replies": replies, "context_tokens": 1 << 20}),),
        )
        config = await asyncio.to_thread(allowing, config, tasks)
        async with open_service(config) as opened, serving(*opened) as url, AsyncClient(url) as client:
            waiting: dict[str, tuple[int, str]] = {}
            found: list[dict[str, GroupView]] = [{} for _ in examples]
            reports: dict[int, TaskReport] = {}
            for number, example in enumerate(examples):
                wanted, has = 1 + len(example.task.get("then") or ()), len(solutions(example))
                problem = NO_SOLUTION if example.gold is None else None
                if example.gold is not None and has != wanted:
                    problem = f"it has {wanted} steps, and gold solutions of {has}"
                try:
                    for kind in ("gold", "nothing") if problem is None else ():
                        body = {"task": checked_task(example, number, kind), "n": TIMES}
                        waiting[(await client.submit(body)).id] = number, kind
                except OutriderError as error:
                    problem = f"it is refused: {error.message}{f' ({error.field})' if error.field else ''}"
                    problem += f"; {error.hint}" if error.hint else ""
                if problem is not None:
                    reports[number] = TaskReport(id=example.id, problems=(problem,))
                    watch(reports[number])
            after = 0
            while len(reports) < len(examples):
                page = await client.results(after=after, wait=30.0)
                after = page.cursor
                for group in page.groups:
                    number, kind = waiting[group.id]
                    found[number][kind] = group
                    if len(found[number]) == 2 and number not in reports:
                        reports[number] = report_of(examples[number].id, **found[number])
                        watch(reports[number])
    return [reports[number] for number in range(len(examples))]


def solutions(example: Example) -> tuple[Gold, ...]:
    """Return the known solution of each step of the example, or an empty tuple if there is none."""
    return () if example.gold is None else (example.gold, *example.gold.then)


def asked(number: int, step: int) -> str:
    """Return the message that makes the scripted model send the reply of the known solution."""
    return f"The gold solution of task {number}, step {step}, please."


def checked_task(example: Example, number: int, kind: str) -> dict[str, Any]:
    """Return the task with GoldAgent as its agent. If `kind` is "gold", the agent carries out the known solution, and
    otherwise it does nothing."""
    count = 1 + len(example.task.get("then") or ())
    limits = {"agent_seconds": 600, **(example.task.get("limits") or {}), "turns": count}
    steps: list[dict[str, Any]] = [{"ask": "Nothing, please."}] * count
    if kind == "gold":
        steps = [
            {"patch": gold.patch, "run": gold.run, "env": gold.env, "files": list(gold.files), "ask": asked(number, at)}
            for at, gold in enumerate(solutions(example))
        ]
    own = (example.task.get("harness") or {}).get("options") or {}
    options = {"steps": steps, "seconds": limits["agent_seconds"], "desktop": own.get("desktop")}
    harness = {"agent": AGENT, "options": options}
    task = {**example.task, "harness": harness, "limits": limits, "max_attempts": 1}
    if isinstance(evaluator := example.task.get("evaluator"), dict):
        task["evaluator"] = testing_empty_patches(evaluator)
    if later := example.task.get("then"):
        task["then"] = [
            {**step, "evaluator": testing_empty_patches(step["evaluator"])}
            if isinstance(step, dict) and isinstance(step.get("evaluator"), dict)
            else step
            for step in later
        ]
    return task


def testing_empty_patches(evaluator: dict[str, Any]) -> dict[str, Any]:
    """Return the evaluator, changed so that `swebench` runs its tests for an empty patch, too. Otherwise the check of
    an agent that does nothing would run no test."""
    options = evaluator.get("options")
    if not isinstance(options, dict):
        return evaluator
    if evaluator.get("kind") == "swebench":
        options = {"test_empty_patch": True, **options}
    elif isinstance(parts := options.get("parts"), dict):
        changed = {
            name: testing_empty_patches(part) if isinstance(part, dict) else part for name, part in parts.items()
        }
        options = {**options, "parts": changed}
    return {**evaluator, "options": options}


def report_of(id: str, gold: GroupView, nothing: GroupView) -> TaskReport:
    problems: list[str] = []
    rewards: dict[str, tuple[float | None, ...]] = {}
    for name, group, wanted in (("the gold solution", gold, RIGHT), ("doing nothing", nothing, WRONG)):
        results = [session.result for session in group.sessions if session.result is not None]
        rewards[name] = tuple(result.verdict.reward if result.verdict else None for result in results)
        for result in results:
            if result.error is not None:
                tail = f": {result.error.log_tail.strip()[-200:]}" if result.error.log_tail else ""
                problem = f"{name} is not graded: {result.error.message}{tail}"
                problem += f"; {result.error.hint}" if result.error.hint else ""
            elif result.verdict is None:
                problem = f"{name} is not graded: it ended with {result.stop_reason.value}"
            elif result.verdict.reward != wanted:
                why = f" ({result.verdict.reason})" if result.verdict.reason else ""
                problem = f"{name} earns {result.verdict.reward:g}, not {wanted:g}{why}"
            else:
                continue
            if problem not in problems:
                problems.append(problem)
        if len({*rewards[name]} - {None}) > 1:
            problems.append(f"{name} earns one thing and then another: {', '.join(map(str, rewards[name]))}")
    return TaskReport(
        id=id, gold=rewards["the gold solution"], nothing=rewards["doing nothing"], problems=tuple(problems)
    )
