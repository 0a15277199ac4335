"""Agents run by an agent service of the operator."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from outrider.callbacks import check_signature
from outrider.errors import ServiceError
from support.service import say
from support.waiting import until

from .test_restart import engine_server, on_engine
from .world import Agent, Elsewhere, elsewhere

SECRET = "a secret of sixteen characters"
REPLIES = (say("It is in a file."), say("Done."))
Work = Callable[[Agent, dict[str, Any]], Awaitable[dict[str, Any]]]


class AgentService:
    """An agent service that follows the contract of docs/external.md. `work` is the agent of a run, and returns the
    last state of the run. Requests are answered with 503 while `down` is True, and those for a run in `broken` always.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.world: Elsewhere | None = None
        self.runs: dict[str, dict[str, Any]] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.archives: dict[str, bytes] = {}
        self.cancelled: list[str] = []
        self.agents: dict[str, asyncio.Task[None]] = {}
        self.down = False
        self.broken: set[str] = set()
        self.asked: list[str] = []
        """The ids of the runs of all requests, in order."""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        check_signature(request.headers, body, SECRET)
        run_id = request.match_info["run_id"]
        self.asked.append(run_id)
        if self.down or run_id in self.broken:
            return web.Response(status=503)
        if request.path.endswith("/files"):
            self.archives[run_id] = body
        elif request.method == "PUT" and run_id not in self.runs:
            self.runs[run_id] = json.loads(body)
            self.states[run_id] = {"status": "running"}
            self.agents[run_id] = asyncio.get_running_loop().create_task(self.run(run_id))
        elif request.method == "GET":
            return web.json_response(self.states[run_id]) if run_id in self.states else web.Response(status=404)
        elif request.method == "DELETE":
            if run_id not in self.agents:
                return web.Response(status=404)
            self.cancelled.append(run_id)
            self.agents[run_id].cancel()
        return web.json_response({})

    async def run(self, run_id: str) -> None:
        assert self.world is not None
        agent = Agent(self.world.http, self.runs[run_id])
        try:
            self.states[run_id] = await self.work(agent, self.runs[run_id])
        except Exception as error:  # the test fails at once, with the reason
            self.states[run_id] = {"status": "failed", "error": repr(error)}
            raise


@asynccontextmanager
async def agent_service(work: Work) -> AsyncIterator[tuple[AgentService, str]]:
    service = AgentService(work)
    app = web.Application(client_max_size=1 << 28)
    app.router.add_route("*", "/api/runs/{run_id}", service.handle)
    app.router.add_route("*", "/api/runs/{run_id}/files", service.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield service, f"http://127.0.0.1:{runner.addresses[0][1]}/api"
    finally:
        for task in service.agents.values():
            task.cancel()
        await runner.cleanup()


@asynccontextmanager
async def with_agents(tmp_path: Path, work: Work, **more: Any) -> AsyncIterator[tuple[AgentService, Elsewhere]]:
    async with (
        agent_service(work) as (agents, url),
        elsewhere(tmp_path, replies=REPLIES, agents=declared(url, **more)) as world,
    ):
        agents.world = world
        yield agents, world


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_SECRET", SECRET)


def declared(url: str, **more: Any) -> tuple[dict[str, Any], ...]:
    return ({"name": "cluster", "url": url, "secret_variable": "CLUSTER_SECRET", "poll_seconds": 0.02, **more},)


def task(**more: Any) -> dict[str, Any]:
    return {
        "instruction": "Find it.",
        "harness": {"remote": {"service": "cluster", "options": {"image": "agent:1"}}},
        "evaluator": {"kind": "reported"},
        "labels": {"run": "r"},
        **more,
    }


async def submitted(world: Elsewhere, n: int = 1, **more: Any) -> str:
    reply = await world.owner.call("POST", "/groups", {"task": task(**more), "n": n})
    assert reply.status_code == 201, reply.text
    id: str = reply.json()["id"]
    return id


async def asks(agent: Agent, run: dict[str, Any]) -> dict[str, Any]:
    await agent.ask(run["instruction"])
    return {"status": "completed", "report": {"reward": 0.5, "metrics": {"x": 1}, "turns": {"0": 1}}}


async def test_a_service_runs_a_group(tmp_path: Path) -> None:
    async with with_agents(tmp_path, asks) as (agents, world):
        files = world.service.config.files
        assert files is not None
        (files / "set").mkdir()
        (files / "set" / "a.txt").write_text("from the folder")
        prepare = [{"write": "told", "to": "b.txt"}, {"upload": "set", "to": "/data"}]
        done = await world.owner.done(await submitted(world, 3, runtime={"prepare": prepare}))
        assert [each["result"]["verdict"]["reward"] for each in done["sessions"]] == [0.5] * 3
        assert [row["turn_rewards"] for row in done["samples"]] == [[1.0]] * 3
        first = done["sessions"][0]["id"]
        run = agents.runs[f"{first}-1"]
        assert (run["options"], run["labels"]) == ({"image": "agent:1"}, {"run": "r"})
        assert run["session"]["sample_index"] == 0
        assert run["variables"]["OUTRIDER_SESSION"] == first
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(agents.archives[f"{first}-1"]))) as archive:
            found = {entry.name: archive.extractfile(entry) for entry in archive if entry.isfile()}
            texts = {name: file.read().decode() for name, file in found.items() if file is not None}
        assert texts == {"b.txt": "told", "data/a.txt": "from the folder"}


