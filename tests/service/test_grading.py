"""Grading in a new sandbox: what is carried into it, when the agent's sandbox ends, and that no sandbox is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.config import SandboxesConfig
from outrider.errors import Boundary, InvalidField, RuntimeFailure
from outrider.evaluators.base import Outcome
from outrider.lifecycle import SessionState, StopReason
from outrider.sandbox.runtimes.base import ExecResult
from outrider.schemas import SessionView
from outrider.trajectory import SessionResult, Verdict
from support.clock import pass_time
from support.waiting import until

from .conftest import MakeWorld
from .stage import StagedRuntime, _stage
from .test_failures import failed
from .world import World, group, result_of

PREPARE = [{"write": "expected", "to": "expected"}, {"run": "mkdir out"}]
TAMPER = "run echo mine > out/answer; echo easy > expected; echo x > left"


class Unsteady(StagedRuntime):
    """A runtime whose first `FAILS` sandboxes for grading do not start."""

    async def start(self) -> None:
        fails = int(self._spec.env.get("FAILS", "0"))
        if "-g" in self._key[0]:
            _stage.get().count["fresh"] += 1
            if _stage.get().count["fresh"] <= fails:
                raise RuntimeFailure("no room for another sandbox")
        await super().start()
        if "-g" in self._key[0]:
            _stage.get().arrived["fresh"].set()


class Unstoppable(Unsteady):
    """A runtime that raises an error when a sandbox for grading is stopped, which plugins must not do."""

    async def stop(self) -> None:
        await super().stop()
        if "-g" in self._key[0]:
            raise OSError("busy")


async def look(outcome: Outcome) -> Any:
    """Record the files to grade, and the sandboxes that are running."""
    stage = _stage.get()
    stage.count["graded"] += 1
    if stage.count["graded"] <= outcome.task.evaluator.options.get("fails", 0):
        raise ValueError("graded badly")
    if place := outcome.task.evaluator.options.get("wait"):
        await stage.wait_at(place)
    listing = await outcome.runtime.exec("ls; cat expected out/answer", seconds=5)
    stage.order.append(listing.stdout.decode())
    stage.order += [name for name, _ in stage.ledger.started.keys() - stage.ledger.stopped.keys()]
    return 0.5


def carried(*do: str, carry: Any = ("out",), runtime: Any = None, options: Any = None, **fields: Any) -> Any:
    """Return the fields of a group whose outcome is graded in a new sandbox."""
    evaluator = {"kind": "callable", "path": "service.test_grading:look", "options": options or {}}
    return {
        "do": do or ("ask", TAMPER),
        "evaluator": {**evaluator, "carry": carry if isinstance(carry, str) else list(carry)},
        "runtime": {"kind": "service.test_grading:Unsteady", "prepare": PREPARE, **(runtime or {})},
        **fields,
    }


async def run(w: World, **given: Any) -> SessionView:
    do = given.pop("do")
    return await w.run(*do, **given)


async def graded(w: World, **given: Any) -> SessionResult:
    result = result_of(await run(w, **given))
    assert result.error is None, result.error
    assert result.verdict == Verdict(reward=0.5)
    return result


async def test_only_the_carried_paths_come_from_the_agent(world: MakeWorld) -> None:
    async with world() as w:
        result = await graded(w, **carried())
        assert w.stage.order == ["expected\nout\nexpectedmine\n", f"{result.session_id}-g0"]
        assert result.seconds.eval > 0
        w.assert_quiet()


async def test_nothing_is_carried_where_nothing_is_named(world: MakeWorld) -> None:
    async with world() as w:
        await graded(w, **carried(carry=()))
        assert w.stage.order[0].startswith("expected\nout\nexpected")
        assert "mine" not in w.stage.order[0]


async def test_everything_is_carried(world: MakeWorld) -> None:
    async with world() as w:
        result = await graded(w, **carried(carry="all"))
        assert w.stage.order == ["expected\nleft\nout\neasy\nmine\n", f"{result.session_id}-g0"]
        w.assert_quiet()


async def test_a_runtime_that_cannot_carry_everything_is_refused(world: MakeWorld) -> None:
    async with world() as w:
        with pytest.raises(InvalidField, match="cannot carry all") as refused:
            await w.submit(evaluator={"run": "true", "carry": "all"}, runtime={"kind": "process"})
        assert refused.value.field == "task.evaluator.carry"
        with pytest.raises(InvalidField, match="root"):
            group(evaluator={"run": "true", "carry": ["."]}, runtime={"workdir": "/"})


async def test_the_new_sandbox_is_started_while_the_agent_runs(world: MakeWorld) -> None:
    async with world() as w:
        given = carried("ask", TAMPER, "wait here")
        view = await w.submit(*given.pop("do"), **given)
        await w.stage.arrived["here"].wait()
        await w.stage.arrived["fresh"].wait()
        assert (f"{view.sessions[0].id}-g0", 1) in w.stage.ledger.started
        assert not w.stage.ledger.stopped
        w.stage.open["here"].set()
        assert result_of((await w.done(view.id)).sessions[0]).verdict is not None
        w.assert_quiet()


@pytest.mark.parametrize(("memory_mb", "ahead"), [(2000, True), (1999, False)])
async def test_two_sandboxes_of_a_session_have_two_shares_or_one_is_made_later(
    world: MakeWorld, memory_mb: int, ahead: bool
) -> None:
    async with world(sandboxes=SandboxesConfig(memory_mb=memory_mb)) as w:

        def set_aside() -> int:
            return w.node.stats().resources.memory_mb_set_aside

        runtime = {"resources": {"memory_mb": 1000}}
        given = carried("ask", TAMPER, "wait here", runtime=runtime, options={"wait": "there"})
        view = await w.submit(*given.pop("do"), **given)
        await w.stage.arrived["here"].wait()
        if ahead:
            await w.stage.arrived["fresh"].wait()
        assert (w.stage.count["fresh"], set_aside()) == ((1, 2000) if ahead else (0, 1000))
        w.stage.open["here"].set()
        await w.stage.arrived["there"].wait()
        assert (w.stage.count["fresh"], set_aside()) == (1, 1000)
        w.stage.open["there"].set()
        assert result_of((await w.done(view.id)).sessions[0]).verdict is not None
        assert set_aside() == 0
        w.assert_quiet()


async def test_the_second_share_is_given_back_whatever_a_plugin_does(world: MakeWorld) -> None:
    async with world(sandboxes=SandboxesConfig(memory_mb=2000)) as w:
        kind = {"kind": "service.test_grading:Unstoppable", "resources": {"memory_mb": 1000}}
        given = carried("ask", "wait fresh", "crash", runtime=kind)
        w.stage.open["fresh"].set()
        session = await w.run(*given.pop("do"), **given, max_attempts=1)
        assert result_of(session).error is not None
        w.assert_quiet()
        assert w.node.stats().resources.memory_mb_set_aside == 0


async def test_a_second_share_is_not_taken_before_those_who_wait(world: MakeWorld) -> None:
    """Six sessions share memory for two sandboxes. A grader's sandbox takes no memory before sessions that wait, so all
    sessions finish."""
    async with world(sandboxes=SandboxesConfig(memory_mb=2500)) as w:
        runtime = {"resources": {"memory_mb": 1000}}
        given = carried("ask", TAMPER, runtime=runtime)
        view = await w.submit(*given.pop("do"), n=6, **given)
        assert all(result_of(session).verdict for session in (await w.done(view.id)).sessions)
        resources = w.node.stats().resources
        assert (resources.memory_mb_set_aside, resources.waiting) == (0, 0)
        w.assert_quiet()


@pytest.mark.parametrize("place", ["here", "there"])
async def test_a_cancel_stops_both_sandboxes(world: MakeWorld, place: str) -> None:
    async with world() as w:
        given = carried("ask", *(["wait here"] if place == "here" else []), options={"wait": "there"})
        view = await w.submit(*given.pop("do"), **given)
        await w.stage.arrived[place].wait()
        both = {(f"{view.sessions[0].id}{end}", 1) for end in ("", "-g0")}
        await until(lambda: w.stage.ledger.started.keys() == both)  # the grader's starts while the agent runs
        await w.service.cancel(view.id)
        assert result_of((await w.done(view.id)).sessions[0]).stop_reason is StopReason.CANCELLED
        w.assert_quiet()


async def test_a_cancel_while_the_new_sandbox_hangs(world: MakeWorld) -> None:
    async with world() as w:
        given = carried("ask", runtime={"kind": "service.test_grading:HangingFresh"})
        view = await w.submit(*given.pop("do"), **given)
        await w.stage.arrived["fresh"].wait()
        await w.state(view.sessions[0].id, SessionState.EVALUATING)
        await w.service.cancel(view.id)
        assert result_of((await w.done(view.id)).sessions[0]).stop_reason is StopReason.CANCELLED
        w.assert_quiet()


class HangingFresh(StagedRuntime):
    async def start(self) -> None:
        await super().start()
        if "-g" in self._key[0]:
            await _stage.get().wait_at("fresh")


async def test_a_new_sandbox_that_is_never_ready_is_no_verdict(world: MakeWorld) -> None:
    async with world() as w:
        given = carried("ask", runtime={"kind": "service.test_grading:HangingFresh"}, max_attempts=1)
        view = await w.submit(*given.pop("do"), **given, limits={"session_seconds": 20})
        await w.stage.arrived["fresh"].wait()
        await w.state(view.sessions[0].id, SessionState.EVALUATING)
        await pass_time(100)  # longer than several tries
        result = failed((await w.done(view.id)).sessions[0], Boundary.RUNTIME, "runtime_failure")
        assert "not ready within 20 s" in str(result.error)
        w.assert_quiet()


@pytest.mark.parametrize(
    ("do", "limits", "ending"),
    [
        (("ask", "crash"), {}, StopReason.ERROR),
        (("ask", "pass 30"), {"agent_seconds": 20}, StopReason.AGENT_TIMEOUT),
        (("ask", "pass 30"), {"session_seconds": 20}, StopReason.SESSION_TIMEOUT),
        (("ask", "ask", "ask"), {"turns": 2}, StopReason.MAX_TURNS),
        (("ask", "break"), {}, StopReason.ERROR),
    ],
)
async def test_every_fate_stops_both_sandboxes(
    world: MakeWorld, do: tuple[str, ...], limits: dict[str, Any], ending: StopReason
) -> None:
    async with world() as w:
        result = result_of(await run(w, **carried(*do), limits=limits, max_attempts=1))
        assert result.stop_reason is ending
        assert (result.verdict is not None) == (ending in (StopReason.AGENT_TIMEOUT, StopReason.MAX_TURNS))
        w.assert_quiet()


async def test_a_new_sandbox_that_fails_ahead_is_started_again(world: MakeWorld) -> None:
    async with world() as w:
        result = await graded(w, **carried(runtime={"env": {"FAILS": "1"}}, max_attempts=1))
        assert w.stage.order[1:] == [f"{result.session_id}-g1"]
        w.assert_quiet()


class Unprepared(StagedRuntime):
    """A runtime whose first sandbox for grading starts but cannot be prepared."""

    async def exec(self, *args: Any, **options: Any) -> ExecResult:
        if self._key[0].endswith("-g0"):
            raise RuntimeFailure("no room in this sandbox")
        result: ExecResult = await super().exec(*args, **options)
        return result


async def test_a_new_sandbox_that_cannot_be_prepared_is_stopped_before_the_next(world: MakeWorld) -> None:
    async with world() as w:
        result = await graded(w, **carried(runtime={"kind": "service.test_grading:Unprepared"}, max_attempts=1))
        assert w.stage.order[1:] == [f"{result.session_id}-g1"]
        w.assert_quiet()


async def test_new_sandboxes_that_keep_failing_are_an_error_of_the_runtime(world: MakeWorld) -> None:
    async with world() as w:
        given = carried(runtime={"env": {"FAILS": "100"}}, max_attempts=2)
        failed(await run(w, **given), Boundary.RUNTIME, "runtime_failure")
        assert w.stage.count["fresh"] == 6  # in each attempt, one ahead and one for each of two tries
        assert w.stage.count["graded"] == 0
        w.assert_quiet()


async def test_each_try_has_a_sandbox_of_its_own(world: MakeWorld) -> None:
    async with world() as w:
        result = await graded(w, **carried(options={"fails": 2}, max_attempts=3))
        assert w.stage.order == ["expected\nout\nexpectedmine\n", f"{result.session_id}-g2"]
        assert result.attempt == 1
        assert len(w.stage.ledger.started) == 4
        w.assert_quiet()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["process", "namespace"])
async def test_nothing_of_the_agent_lives_when_its_work_is_graded(world: MakeWorld, temporary: Path, kind: str) -> None:
    """The agent leaves a process that changes its answer for ever, and a link to the expected answer."""
    left = "(while sleep 0.01; do echo cheat > out/answer; done) > /dev/null 2>&1 &"
    tamper = f"run mkdir out; ln -s ../expected out/link; {left} echo done > out/done; echo evil > shadow"
    check = "echo secret > expected; test -f out/done && ! test -e out/link && ! test -e shadow"
    steady = "rm -f out/answer; sleep 0.2; test ! -e out/answer"
    async with world(http=True) as w:
        result = result_of(
            await w.run(
                "ask",
                tamper,
                runtime={"kind": kind},
                evaluator={"run": f"{check} && {steady}", "carry": ["out"]},
                max_attempts=1,
            )
        )
        assert result.error is None, result.error
        assert result.verdict == Verdict(reward=1.0)


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["process", "namespace"])
async def test_no_agent_escapes_its_grade_by_what_it_leaves(world: MakeWorld, temporary: Path, kind: str) -> None:
    """The agent leaves files that change for ever, pipes in place of files, and folders nested a thousand deep."""
    flip = "head -c 9000000 /dev/zero > out/big; : > out/big; rm -f out/odd; mkfifo out/odd; rm -f out/odd; : > out/odd"
    deep = "mkdir -p out/$(printf 'd/%.0s' $(seq 1200)); touch out/$(printf 'd/%.0s' $(seq 1200))last"
    leave = f"run mkdir out; {deep}; (while :; do {flip}; done) > /dev/null 2>&1 & echo done > out/done"
    async with world(http=True) as w:
        result = result_of(
            await w.run(
                "ask",
                leave,
                runtime={"kind": kind},
                evaluator={"run": 'test -f out/done && test -n "$(find out -name last)"', "carry": ["out"]},
                max_attempts=1,
            )
        )
        assert result.error is None, result.error
        assert result.verdict == Verdict(reward=1.0)


@pytest.mark.timeout(60)
async def test_everything_that_was_written_is_carried_between_real_sandboxes(world: MakeWorld, temporary: Path) -> None:
    write = "run echo 1 > /root/a; rm given; mkdir /work/d; echo 2 > /work/d/b; (sleep 3010 &) > /dev/null 2>&1"
    check = "test $(cat /root/a)$(cat d/b) = 12 && test ! -e given && ! grep -aq [3]010 /proc/[0-9]*/cmdline"
    async with world(http=True) as w:
        result = result_of(
            await w.run(
                "ask",
                write,
                runtime={"kind": "namespace", "prepare": [{"write": "x", "to": "given"}]},
                evaluator={"run": check, "carry": "all"},
                max_attempts=1,
            )
        )
        assert result.error is None, result.error
        assert result.verdict == Verdict(reward=1.0)
