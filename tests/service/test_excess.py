"""The damage that an agent does to its sandbox is an outcome: the agent gets neither another attempt nor a better
grade."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import Boundary, RuntimeFailure
from outrider.evaluators.base import Outcome
from outrider.lifecycle import StopReason
from outrider.sandbox.runtimes.base import ExecResult
from outrider.trajectory import SessionResult, Verdict

from .conftest import MakeWorld
from .program import program
from .stage import StagedRuntime, _stage
from .test_failures import failed
from .world import World, result_of

FILL = "head -c 9000000 /dev/zero > /work/large"
BOMB = """touch bomb; python3 -c '
import os, time
while True:
    try: os.fork()
    except OSError: time.sleep(0.01)' > /dev/null 2>&1 &
exit 0"""
SLAY = "(while :; do kill -9 -1; done) > /dev/null 2>&1 &"
"""Kills every other process in the sandbox, also those that start later."""
TAKE = "rm -f /usr/bin/python3* /usr/local/bin/python3*"
WRITES = 'printf 1 > "$OUTRIDER_VERDICT"'
SMALL = {"disk_mb": 4}


def call_markup(tool: str, argument: str) -> str:
    arguments = {"command" if tool == "bash" else "code": argument}
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call><|im_end|>"


async def run(w: World, then: str, evaluator: dict[str, Any], *, kind: str = "namespace", **fields: Any) -> Any:
    runtime = {"kind": kind, "resources": fields.pop("resources", {})}
    return await w.run("ask", harness=program(then), evaluator=evaluator, runtime=runtime, max_attempts=2, **fields)


async def excess(w: World, session: Any, *, reward: float = 0.0) -> SessionResult:
    """Check that the session ended as AGENT_EXCESS in its first attempt, and return its result."""
    result = result_of(session)
    assert (result.stop_reason, result.error, result.attempt) == (StopReason.AGENT_EXCESS, None, 1), result
    assert result.verdict is not None
    assert (result.verdict.reward, result.verdict.metrics) == (reward, {"agent_excess": 1.0})
    assert (result.verdict.reason or "").startswith("agent_excess: ")
    samples = await w.service.reader.samples(session.id)
    assert [(sample.reward, sample.stop_reason) for sample in samples] == [(reward, StopReason.AGENT_EXCESS)]
    w.assert_quiet()
    return result


IN_PLACE = {
    "a full disk": (FILL, {"run": WRITES}, SMALL),
    "no shell": ("rm -f /usr/bin/bash /usr/bin/sh", {"run": "true"}, {}),
    "a working directory that may not be entered": ("chmod 000 /work", {"run": "true"}, {}),
    "no working directory": ("cd /; mv /work /away", {"run": "true"}, {}),
    "no process left": (BOMB, {"kind": "callable", "path": "service.test_excess:graded_beside"}, {"pids": 24}),
    "a killer": (SLAY, {"run": "sleep 0.1; true"}, {}),
}


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", IN_PLACE)
async def test_a_sandbox_in_which_nothing_can_be_graded_any_more(world: MakeWorld, temporary: Path, how: str) -> None:
    then, evaluator, resources = IN_PLACE[how]
    async with world(http=True) as w:
        await excess(w, await run(w, then, evaluator, resources=resources))


CARRIED = {
    "a file with a hole that is larger than what is carried": ("mkdir out; truncate -s 3G out/big", ["out"], {}),
    "a hole that takes room where it is carried to": ("mkdir out; truncate -s 12M out/big", ["out"], SMALL),
    "a hole in what was written anywhere": ("truncate -s 6M /root/big", "all", SMALL),
    "a file where the sandbox needs a folder": ("cd /; rmdir /work; touch /work", "all", {}),
}


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", CARRIED)
async def test_what_cannot_be_carried(world: MakeWorld, temporary: Path, how: str) -> None:
    then, carry, resources = CARRIED[how]
    async with world(http=True) as w:
        await excess(w, await run(w, then, {"run": "true", "carry": carry}, resources=resources))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["process", "process-landlock"])
@pytest.mark.parametrize("carry", [{}, {"carry": ["out"]}], ids=["in place", "carried"])
async def test_the_tool_server_is_killed(world: MakeWorld, temporary: Path, kind: str, carry: Any) -> None:
    async with world(http=True) as w:
        result = await excess(w, await run(w, "kill -9 $PPID; sleep 60", {"run": "true", **carry}, kind=kind))
        assert result.verdict is not None
        assert "tool server is gone" in (result.verdict.reason or "")


@pytest.mark.deep
@pytest.mark.timeout(120)
async def test_a_carried_program_kills_its_grader(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True) as w:
        leave = "mkdir out; echo 'kill -9 $PPID' > out/solve"
        await excess(w, await run(w, leave, {"run": "bash out/solve; true", "carry": ["out"]}))
        leave = "mkdir out; echo 'exit 3' > out/solve"  # no excess: the grader decides what this exit code means
        result = result_of(await run(w, leave, {"run": "bash out/solve || exit 1", "carry": ["out"]}))
        assert result.verdict is not None
        assert (result.stop_reason, result.verdict.reward) == (StopReason.COMPLETED, 0.0)


@pytest.mark.deep
@pytest.mark.timeout(120)
async def test_an_evaluator_that_fails_by_itself_is_an_error(world: MakeWorld, temporary: Path) -> None:
    """The error is the evaluator's even if the agent has left its sandbox in disorder."""
    async with world(http=True) as w:
        for run_ in ("exit 7", "kill -9 $$", "echo no number > $OUTRIDER_VERDICT"):
            failed(await run(w, "chmod 000 /root", {"run": run_}), Boundary.EVALUATOR, "evaluator_error")


