"""Agents run by a Harbor run server: a server written from the contract alone, and Outrider's own server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from support.harbor import AgentRunRequest, HarborServer, Work, harbor_server, task_folder
from support.service import call, running_service, say
from support.waiting import until

from .test_restart import engine_server, on_engine
from .world import Elsewhere, elsewhere

REPLIES = (say("It is in a file."), say("Done."))
REWARDS = {"reward": 0.5, "speed": 2.0}


def declared(url: str, **more: Any) -> tuple[dict[str, Any], ...]:
    return ({"name": "harbor", "kind": "harbor", "url": url, "poll_seconds": 0.02, "patience_seconds": 5, **more},)


def options(**more: Any) -> dict[str, Any]:
    return {"agent": {"name": "claude-code", "kwargs": {"a": 1}}, **more}


def task(given: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "instruction": "See the task folder.",
        "harness": {"remote": {"service": "harbor", "options": options() if given is None else given}},
        "evaluator": {"kind": "reported"},
        "runtime": {"prepare": [{"upload": "swe-1", "to": "swe-1"}]},
        **more,
    }


async def submitted(world: Elsewhere, given: dict[str, Any] | None = None, *, n: int = 1, **more: Any) -> str:
    files = world.service.config.files
    assert files is not None
    if not (files / "swe-1").exists():
        task_folder(files / "swe-1")
    reply = await world.owner.call("POST", "/groups", {"task": task(given, **more), "n": n})
    assert reply.status_code == 201, reply.text
    id: str = reply.json()["id"]
    return id


async def ask(asked: AgentRunRequest, text: str, history: list[dict[str, Any]] | None = None) -> None:
    """Make a model call as an agent of Harbor does: to the URL from the submission, with a meaningless key."""
    messages = [*(history or []), {"role": "user", "content": text}]
    async with aiohttp.ClientSession() as http:
        url = f"{asked.llm_proxy_url}/chat/completions"
        headers = {"Authorization": "Bearer EMPTY"}
        async with http.post(url, json={"model": "m", "messages": messages}, headers=headers) as reply:
            assert reply.status == 200, await reply.text()


async def asks(asked: AgentRunRequest, files: dict[str, bytes]) -> dict[str, Any]:
    await ask(asked, "Where is it?")
    return {"rewards": REWARDS}


@asynccontextmanager
async def with_harbor(
    tmp_path: Path, work: Work, *, late: int = 1, **more: Any
) -> AsyncIterator[tuple[HarborServer, Elsewhere]]:
    async with (
        harbor_server(work, late=late) as (server, url),
        elsewhere(tmp_path, replies=REPLIES, agents=declared(url, **more)) as world,
    ):
        yield server, world


async def test_a_harbor_server_runs_a_group(tmp_path: Path) -> None:
    given: list[dict[str, bytes]] = []

    async def keeps(asked: AgentRunRequest, files: dict[str, bytes]) -> dict[str, Any]:
        given.append(files)
        return await asks(asked, files)

    async with with_harbor(tmp_path, keeps) as (server, world):
        files = world.service.config.files
        assert files is not None
        (task_folder(files / "swe-1") / "large.bin").write_bytes(os.urandom(2 << 20))
        extra = options(timeout_multiplier=2.0, environment_kwargs={"namespace": "x"}, verifier={"disable": False})
        group_id = await submitted(world, extra, n=3, limits={"session_seconds": 100})
        done = await world.owner.done(group_id)
        verdicts = [each["result"]["verdict"] for each in done["sessions"]]
        assert [(each["reward"], each["metrics"]) for each in verdicts] == [(0.5, REWARDS)] * 3
        assert [row["reward"] for row in done["samples"]] == [0.5] * 3
        assert sorted(given[0]) == ["swe-1/instruction.md", "swe-1/large.bin", "swe-1/task.toml", "swe-1/tests/test.sh"]
        asked = server.requests["run-0"]
        assert {each.task_id for each in server.requests.values()} == {f"{each['id']}-1" for each in done["sessions"]}
        assert (asked.job_id, asked.task_path, asked.timeout_multiplier) == (group_id, "swe-1", 2.0)
        assert (asked.agent.name, asked.agent.kwargs, asked.agent.max_timeout_sec) == ("claude-code", {"a": 1}, 100.0)
        assert asked.agent.model_name == world.service.model
        assert (asked.agent.llm_proxy_url, asked.environment_kwargs) == (None, {"namespace": "x"})


async def test_its_own_evaluator_grades_the_run(tmp_path: Path) -> None:
    async def no_rewards(asked: AgentRunRequest, files: dict[str, bytes]) -> dict[str, Any]:
        return {**await asks(asked, files), "rewards": None}

    async with with_harbor(tmp_path, no_rewards) as (_, world):
        evaluator = {"kind": "callable", "path": "external.agents:one"}
        group = await submitted(world, options(verifier={"disable": True}), evaluator=evaluator)
        [session] = (await world.owner.done(group))["sessions"]
        assert session["result"]["verdict"]["reward"] == 1.0


@pytest.mark.parametrize(
    ("response", "reward", "stop", "code"),
    [
        ({"rewards": {"only": 3.0}}, 3.0, "completed", None),
        ({"rewards": {"a": 1.0, "b": 2.0}}, None, "error", "remote_run_failed"),
        ({"rewards": None}, None, "error", "remote_run_failed"),
        ({"rewards": {}}, None, "error", "remote_run_failed"),
        ({"rewards": {"reward": "much"}}, None, "error", "remote_run_unclear"),
        ({"status": "failed", "error": "no pod"}, None, "error", "remote_run_failed"),
        ({"status": "timeout", "error": "slow", "rewards": {"reward": 0.25}}, 0.25, "agent_timeout", None),
        ({"status": "timeout", "error": "slow", "rewards": None}, None, "error", "agent_failed"),
    ],
)
async def test_how_a_run_ends(
    tmp_path: Path, response: dict[str, Any], reward: float | None, stop: str, code: str | None
) -> None:
    async def ends(asked: AgentRunRequest, files: dict[str, bytes]) -> dict[str, Any]:
        return {**await asks(asked, files), **response}

    async with with_harbor(tmp_path, ends, patience_seconds=0.3) as (_, world):
        [session] = (await world.owner.done(await submitted(world, max_attempts=1)))["sessions"]
        result = session["result"]
        assert (result["verdict"]["reward"] if result["verdict"] else None) == reward
        assert (result["stop_reason"], result["error"]["code"] if result["error"] else None) == (stop, code)


async def test_the_reward_of_several_is_named(tmp_path: Path) -> None:
    async def several(asked: AgentRunRequest, files: dict[str, bytes]) -> dict[str, Any]:
        return {**await asks(asked, files), "rewards": {"a": 1.0, "b": 2.0}}

    async with with_harbor(tmp_path, several) as (_, world):
        [session] = (await world.owner.done(await submitted(world, options(reward="b"))))["sessions"]
        assert session["result"]["verdict"]["reward"] == 2.0


async def test_a_failed_run_is_tried_again_and_a_lost_one_is_not(tmp_path: Path) -> None:
    async def fails_once(asked: AgentRunRequest, files: dict[str, bytes]) -> dict[str, Any]:
        await ask(asked, "Try.")
        return {"rewards": REWARDS} if asked.task_id.endswith("-2") else {"status": "failed", "error": "no pod"}

    async with with_harbor(tmp_path, fails_once, patience_seconds=0.2) as (server, world):
        [session] = (await world.owner.done(await submitted(world)))["sessions"]
        assert (session["attempt"], session["last_error"]["code"]) == (2, "remote_run_failed")
        assert (session["result"]["turns"], session["result"]["verdict"]["reward"]) == (1, 0.5)
        server.down = True
        [session] = (await world.owner.done(await submitted(world)))["sessions"]
        assert (session["attempt"], session["result"]["error"]["code"]) == (1, "remote_run_unclear")
        assert "503" in session["result"]["error"]["message"]


async def test_a_status_that_comes_late_and_a_result_that_is_lost(tmp_path: Path) -> None:
    async with with_harbor(tmp_path, asks, late=2) as (server, world):
        server.results_lost = True
        [session] = (await world.owner.done(await submitted(world)))["sessions"]
        assert session["result"]["verdict"]["metrics"] == REWARDS
        assert list(server.looks.values()) == [3]


async def test_after_a_cancellation_the_agent_gets_no_reply(tmp_path: Path) -> None:
    codes: list[int] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def goes_on(asked: AgentRunRequest, files: dict[str, bytes]) -> dict[str, Any]:
        await ask(asked, "Where?")
        begun.set()
        await go_on.wait()
        async with aiohttp.ClientSession() as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "Still?"}]}
            async with http.post(f"{asked.llm_proxy_url}/chat/completions", json=body) as reply:
                codes.append(reply.status)
        return {"rewards": REWARDS}

    async with with_harbor(tmp_path, goes_on) as (_, world):
        group = await submitted(world)
        await begun.wait()
        await world.owner.call("DELETE", f"/groups/{group}")
        [session] = (await world.owner.done(group))["sessions"]
        assert (session["result"]["stop_reason"], session["result"]["turns"]) == ("cancelled", 1)
        go_on.set()
        await until(lambda: codes)
        assert codes == [410]


async def test_the_next_service_follows_the_run(tmp_path: Path) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    worlds: list[Elsewhere] = []

    async def long(asked: AgentRunRequest, files: dict[str, bytes]) -> dict[str, Any]:
        await ask(asked, "Where is it?")
        begun.set()
        await go_on.wait()
        history = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "It is in a file."}]
        key = str(asked.llm_proxy_url).rsplit("/", 2)[1]
        moved = asked.model_copy(update={"llm_proxy_url": f"{worlds[-1].owner.url}/s/{key}/v1"})
        await ask(moved, "Read it.", history)
        return {"rewards": REWARDS}

    async with harbor_server(long) as (server, url), engine_server(tmp_path) as (_, engine):
        async with on_engine(tmp_path, engine, agents=declared(url)) as world:
            worlds.append(world)
            group = await submitted(world)
            await begun.wait()
            await until(lambda: server.looks.get("run-0", 0) > 1)
        async with on_engine(tmp_path, engine, agents=declared(url)) as world:
            worlds.append(world)
            [session] = await world.service.store.sessions(group)
            assert await world.service.external.running(session.id, 20)
            go_on.set()
            done = await world.owner.done(group)
        assert len(server.runs) == 1
        [row] = done["samples"]
        assert (row["turns"], row["reward"]) == ([0, 1], 0.5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"given": {}}, "task.harness.remote.options.agent"),
        ({"given": {"agent": {}}}, "task.harness.remote.options.agent"),
        ({"given": options(odd=1)}, "task.harness.remote.options.odd"),
        ({"given": options(max_retries=1)}, "task.harness.remote.options.max_retries"),
        ({"given": options(verifier={"disable": True})}, "task.harness.remote.options.verifier.disable"),
        ({"runtime": {}}, "task.runtime.prepare"),
    ],
)
async def test_what_cannot_run_there_is_refused(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    async with elsewhere(tmp_path, replies=REPLIES, agents=declared("http://127.0.0.1:9")) as world:
        reply = await world.owner.call("POST", "/groups", {"task": task(changes.pop("given", None), **changes)})
        assert (reply.status_code, reply.json()["field"]) == (422, field)


async def test_files_that_are_no_task_folder_are_an_error(tmp_path: Path) -> None:
    async with with_harbor(tmp_path, asks) as (server, world):
        prepare = [{"write": "x", "to": "a.txt"}, {"upload": "swe-1", "to": "swe-1"}]
        group = await submitted(world, runtime={"prepare": prepare}, max_attempts=1)
        [session] = (await world.owner.done(group))["sessions"]
        assert "no task folder" in session["result"]["error"]["message"]
        assert not server.runs


async def test_a_submission_that_may_have_arrived_is_not_repeated(tmp_path: Path) -> None:
    posts: list[str] = []

    async def breaks(request: web.Request) -> web.StreamResponse:
        posts.append(request.headers["Idempotency-Key"])
        await request.read()
        assert request.transport is not None
        if len(posts) == 1:
            return web.Response(status=503)
        request.transport.close()
        return web.Response()

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/api/v1/runs/async", breaks)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with elsewhere(tmp_path, replies=REPLIES, agents=declared(url)) as world:
            [session] = (await world.owner.done(await submitted(world)))["sessions"]
            assert (session["attempt"], session["result"]["error"]["code"]) == (1, "remote_run_unclear")
            assert posts == [f"{session['id']}-1"] * 2
    finally:
        await runner.cleanup()


class Between:
    """Passes submissions on to another Outrider service, and is the engine of that service: each of its model calls
    becomes a call of the session whose URL came with the submission. This URL is removed from the submission, because
    the other service refuses proxies that are not its own."""

    def __init__(self) -> None:
        self.server = ""
        self.proxies: dict[str, str] = {}
        self.calls = 0

    async def submit(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        start = body.index(b"\r\n\r\n") + 4
        end = body.index(b"\r\n--", start)
        metadata = json.loads(body[start:end])
        self.proxies["last"] = metadata.pop("llm_proxy_url")
        changed = body[:start] + json.dumps(metadata).encode() + body[end:]
        return await self._passed(request, "POST", changed)

    async def look(self, request: web.Request) -> web.StreamResponse:
        return await self._passed(request, "GET", b"")

    async def _passed(self, request: web.Request, method: str, body: bytes) -> web.StreamResponse:
        headers = {
            name: request.headers[name] for name in ("Content-Type", "Idempotency-Key") if name in request.headers
        }
        async with aiohttp.ClientSession() as http:
            url = self.server + request.path
            async with http.request(method, url, data=body or None, headers=headers) as reply:
                return web.Response(status=reply.status, body=await reply.read(), content_type="application/json")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        url = f"{self.proxies['last']}/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(url, data=await request.read()) as reply:
            return web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)


@pytest.mark.skipif(not NamespaceRuntime.available().ok, reason="no user namespaces on this machine")
async def test_outrider_runs_at_outrider(tmp_path: Path) -> None:
    """The other service's rewards are returned, and its agent's two model calls are turns of the first service's
    session."""
    between = Between()
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/api/v1/runs/async", between.submit)
    app.router.add_get("/api/v1/runs/async/{run_id}/{what}", between.look)
    app.router.add_post("/v1/chat/completions", between.chat)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    replies = (f"I write.{call('echo 42 > answer.txt')}", say("Done."))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    engine = {"kind": "openai", "name": "between", "url": f"{url}/v1", "model": "policy"}
    try:
        async with (
            running_service(tmp_path=tmp_path / "b", engines=(engine,), compat=("verl",)) as (_, server),
            elsewhere(tmp_path / "a", replies=replies, agents=declared(url)) as world,
        ):
            between.server = server
            group = await submitted(world, options(agent={"import_path": "tools"}))
            done = await world.owner.done(group)
            [session] = done["sessions"]
            assert session["result"]["error"] is None, session["result"]["error"]
            assert session["result"]["verdict"]["metrics"] == {"reward": 1.0, "speed": 0.5}
            [row] = done["samples"]
            assert (row["turns"], row["reward"]) == ([0, 1], 1.0)
            assert between.calls == 2
    finally:
        await runner.cleanup()


async def models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})
