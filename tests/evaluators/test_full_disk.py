"""Grading in a sandbox whose disk the agent has filled gives an error, never a reward."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.errors import EvaluatorError
from outrider.evaluators.factory import make_evaluator
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import EvaluatorSpec, Resources
from runtimes.world import World

FILES = "n=0; while : > /work/$n; do n=$((n + 1)); done 2> /dev/null"
BYTES = "head -c 9000000 /dev/zero > /work/large 2> /dev/null"


@pytest.fixture
async def small() -> AsyncIterator[Runtime]:
    with tempfile.TemporaryDirectory(prefix="or-") as name:
        async with Host(Path(name)) as host:
            sandbox = await World(host).start("namespace", resources=Resources(disk_mb=4))
            try:
                yield sandbox
            finally:
                await sandbox.stop()


@pytest.mark.deep
@pytest.mark.parametrize("fill", [FILES, BYTES], ids=["files", "bytes"])
@pytest.mark.parametrize("number", [0, 1])
async def test_a_verdict_that_could_not_be_written_is_no_reward(
    outcome: Any, small: Runtime, fill: str, number: int
) -> None:
    """The disk is filled by the grader just before it writes the verdict, or is full before the grader begins."""
    late = f'rm -f "$OUTRIDER_VERDICT"; {fill}; printf {number} > "$OUTRIDER_VERDICT"; exit $((1 - {number}))'
    await graded_as_error(outcome, small, late)
    await small.exec(fill, seconds=20)
    await graded_as_error(outcome, small, f'printf {number} > "$OUTRIDER_VERDICT"; true')


async def graded_as_error(outcome: Any, sandbox: Runtime, run: str) -> None:
    spec = EvaluatorSpec(run=run, seconds=20)
    with pytest.raises(EvaluatorError):
        await make_evaluator(spec).evaluate(msgspec.structs.replace(outcome(spec), runtime=sandbox))
