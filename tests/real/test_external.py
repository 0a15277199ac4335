"""Real external agents: Claude Code in processes outside of any sandbox, and an agent in a container."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from http.client import HTTPConnection
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

import pytest

from outrider.client.client import AsyncClient, ExternalSession
from outrider.harnesses.install import installation
from outrider.harnesses.presets import load_preset
from outrider.schemas import GroupView
from outrider.trajectory import Sample
from runtimes import engines

from .rollout import END, a_world, call

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("installed")]

PRESET = "claude-code"
SIZE = 16
AT_ONCE = 4
TOLD = "Write the word hello into the file out.txt in the working directory."
REPLIES = [call("Bash", command="echo hello > out.txt") + END, "All done." + END]
SETTINGS = {
    "IS_SANDBOX": "1",
    "ENABLE_TOOL_SEARCH": "false",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "131072",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "16384",
}
LIMITS = [
    {"Name": name, "Soft": min(most, hard), "Hard": min(most, hard)}
    for name, most, (_, hard) in (
        ("nofile", 1024, resource.getrlimit(resource.RLIMIT_NOFILE)),
        ("nproc", 1024, resource.getrlimit(resource.RLIMIT_NPROC)),
    )
]
"""A container without limits gets podman's defaults, which this machine may not allow."""
MODELS = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_FABLE_MODEL")
IN_CONTAINER = """
import json, sys, urllib.request
url, key = sys.argv[1:]
messages = []
for question in ("Where is it?", "Read it."):
    messages.append({"role": "user", "content": question})
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    reply = urllib.request.urlopen(urllib.request.Request(url + "/v1/chat/completions", body, headers))
    messages.append({"role": "assistant", "content": json.load(reply)["choices"][0]["message"]["content"]})
"""


async def claude(session: ExternalSession, folder: Path) -> None:
    """Run Claude Code as a user would, and report the reward 1 if its file has the right content."""
    (folder / "work").mkdir(parents=True)
    places = installation(load_preset(PRESET))
    assert places is not None
    program = Path(places.words()["prefix"]) / "node_modules/@anthropic-ai/claude-code/bin/claude.exe"
    models = {f"ANTHROPIC_{name}": session.model for name in MODELS}
    process = await asyncio.create_subprocess_exec(
        *(program, "--print", "--permission-mode=bypassPermissions", "--disallowed-tools=WebFetch,WebSearch"),
        stdin=-1,
        stdout=-1,
        stderr=-2,
        cwd=folder / "work",
        env={"HOME": str(folder), "PATH": os.environ["PATH"], **SETTINGS, **models, **session.variables},
        start_new_session=True,
    )
    said, _ = await process.communicate(TOLD.encode())
    assert process.returncode == 0, said.decode()
    file = folder / "work" / "out.txt"
    await session.complete(reward=float(file.read_text() == "hello\n"), answer=said.decode())


def trained(sample: Sample) -> list[int]:
    """Return the ids that train. Their log-probabilities are not compared, because they depend on the prompt, which
    contains the working directory."""
    return [id for id, mask in zip(sample.ids.tolist(), sample.loss_mask.tolist(), strict=True) if mask]


def shape(sample: Sample) -> tuple[Any, ...]:
    return sample.kind, sample.turns, sample.reward, sample.mode, sample.logprob_kind, trained(sample)


async def delivered(client: AsyncClient, group_id: str) -> GroupView:
    await client.wait([group_id])
    return await client.group(group_id, samples=True)


async def test_a_group_of_claude_codes_elsewhere(policy_folder: Path, tmp_path: Path) -> None:
    """The rows of external sessions train the same tokens as the rows of the same program in one of Outrider's
    sandboxes. The prompts differ, because each contains its own working directory."""
    async with a_world(tmp_path / "data", policy_folder, REPLIES) as world:
        client = world.client
        ours = await world.group(PRESET)
        task = {"instruction": TOLD, "harness": {"external": {}}, "evaluator": {"kind": "reported"}}
        group = await client.submit({"task": task, "n": SIZE})
        room = asyncio.Semaphore(AT_ONCE)

        async def roll_out(index: int) -> None:
            async with room, client.external_session({"group_id": group.id, "sample_index": index}) as session:
                await claude(session, tmp_path / str(index))

        async with asyncio.timeout(280):
            await asyncio.gather(*map(roll_out, range(SIZE)))
        theirs = await delivered(client, group.id)
        assert ours.samples
        assert theirs.samples
        assert len(theirs.samples) == SIZE * len(ours.samples)
        for index in range(SIZE):
            rows = [row for row in theirs.samples if row.sample_index == index]
            assert list(map(shape, rows)) == list(map(shape, ours.samples))
        for session in theirs.sessions:
            assert session.result is not None
            assert session.result.tokens.drift == 0
            assert session.result.forks == {}


async def test_an_agent_in_a_container(policy_folder: Path, tmp_path: Path) -> None:
    podman = engines.engine("podman")
    image = engines.image("podman")
    async with a_world(tmp_path / "data", policy_folder, ["In a file." + END, "It is empty." + END]) as world:
        async with world.client.external_session() as session:
            body = {
                "Image": image,
                "Cmd": [engines.PYTHON, "-c", IN_CONTAINER, session.base_url, session.key],
                "HostConfig": {"NetworkMode": "host", "Ulimits": LIMITS},
            }
            code = await asyncio.to_thread(run_in_container, podman, body)
            assert code == 0
            await session.complete(reward=1)
        done = await delivered(world.client, session.group_id)
        assert done.samples
        [row] = done.samples
        assert (row.turns, row.reward, bool(sum(row.loss_mask))) == ((0, 1), 1.0, True)


def run_in_container(podman: Path, body: dict[str, Any]) -> int:
    """Run a container to its end, and return its exit code."""
    made = json.loads(ask(podman, "POST", "/containers/create", body))
    try:
        ask(podman, "POST", f"/containers/{made['Id']}/start")
        code: int = json.loads(ask(podman, "POST", f"/containers/{made['Id']}/wait"))["StatusCode"]
        return code
    finally:
        ask(podman, "DELETE", f"/containers/{made['Id']}?force=true")


def ask(podman: Path, method: str, target: str, body: dict[str, Any] | None = None) -> bytes:
    connection = HTTPConnection("localhost", timeout=120)
    connection.sock = socket(AF_UNIX)
    connection.sock.connect(str(podman))
    connection.request(method, target, json.dumps(body or {}), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    assert reply.status < 300, content.decode()
    return content