@pytest.mark.deep
@pytest.mark.timeout(120)
async def test_an_evaluator_that_failed_once_is_no_evidence(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True) as w:
        flaky = {"run": "test -f /tmp/seen && exit 0; touch /tmp/seen; test -f out && exit 7; exit 1"}
        session = await w.run(
            harness=program("touch out"), evaluator=flaky, runtime={"kind": "namespace"}, max_attempts=1
        )
        result = result_of(session)
        assert (result.stop_reason, result.verdict) == (StopReason.COMPLETED, Verdict(reward=1.0))


@pytest.mark.deep
@pytest.mark.timeout(120)
async def test_excess_pays_no_better_than_to_do_nothing(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True) as w:
        grade = 'test -f out && printf 1 > "$OUTRIDER_VERDICT" || printf -- -1 > "$OUTRIDER_VERDICT"'
        await excess(w, await run(w, f"touch out; {FILL}", {"run": grade}, resources=SMALL), reward=-1.0)


class Breakable(StagedRuntime):
    """A runtime whose commands fail after the agent has run `fail`. The failures come from inside the sandbox, or from
    outside if the spec's variable FAILS is `outside`. With `everywhere`, all commands in sandboxes for grading fail,
    too."""

    _broken = False

    async def exec(self, command: Any, **options: Any) -> ExecResult:
        how = self._spec.env["FAILS"]
        if self._broken or (how == "everywhere" and "-g" in self._key[0]):
            raise RuntimeFailure("broken, as it was told to be", inside=how != "outside")
        if command == "fail":
            self._broken = True
            command = "true"
        result: ExecResult = await super().exec(command, **options)
        return result


async def graded_beside(outcome: Outcome) -> float:
    """Run commands beside the bomb until one fails. Returns 0 if there is no bomb."""
    try:
        await outcome.runtime.read("bomb")
    except FileNotFoundError:
        return 0.0
    while True:
        await outcome.runtime.exec("true", seconds=5)


async def graded_by_hand(outcome: Outcome) -> float:
    _stage.get().count["graded"] += 1
    return float((await outcome.runtime.exec("true", seconds=5)).exit_code == 0)


@pytest.mark.parametrize("do", [("ask", "run fail"), ("ask", "run fail", "run true")], ids=["graded", "run"])
@pytest.mark.parametrize("fails", ["inside", "outside", "everywhere"])
async def test_only_what_comes_from_inside_one_sandbox_alone_is_the_agents(
    world: MakeWorld, do: tuple[str, ...], fails: str
) -> None:
    evaluator = {"kind": "callable", "path": "service.test_excess:graded_by_hand"}
    runtime = {"kind": "service.test_excess:Breakable", "env": {"FAILS": fails}}
    async with world() as w:
        session = await w.run(*do, evaluator=evaluator, runtime=runtime, max_attempts=2)
        if fails == "inside":
            await excess(w, session)
            assert w.stage.ledger.started.keys() == {(session.id, 1), (f"{session.id}-g0", 1)}
        else:
            failed(session, Boundary.RUNTIME, "runtime_failure")
            assert session.attempt == 2
            w.assert_quiet()


@pytest.mark.timeout(120)
async def test_a_run_that_the_agent_has_cut_short_is_graded_if_it_can_be(world: MakeWorld, temporary: Path) -> None:
    """An evaluator that does not need the broken sandbox grades the run. If commands fail in other sandboxes, too, the
    session ends with an error."""
    async with world(http=True) as w:
        grader = {"kind": "callable", "path": "service.test_excess:graded_by_turns"}
        session = await run(w, "kill -9 $PPID; sleep 60", grader, kind="process")
        result = result_of(session)
        assert (result.stop_reason, result.error, result.attempt) == (StopReason.AGENT_EXCESS, None, 1)
        assert result.verdict == Verdict(reward=0.25)
        w.assert_quiet()
    runtime = {"kind": "service.test_excess:Breakable", "env": {"FAILS": "everywhere"}}
    async with world() as w:
        session = await w.run("ask", "run fail", "run true", evaluator=grader, runtime=runtime, max_attempts=1)
        failed(session, Boundary.RUNTIME, "runtime_failure")


async def graded_by_turns(outcome: Outcome) -> float:
    assert outcome.stop_reason is StopReason.AGENT_EXCESS
    return outcome.turns / 4


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize("there", [True, False])
async def test_a_tool_that_the_agent_has_taken_away(world: MakeWorld, temporary: Path, there: bool) -> None:
    """If the agent removes the sandbox's Python, this is its excess. If the root never had a Python, the session fails
    with an error of the runtime."""
    take = [] if there else [{"run": TAKE}]
    calls = [call_markup(name, command) for name, command in (("bash", TAKE), ("python", "1"))]
    async with world(calls, http=True) as w:
        runtime = {"kind": "namespace", "prepare": take}
        harness = {"agent": "tools"}
        session = await w.run(harness=harness, evaluator={"run": "exit 1"}, runtime=runtime, max_attempts=1)
        if there:
            result = result_of(session)
            assert result.verdict == Verdict(reward=0.0), result.error
            assert result.stop_reason is StopReason.AGENT_EXCESS
        else:
            error = failed(session, Boundary.RUNTIME, "runtime_failure").error
            assert error is not None
            assert error.message == "no Python in the sandbox"


async def test_a_sandbox_that_breaks_before_the_model_has_spoken_is_a_failure(world: MakeWorld) -> None:
    runtime = {"kind": "service.test_excess:Breakable", "env": {"FAILS": "inside"}}
    async with world() as w:
        session = await w.run("run fail", "run true", "ask", runtime=runtime, max_attempts=2)
        failed(session, Boundary.RUNTIME, "runtime_failure")
        assert session.attempt == 2
