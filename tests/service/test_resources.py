"""The resources that a task requests are reserved from before its sandbox starts until the sandbox has stopped, and
never twice."""

from __future__ import annotations

import os
from typing import Any

import pytest

from outrider.config import SandboxesConfig
from outrider.errors import InvalidField
from outrider.evaluators.base import Outcome
from outrider.lifecycle import SessionState, StopReason
from outrider.sandbox.gpu_locks import WAIT_SECONDS, lock_gpus
from outrider.sandbox.runtimes.base import Runtime
from outrider.schemas import ResourceStats
from outrider.trajectory import Verdict
from support.clock import pass_time

from .conftest import MakeWorld
from .world import World, group, result_of

SMALL = SandboxesConfig(cpus=2.0, memory_mb=1024, gpus=())


def needing(**resources: Any) -> dict[str, Any]:
    return {"resources": resources}


def resources(w: World) -> ResourceStats:
    return w.node.stats().resources


async def test_sessions_that_need_all_of_it_run_one_after_another(world: MakeWorld) -> None:
    async with world(sandboxes=SMALL) as w:
        view = await w.submit("note in", "ask", "note out", n=3, runtime=needing(memory_mb=1000))
        done = await w.done(view.id)
        assert {result_of(session).stop_reason for session in done.sessions} == {StopReason.COMPLETED}
        assert w.stage.order == ["in", "out"] * 3
        assert (resources(w).served, resources(w).memory_mb_set_aside) == (3, 0)


async def test_it_is_shown_and_given_back_when_the_sandbox_is_stopped(world: MakeWorld) -> None:
    async with world(sandboxes=SMALL) as w:
        view = await w.submit("wait door", "ask", runtime=needing(cpus=1.5, memory_mb=64), verdicts=["wait grading"])
        await w.stage.arrived["door"].wait()
        assert resources(w) == ResourceStats(
            cpus=2.0,
            cpus_set_aside=1.5,
            memory_mb=1024,
            memory_mb_set_aside=64,
            served=1,
            waited_seconds=resources(w).waited_seconds,
        )
        assert (await w.service.status()).nodes[0].resources == resources(w)
        w.stage.open["door"].set()
        await w.stage.arrived["grading"].wait()
        assert resources(w).cpus_set_aside == 1.5
        assert not w.stage.ledger.stopped
        w.stage.open["grading"].set()
        await w.done(view.id)
        assert resources(w).cpus_set_aside == 0


async def test_waiting_is_charged_to_no_limit(world: MakeWorld) -> None:
    async with world(sandboxes=SMALL) as w:
        await w.submit("wait door", "ask", runtime=needing(cpus=2))
        await w.stage.arrived["door"].wait()
        limits = {"session_seconds": 20, "agent_seconds": 20}
        view = await w.submit("ask", runtime=needing(cpus=2), limits=limits)
        while not resources(w).waiting:
            await w.service.status()
        await pass_time(30)
        w.stage.open["door"].set()
        result = result_of((await w.done(view.id)).sessions[0])
        assert result.stop_reason is StopReason.COMPLETED
        assert result.seconds.queued > 0
        assert resources(w).waited_seconds > 0


async def test_what_asks_for_nothing_passes(world: MakeWorld) -> None:
    async with world(sandboxes=SMALL) as w:
        first = await w.submit("wait door", "ask", n=2, runtime=needing(cpus=2))
        await w.stage.arrived["door"].wait()
        await w.run("ask")
        assert resources(w).waiting == 1
        w.stage.open["door"].set()
        await w.done(first.id)


async def test_who_waits_can_be_cancelled(world: MakeWorld) -> None:
    async with world(sandboxes=SMALL) as w:
        await w.submit("wait door", "ask", runtime=needing(cpus=2))
        await w.stage.arrived["door"].wait()
        waiting = await w.submit("ask", runtime=needing(cpus=1))
        await w.state(waiting.sessions[0].id, SessionState.INITIALIZING)
        while not resources(w).waiting:
            await w.service.status()
        await w.service.cancel(waiting.id)
        assert result_of((await w.done(waiting.id)).sessions[0]).stop_reason is StopReason.CANCELLED
        assert resources(w).waiting == 0
        w.stage.open["door"].set()


@pytest.fixture
def three() -> SandboxesConfig:
    """Three GPUs whose names contain this process's id, because other tests on this machine may use GPUs at the same
    time."""
    return SandboxesConfig(cpus=64.0, gpus=tuple(f"{os.getpid()}-{number}" for number in "abc"))


USE = "run echo $NVIDIA_VISIBLE_DEVICES of $CUDA_VISIBLE_DEVICES > gpus"


