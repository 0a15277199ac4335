"""Grading in a sandbox of the evaluator's own runtime, after the last step and between steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.config import SandboxesConfig
from outrider.errors import Boundary, EvaluatorError, InvalidField
from outrider.evaluators.base import Outcome
from outrider.lifecycle import SessionState, StopReason
from outrider.spec import EvaluatorSpec, RegradeSpec, TaskSpec
from outrider.trajectory import Verdict

from .conftest import MakeWorld
from .program import program
from .stage import SANDBOX, StagedRuntime, _stage
from .test_excess import BOMB
from .test_failures import failed
from .world import World, group, result_of

AGENTS = {"prepare": [{"write": "expected", "to": "expected"}, {"run": "mkdir out; echo first > out/answer"}]}
GRADERS = {"kind": SANDBOX, "workdir": "/grade", "env": {"WHO": "grader"}, "prepare": [{"write": "key", "to": "key"}]}


async def look(outcome: Outcome) -> Any:
    """Record the files to grade and the running sandboxes, and return the reward of the options."""
    stage, options = _stage.get(), outcome.task.evaluator.options
    if place := options.get("wait"):
        await stage.wait_at(place)
    listing = await outcome.runtime.exec("pwd; ls; echo $WHO; ls /work; cat /work/out/answer", seconds=5)
    stage.order.append(listing.stdout.decode())
    alive = stage.ledger.started.keys() - stage.ledger.stopped.keys()
    stage.order.append(" ".join(sorted(name.rpartition("-")[2] for name, _ in alive)))
    if options.get("needs") and not (await outcome.runtime.exec(options["needs"], seconds=5)).exit_code == 0:
        raise EvaluatorError("what is needed is not there", inside=True)
    return options.get("reward", 0.5)


def graded(carry: Any = ("out",), runtime: Any = None, **options: Any) -> dict[str, Any]:
    callable_ = {"kind": "callable", "path": "service.test_own_runtime:look", "options": options}
    return {**callable_, "carry": list(carry), "runtime": {**GRADERS, **(runtime or {})}}


async def run(w: World, *do: str, **fields: Any) -> Any:
    return await w.run(*do, **{"runtime": AGENTS, "evaluator": graded(), **fields})


def step(**evaluator: Any) -> dict[str, Any]:
    return {"instruction": "go on", "evaluator": graded(**evaluator)}


async def test_only_what_is_carried_is_there_and_the_rest_is_the_graders(world: MakeWorld) -> None:
    async with world() as w:
        result = result_of(await run(w, "ask", "run echo mine > out/answer; echo x > expected"))
        assert result.verdict == Verdict(reward=0.5)
        assert w.stage.order == ["/grade\nkey\ngrader\nout\nmine\n", "g0"]
        w.assert_quiet()


async def test_relative_paths_begin_where_the_agents_do(world: MakeWorld) -> None:
    """A relative path is resolved in the agent's working directory and is at the same place in the grader's sandbox,
    whose working directory is another one."""
    async with world() as w:
        await run(w, "ask", "run echo mine > /work/out/answer", evaluator=graded(carry=["./out/answer"]))
        assert w.stage.order[0] == "/grade\nkey\ngrader\nout\nmine\n"


async def test_what_the_agent_took_away_is_not_there_though_the_grader_has_it(world: MakeWorld) -> None:
    async with world() as w:
        own = graded(runtime={"prepare": [{"run": "mkdir -p /work/out; echo the graders > /work/out/answer"}]})
        await run(w, "ask", "run rm out/answer", evaluator={**own, "carry": ["out/answer"]})
        assert w.stage.order[0] == "/grade\ngrader\nout\n"


async def test_it_is_started_while_the_agent_runs(world: MakeWorld) -> None:
    async with world() as w:
        view = await w.submit("ask", "wait here", runtime=AGENTS, evaluator=graded())
        await w.stage.arrived["here"].wait()
        while (f"{view.sessions[0].id}-g0", 1) not in w.stage.ledger.started:
            await w.service.status()
        w.stage.open["here"].set()
        assert result_of((await w.done(view.id)).sessions[0]).verdict is not None
        w.assert_quiet()


async def test_a_step_between_is_graded_elsewhere_while_the_agents_sandbox_goes_on(world: MakeWorld) -> None:
    async with world() as w:
        session = await run(
            w,
            "ask",
            "run echo x > left",
            evaluator=graded(reward=1.0),
            then=[step(carry=["left"], reward=0.5), {**step(), "evaluator": {"kind": "callable", "path": IN_PLACE}}],
        )
        result = result_of(session)
        assert result.verdict is not None, result
        assert [result.verdict.metrics[f"step{number}.reward"] for number in (1, 2, 3)] == [1.0, 0.5, 0.25]
        assert w.stage.order == [
            *("/grade\nkey\ngrader\nout\nfirst\n", f"{session.sample_index} g0"),
            *("/grade\nkey\ngrader\nleft\n", f"{session.sample_index} g1"),
            *("expected\nleft\nout\n", f"{session.sample_index}"),
        ]
        w.assert_quiet()


IN_PLACE = "service.test_own_runtime:in_place"


async def in_place(outcome: Outcome) -> float:
    stage = _stage.get()
    stage.order.append((await outcome.runtime.exec("ls", seconds=5)).stdout.decode())
    alive = stage.ledger.started.keys() - stage.ledger.stopped.keys()
    stage.order.append(" ".join(sorted(name.rpartition("-")[2] for name, _ in alive)))
    return 0.25


async def test_between_steps_a_sandbox_of_the_agents_runtime_grades_too(world: MakeWorld) -> None:
    async with world() as w:
        evaluator = {**graded(), "runtime": None}
        session = await run(w, "ask", "run echo mine > out/answer; echo x > left", evaluator=evaluator, then=[step()])
        assert result_of(session).verdict is not None
        assert w.stage.order[0] == "/work\nexpected\nout\n\nexpected\nout\nmine\n"
        w.assert_quiet()


@pytest.mark.parametrize("place", ["in the run", "in the grading"])
async def test_a_cancel_between_steps_stops_both_sandboxes(world: MakeWorld, place: str) -> None:
    async with world() as w:
        do = ("ask", "wait it") if place == "in the run" else ("ask",)
        options = {"wait": "it"} if place == "in the grading" else {}
        view = await w.submit(*do, runtime=AGENTS, evaluator=graded(**options), then=[step()])
        await w.stage.arrived["it"].wait()
        await w.service.cancel(view.id)
        assert result_of((await w.done(view.id)).sessions[0]).stop_reason is StopReason.CANCELLED
        w.assert_quiet()


async def test_a_step_that_runs_out_of_the_sessions_time_leaves_no_grader(world: MakeWorld) -> None:
    async with world() as w:
        session = await run(w, "ask", "pass 30", then=[step()], limits={"session_seconds": 20})
        assert result_of(session).stop_reason is StopReason.SESSION_TIMEOUT
        w.assert_quiet()


async def test_tries_between_steps_have_a_sandbox_each_and_the_agents_is_not_run_again(world: MakeWorld) -> None:
    async with world() as w:
        evaluator = graded(needs="cat /nowhere")  # fails in an untouched sandbox, too
        session = await run(w, "ask", evaluator=evaluator, then=[step()], max_attempts=2)
        result = failed(session, Boundary.EVALUATOR, "evaluator_error")
        assert "what is needed" in str(result.error)
        # g0 and g1 are the two tries. g2 and g3 are untouched sandboxes of the agent's and the grader's runtime.
        names = [(name.rpartition("-")[2], attempt) for name, attempt in w.stage.ledger.started]
        assert names == [(name, 1) for name in ("0", "g0", "g1", "g2", "g3")]
        w.assert_quiet()


@pytest.mark.parametrize("between", [True, False], ids=["between steps", "at the end"])
async def test_who_makes_its_grading_impossible_earns_nothing(world: MakeWorld, between: bool) -> None:
    """The grader needs a file that exists in an untouched sandbox of the agent's runtime, but not in one of the
    grader's runtime."""
    async with world() as w:
        evaluator = graded(needs="cat /work/out/answer")
        then = [step()] if between else []
        session = await run(w, "ask", "run rm out/answer", evaluator=evaluator, then=then, max_attempts=2)
        result = result_of(session)
        assert (result.stop_reason, result.error, result.attempt) == (StopReason.AGENT_EXCESS, None, 1), result
        assert result.verdict is not None
        assert (result.verdict.reward, result.verdict.metrics) == (0.0, {"agent_excess": 1.0})
        w.assert_quiet()


