"""Sessions whose agents run elsewhere, through the Python client and the command line."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx
import pytest

from cli.world import Cli
from outrider.client.client import AsyncClient, Client
from outrider.errors import Conflict, InvalidField
from support.service import running_service, say

REPLIES = (say("It is in a file."), say("Done."))
PROGRAM = """
import json, os, sys, urllib.request
assert os.environ["OUTRIDER_SESSION"].startswith("s-") and os.environ["OUTRIDER_SAMPLE"] == "0"
body = json.dumps({"model": "x", "messages": [{"role": "user", "content": "Where is it?"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"], file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


async def ask(base_url: str, key: str) -> str:
    async with httpx.AsyncClient(verify=False) as http:
        body = {"model": "any", "messages": [{"role": "user", "content": "Where is it?"}]}
        headers = {"Authorization": f"Bearer {key}"}
        reply = await http.post(f"{base_url}/v1/chat/completions", json=body, headers=headers)
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text


async def test_a_block_runs_an_agent(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        async with client.external_session({"labels": {"run": "r"}}) as session:
            assert await ask(session.base_url, session.key) == "It is in a file."
            await session.reset()
            await ask(session.base_url, session.key)
            await session.complete(reward=0.5, turns={0: 1.0})
        [group] = await client.wait([session.group_id])
        result = group.sessions[0].result
        assert result is not None
        assert result.verdict is not None
        assert (result.verdict.reward, result.verdict.turns) == (0.5, {0: 1.0})
        [listed] = (await client.sessions(labels={"run": "r"}, state="done")).sessions
        assert listed.id == session.id
        assert (await client.sessions(labels={"run": "other"})).sessions == ()
        [turn] = await client.turns(session.id, tokens=True)
        assert turn.tokens is not None
        assert len(turn.tokens.output_ids) == len(turn.tokens.logprobs) == turn.output_tokens


async def test_a_block_that_fails_is_no_reward(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.external_session() as failed:
                raise ZeroDivisionError("1/0")
        async with client.external_session() as silent:
            await ask(silent.base_url, silent.key)
        async with client.external_session() as wrong:
            await ask(wrong.base_url, wrong.key)
            with pytest.raises(InvalidField):
                await wrong.complete(reward=1, turns={7: 1.0})
            await wrong.complete(reward=1)
        for session, said in ((failed, "reported: ZeroDivisionError: 1/0"), (silent, "without a completion")):
            [group] = await client.wait([session.group_id])
            result = group.sessions[0].result
            assert result is not None
            assert result.error is not None
            assert result.verdict is None
            assert said in result.error.message
        with pytest.raises(Conflict):
            await client.complete_session(failed.id, {"reward": 1})


async def test_the_blocking_client_runs_an_agent(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):

        def blocking() -> float:
            with Client(url) as client:
                with client.external_session() as session:
                    asyncio.run(ask(session.base_url, session.key))
                    session.reset()
                    asyncio.run(ask(session.base_url, session.key))
                    session.complete(reward=0.25)
                result = client.wait([session.group_id])[0].sessions[0].result
                assert result is not None
                assert result.verdict is not None
                return result.verdict.reward

        assert await asyncio.to_thread(blocking) == 0.25


async def test_a_program_here_is_captured(cli: Cli, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        words = ("capture", "--url", url, "--", sys.executable, program)
        ran = await cli(*words, "0")
        assert (ran.code, "It is in a file." in ran.out, "reward" in ran.out) == (0, True, True)
        failed = await cli("capture", "--json", *words[1:], "3")
        assert failed.code == 3
        result = failed.document["session"]["result"]
        assert (result["verdict"], result["error"]["code"]) == (None, "agent_failed")
        graded = await cli("capture", "--json", "--reward", "0.5", *words[1:], "3")
        assert (graded.code, graded.document["session"]["result"]["verdict"]["reward"]) == (3, 0.5)
        folder = tmp_path / "runs/1"
        writing = (
            "import os; [open(os.environ[n] + '/x', 'w').write(n) for n in ('OUTRIDER_ARTIFACTS', 'OUTRIDER_LOGS')]"
        )
        with_folder = ("capture", "--reward", "0", "--folder", str(folder), *words[1:4], sys.executable, "-c", writing)
        assert (await cli(*with_folder)).code == 0
        assert ((folder / "artifacts/x").read_text(), (folder / "logs/x").read_text()) == (
            "OUTRIDER_ARTIFACTS",
            "OUTRIDER_LOGS",
        )
        assert (await cli(*words[:3], "--folder", str(program / "no"), *words[3:], "0")).code == 2
        missing = await cli("capture", "--url", url, "--", "no-such-program")
        assert (missing.code, "cannot be run" in missing.err) == (2, True)


async def test_sessions_from_the_command_line(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        opened = await cli("session", "open", "--label", "run=r", "--idempotency-key", "k", "--url", url)
        lines = dict(line.removeprefix("export ").split("=", 1) for line in opened.out.splitlines())
        again = await cli("session", "open", "--label", "run=r", "--idempotency-key", "k", "--url", url, "--json")
        assert again.document["variables"]["OUTRIDER_SESSION"] == lines["OUTRIDER_SESSION"]
        session = lines["OUTRIDER_SESSION"]
        await ask(lines["ANTHROPIC_BASE_URL"], lines["OPENAI_API_KEY"])
        assert (await cli("session", "reset", session, "--url", url)).code == 0
        await ask(lines["ANTHROPIC_BASE_URL"], lines["OPENAI_API_KEY"])
        listed = await cli("session", "list", "--state", "running", "--url", url)
        assert session in listed.out
        wrong = await cli("session", "complete", session, "--reward", "1", "--metric", "x=many", "--url", url)
        assert (wrong.code, "is no number" in wrong.err) == (2, True)
        done = await cli("session", "complete", session, "--reward", "1", "--metric", "x=2", "--url", url)
        assert (done.code, f"outrider show {session}" in done.out) == (0, True)
