"""Tasks that name no kind of sandbox get the default of their node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.config import SandboxesConfig
from outrider.errors import Boundary, InvalidField
from outrider.lifecycle import StopReason
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.service.principals import Principal
from outrider.spec import EvaluatorSpec, HarnessSpec, RuntimeSpec, StepSpec, TaskSpec, with_default_runtime
from outrider.trajectory import Verdict

from .conftest import MakeWorld
from .stage import StagedRuntime
from .world import group, result_of

KIND = f"{__name__}:Named"


class Named(StagedRuntime):
    """A staged sandbox that records the kinds in the specs from which it is made."""

    asked: list[str | None] = []  # noqa: RUF012

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> Any:
        cls.asked.append(spec.kind)
        return super().create(spec, context)


def test_only_sandboxes_without_a_kind_get_the_default() -> None:
    own = EvaluatorSpec(run="true", carry=["x"], runtime=RuntimeSpec(kind="docker", image="y"))
    task = TaskSpec(
        instruction="x",
        harness=HarnessSpec(command=["true"]),
        evaluator=EvaluatorSpec(run="true", carry=["x"], runtime=RuntimeSpec(workdir="/grade")),
        then=[StepSpec(instruction="y", evaluator=own)],
    )
    filled = with_default_runtime(task, "podman")
    assert (filled.runtime.kind, filled.evaluator.runtime and filled.evaluator.runtime.kind) == ("podman", "podman")
    last = filled.then[0].evaluator.runtime
    assert last == RuntimeSpec(kind="docker", image="y")
    assert task.runtime.kind is None
    assert TaskSpec.model_validate_json(task.model_dump_json()).runtime.kind is None


async def test_a_session_runs_in_the_default_of_its_node(world: MakeWorld) -> None:
    Named.asked.clear()
    async with world(sandboxes=SandboxesConfig(default_kind=KIND)) as w:
        spec = group("ask", runtime={"kind": None})
        assert spec.task.runtime.kind is None
        done = await w.done((await w.service.submit(spec)).id)
        result = result_of(done.sessions[0])
        assert (result.error, result.verdict, Named.asked) == (None, Verdict(reward=1.0), [KIND])
        w.assert_quiet()


async def test_the_default_is_checked_at_submission_by_the_services_own(world: MakeWorld) -> None:
    async with world(sandboxes=SandboxesConfig(default_kind="process")) as w:
        spec = group("ask", runtime={"kind": None}, evaluator={"run": "true", "carry": "all"})
        with pytest.raises(InvalidField, match="'process' sandboxes cannot carry all"):
            await w.service.submit(spec)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"runtime": {"kind": None, "image": "debian"}}, "task.runtime.image"),
        (
            {"evaluator": {"run": "true", "carry": ["answer"], "runtime": {"mounts": [{"source": "/usr"}]}}},
            "task.evaluator.runtime.mounts",
        ),
        ({"runtime": {"kind": None}, "evaluator": {"run": "true", "carry": "all"}}, "task.evaluator.carry"),
    ],
)
async def test_a_node_whose_default_cannot_do_it_ends_the_session_with_an_error_of_the_runtime(
    world: MakeWorld, fields: dict[str, Any], field: str
) -> None:
    async with world(sandboxes=SandboxesConfig(default_kind=KIND, allow=(Path("/usr"),))) as w:
        process = w.node._config.sandboxes.model_copy(update={"default_kind": "process"})
        w.node._config = w.node._config.model_copy(update={"sandboxes": process})
        session = await w.run("ask", max_attempts=2, **fields)
        result = result_of(session)
        assert result.error is not None
        assert (result.error.boundary, result.error.code) == (Boundary.RUNTIME, "runtime_unavailable")
        assert (result.error.field, result.stop_reason, result.verdict) == (field, StopReason.ERROR, None)
        assert result.turns == 0  # the agent did not begin
        assert "'process' sandboxes" in result.error.message
        assert session.attempt == 1
        w.assert_quiet()


async def test_a_token_needs_the_right_to_the_default_kind(world: MakeWorld) -> None:
    stranger = Principal("stranger", "submit", "strangers")
    async with world(sandboxes=SandboxesConfig(default_kind=KIND)) as w:
        with pytest.raises(InvalidField, match="are for admins") as caught:
            await w.service.submit(group("ask", runtime={"kind": None}), stranger)
        assert caught.value.field == "task.runtime.kind"


async def test_a_default_that_is_not_there_is_refused_at_the_start(world: MakeWorld) -> None:
    with pytest.raises(InvalidField, match="unknown runtime 'nonsense'") as caught:
        async with world(sandboxes=SandboxesConfig(default_kind="nonsense")):
            pass
    assert caught.value.field == "sandboxes.default_kind"
