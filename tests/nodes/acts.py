"""Agents and graders for sessions in other processes. The agents exchange signals with the test through files in a
folder.
"""

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
    """Carries out the steps in `do`:

    - `ask`: calls the model
    - `consult MODEL`: calls the frozen model MODEL
    - `wait NAME`: waits until the folder has the file NAME; the file NAME.here shows that the agent waits
    - `write NAME`: writes a file in the sandbox
    - `hold NAME SECONDS`: sleeps, and appends the process id and the times of beginning and end to the file NAME
    - `use NAME SECONDS`: the same, with the names of the session's GPUs in place of the process id
    - `leave with N`: returns the exit code N, which may be a power such as `2**70`
    - `exit`: ends the process
    """

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
    """The reward is the number of bytes in the file `answer`."""
    return Verdict(reward=float(len(await outcome.runtime.read("answer"))))


async def grade(outcome: Outcome) -> Verdict:
    return Verdict(reward=float(outcome.turns), metrics={"process": float(os.getpid())})
