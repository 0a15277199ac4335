"""A task's prepare steps, carried out in a started sandbox, in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

from outrider.concurrency.backoff import Backoff
from outrider.errors import RuntimeFailure
from outrider.runtimes.base import Runtime
from outrider.spec import PrepareStep, Run, Upload, Write

PAUSES = Backoff(first=1.0, longest=30.0)
"""Between the attempts of one step."""


async def prepare(runtime: Runtime, steps: list[PrepareStep], *, files: Path, pauses: Backoff = PAUSES) -> None:
    """Raises RuntimeFailure naming the step that failed, with the end of its output."""
    for number, step in enumerate(steps):
        match step:
            case Run():
                await _run(runtime, step, number, pauses)
            case Upload():
                await runtime.upload(files / step.upload, step.to)
            case Write():
                await runtime.write(step.to, await asyncio.to_thread(step.data), executable=step.executable)


async def _run(runtime: Runtime, step: Run, number: int, pauses: Backoff) -> None:
    """A sandbox that is broken is not tried again: only the command is."""
    result = await runtime.exec(step.run, env=step.env, seconds=step.seconds)
    for failures in range(1, step.attempts):
        if result.exit_code == 0:
            return
        await asyncio.sleep(pauses.wait(failures - 1))
        result = await runtime.exec(step.run, env=step.env, seconds=step.seconds)
    if result.exit_code == 0:
        return
    ended = f"took longer than {step.seconds:g} s" if result.timed_out else f"exited with {result.exit_code}"
    tried = f", the last of {step.attempts} times" if step.attempts > 1 else ""
    raise RuntimeFailure(
        f"prepare step {number} {ended}{tried}: {step.run[:200]}",
        field=f"task.runtime.prepare.{number}",
        log_tail=result.log_tail(),
    )