async def test_what_collects_belongs_to_a_sandbox_in_which_nothing_was_done(world: MakeWorld) -> None:
    async with world() as w:
        collect = [{"run": "ls out > out/listing"}]
        evaluator = graded(needs="cat /work/out/listing")
        honest = result_of(await run(w, "ask", evaluator=evaluator, collect=collect))
        assert honest.verdict == Verdict(reward=0.5)
        broken = await run(w, "ask", "run rm -r out; echo x > out", evaluator=evaluator, collect=collect)
        assert result_of(broken).stop_reason is StopReason.AGENT_EXCESS


async def test_a_grader_that_cannot_be_prepared_is_no_verdict_and_its_field_is_named(world: MakeWorld) -> None:
    async with world() as w:
        broken = graded(runtime={"prepare": [{"run": "true"}, {"run": "exit 3"}]})
        result = failed(await run(w, "ask", evaluator=broken, max_attempts=1), Boundary.RUNTIME, "runtime_failure")
        assert result.error is not None
        assert result.error.field == "task.evaluator.runtime.prepare.1"
        later = {"instruction": "go on", "evaluator": broken}
        result = failed(await run(w, "ask", then=[later], max_attempts=1), Boundary.RUNTIME, "runtime_failure")
        assert result.error is not None
        assert result.error.field == "task.then.0.evaluator.runtime.prepare.1"
        w.assert_quiet()


