"""Sessions of agents that run elsewhere, with slow models, hostile callers and agent services that misbehave."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from outrider.client.client import Client
from outrider.errors import InvalidField
from outrider.service.admission import parse_body
from outrider.service.scheduler import EXTERNAL_AT_ONCE
from outrider.spec import ReportSpec
from support.service import say, scripted_engine
from support.waiting import until

from .test_remote import SECRET, declared, submitted, with_agents
from .world import Agent, Owner, elsewhere


@pytest.mark.deep
async def test_idle_time_begins_at_the_end_of_a_call(tmp_path: Path) -> None:
    """A model call may last longer than `idle_seconds`; the idle time begins again when the call ends."""
    engine = scripted_engine(tmp_path, [{"reply": say("slow"), "stall": 1}])
    async with elsewhere(tmp_path, engine=engine) as world:
        opened = await world.owner.open(idle_seconds=1.0)
        await asyncio.sleep(0.5)
        asking = asyncio.create_task(world.agent(opened).ask("Slow?"))
        await asyncio.sleep(1.2)
        engine.release()
        await asking
        await asyncio.sleep(0.6)
        assert (await world.owner.complete(opened, reward=1)).status_code == 200
        assert (await world.owner.result(opened))["verdict"]["reward"] == 1


async def test_a_huge_error_of_an_agent_service_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_SECRET", SECRET)

    async def fails(agent: Agent, run: dict[str, Any]) -> dict[str, Any]:
        return {"status": "failed", "error": "Authorization: Bearer sk-abcdefghijklmnopqrstuvwxyz " + "x" * 3_000_000}

    async def odd(agent: Agent, run: dict[str, Any]) -> dict[str, Any]:
        await agent.ask("Hm.")
        return {"status": "completed", "report": {"reward": 1, **{f"f{i}": i for i in range(50_000)}}}

    for number, work in enumerate((fails, odd)):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with with_agents(folder, work) as (_, world):
            [session] = (await world.owner.done(await submitted(world, max_attempts=1)))["sessions"]
            assert session["result"]["error"]["code"] == "remote_run_failed"
            assert session["result"]["verdict"] is None
            assert len(session["result"]["error"]["message"]) < 10_000
            assert "sk-abcdef" not in json.dumps(session)


@pytest.mark.parametrize("key", ["%ff%fe", "%ed%a0%80", "..%2f..%2f", "%00", "x" * 5000, "\u00e9"])
async def test_odd_keys_are_refused(tmp_path: Path, key: str) -> None:
    async with elsewhere(tmp_path) as world:
        opened = await world.owner.open()
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        for text in (key, opened["key"] + key, opened["key"][:10] + key):
            by_path = await world.http.post(f"{world.owner.url}/s/{text}/v1/chat/completions", json=body)
            headers = {b"Authorization": b"Bearer " + text.encode()}
            by_header = await world.http.post(f"{world.owner.url}/v1/chat/completions", headers=headers, json=body)
            assert by_path.status_code in (401, 404)
            assert by_header.status_code == 401


async def test_a_session_key_is_no_control_token(tmp_path: Path) -> None:
    token = "a-token-of-the-operator"
    async with elsewhere(tmp_path, token=token) as world:
        owner = Owner(world.http, world.owner.url, token)
        opened = await owner.open()
        id = opened["session"]["id"]
        agent = Owner(world.http, world.owner.url, opened["key"])
        for method, path in (
            ("GET", "/sessions"),
            ("GET", f"/sessions/{id}"),
            ("GET", f"/sessions/{id}/turns"),
            ("POST", f"/sessions/{id}/complete"),
            ("POST", f"/sessions/{id}/reset"),
            ("DELETE", f"/sessions/{id}"),
            ("POST", "/sessions"),
        ):
            assert (await agent.call(method, path)).status_code == 401
        for path in ("/sessions", f"/sessions/{id}", f"/sessions/{id}/turns"):
            assert opened["key"] not in (await owner.call("GET", path)).text


async def test_no_run_is_started_after_its_cancellation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session reaches its time limit while the start of its run is tried again and again at a busy agent
    service."""
    monkeypatch.setenv("CLUSTER_SECRET", SECRET)
    methods: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        methods.append(request.method)
        if request.method == "DELETE":
            await asyncio.sleep(0.9)
            methods.append("DELETED")
        return web.Response(status=503)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with elsewhere(tmp_path, agents=declared(url)) as world:
            await world.owner.done(await submitted(world, max_attempts=1, limits={"session_seconds": 0.3}))
        begun = methods.index("DELETE")
        assert (set(methods[:begun]), methods[begun:]) == ({"PUT"}, ["DELETE", "DELETED"])
    finally:
        await runner.cleanup()


def test_a_report_may_have_a_reward_for_each_of_many_turns() -> None:
    body = {"reward": 1, "turns": {str(index): 0.5 for index in range(5_000)}, "rows": {"0": 1}}
    assert len(parse_body(ReportSpec, json.dumps(body).encode()).turns) == 5_000
    with pytest.raises(InvalidField, match="no object has more than 1024"):
        parse_body(ReportSpec, json.dumps({"reward": 1, "metrics": body["turns"]}).encode())


async def test_the_error_of_a_block_that_does_not_await_is_reported(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as world:

        def fails() -> None:
            with Client(world.owner.url) as client, client.external_session():
                raise RuntimeError("its disk is full \udcff" + "x" * 2_000_000)

        with pytest.raises(RuntimeError, match="its disk is full"):
            await asyncio.to_thread(fails)
        [session] = (await world.owner.call("GET", "/sessions")).json()["sessions"]
        [done] = (await world.owner.done(session["group_id"]))["sessions"]
        assert "RuntimeError: its disk is full" in done["result"]["error"]["message"]


async def test_a_key_that_cannot_be_sent_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_SECRET", SECRET)
    monkeypatch.setenv("CLUSTER_KEY", "two\nlines-of-a-key")

    async def unused(agent: Agent, run: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("the run was started")

    async with with_agents(tmp_path, unused, key_variable="CLUSTER_KEY") as (_, world):
        [session] = (await world.owner.done(await submitted(world, max_attempts=1)))["sessions"]
        assert (session["result"]["error"]["code"], session["result"]["verdict"]) == ("remote_run_failed", None)


async def test_many_opened_sessions_do_not_hold_up_other_work(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as world:
        scheduler = world.service.scheduler
        started: list[str] = []
        start = scheduler._start

        async def noted(chores: Any, session: Any, *, reserved: bool) -> bool:
            started.append(session.bucket)
            return await start(chores, session, reserved=reserved)

        scheduler._start = noted  # type: ignore[method-assign]
        task = {"instruction": "x", "harness": {"external": {}}, "evaluator": {"kind": "reported"}}
        ordinary = {
            "instruction": "x",
            "harness": {"agent": "tools"},
            "runtime": {"kind": "memory"},
            "evaluator": {"kind": "command", "run": "true"},
        }
        many = await world.owner.call("POST", "/groups", {"task": task, "n": 200})
        other = await world.owner.call("POST", "/groups", {"task": ordinary, "n": 1})
        assert (many.status_code, other.status_code) == (201, 201), (many.text, other.text)
        await world.owner.done(other.json()["id"])
        position = next(place for place, bucket in enumerate(started) if bucket != started[0])
        assert position <= 2 * EXTERNAL_AT_ONCE
        await until(lambda: len(started) == 201)
