"""`outrider run` against a live service."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cli.world import REPLIES, STALLED, TASK, Cli, program, write_task
from outrider.client.client import AsyncClient
from outrider.lifecycle import GroupState
from outrider.schemas import GroupView
from support.service import call, running_service, say, scripted_engine

GROUP = GroupView(
    id="g-1",
    state=GroupState.ACTIVE,
    cancelled=False,
    n=1,
    priority=0,
    created=0.0,
    finished=None,
    cursor=None,
    labels={},
    sessions=(),
)


async def test_a_group_is_run_and_shown(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        ran = await cli("run", write_task(tmp_path), "-n", "3", "--url", url)
    header, _, *rows = ran.out.splitlines()
    assert ran.code == 0
    assert header.split()[:5] == ["session", "state", "reward", "turns", "tokens"]
    assert [row.split()[1:4] for row in rows] == [["completed", "1.00", "2"]] * 3
    assert "group g-" in ran.err


async def test_json_is_one_document(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        ran = await cli("run", write_task(tmp_path), "-n", "2", "--priority", "7", "--url", url, "--json")
    group = ran.document
    assert (ran.code, group["state"], group["priority"]) == (0, "done", 7)
    assert [session["result"]["verdict"]["reward"] for session in group["sessions"]] == [1.0, 1.0]


async def test_a_failed_session_ends_it_with_1(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[{"reply": "", "fail": "rejected"}]) as (_, url):
        ran = await cli("run", write_task(tmp_path), "--url", url)
    assert ran.code == 1
    assert "engine_rejected" in ran.out
    assert "outrider show s-" in ran.err


async def test_a_file_beside_the_task_reaches_the_sandbox(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "greeting").write_text("hi\n")
    task = write_task(tmp_path, TASK.replace("[runtime]", '[runtime]\nprepare = [{upload = "greeting", to = "in"}]'))
    async with running_service(tmp_path=tmp_path, replies=[call("cat in > out.txt"), say("done")]) as (_, url):
        ran = await cli("run", task, "--url", url, "--json")
    assert ran.document["sessions"][0]["result"]["verdict"]["reward"] == 1.0


async def test_what_the_service_refuses_names_its_field(cli: Cli, tmp_path: Path) -> None:
    task = write_task(tmp_path, TASK.replace('"memory"', '"cloud"'))
    async with running_service(tmp_path=tmp_path) as (_, url):
        ran = await cli("run", task, "--url", url)
        none = await cli("run", task, "-n", "0", "--url", url)
        typed = await cli("run", write_task(tmp_path, "instruction = 3\n"), "--url", url)
    assert (ran.code, typed.code, none.code) == (2, 2, 2)
    assert typed.err.startswith("error: task.")
    assert none.err == "error: n: must be at least 1\n"
    assert ran.err.startswith("error: task.runtime.kind: unknown runtime 'cloud'\nhint: known: ")


@pytest.mark.parametrize(("given", "code"), [("secret", 0), ("wrong", 2), (None, 2)])
async def test_the_token_is_shown(cli: Cli, tmp_path: Path, given: str | None, code: int) -> None:
    words = ["--token", given] if given else []
    async with running_service(tmp_path=tmp_path, replies=REPLIES, token="secret") as (_, url):
        ran = await cli("run", write_task(tmp_path), "--url", url, *words)
    assert ran.code == code
    assert ("hint: " in ran.err) == (code != 0)


@pytest.mark.deep
async def test_ctrl_c_cancels_the_group_and_waits_for_it(tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, [STALLED])
    async with running_service(tmp_path=tmp_path, engine=engine) as (_, url), AsyncClient(url) as client:
        process = await program("run", write_task(tmp_path), "-n", "2", "--url", url, "--json")
        await engine.stalled.wait()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        group = json.loads(out)
        assert (await client.group(group["id"])).cancelled
    assert process.returncode == 130
    assert {session["result"]["stop_reason"] for session in group["sessions"]} == {"cancelled"}
    assert b"cancelling g-" in err


@pytest.mark.deep
async def test_ctrl_c_before_the_answer_to_the_submission_cancels_it_too(tmp_path: Path) -> None:
    """Ctrl-C comes after the service has accepted the group, and before its reply arrives."""
    accepted, answering = asyncio.Event(), asyncio.Event()
    methods = []

    async def answer(request: web.Request) -> web.Response:
        methods.append(request.method)
        if request.method == "POST":
            accepted.set()
            await answering.wait()
        return web.Response(body=msgspec.json.encode(msgspec.structs.replace(GROUP, state=GroupState.DONE)))

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    async with TestServer(app) as server:
        process = await program("run", write_task(tmp_path), "--url", str(server.make_url("")))
        await accepted.wait()
        process.send_signal(signal.SIGINT)
        asyncio.get_running_loop().call_later(0.3, answering.set)
        _, err = await process.communicate()
    assert process.returncode == 130
    assert b"cancelling g-1" in err
    assert methods[:2] == ["POST", "DELETE"]


@pytest.mark.deep
async def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    asked, cancelling = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            asked.set()
        if request.method == "DELETE":
            cancelling.set()
            await asyncio.Event().wait()
        return web.Response(body=msgspec.json.encode(GROUP))

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    async with TestServer(app) as server:
        process = await program("run", write_task(tmp_path), "--url", str(server.make_url("")))
        await asked.wait()
        process.send_signal(signal.SIGINT)
        await cancelling.wait()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in err