class Imageless(StagedRuntime):
    """A runtime whose image existed when the task was submitted, and is gone when a sandbox starts."""

    async def start(self) -> None:
        raise InvalidField("there is no such image", field="task.runtime.image")


async def test_a_graders_image_that_is_gone_is_named_by_its_field(world: MakeWorld) -> None:
    async with world() as w:
        evaluator = graded(runtime={"kind": "service.test_own_runtime:Imageless"})
        result = result_of(await run(w, "ask", evaluator=evaluator))
        assert (result.stop_reason, result.verdict, result.attempt) == (StopReason.ERROR, None, 1)
        assert result.error is not None
        assert result.error.field == "task.evaluator.runtime.image"
        w.assert_quiet()


async def test_beside_is_a_sandbox_like_the_graders(world: MakeWorld) -> None:
    async with world() as w:
        evaluator = {**graded(), "path": "service.test_own_runtime:beside"}
        assert result_of(await run(w, "ask", evaluator=evaluator)).verdict == Verdict(reward=1.0)
        w.assert_quiet()


async def beside(outcome: Outcome) -> float:
    async with outcome.beside() as runtime:
        said = await runtime.exec("pwd; ls; echo $WHO", seconds=5)
        return float(said.stdout == b"/grade\nkey\ngrader\n")


NEEDS = {"memory_mb": 400}


async def test_both_sandboxes_of_a_step_between_are_set_aside(world: MakeWorld) -> None:
    async with world(sandboxes=SandboxesConfig(memory_mb=1000)) as w:

        def set_aside() -> int:
            return w.node.stats().resources.memory_mb_set_aside

        needing = graded(runtime={"resources": NEEDS}, wait="there")
        task: dict[str, Any] = {"runtime": {**AGENTS, "resources": {"memory_mb": 500}}, "evaluator": needing}
        view = await w.submit("ask", "wait here", n=3, then=[step()], **task)
        await w.stage.arrived["here"].wait()
        assert set_aside() == 900  # for one session: the next one waits until there is room for both of its sandboxes
        w.stage.open["here"].set()
        await w.stage.arrived["there"].wait()
        assert set_aside() == 900
        w.stage.open["there"].set()
        assert all(result_of(session).verdict for session in (await w.done(view.id)).sessions)
        assert set_aside() == 0
        w.assert_quiet()


async def test_a_last_grader_that_needs_more_than_the_agent_takes_its_place(world: MakeWorld) -> None:
    async with world(sandboxes=SandboxesConfig(memory_mb=1000)) as w:
        large = graded(runtime={"resources": {"memory_mb": 900}}, wait="there")
        view = await w.submit("ask", runtime={**AGENTS, "resources": {"memory_mb": 100}}, evaluator=large)
        await w.stage.arrived["there"].wait()
        assert w.node.stats().resources.memory_mb_set_aside == 900
        w.stage.open["there"].set()
        assert result_of((await w.done(view.id)).sessions[0]).verdict is not None
        with pytest.raises(InvalidField, match="with the sandboxes for grading, is more than a node has"):
            await w.submit("ask", evaluator=graded(runtime={"resources": {"memory_mb": 1001}}))
        task = {"resources": {"memory_mb": 600}}
        with pytest.raises(InvalidField, match="1200, with the"):
            await w.submit("ask", runtime=task, evaluator=graded(runtime=task), then=[step()])