async def test_each_session_has_gpus_of_its_own(world: MakeWorld, three: SandboxesConfig) -> None:
    a, b, c = three.gpus or ()
    async with world(sandboxes=three) as w:
        both = await w.submit(USE, "wait first", "ask", runtime=needing(gpus=2), artifacts=["gpus"])
        await w.stage.arrived["first"].wait()
        one = await w.submit(USE, "wait second", "ask", runtime=needing(gpus=1), artifacts=["gpus"])
        await w.stage.arrived["second"].wait()
        later = await w.submit(USE, "ask", runtime=needing(gpus=3), artifacts=["gpus"])
        while not resources(w).waiting:
            await w.service.status()
        assert (resources(w).gpus, resources(w).gpus_set_aside) == (3, 3)
        for place in ("first", "second"):
            w.stage.open[place].set()
        had = [gpus_of(w, (await w.done(view.id)).sessions[0].id) for view in (both, one, later)]
        assert had == [f"{a},{b} of 0,1", f"{c} of 0", f"{a},{b},{c} of 0,1,2"]
        assert resources(w).gpus_set_aside == 0


def gpus_of(w: World, session_id: str) -> str:
    """Return the GPUs that the session's agent has recorded."""
    return w.service.artifacts.file(session_id, "/work/gpus").read_text().strip()


@pytest.mark.parametrize("do", [("crash",), ("oddly exit",), ("break",), ("ask", "sleep 0")])
async def test_gpus_are_given_back_however_a_session_ends(
    world: MakeWorld, three: SandboxesConfig, do: tuple[str, ...]
) -> None:
    async with world(sandboxes=three) as w:
        for _ in range(2):
            await w.run(*do, runtime=needing(gpus=3), max_attempts=1)
        cancelled = await w.submit("wait here", runtime=needing(gpus=3))
        await w.stage.arrived["here"].wait()
        await w.service.cancel(cancelled.id)
        await w.done(cancelled.id)
        assert resources(w).gpus_set_aside == 0
        assert result_of(await w.run("ask", runtime=needing(gpus=3))).stop_reason is StopReason.COMPLETED


@pytest.mark.parametrize("gpus", [-1, 65, 1.5, True, "1", None])
def test_gpus_are_a_whole_number(gpus: Any) -> None:
    with pytest.raises(InvalidField) as refused:
        group(runtime=needing(gpus=gpus))
    assert refused.value.field == "task.runtime.resources.gpus"


async def look(outcome: Outcome) -> Verdict:
    """Return the GPUs of the grader's sandbox, and of a sandbox beside it, as the verdict's reason."""

    async def told(runtime: Runtime) -> str:
        return (await runtime.exec("echo $NVIDIA_VISIBLE_DEVICES", seconds=30)).stdout.decode().strip()

    async with outcome.beside() as other:
        return Verdict(reward=1.0, reason=f"{await told(outcome.runtime)} and [{await told(other)}]")


@pytest.mark.parametrize("carry", [["gpus"], "all", None])
async def test_a_grader_has_the_gpus_of_the_session_and_a_sandbox_beside_it_none(
    world: MakeWorld, three: SandboxesConfig, carry: Any
) -> None:
    async with world(sandboxes=three) as w:
        evaluator = {"kind": "callable", "path": "service.test_resources:look", "carry": carry}
        session = await w.run(USE, "ask", runtime=needing(gpus=3), evaluator=evaluator, max_attempts=1)
        verdict = result_of(session).verdict
        assert verdict is not None
        assert verdict.reason == f"{','.join(three.gpus or ())} and []"
        assert resources(w).gpus_set_aside == 0


async def test_a_kind_that_cannot_keep_gpus_apart_is_refused(world: MakeWorld, three: SandboxesConfig) -> None:
    async with world(sandboxes=three) as w:
        for kind in ("process", "process-landlock"):
            with pytest.raises(InvalidField, match=f"'{kind}' sandboxes cannot have GPUs") as refused:
                await w.submit("ask", runtime={"kind": kind, **needing(gpus=1)})
            assert refused.value.field == "task.runtime.resources.gpus"
            assert "'docker', 'podman'" in str(refused.value.hint)


@pytest.mark.deep
async def test_a_gpu_that_another_service_of_this_machine_uses_is_not_used(
    world: MakeWorld, three: SandboxesConfig
) -> None:
    async with world(sandboxes=three) as w:
        with await lock_gpus((three.gpus or ())[:1]):
            view = await w.submit("ask", runtime=needing(gpus=1), max_attempts=1)
            while not resources(w).gpus_set_aside:
                await w.service.status()
            await pass_time(WAIT_SECONDS)
            (session,) = (await w.done(view.id)).sessions
        error = result_of(session).error
        assert error is not None
        assert "in use by another program of this machine" in error.message
        assert error.retryable
        await w.run("ask", runtime=needing(gpus=1), max_attempts=1)


@pytest.mark.parametrize(("name", "value"), [("cpus", 2.5), ("memory_mb", 1025), ("gpus", 1)])
async def test_more_than_the_node_has_is_refused_at_once(world: MakeWorld, name: str, value: float) -> None:
    async with world(sandboxes=SMALL) as w:
        with pytest.raises(InvalidField, match="2 cpus, 1024 MiB") as refused:
            await w.submit("ask", runtime=needing(**{name: value}))
        assert refused.value.field == f"task.runtime.resources.{name}"
        assert f"sandboxes.{name}" in str(refused.value.hint)
        assert await w.service.store.groups() == []
