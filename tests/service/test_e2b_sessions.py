"""Whole sessions in `e2b` sandboxes: the model's replies, the grade, the clocks, and a killed service."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from outrider.config import SandboxesConfig
from outrider.errors import Boundary, InvalidField
from outrider.lab.fakes.e2b_server.app import FakeE2B
from outrider.lifecycle import StopReason
from outrider.service.principals import Principal
from support.e2b import e2b, variables

from .conftest import MakeWorld
from .program import program
from .world import SAY, group, result_of

pytestmark = pytest.mark.deep  # a test starts servers and many processes

RUNTIME = {"kind": "e2b"}


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeE2B]:
    async with e2b(monkeypatch) as running:
        yield running


def refused(status: int, **headers: str) -> object:
    async def fault(request: web.Request, reply: object) -> web.StreamResponse:
        return web.json_response({"code": status, "message": "not now"}, status=status, headers=headers)

    return fault


async def test_sessions_run_and_are_graded(world: MakeWorld, server: FakeE2B) -> None:
    then = 'case "$answer" in *hello*) echo right > out;; esac'
    async with world([SAY] * 3, http=True) as w:
        submitted = await w.submit(runtime=RUNTIME, harness=program(then), evaluator={"run": "grep right out"}, n=3)
        for session in (await w.done(submitted.id)).sessions:
            result = result_of(session)
            assert (result.error, result.stop_reason) == (None, StopReason.COMPLETED)
            assert result.verdict is not None
            assert result.verdict.reward == 1.0
        assert server.sandboxes == {}
        assert server.made >= 3
        w.assert_quiet()


async def test_a_service_that_fails_gives_an_error_and_no_reward(world: MakeWorld, server: FakeE2B) -> None:
    server.faults["POST /sandboxes"].extend([refused(500)] * 3)  # type: ignore[list-item]  # typed as an object above
    async with world([SAY], http=True) as w:
        session = await w.run(runtime=RUNTIME, harness=program("true"), evaluator={"run": "true"}, max_attempts=1)
        result = result_of(session)
        assert result.error is not None
        assert (result.error.boundary, result.verdict) == (Boundary.RUNTIME, None)
        w.assert_quiet()


async def test_no_clock_runs_while_the_service_has_no_room(world: MakeWorld, server: FakeE2B) -> None:
    full = [refused(429, **{"Retry-After": "3"})] * 4
    server.faults["POST /sandboxes"].extend(full)  # type: ignore[arg-type]  # typed as an object above
    limits = {"prepare_seconds": 8, "session_seconds": 10}
    async with world([SAY], http=True) as w:
        result = result_of(
            await w.run(runtime=RUNTIME, harness=program("true"), evaluator={"run": "true"}, limits=limits)
        )
        assert (result.error, result.stop_reason) == (None, StopReason.COMPLETED)
        assert result.seconds.init > 11
        w.assert_quiet()


KILLED = """
import asyncio
from outrider.sandbox import open_sandbox
from outrider.spec import RuntimeSpec

async def main():
    async with open_sandbox(RuntimeSpec(kind="e2b")) as sandbox:
        print("runs", flush=True)
        await sandbox.exec("sleep 600", seconds=600)

asyncio.run(main())
"""


async def test_the_next_service_removes_what_a_killed_node_has_left(world: MakeWorld, server: FakeE2B) -> None:
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, stdout=subprocess.PIPE, env={**os.environ, **variables(server.url)}
    )
    assert node.stdout is not None
    assert await node.stdout.readline() == b"runs\n"
    node.kill()
    await node.wait()
    assert len(server.sandboxes) == 1
    async with world([SAY]), asyncio.timeout(30):
        while server.sandboxes:  # noqa: ASYNC110  # the server's own state
            await asyncio.sleep(0.05)


async def test_only_tokens_that_may_use_the_kind_use_it(world: MakeWorld, server: FakeE2B) -> None:
    """A sandbox costs money, so tokens may use the kind only if the operator lists it."""
    trainer = Principal("trainer", "submit", "trainer")
    spec = group(runtime=RUNTIME, harness=program("true"), evaluator={"run": "true"})
    async with world([SAY], http=True) as w:
        with pytest.raises(InvalidField, match="e2b"):
            await w.service.submit(spec, trainer)
    async with world([SAY], http=True, sandboxes=SandboxesConfig(runtimes=("e2b",))) as w:
        submitted = await w.service.submit(spec, trainer)
        (session,) = (await w.done(submitted.id)).sessions
        assert result_of(session).error is None