@pytest.mark.parametrize(
    ("evaluator", "then", "says"),
    [
        ({"runtime": {}}, [], "needs 'carry' with the paths"),
        ({"runtime": {}, "carry": "all"}, [], "needs 'carry' with the paths"),
        ({"runtime": {}, "carry": {"diff": "."}}, [], "needs 'carry' with the paths"),
        ({"runtime": {"imag": "x"}, "carry": []}, [], "unknown field"),
        ({"carry": "all"}, [{"run": "true"}], "must be a list of paths if another step follows"),
        ({"carry": {"diff": "."}}, [{"run": "true"}], "must be a list of paths if another step follows"),
        ({"carry": ["x"], "keep": True}, [{"run": "true"}], "keep is for the last step"),
        ({"carry": ["/work/.."]}, [{"run": "true"}], "must not contain"),
        ({"carry": ["/"]}, [{"run": "true"}], "not the sandbox's root"),
    ],
)
def test_what_cannot_be_is_refused(evaluator: dict[str, Any], then: list[dict[str, Any]], says: str) -> None:
    later = [{"instruction": "go on", "evaluator": one} for one in then]
    with pytest.raises(InvalidField, match=says):
        group("ask", evaluator={"run": "true", **evaluator}, then=later)


async def test_what_was_kept_is_graded_again_in_the_graders_runtime(world: MakeWorld) -> None:
    async with world() as w:
        session = await run(w, "ask", "run echo mine > out/answer", evaluator={**graded(), "keep": True})
        again = await w.service.regrade_session(session.id, RegradeSpec())
        assert result_of((await w.done(again.id)).sessions[0]).verdict == Verdict(reward=0.5)
        assert w.stage.order[2:] == w.stage.order[:2]
        other = graded(runtime={"workdir": "/other", "prepare": []}, reward=0.75)
        asked = RegradeSpec(evaluator=EvaluatorSpec.model_validate(other))
        again = await w.service.regrade_session(session.id, asked)
        assert result_of((await w.done(again.id)).sessions[0]).verdict == Verdict(reward=0.75)
        assert w.stage.order[4] == "/other\ngrader\nout\nmine\n"
        plain = EvaluatorSpec(kind="callable", path="service.test_own_runtime:look")
        again = await w.service.regrade_session(session.id, RegradeSpec(evaluator=plain))
        assert result_of((await w.done(again.id)).sessions[0]).verdict == Verdict(reward=0.5)
        assert w.stage.order[6] == "/work\nexpected\nout\n\nexpected\nout\nmine\n"
        w.assert_quiet()


async def test_who_grades_again_names_no_image_that_tasks_may_not_name(world: MakeWorld) -> None:
    async with world(sandboxes=SandboxesConfig(images=("python",))) as w:
        session = await run(w, "ask", evaluator={**graded(), "keep": True})
        for runtime, field in (({"image": "evil"}, "image"), ({"mounts": [{"source": "/etc"}]}, "mounts.0.source")):
            asked = RegradeSpec(evaluator=EvaluatorSpec.model_validate(graded(runtime=runtime)))
            with pytest.raises(InvalidField, match="may name") as refused:
                await w.service.regrade_session(session.id, asked)
            assert refused.value.field == f"evaluator.runtime.{field}"


async def test_what_was_not_kept_has_no_sandbox_to_be_graded_in(world: MakeWorld) -> None:
    async with world() as w:
        session = await run(w, "ask")
        for asked in (RegradeSpec(), RegradeSpec(evaluator=EvaluatorSpec.model_validate(graded()))):
            with pytest.raises(InvalidField, match="were not kept") as refused:
                await w.service.regrade_session(session.id, asked)
            assert refused.value.field == "evaluator.runtime"


async def test_an_agent_that_is_in_excess_when_graded_again_was_so_against_both_sandboxes(world: MakeWorld) -> None:
    async with world() as w:
        session = await run(w, "ask", "run rm out/answer", evaluator={**graded(), "keep": True})
        needy = EvaluatorSpec.model_validate(graded(needs="cat /work/out/answer"))
        again = await w.service.regrade_session(session.id, RegradeSpec(evaluator=needy))
        assert result_of((await w.done(again.id)).sessions[0]).stop_reason is StopReason.AGENT_EXCESS
        w.assert_quiet()


