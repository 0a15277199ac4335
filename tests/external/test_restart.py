"""Sessions whose agents run elsewhere go on after the service stops, or is killed, and starts again."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.world import program
from outrider.engines.base import EngineOptions
from outrider.lab.fakes.engine_servers import engine_app, serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.tokens.rendering.tokenizer import Tokenizer
from support.pdfs import block, pdf
from support.ports import free_port
from support.service import say
from support.tokenizer import write_tokenizer
from support.vision import conversation, picture
from support.vision_model import write_vision_tokenizer

from .agents import QUESTIONS, SCRIPT
from .world import Agent, Elsewhere, Owner, elsewhere

AGENT = Path(__file__).parent / "openai_agent.py"
SIZE = 16


@asynccontextmanager
async def engine_server(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[ScriptedEngine, str]]:
    """An engine that outlives the service."""
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    engine = ScriptedEngine(EngineOptions(name="e", tokenizer=tokenizer, options={"replies": SCRIPT} | options))
    async with serving(engine_app(engine)) as url:
        yield engine, url


@asynccontextmanager
async def on_engine(tmp_path: Path, url: str, **settings: Any) -> AsyncIterator[Elsewhere]:
    async with elsewhere(tmp_path, engines=({"kind": "vllm", "name": "e", "url": url},), **settings) as world:
        yield world


async def test_a_session_goes_on_in_the_next_service(tmp_path: Path) -> None:
    async with engine_server(tmp_path) as (engine, url):
        async with on_engine(tmp_path, url) as world:
            opened, other = await world.owner.open(), await world.owner.open(limits={"turns": 3})
            agent, limited = world.agent(opened), world.agent(other)
            for question in QUESTIONS[:2]:
                await agent.ask(question)
                await limited.ask(question)
        async with on_engine(tmp_path, url) as world:
            again = await world.owner.open(group_id=opened["session"]["group_id"])
            assert (again["key"], again["session"]["attempt"]) == (opened["key"], 2)
            await world.owner.open(group_id=other["session"]["group_id"])  # waits until the session runs again
            for conversation, key in ((agent, opened["key"]), (limited, other["key"])):
                conversation.base_url = f"{world.owner.url}/s/{key}"
                conversation._http = world.http
                await conversation.ask(QUESTIONS[2])
            assert (await limited.post([{"role": "user", "content": "More?"}])).status_code == 429
            await agent.ask(QUESTIONS[3])
            for each in (opened, other):
                await world.owner.complete(each, reward=1)
            group = await world.owner.done(opened["session"]["group_id"])
            [row] = group["samples"]
            assert row["turns"] == [0, 1, 2, 3], "one conversation, in one row"
            assert group["sessions"][0]["result"]["forks"] == {}
            last_prompt = engine.requests[-1].input_ids.tolist()
            assert row["ids"][: len(last_prompt)] == last_prompt
            assert (await world.owner.result(other))["stop_reason"] == "max_turns"


async def test_the_next_service_has_the_turns_from_its_first_moment(tmp_path: Path) -> None:
    async with engine_server(tmp_path) as (_, url):
        async with on_engine(tmp_path, url) as world:
            opened = [await world.owner.open() for _ in range(40)]
            for each in opened:
                await world.agent(each).ask(QUESTIONS[0])
        async with on_engine(tmp_path, url) as world:
            ids = {each["session"]["id"] for each in opened}
            while ids:
                for id in list(ids):
                    session = f"{world.owner.url}/v1/sessions/{id}"
                    assert len((await world.http.get(f"{session}/turns")).json()["turns"]) == 1
                    if (await world.http.get(session)).json()["state"] == "running":
                        ids.remove(id)


async def test_a_session_with_images_goes_on_in_the_next_service(tmp_path: Path) -> None:
    """The next service has no decoded image. It makes the same pixels from the images when the agent sends them
    again."""
    folder = tmp_path / "vision"
    write_vision_tokenizer(folder)
    model = {"tokenizer": str(folder), "renderer": "qwen3-vl"}
    turns = [("look", [picture(64, 64, seed=seed) for seed in range(3)]), ("and now", [picture(96, 64, seed=4)])]
    replies = ["one", "two"]
    script = EngineOptions(name="e", tokenizer=str(folder), options={"replies": [say(reply) for reply in replies]})
    engine = ScriptedEngine(script)
    async with serving(engine_app(engine)) as url:
        async with on_engine(tmp_path, url, model=model) as world:
            opened = await world.owner.open()
            first = await world.agent(opened).post(conversation("chat", turns[:1], [])["messages"])
            assert first.status_code == 200, first.text
        async with on_engine(tmp_path, url, model=model) as world:
            await world.owner.open(group_id=opened["session"]["group_id"])
            opened["base_url"] = f"{world.owner.url}/s/{opened['key']}"
            second = await world.agent(opened).post(conversation("chat", turns, replies)["messages"])
            assert second.status_code == 200, second.text
            await world.owner.complete(opened, reward=1)
            group = await world.owner.done(opened["session"]["group_id"])
            [row] = group["samples"]
        before, after = engine.requests
        assert [image.item for image in after.images[:3]] == [image.item for image in before.images]
        prompt = before.input_ids.tolist()
        assert after.input_ids.tolist()[: len(prompt)] == prompt
        assert [image["grid"] for image in row["images"]] == [[1, 4, 4]] * 3 + [[1, 4, 6]]
        assert group["sessions"][0]["result"]["forks"] == {}


async def test_a_session_with_a_document_goes_on_in_the_next_service(tmp_path: Path) -> None:
    """The next service reads the document again when the agent sends it again, and finds the recorded pages."""
    pytest.importorskip("pypdfium2")
    document = block("chat", pdf(["first words", "second words"]))
    question: dict[str, Any] = {"role": "user", "content": [document, {"type": "text", "text": "read"}]}
    more = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "and now"}]
    async with engine_server(tmp_path, replies=[say("one"), say("two")]) as (engine, url):
        async with on_engine(tmp_path, url) as world:
            opened = await world.owner.open()
            first = await world.agent(opened).post([question])
            assert first.status_code == 200, first.text
        async with on_engine(tmp_path, url) as world:
            await world.owner.open(group_id=opened["session"]["group_id"])
            opened["base_url"] = f"{world.owner.url}/s/{opened['key']}"
            second = await world.agent(opened).post([question, *more])
            assert second.status_code == 200, second.text
            await world.owner.complete(opened, reward=1)
            group = await world.owner.done(opened["session"]["group_id"])
    [row] = group["samples"]
    assert row["turns"] == [0, 1]
    assert group["sessions"][0]["result"]["forks"] == {}
    before, after = (request.input_ids.tolist() for request in engine.requests)
    assert after[: len(before)] == before
    text = Tokenizer.load(tmp_path / "tokenizer").decode(row["ids"])
    assert '<page number="2">\nsecond words\n</page>' in text


async def test_a_report_outlives_the_service(tmp_path: Path) -> None:
    """The report is stored and acknowledged, and the service is gone before the session is graded."""
    async with engine_server(tmp_path) as (_, url):
        async with on_engine(tmp_path, url) as world:
            opened = await world.owner.open()
            await world.agent(opened).ask(QUESTIONS[0])
            world.service.external.note_report = lambda session_id: None  # type: ignore[method-assign]  # as if killed
            assert (await world.owner.complete(opened, reward=0.5)).status_code == 200
        async with on_engine(tmp_path, url) as world:
            assert (await world.owner.result(opened))["verdict"]["reward"] == 0.5


async def test_a_failed_call_outlives_the_service(tmp_path: Path) -> None:
    """A restart does not turn a session whose last call failed into one with a reward."""
    breaks = {"when": "Break!", "reply": say("some words and more"), "fail": "unavailable", "after": 2}
    async with engine_server(tmp_path, replies=[breaks, {"when": "Well?", "reply": say("well")}]) as (_, url):
        async with on_engine(tmp_path, url) as world:
            failed, recovers, reported = [await world.owner.open() for _ in range(3)]
            for opened in (failed, recovers, reported):
                reply = await world.agent(opened).post([{"role": "user", "content": "Break!"}])
                assert reply.status_code in (502, 503)
            world.service.external.note_report = lambda session_id: None  # type: ignore[method-assign]  # as if killed
            assert (await world.owner.complete(reported, reward=0.5)).status_code == 200
        async with on_engine(tmp_path, url) as world:
            for opened in (failed, recovers):
                await world.owner.open(group_id=opened["session"]["group_id"])
            recovers["base_url"] = f"{world.owner.url}/s/{recovers['key']}"
            await world.agent(recovers).ask("Well?")
        async with on_engine(tmp_path, url) as world:
            for opened in (failed, recovers):
                await world.owner.open(group_id=opened["session"]["group_id"])
                assert (await world.owner.complete(opened, reward=0.5)).status_code == 200
            for opened in (failed, reported):
                result = await world.owner.result(opened)
                assert (result["verdict"], result["error"]["boundary"]) == (None, "engine")
            assert (await world.owner.result(recovers))["verdict"]["reward"] == 0.5


async def test_a_call_before_the_session_runs_again_is_told_to_come_back(tmp_path: Path) -> None:
    async with engine_server(tmp_path) as (_, url), on_engine(tmp_path, url) as world:
        opened = await world.owner.open()
        held = world.service.external._live.pop(opened["session"]["id"])
        reply = await world.agent(opened).post([{"role": "user", "content": QUESTIONS[0]}])
        assert reply.status_code == 503
        world.service.external._live[opened["session"]["id"]] = held
        forged = opened["key"][:-4] + "AAAA"
        strange = Agent(world.http, {"key": forged, "base_url": opened["base_url"].replace(opened["key"], forged)})
        assert (await strange.post([{"role": "user", "content": QUESTIONS[0]}])).status_code == 401


@asynccontextmanager
async def served(tmp_path: Path, engine: str, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `outrider serve` on a fixed port. Yields the process when the service is ready."""
    process = await program(
        *("serve", "--port", str(port), "--data", tmp_path / "data", "--engine", f"vllm={engine}"),
        *("--tokenizer", tmp_path / "tokenizer", "--renderer", "qwen3", "--allow-plugin", "external.agents"),
        env={"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": "/usr/bin:/bin"},
    )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        assert b"ready" in line, (await process.communicate())[1].decode()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.deep