async def test_a_run_that_fails_is_tried_again_from_the_beginning(tmp_path: Path) -> None:
    async def fails_once(agent: Agent, run: dict[str, Any]) -> dict[str, Any]:
        if run["run_id"].endswith("-1"):
            await agent.ask("Try.")
            return {"status": "failed", "error": "no machine"}
        return await asks(agent, run)

    async with with_agents(tmp_path, fails_once) as (_, world):
        [session] = (await world.owner.done(await submitted(world)))["sessions"]
        assert (session["attempt"], session["last_error"]["code"]) == (2, "remote_run_failed")
        assert "no machine" in session["last_error"]["message"]
        assert (session["result"]["turns"], session["result"]["verdict"]["reward"]) == (1, 0.5)


@pytest.mark.parametrize("attempts", [2, 3])
async def test_a_run_out_of_sight_ends_before_the_next_one_begins(tmp_path: Path, attempts: int) -> None:
    """The agent of a run that counts as lost may still work. Both runs have the same key, so the agent's calls would be
    mixed with those of the next run."""
    begun = asyncio.Event()

    async def goes_on(agent: Agent, run: dict[str, Any]) -> dict[str, Any]:
        if not run["run_id"].endswith("-1"):
            await asyncio.sleep(0.3)
            return await asks(agent, run)
        await agent.ask("Try.")
        begun.set()
        while True:  # its calls are refused while the session does not run
            await asyncio.sleep(0.01)
            with suppress(AssertionError):
                await agent.ask("Try again.")

    async with with_agents(tmp_path, goes_on, patience_seconds=0.5) as (agents, world):
        group = await submitted(world, max_attempts=attempts + 1)
        await begun.wait()
        agents.down = True
        session_id = f"s-{group.removeprefix('g-')}-0"
        while (await world.service.store.session(session_id)).attempt < attempts:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        agents.down = False
        [session] = (await world.owner.done(group))["sessions"]
        assert agents.cancelled == [f"{session_id}-1"]
        assert session["attempt"] >= attempts
        assert session["result"]["turns"] == 1


async def test_a_session_that_ends_cancels_its_run(tmp_path: Path) -> None:
    async def waits(agent: Agent, run: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    async with with_agents(tmp_path, waits) as (agents, world):
        group = await submitted(world, 2)
        late = await submitted(world, limits={"session_seconds": 0.3}, max_attempts=1)
        await until(lambda: len(agents.runs) == 3)
        await world.owner.call("DELETE", f"/groups/{group}")
        await world.owner.done(group)
        [session] = (await world.owner.done(late))["sessions"]
        assert session["result"]["error"]["code"] == "agent_failed"
        assert sorted(agents.cancelled) == sorted(agents.runs)


async def test_a_service_out_of_reach_is_waited_for(tmp_path: Path) -> None:
    async with with_agents(tmp_path, asks) as (agents, world):
        agents.down = True
        group = await submitted(world)
        await asyncio.sleep(0.2)
        agents.down = False
        [session] = (await world.owner.done(group))["sessions"]
        assert (session["attempt"], session["result"]["verdict"]["reward"]) == (1, 0.5)


async def test_a_service_that_stays_away_is_an_error(tmp_path: Path) -> None:
    async with with_agents(tmp_path, asks, patience_seconds=0.1) as (agents, world):
        agents.down = True
        [session] = (await world.owner.done(await submitted(world, max_attempts=1)))["sessions"]
        assert (session["result"]["verdict"], session["result"]["error"]["code"]) == (None, "remote_run_failed")
        assert "answered 503, for 0.1 s" in session["result"]["error"]["message"]


async def test_a_failure_of_the_store_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with with_agents(tmp_path, asks) as (_, world):
        store = world.service.store
        report, failures = store.report, [ServiceError("the disk is full")]

        async def full(session_id: str, report: bytes) -> None:
            monkeypatch.setattr(store, "report", unreadable)
            raise ServiceError("the disk is full")

        async def unreadable(session_id: str) -> bytes | None:
            if failures:
                raise failures.pop()
            return await report(session_id)

        monkeypatch.setattr(store, "add_report", full)
        [session] = (await world.owner.done(await submitted(world, max_attempts=1)))["sessions"]
        error = session["result"]["error"]
        assert (error["code"], error["message"]) == ("service_error", "the disk is full")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"status": "completed", "report": {}}, "reward"),
        ({"status": "completed", "report": {"reward": 1, "turns": {"9": 1}}}, "turn 9"),
        ({"status": "completed", "report": {"reward": "much"}}, "report"),
        ({"status": "sleeping"}, "state"),
        ({"status": "failed"}, "failed"),
    ],
)
async def test_an_odd_state_is_no_reward(tmp_path: Path, state: dict[str, Any], said: str) -> None:
    async def odd(agent: Agent, run: dict[str, Any]) -> dict[str, Any]:
        await agent.ask("Hm.")
        return state

    async with with_agents(tmp_path, odd) as (_, world):
        [session] = (await world.owner.done(await submitted(world, max_attempts=1)))["sessions"]
        assert session["result"]["verdict"] is None
        assert said in session["result"]["error"]["message"]


