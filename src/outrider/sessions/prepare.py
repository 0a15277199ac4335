"""A task's prepare steps, carried out in a started sandbox, in order."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import RuntimeFailure
from outrider.runtimes.base import Runtime
from outrider.spec import PrepareStep, Run, Upload, Write


async def prepare(runtime: Runtime, steps: list[PrepareStep], *, files: Path) -> None:
    """Raises RuntimeFailure naming the step that failed, with the end of its output."""
    for number, step in enumerate(steps):
        match step:
            case Run():
                await _run(runtime, step, number)
            case Upload():
                await runtime.upload(files / step.upload, step.to)
            case Write():
                await runtime.write(step.to, step.data(), executable=step.executable)


async def _run(runtime: Runtime, step: Run, number: int) -> None:
    result = await runtime.exec(step.run, seconds=step.seconds)
    if result.exit_code == 0:
        return
    ended = f"took longer than {step.seconds:g} s" if result.timed_out else f"exited with {result.exit_code}"
    raise RuntimeFailure(
        f"prepare step {number} {ended}: {step.run[:200]}",
        field=f"task.runtime.prepare.{number}",
        log_tail=result.log_tail(),
    )
