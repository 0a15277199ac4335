"""The agent of a task check: carries out a known solution, or nothing, and says what it was told to say.

It knows no task. Invariant: it calls the model once, as every session must, whose reply is what the agent says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import HarnessError
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.harnesses.desktop import Desktop, DesktopOptions
from outrider.messages import Message, Role
from outrider.runtimes.base import PatchConflict
from outrider.spec import Write


class GoldAgent:
    """Options: `patch`, a diff of the working directory; `run`, a command for the sandbox, with `env`; `files`, prepare
    steps that write, which are carried out before; `ask`, the words by which the scripted model knows what to reply;
    `seconds` for the command; `desktop`, the options of the task's own desktop, which is opened behind the `files`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._patch: str | None = options.get("patch")
        self._run: str | None = options.get("run")
        self._ask: str = options["ask"]
        self._seconds: float = options["seconds"]
        self._env: dict[str, str] = options.get("env", {})
        desktop = options.get("desktop")
        self._desktop = None if desktop is None else DesktopOptions.model_validate(desktop)
        self._files = [Write.model_validate(file) for file in options.get("files", ())]

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        if self._patch is not None:
            try:
                await context.runtime.patch(self._patch)
            except PatchConflict as error:
                raise HarnessError(f"the gold patch does not apply: {error}") from error
        for file in self._files:
            await context.runtime.write(file.to, file.data(), executable=file.executable)
        if self._desktop is not None:
            await Desktop(context.runtime, self._desktop, seconds=self._seconds).open()
        if self._run is not None:
            done = await context.runtime.exec(self._run, env=self._env, seconds=self._seconds)
            if done.exit_code != 0:
                ended = "did not end in time" if done.exit_code is None else f"exited with code {done.exit_code}"
                raise HarnessError(f"the gold solution {ended}", log_tail=done.log_tail())
        said = await context.model.chat([Message(role=Role.USER, content=self._ask)])
        return HarnessOutcome(answer=said.content)
