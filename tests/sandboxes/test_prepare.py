"""Prepare steps run in order and with their arguments. A failed command is repeated as often as the task allows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.runtimes.base import ExecResult, Runtime
from outrider.sandbox.sandbox import prepare
from outrider.spec import PrepareCommand, PrepareStep, Upload, Write


class Noting:
    """A fake sandbox that records its calls. Its commands exit with `codes`, in order; None means a timeout."""

    def __init__(self, *codes: int | None, breaks: bool = False) -> None:
        self.done: list[Any] = []
        self._codes = list(codes)
        self._breaks = breaks

    async def exec(self, command: str, *, env: Mapping[str, str], seconds: float) -> ExecResult:
        self.done.append((command, dict(env), seconds))
        if self._breaks:
            raise RuntimeFailure("the sandbox is gone")
        code = self._codes.pop(0) if self._codes else 0
        return ExecResult(exit_code=code, stdout=b"said", stderr=b"", timed_out=code is None)

    async def upload(self, source: Path, target: str) -> None:
        self.done.append((source, target))

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        self.done.append((path, data, executable))


async def prepared(sandbox: Noting, *steps: PrepareStep, files: Path | None = None) -> list[Any]:
    await prepare(cast(Runtime, sandbox), list(steps), paths=HostPaths.of(files))
    return sandbox.done


async def test_steps_are_done_in_order(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    steps = (
        PrepareCommand(run="one", env={"A": "b"}, seconds=5.0),
        Upload(upload="folder", to="there"),
        Write(write="text", to="x"),
    )
    assert await prepared(Noting(), *steps, files=tmp_path) == [
        ("one", {"A": "b"}, 5.0),
        (tmp_path / "folder", "there"),
        ("x", b"text", False),
    ]


@pytest.mark.parametrize(("codes", "runs"), [((0,), 1), ((1, None, 0), 3), ((1, 1, 0), 3)])
async def test_a_command_is_run_again_until_it_succeeds(codes: tuple[int | None, ...], runs: int) -> None:
    assert len(await prepared(Noting(*codes), PrepareCommand(run="fetch", attempts=3, pause_seconds=0.0))) == runs


@pytest.mark.parametrize(
    ("codes", "attempts", "message"),
    [
        ((4,), 1, "prepare step 0 exited with 4"),
        ((4, 5, 6), 3, "prepare step 0 exited with 6, the last of 3 times"),
        ((4, None), 2, "prepare step 0 took longer than 300 s, the last of 2 times"),
    ],
)
async def test_a_command_that_never_succeeds_fails_the_step(
    codes: tuple[int | None, ...], attempts: int, message: str
) -> None:
    sandbox = Noting(*codes, 0)
    with pytest.raises(RuntimeFailure) as failed:
        await prepared(sandbox, PrepareCommand(run="fetch", attempts=attempts, pause_seconds=0.0))
    assert (failed.value.message, failed.value.field, failed.value.log_tail) == (
        message,
        "task.runtime.prepare.0",
        "said",
    )
    assert failed.value.hint == "it ran: fetch"
    assert len(sandbox.done) == attempts


async def test_a_broken_sandbox_is_not_tried_again() -> None:
    sandbox = Noting(breaks=True)
    with pytest.raises(RuntimeFailure, match="gone"):
        await prepared(sandbox, PrepareCommand(run="fetch", attempts=3, pause_seconds=0.0))
    assert len(sandbox.done) == 1