class Frail(StagedRuntime):
    """A runtime whose sandboxes cannot restore carried files."""

    async def restore(self, archive: Path, paths: Any) -> None:
        raise ValueError("not mine")


async def test_a_grader_of_a_plugin_that_fails_is_no_verdict(world: MakeWorld) -> None:
    async with world() as w:
        kind = {"kind": "service.test_own_runtime:Frail"}
        session = await run(w, "ask", evaluator=graded(runtime=kind), then=[step()], max_attempts=1)
        assert result_of(session).stop_reason is StopReason.ERROR
        w.assert_quiet()


def test_the_spec_is_stored_whole() -> None:
    task = group("ask", evaluator=graded(), then=[step()]).task
    assert TaskSpec.model_validate_json(task.model_dump_json()) == task


@pytest.mark.deep
@pytest.mark.timeout(120)
async def test_real_sandboxes_of_a_step_between_and_of_the_last(world: MakeWorld, temporary: Path) -> None:
    """Processes that the agent has left go on in the next step. Links and files that are not carried do not reach the
    grader."""
    leave = "ln -s /secret out/link; (while sleep 0.05; do date > beat; done) > /dev/null 2>&1 & echo 1 > out/a; exit 0"
    grader = {"kind": "namespace", "workdir": "/grade", "prepare": [{"run": "echo s > /secret; echo 1 > expected"}]}
    check = "cmp /work/out/a expected && ! test -L /work/out/link && ! test -e /work/beat"
    beats = (
        "rm -f beat; for _ in $(seq 300); do test -s beat && break; sleep 0.1; done; test -s beat && ! test -e /secret"
    )
    async with world(http=True) as w:
        session = await w.run(
            harness=program(f"mkdir -p out; {leave}"),
            runtime={"kind": "namespace"},
            evaluator={"run": check, "carry": ["out"], "runtime": grader},
            then=[
                {
                    "instruction": "two",
                    "evaluator": {"run": beats},
                },
                {"instruction": "three", "evaluator": {"run": check, "carry": ["out"], "runtime": grader}},
            ],
        )
        result = result_of(session)
        assert result.verdict is not None, result
        assert [result.verdict.metrics[f"step{number}.reward"] for number in (1, 2, 3)] == [1.0, 1.0, 1.0]
        w.assert_quiet()


@pytest.mark.timeout(120)
async def test_what_does_not_fit_between_steps_is_the_agents_doing(world: MakeWorld, temporary: Path) -> None:
    small = {"kind": "namespace", "resources": {"disk_mb": 4}}
    async with world(http=True) as w:
        session = await w.run(
            harness=program("mkdir out; truncate -s 3G out/big; exit 0"),
            runtime={"kind": "namespace"},
            evaluator={"run": "true", "carry": ["out"], "runtime": small},
            then=[{"instruction": "two", "evaluator": {"run": "true"}}],
        )
        result = result_of(session)
        assert (result.stop_reason, result.error, result.attempt) == (StopReason.AGENT_EXCESS, None, 1), result
        w.assert_quiet()


@pytest.mark.deep
@pytest.mark.timeout(120)
async def test_processes_without_number_between_steps_are_the_agents_doing(world: MakeWorld, temporary: Path) -> None:
    """Processes are not ended between steps, because the next step may need them."""
    async with world(http=True) as w:
        session = await w.run(
            harness=program(BOMB),
            runtime={"kind": "namespace", "resources": {"pids": 24}},
            evaluator={"run": "true", "carry": ["bomb"], "runtime": {"kind": "namespace"}},
            then=[{"instruction": "two", "evaluator": {"run": "true"}}],
        )
        result = result_of(session)
        assert (result.stop_reason, result.error, result.attempt) == (StopReason.AGENT_EXCESS, None, 1), result
        w.assert_quiet()


async def test_the_state_of_a_session_that_is_graded_between_steps_is_running(world: MakeWorld) -> None:
    async with world() as w:
        view = await w.submit("ask", runtime=AGENTS, evaluator=graded(wait="there"), then=[step()])
        await w.stage.arrived["there"].wait()
        assert (await w.service.reader.session(view.sessions[0].id)).state is SessionState.RUNNING
        w.stage.open["there"].set()
        await w.done(view.id)
