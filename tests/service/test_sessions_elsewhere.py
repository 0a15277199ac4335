"""Whole sessions in sandboxes of the kinds `e2b` and `kubernetes`, also with sandboxes that are made ahead or lost, and
with a service of sandboxes that is busy, full or down.

The invariants of every test: no sandbox is left at the service, each session has one result, and a fault of the service
is an error that is tried again, never a reward.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from outrider.config import PodsConfig, SandboxesConfig
from outrider.errors import Boundary
from outrider.lifecycle import StopReason
from outrider.schemas import SessionView
from outrider.trajectory import SessionResult
from support.waiting import until

from .conftest import MakeWorld
from .elsewhere import NODE, SESSION, Elsewhere, sandboxes, service_elsewhere
from .program import program
from .test_restart import assert_nothing_twice, done_events, finish_all
from .world import SAY, result_of

pytestmark = [pytest.mark.deep, pytest.mark.timeout(120)]

TESTS = Path(__file__).parent.parent
TOOLS: dict[str, Any] = {"agent": "tools"}
GRADER = {"run": "test -f prepared && grep -qx right out"}
PREPARE = [{"run": "echo yes > prepared"}]


@pytest.fixture(params=["e2b", "kubernetes"])
async def elsewhere(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[Elsewhere]:
    async with service_elsewhere(request.param, monkeypatch, tmp_path) as service:
        yield service


def bash(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call><|im_end|>"


def failed(session: SessionView) -> SessionResult:
    """Check that the session ended with an error of the runtime and without a verdict, and return its result."""
    result = result_of(session)
    assert result.error is not None
    assert (result.error.boundary, result.verdict) == (Boundary.RUNTIME, None), result
    return result


def completed(session: SessionView, attempt: int = 1) -> SessionResult:
    result = result_of(session)
    assert (result.error, result.stop_reason, result.attempt) == (None, StopReason.COMPLETED, attempt), result
    assert result.verdict is not None
    assert result.verdict.reward == 1.0
    return result


async def test_a_group_of_tool_agents_is_graded_with_its_artifacts(world: MakeWorld, elsewhere: Elsewhere) -> None:
    replies = [bash("cat prepared; echo right > out; mkdir logs; echo kept > logs/a"), "done<|im_end|>"]
    async with world(replies, http=True, sandboxes=sandboxes(elsewhere.kind)) as w:
        runtime = {**elsewhere.runtime, "prepare": PREPARE}
        view = await w.submit(harness=TOOLS, evaluator=GRADER, runtime=runtime, artifacts=["logs/*", "out"], n=4)
        done = await w.done(view.id, samples=True)
        for session in done.sessions:
            result = completed(session)
            assert result.turns == 2
            listed = w.service.artifacts.listed(session.id, None).artifacts
            assert [(each.path, each.size) for each in listed] == [("/work/logs/a", 5), ("/work/out", 6)]
        assert [sample.reward for sample in done.samples or ()] == [1.0] * 4
        assert elsewhere.made() == 4
        assert elsewhere.labels() == {}
        w.assert_quiet()


async def test_a_program_is_graded_in_a_second_sandbox(world: MakeWorld, elsewhere: Elsewhere) -> None:
    then = 'case "$answer" in *hello*) echo right > out;; esac'
    grader = {"run": "test ! -e begun && grep -qx right out", "carry": ["out"]}
    async with world([SAY], http=True, sandboxes=sandboxes(elsewhere.kind)) as w:
        session = await w.run(harness=program(f"touch begun; {then}"), evaluator=grader, runtime=elsewhere.runtime)
        completed(session)
        assert elsewhere.made() == 2
        w.assert_quiet()


async def test_an_agent_out_of_time_is_graded(world: MakeWorld, elsewhere: Elsewhere) -> None:
    async with world([bash("echo right > out; touch prepared; sleep 600")], sandboxes=sandboxes(elsewhere.kind)) as w:
        limits = {"agent_seconds": 3}
        session = await w.run(harness=TOOLS, evaluator=GRADER, runtime=elsewhere.runtime, limits=limits)
        result = result_of(session)
        assert (result.error, result.stop_reason) == (None, StopReason.AGENT_TIMEOUT)
        assert result.verdict is not None
        assert result.verdict.reward == 1.0
        w.assert_quiet()


@pytest.mark.parametrize("when", ["while they run", "while they start"])
async def test_a_cancelled_group_leaves_nothing(world: MakeWorld, elsewhere: Elsewhere, when: str) -> None:
    if when == "while they start":
        elsewhere.limit(2)
    async with world([SAY], sandboxes=sandboxes(elsewhere.kind)) as w:
        view = await w.submit("ask", "run touch begun", "wait door", runtime=elsewhere.runtime, n=4)
        await w.stage.arrived["door"].wait()
        await until(lambda: len(elsewhere.labels()) == (4 if when == "while they run" else 2))
        await w.service.cancel(view.id)
        for session in (await w.done(view.id)).sessions:
            result = result_of(session)
            assert (result.stop_reason, result.verdict) == (StopReason.CANCELLED, None)
        assert elsewhere.labels() == {}
        w.assert_quiet()


async def test_a_killed_service_doubles_nothing_and_its_sandboxes_are_removed(
    world: MakeWorld, elsewhere: Elsewhere, tmp_path: Path, tokenizer: Path
) -> None:
    arguments = map(str, (tmp_path, tokenizer, elsewhere.kind, elsewhere.runtime.get("image", "")))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service.crash_elsewhere", *arguments), cwd=TESTS, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
    finally:
        process.kill()
        await process.wait()
    left = elsewhere.labels()
    assert len(left) == 6
    assert len({labels[NODE] for labels in left.values()}) == 1
    async with world(http=True, sandboxes=sandboxes(elsewhere.kind)) as w:
        w.stage.count["admit"] = -10  # lets all sessions go on
        await until(lambda: not left.keys() & elsewhere.labels().keys())
        groups = await finish_all(w, 2)
        assert [result_of(session).attempt for group in groups for session in group.sessions] == [1, 1, 2, 2, 2, 2]
        assert [result_of(session).stop_reason for group in groups for session in group.sessions] == ["completed"] * 6
        assert_nothing_twice(groups, await done_events(w))
        assert elsewhere.labels() == {}
        w.assert_quiet()


async def test_sandboxes_are_made_ahead(world: MakeWorld, elsewhere: Elsewhere) -> None:
    given: dict[str, Any] = {"evaluator": GRADER, "runtime": {**elsewhere.runtime, "prepare": PREPARE}}
    do = ("ask", "run test -f prepared && test ! -e out && echo right > out")
    async with world(sandboxes=sandboxes(elsewhere.kind, warm=2, warm_memory_mb=1024)) as w:
        completed(await w.run(*do, **given))
        await until(lambda: w.node.stats().warm.ready == 2)
        ahead = elsewhere.labels()
        assert {labels[SESSION] for labels in ahead.values()} == {"warm-0", "warm-1"}
        completed(await w.run(*do, **given))
        assert (w.node.stats().warm.taken, w.node.stats().warm.misses) == (1, 1)
        await until(lambda: w.node.stats().warm.ready == 2)
        # No session gets a sandbox that the service has ended: the session completes in its first attempt, in a sandbox
        # of its own or in a new one that was made ahead.
        for name in elsewhere.labels():
            await elsewhere.lose(name)
        completed(await w.run(*do, **given))
        await until(lambda: w.node.stats().warm.ready == 2)
        assert w.node.stats().warm.taken + w.node.stats().warm.misses == 3
    assert elsewhere.labels() == {}


async def test_sandboxes_made_ahead_give_way_to_sessions(world: MakeWorld, elsewhere: Elsewhere) -> None:
    """Sandboxes that wait for sessions of one kind use up a quota of two. A session of another kind gets room."""
    other = {**elsewhere.runtime, "env": {"ANOTHER": "kind"}}
    async with world(sandboxes=sandboxes(elsewhere.kind, warm=2)) as w:
        completed(await w.run(*WORK[:2], evaluator=GRADER, runtime=elsewhere.runtime))
        await until(lambda: w.node.stats().warm.ready == 2)
        elsewhere.limit(2)
        async with asyncio.timeout(30):
            completed(await w.run(*WORK[:2], evaluator=GRADER, runtime=other))
        assert w.node.stats().warm.taken == 0
        assert len(elsewhere.labels()) <= 1  # nothing is made ahead for a minute


WORK = ("ask", "run echo right > out; touch prepared", "wait door", "run sleep 2; test -f out")
LOSSES = {
    "one sandbox is ended": lambda here: here.lose(next(iter(here.labels()))),
    "the connection breaks": lambda here: here.cut(),
}


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
async def test_a_sandbox_lost_in_a_command_is_an_error_and_tried_again(
    world: MakeWorld, elsewhere: Elsewhere, loss: str, attempts: int
) -> None:
    async with world(sandboxes=sandboxes(elsewhere.kind)) as w:
        view = await w.submit(*WORK, evaluator=GRADER, runtime=elsewhere.runtime, max_attempts=attempts)
        await w.stage.arrived["door"].wait()
        w.stage.open["door"].set()
        await asyncio.sleep(0.3)  # in the command or just before: the outcome is the same
        await LOSSES[loss](elsewhere)
        (session,) = (await w.done(view.id)).sessions
        if attempts == 1:
            failed(session)
        else:
            completed(session, attempt=2)
            assert session.last_error is not None
            assert session.last_error.code == "runtime_failure"
        w.assert_quiet()


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_service_is_asked_again(world: MakeWorld, elsewhere: Elsewhere, status: int) -> None:
    elsewhere.refuse(status, times=2)
    async with world(sandboxes=sandboxes(elsewhere.kind)) as w:
        completed(await w.run(*WORK[:2], evaluator=GRADER, runtime=elsewhere.runtime, max_attempts=1))
        w.assert_quiet()


async def test_a_service_that_dies_is_an_error_and_its_return_ends_the_wait(
    world: MakeWorld, elsewhere: Elsewhere, request: pytest.FixtureRequest
) -> None:
    """A later sweep removes the sandbox that could not be removed meanwhile."""
    request.addfinalizer((patched := pytest.MonkeyPatch()).undo)
    for module in ("kubernetes.cluster", "e2b.service"):
        patched.setattr(f"outrider.sandbox.runtimes.{module}.REMOVE_SECONDS", 0.5)
    pods = PodsConfig(namespace="rl", queue_seconds=4.0)
    settings = sandboxes(elsewhere.kind, **({"kubernetes": pods} if elsewhere.kind == "kubernetes" else {}))
    async with world(sandboxes=settings) as w:
        view = await w.submit(*WORK, evaluator=GRADER, runtime=elsewhere.runtime, max_attempts=1)
        await w.stage.arrived["door"].wait()
        elsewhere.die()
        w.stage.open["door"].set()
        (session,) = (await w.done(view.id)).sessions
        failed(session)
        failed(await w.run(*WORK[:2], evaluator=GRADER, runtime=elsewhere.runtime, max_attempts=1))
        assert len(elsewhere.labels()) == 1
        elsewhere.revive()
        patched.undo()  # the last sweep has its usual time limit
        completed(await w.run(*WORK[:2], evaluator=GRADER, runtime=elsewhere.runtime, max_attempts=1))
        w.assert_quiet()
    assert elsewhere.labels() == {}  # the last sweep


async def test_a_full_service_is_waited_for(world: MakeWorld, elsewhere: Elsewhere) -> None:
    """A quota of one: the sessions run one after another, and no clock runs while they wait."""
    elsewhere.limit(1)
    limits = {"prepare_seconds": 4, "session_seconds": 8}
    do = ("ask", "run echo right > out; touch prepared; sleep 1.5")
    async with world(sandboxes=sandboxes(elsewhere.kind)) as w:
        view = await w.submit(*do, evaluator=GRADER, runtime=elsewhere.runtime, n=3, limits=limits, max_attempts=1)
        sessions = [completed(session) for session in (await w.done(view.id)).sessions]
        assert max(result.seconds.init for result in sessions) > 3
        w.assert_quiet()


async def test_no_clock_runs_while_a_start_waits_for_its_turn(world: MakeWorld, elsewhere: Elsewhere) -> None:
    limits = {"prepare_seconds": 3, "session_seconds": 5}
    settings = sandboxes(elsewhere.kind, starts_per_second=0.4)
    async with world(sandboxes=settings) as w:
        do = WORK[:2]
        view = await w.submit(*do, evaluator=GRADER, runtime=elsewhere.runtime, n=4, limits=limits, max_attempts=1)
        results = [completed(session) for session in (await w.done(view.id)).sessions]
        assert max(result.seconds.init for result in results) > 7
        w.assert_quiet()


async def test_no_clock_runs_while_the_service_is_slow_to_make_a_sandbox(
    world: MakeWorld, elsewhere: Elsewhere
) -> None:
    elsewhere.delay(5)
    limits = {"prepare_seconds": 3, "session_seconds": 5}
    async with world(sandboxes=sandboxes(elsewhere.kind)) as w:
        done = await w.run(*WORK[:2], evaluator=GRADER, runtime=elsewhere.runtime, limits=limits, max_attempts=1)
        assert completed(done).seconds.init > 5


async def test_nothing_is_set_aside_on_the_node(world: MakeWorld, elsewhere: Elsewhere) -> None:
    """The memory is another machine's, so sessions run although the node has less than one sandbox requests."""
    settings = SandboxesConfig(**{**dict(sandboxes(elsewhere.kind)), "memory_mb": 64, "cpus": 0.5})
    runtime = {**elsewhere.runtime, "resources": {"memory_mb": 256, "cpus": 1}}
    async with world(sandboxes=settings) as w:
        view = await w.submit(*WORK[:2], evaluator=GRADER, runtime=runtime, n=2, max_attempts=1)
        for session in (await w.done(view.id)).sessions:
            completed(session)
