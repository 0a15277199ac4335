from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessOutcome
from outrider.lifecycle import StopReason
from outrider.runtimes.base import SandboxContext
from outrider.runtimes.host import Host
from outrider.runtimes.process import ProcessRuntime
from outrider.spec import EvaluatorSpec, HarnessSpec, RuntimeSpec, TaskSpec


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[ProcessRuntime]:
    directory = tmp_path / "sandbox"
    directory.mkdir()
    async with Host(tmp_path) as host:
        runtime = ProcessRuntime.create(
            RuntimeSpec(kind="process"),
            SandboxContext(
                session_id="session-1",
                attempt=1,
                directory=directory,
                host=host,
                gateway_url="http://127.0.0.1:9",
                gateway_socket=tmp_path / "gateway.sock",
            ),
        )
        await runtime.start()
        try:
            yield runtime
        finally:
            await runtime.stop()


@pytest.fixture
def outcome(sandbox: ProcessRuntime) -> Callable[[EvaluatorSpec], Outcome]:
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
