"""The agent that checks a task. In each step of the task it carries out the known solution or does nothing. Then the
agent calls the model, and the model's reply becomes the agent's answer.

Invariant: the agent calls the model once in each step, because a step without a model call ends with an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from outrider.errors import HarnessError
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.harnesses.desktop import Desktop, DesktopOptions
from outrider.messages import Message, Role
from outrider.sandbox.runtimes.base import PatchConflict
from outrider.spec import Write


class GoldAgent:
    """The agent has these options:

    - `steps`: one entry for each step of the task.
        - `patch`: a diff to apply to the working directory.
        - `files`: prepare steps of the type `Write`, carried out after the patch and before the command.
        - `run`: a command to run in the sandbox, with the variables `env`.
        - `ask`: the message to send to the scripted model, which has a reply for this message.
    - `seconds`: the time limit of each command.
    - `desktop`: the options of the task's own desktop, which is opened after the first step's files are written.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._seconds: float = options["seconds"]
        self._steps: Iterator[Mapping[str, Any]] = iter(options["steps"])
        desktop = options.get("desktop")
        self._desktop = None if desktop is None else DesktopOptions.model_validate(desktop)

    async def init(self, context: HarnessContext) -> None:
        """Do nothing. `run` opens the desktop later, because the first step's files must exist before the desktop
        opens."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        step = next(self._steps)
        if (patch := step.get("patch")) is not None:
            try:
                await context.runtime.patch(patch)
            except PatchConflict as error:
                raise HarnessError(f"the gold patch does not apply: {error}") from error
        for written in step.get("files", ()):
            file = Write.model_validate(written)
            await context.runtime.write(file.to, file.data(), executable=file.executable)
        if self._desktop is not None:
            await Desktop(context.runtime, self._desktop, seconds=self._seconds).open()
            self._desktop = None
        if (command := step.get("run")) is not None:
            done = await context.runtime.exec(command, env=step.get("env", {}), seconds=self._seconds)
            if done.exit_code != 0:
                ended = "did not end in time" if done.exit_code is None else f"exited with code {done.exit_code}"
                raise HarnessError(f"the gold solution {ended}", log_tail=done.log_tail())
        completion = await context.model.chat([Message(role=Role.USER, content=step["ask"])])
        return HarnessOutcome(answer=completion.content)
