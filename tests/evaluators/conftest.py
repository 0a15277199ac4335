from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessOutcome
from outrider.lifecycle import StopReason
from outrider.sandbox.runtimes.base import Runtime
from outrider.spec import EvaluatorSpec, HarnessSpec, TaskSpec
from support.sandboxes import process_sandbox


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with process_sandbox(tmp_path) as runtime:
        yield runtime


@pytest.fixture
def outcome(sandbox: Runtime) -> Callable[[EvaluatorSpec], Outcome]:
    def of(spec: EvaluatorSpec) -> Outcome:
        return Outcome(
            task=TaskSpec(instruction="x", harness=HarnessSpec(command=["true"]), evaluator=spec),
            runtime=sandbox,
            stop_reason=StopReason.COMPLETED,
            harness=HarnessOutcome(),
            transcript=(),
            turns=1,
        )

    return of