async def test_what_cannot_run_there_is_refused(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, replies=REPLIES, agents=declared("http://127.0.0.1:9")) as world:
        for changes, field in (
            ({"harness": {"remote": {"service": "other"}}}, "task.harness.remote.service"),
            ({"runtime": {"prepare": [{"run": "true"}]}}, "task"),
            ({"harness": {"remote": {"service": "cluster"}, "env": {"A": "b"}}}, "task.harness"),
        ):
            reply = await world.owner.call("POST", "/groups", {"task": task(**changes)})
            assert (reply.status_code, reply.json()["field"]) == (422, field)


async def test_the_next_service_follows_the_run(tmp_path: Path) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def long(agent: Agent, run: dict[str, Any]) -> dict[str, Any]:
        await agent.ask("Where is it?")
        begun.set()
        await go_on.wait()
        assert agents.world is not None
        again = Agent(agents.world.http, run)
        again.messages, again.base_url = agent.messages, f"{agents.world.owner.url}/s/{run['key']}"
        await again.ask("Read it.")
        return {"status": "completed", "report": {"reward": 1}}

    async with agent_service(long) as (agents, url), engine_server(tmp_path) as (_, engine):
        async with on_engine(tmp_path, engine, agents=declared(url)) as world:
            agents.world = world
            group = await submitted(world)
            await begun.wait()
        assert agents.cancelled == []
        async with on_engine(tmp_path, engine, agents=declared(url)) as world:
            agents.world = world
            assert await world.service.external.running(f"s-{group.removeprefix('g-')}-0", 20)
            go_on.set()
            done = await world.owner.done(group)
        assert len(agents.runs) == 1
        [row] = done["samples"]
        assert (row["turns"], row["reward"]) == ([0, 1], 1)


@asynccontextmanager
async def second_run_under_way(tmp_path: Path) -> AsyncIterator[tuple[AgentService, str, str, str]]:
    """A session whose first run has failed, and whose second run has made a call and goes on while Outrider is stopped.
    Yields the agent service, its URL, the engine's URL and the id of the group."""
    begun = asyncio.Event()

    async def second_one_works(agent: Agent, run: dict[str, Any]) -> dict[str, Any]:
        if run["run_id"].endswith("-1"):
            return {"status": "failed", "error": "no machine"}
        await agent.ask("Where is it?")
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with agent_service(second_one_works) as (agents, url), engine_server(tmp_path) as (_, engine):
        async with on_engine(tmp_path, engine, agents=declared(url)) as world:
            agents.world = world
            group = await submitted(world, max_attempts=2)
            await begun.wait()
        yield agents, url, engine, group


async def test_a_service_that_stays_away_after_a_restart_costs_no_turns(tmp_path: Path) -> None:
    """Earlier runs are ended before a run is followed. At this time, the agent service cannot be reached."""
    async with second_run_under_way(tmp_path) as (agents, url, engine, group):
        agents.down = True
        async with on_engine(tmp_path, engine, agents=declared(url, patience_seconds=0.1)) as world:
            agents.world = world
            [session] = (await world.owner.done(group))["sessions"]
    assert "answered 503, for 0.1 s" in session["result"]["error"]["message"]
    assert session["result"]["turns"] == 1


async def test_a_session_that_is_cancelled_before_its_run_is_followed_again_cancels_the_run(tmp_path: Path) -> None:
    """After a restart, the session waits until the service replies about the first run. The second run goes on."""
    async with second_run_under_way(tmp_path) as (agents, url, engine, group):
        session_id = f"s-{group.removeprefix('g-')}-0"
        agents.broken.add(f"{session_id}-1")
        agents.asked.clear()
        async with on_engine(tmp_path, engine, agents=declared(url)) as world:
            agents.world = world
            await until(lambda: bool(agents.asked))
            await world.owner.call("DELETE", f"/groups/{group}")
            await world.owner.done(group)
        assert agents.cancelled == [f"{session_id}-1", f"{session_id}-2"]


async def test_a_failure_of_the_store_at_the_end_of_the_service_ends_no_session(tmp_path: Path) -> None:
    """The session has one attempt. The next service goes on with this attempt."""

    async def unreadable(session_id: str) -> Any:
        raise ServiceError("the disk is full")

    waiting = {**task(max_attempts=1), "harness": {"external": {}}}
    async with engine_server(tmp_path) as (_, engine):
        async with on_engine(tmp_path, engine) as world:
            reply = await world.owner.call("POST", "/groups", {"task": waiting, "n": 1})
            session_id = f"s-{reply.json()['id'].removeprefix('g-')}-0"
            assert await world.service.external.running(session_id, 20)
            vars(world.service.external._store)["session"] = unreadable  # until the service has ended
        async with on_engine(tmp_path, engine) as world:
            assert await world.service.external.running(session_id, 20)