async def test_agents_go_on_after_a_kill(tmp_path: Path) -> None:
    """16 agents with the OpenAI SDK run in processes of their own, and the service is killed twice meanwhile. Their
    rows equal those of an in-process agent with the same conversation."""
    async with engine_server(tmp_path) as (_, engine), httpx.AsyncClient(verify=False, timeout=60) as http:
        port = free_port()
        owner = Owner(http, f"http://127.0.0.1:{port}")
        task = {"instruction": "Ask.", "harness": {"external": {}}, "evaluator": {"kind": "reported"}}
        agents: list[asyncio.subprocess.Process] = []
        async with served(tmp_path, engine, port):
            group = (await owner.call("POST", "/groups", {"task": task, "n": SIZE})).json()
            opened = [await owner.open(group_id=group["id"], sample_index=index) for index in range(SIZE)]
            for each in opened:
                words = (each["base_url"], each["key"], "0.5")
                agents.append(
                    await asyncio.create_subprocess_exec(
                        sys.executable, "-I", AGENT, *words, stdout=-1, start_new_session=True
                    )
                )
            await some_turns(owner, opened)
        async with served(tmp_path, engine, port):
            await asyncio.sleep(1)
        async with served(tmp_path, engine, port):
            said = [(await agent.communicate())[0] for agent in agents]
            assert said == [b"You are welcome.\n"] * SIZE
            for each in opened:
                assert (await owner.complete(each, reward=1)).status_code == 200
            done = await owner.done(group["id"])
            own = {
                "instruction": "Ask.",
                "harness": {"agent": "external.agents:Questions"},
                "runtime": {"kind": "process"},
                "evaluator": {"kind": "callable", "path": "external.agents:one"},
            }
            ours = await owner.done((await owner.call("POST", "/groups", {"task": own})).json()["id"])
        [expected] = ours["samples"]
        assert expected["reward"] == 1
        rows = done["samples"]
        assert len(rows) == SIZE
        for row in rows:
            assert {name: row[name] for name in SAME} == {name: expected[name] for name in SAME}
        assert all(session["attempt"] == 3 for session in done["sessions"])


SAME = ("ids", "loss_mask", "logprobs", "versions", "turns", "prompt_length", "reward", "kind", "mode", "turn_spans")


async def some_turns(owner: Owner, opened: Sequence[dict[str, Any]]) -> None:
    """Wait until a session has two turns."""
    for _ in range(600):
        turns = await owner.call("GET", f"/sessions/{opened[-1]['session']['id']}/turns")
        if len(json.loads(turns.text)["turns"]) >= 2:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the agents make no turns")
