"""Agents, graders and sandboxes for sessions in other processes. They meet the test in a folder, by files."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role
from outrider.trajectory import Verdict

AGENT = "nodes.acts:Agent"
GRADER = "nodes.acts:grade"


class Agent:
    """Carries out the steps in `do`: ask: a model call · wait NAME: until the folder has such a file; `NAME.here` says
    that it waits · write NAME: a file in the sandbox · hold NAME SECONDS: write when it began and ended into NAME ·
    use NAME SECONDS: the same, and the names of its GPUs ·
    leave with N: an exit code · exit: the process dies."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._do: list[str] = options["do"]
        self._folder = Path(options["folder"])

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        messages = [Message(role=Role.USER, content=context.task.instruction)]
        for step in self._do:
            match step.split():
                case ["ask"]:
                    messages += [await context.model.chat(messages), Message(role=Role.USER, content="again")]
                case ["consult", model]:
                    await context.model.chat(messages, model=model)
                case ["wait", name]:
                    (self._folder / f"{name}.here").touch()
                    while not (self._folder / name).exists():  # noqa: ASYNC110  # another process makes it
                        await asyncio.sleep(0.01)
                case ["write", name]:
                    await context.runtime.write(name, b"theirs")
                case ["hold", name, seconds]:
                    began = time.monotonic()
                    await asyncio.sleep(float(seconds))
                    with (self._folder / name).open("a") as file:
                        file.write(f"{os.getpid()} {began} {time.monotonic()}\n")
                case ["use", name, seconds]:
                    told = await context.runtime.exec("echo $NVIDIA_VISIBLE_DEVICES", seconds=30)
                    began = time.monotonic()
                    await asyncio.sleep(float(seconds))
                    with (self._folder / name).open("a") as file:
                        file.write(f"{told.stdout.decode().strip()} {began} {time.monotonic()}\n")
                case ["leave", "with", number]:
                    base, _, power = number.partition("**")
                    return HarnessOutcome(exit_code=int(base) ** int(power))
                case ["exit"]:
                    os._exit(3)
                case _:
                    raise ValueError(step)
        return HarnessOutcome()


async def grade_files(outcome: Outcome) -> Verdict:
    """The reward is how many bytes there are in the file `answer`."""
    return Verdict(reward=float(len(await outcome.runtime.read("answer"))))


async def grade(outcome: Outcome) -> Verdict:
    return Verdict(reward=float(outcome.turns), metrics={"process": float(os.getpid())})
