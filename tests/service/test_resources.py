"""What a task asks for is set aside from before its sandbox is started until it is stopped, and never twice."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import SandboxesConfig
from outrider.errors import InvalidField
from outrider.lifecycle import SessionState, StopReason
from outrider.schemas import ResourceStats
from support.clock import pass_time

from .conftest import MakeWorld
from .world import World, result_of

SMALL = SandboxesConfig(cpus=2.0, memory_mb=1024)


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


@pytest.mark.parametrize(("name", "value"), [("cpus", 2.5), ("memory_mb", 1025)])
async def test_more_than_the_node_has_is_refused_at_once(world: MakeWorld, name: str, value: float) -> None:
    async with world(sandboxes=SMALL) as w:
        with pytest.raises(InvalidField, match="2 cpus, 1024 MiB") as refused:
            await w.submit("ask", runtime=needing(**{name: value}))
        assert refused.value.field == f"task.runtime.resources.{name}"
        assert f"sandboxes.{name}" in str(refused.value.hint)
        assert await w.service.store.groups() == []
