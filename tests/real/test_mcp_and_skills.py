"""Programs with a skill and with real MCP servers from the registries: `files` and `time` over stdio, and `web` over
HTTP on the sandbox's loopback."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from outrider.harnesses.install import install, installation
from outrider.harnesses.presets import load_preset, preset_names
from outrider.schemas import TimelineView
from support.environments import environment_with

from .certified import assert_exact, certified
from .rollout import END, World, a_world, call

pytestmark = pytest.mark.real

NPM = ("@modelcontextprotocol/server-filesystem@2026.8.31", "@modelcontextprotocol/server-everything@2026.8.31")
PYPI = "mcp-server-time==2026.10.19"
SYSTEM_PYTHON = "/usr/bin/python3"
PORT = 3991
PROGRAMS = [name for name in preset_names() if load_preset(name).mcp]
SKILL = "---\nname: greeting\ndescription: How to greet, by the rule zqgreetqz.\n---\nSay zqhelloqz.\n"
READ_SKILL = {
    "claude-code": call("Skill", skill="greeting"),
    "cline": call("skills", skill="greeting"),
    "codex": call("exec_command", cmd="cat ~/.agents/skills/greeting/SKILL.md"),
    "copilot": call("skill", skill="greeting"),
    "hermes": call("skill_view", name="greeting"),
    "kimi-code": call("Skill", skill="greeting"),
    "mistral-vibe": call("skill", name="greeting"),
    "openclaw": call("read", path="~/.openclaw/skills/greeting/SKILL.md"),
    "openhands-sdk": call("invoke_skill", name="greeting"),
    "gemini-cli": call("activate_skill", name="greeting"),
    "opencode": call("skill", name="greeting"),
    "openhands": call("invoke_skill", name="greeting"),
    "pi": call("bash", command="cat ~/.pi/agent/skills/greeting/SKILL.md"),
    "qwen-code": call("skill", skill="greeting"),
}
START = """
PORT={port} setsid {node} {index} streamableHttp > /tmp/everything.log 2>&1 &
for _ in $(seq 300); do (: < /dev/tcp/127.0.0.1/{port}) 2> /dev/null && exit 0; sleep 0.1; done
cat /tmp/everything.log; exit 1
"""


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with the servers, and the Node.js that runs them. Skips if the servers cannot be installed."""
    install("pi")
    found = installation(load_preset("pi"))
    assert found is not None
    assert found.node is not None
    folder = tmp_path_factory.mktemp("servers")
    (folder / "package.json").write_text('{"private": true}')
    npm = found.node.parent.parent / "lib/node_modules/npm/bin/npm-cli.js"
    done = subprocess.run(
        [str(found.node), str(npm), "install", "--no-audit", "--no-fund", "--ignore-scripts", *NPM],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"{NPM[0]} cannot be installed here: {done.stderr.strip()[-300:]}")
    environment_with(folder / "time", [PYPI], python=SYSTEM_PYTHON)
    return folder, found.node


def given(servers: tuple[Path, Path], skill: str) -> dict[str, Any]:
    folder, node = servers
    packages = folder / "node_modules/@modelcontextprotocol"
    prepare = [
        {"write": SKILL, "to": f"{skill}/SKILL.md"},
        {"run": START.format(port=PORT, node=node, index=packages / "server-everything/dist/index.js")},
    ]
    return {
        "mcp_servers": [
            {
                "name": "files",
                "transport": "stdio",
                "command": str(node),
                "args": [str(packages / "server-filesystem/dist/index.js"), "/work"],
            },
            {
                "name": "time",
                "transport": "stdio",
                "command": str(folder / "time/bin/mcp-server-time"),
                "args": ["--local-timezone", "Asia/Tokyo"],
            },
            {"name": "web", "transport": "streamable-http", "url": f"http://127.0.0.1:{PORT}/mcp"},
        ],
        "skills": [skill],
        "runtime": {
            "kind": "namespace",
            "mounts": [{"source": str(folder)}, {"source": str(node.parents[2])}],
            "prepare": prepare,
        },
    }


SLOW = {"cline", "copilot", "hermes", "kimi-code", "mistral-vibe", "openclaw", "openhands", "openhands-sdk"}


def slow_at_night(names: Iterable[str]) -> list[Any]:
    """Return test parameters, one for each program. Slow programs are tested nightly."""
    return [pytest.param(name, marks=pytest.mark.nightly if name in SLOW else ()) for name in names]


MORE = {"openhands": {"security_risk": "LOW"}, "openhands-sdk": {"security_risk": "LOW"}}
"""Arguments that a program adds to every tool of a server and requires."""


def called(program: str, server: str, name: str, **arguments: Any) -> str:
    preset = load_preset(program)
    assert preset.mcp is not None
    arguments |= MORE.get(program, {})
    within = preset.certify.mcp_call
    if within is None:
        return call(preset.mcp.tool.format(server=server, tool=name), **arguments)
    words = {"{server}": server, "{tool}": name, "{arguments}": json.dumps(arguments)}
    text = re.sub("|".join(map(re.escape, words)), lambda found: words[found[0]], within.text)
    return call(within.tool, **{within.argument: text})


async def timeline_of(world: World, session: str) -> TimelineView:
    """Poll the timeline until the node has stored the sandbox's entry. Returns the timeline."""
    async with asyncio.timeout(20):
        while True:
            view = await world.client.timeline(session)
            if any(span.kind == "sandbox" for span in view.spans):
                return view
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("name", slow_at_night(PROGRAMS))
async def test_a_program_calls_real_servers_and_reads_a_skill(
    name: str, servers: tuple[Path, Path], policy_folder: Path, tmp_path: Path
) -> None:
    await asyncio.to_thread(install, name)
    noon = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    replies: list[str | dict[str, Any]] = [
        {"when": "Generate a title for this conversation", "reply": "A greeting" + END},
        "First the skill." + READ_SKILL[name] + END,
        called(name, "files", "write_file", path="/work/out.txt", content="hello\n") + END,
        called(name, "time", "convert_time", **noon) + END,
        called(name, "web", "echo", message="zqmessageqz") + END,
        "All done." + END,
    ]
    task = given(servers, "/opt/skills/greeting")
    harness = {"preset": name, "mcp_servers": task["mcp_servers"], "skills": task["skills"]}
    folder, node = servers
    async with a_world(tmp_path, policy_folder, replies, allow=[folder, node.parents[2]]) as world:
        rollout = await world.run(name, harness=harness, runtime=task["runtime"])
        view = await timeline_of(world, rollout.session.id)
        sent = world.wire.sent.decode(errors="replace")
    assert "zqgreetqz" in sent, "the skill's description is offered"
    assert "zqhelloqz" in sent, "the skill is read"
    assert "T21:00:00+09:00" in sent, "what the server of the time answers"
    assert "Echo: zqmessageqz" in sent, "what the server by HTTP answers"
    calls = [one for span in view.spans for one in span.data.get("mcp_calls", ())]
    if load_preset(name).certify.mcp_call is None:  # otherwise the calls are arguments of another tool
        assert calls == [
            {"server": "files", "tool": "write_file"},
            {"server": "time", "tool": "convert_time"},
            {"server": "web", "tool": "echo"},
        ]
    main = [turn for turn in rollout.turns if turn.kind == "main"]
    assert len(main) == 5
    # server-everything announces more tools right after its start. On a busy machine this announcement comes after a
    # program's first call. OpenClaw forks at every turn.
    forks = [turn.cause for turn in main if turn.join == "fork"]
    assert name == "openclaw" or forks in ([], ["tools_changed"], ["tools_and_system_changed"])


@pytest.mark.parametrize("name", slow_at_night(name for name in preset_names() if load_preset(name).skills))
async def test_a_program_is_certified_with_a_server_and_a_skill(name: str) -> None:
    rows = await certified(name, ("mcp", "skill"))
    assert_exact(rows["skill"])
    if name in PROGRAMS:
        assert_exact(rows["mcp"])
    else:
        assert rows["mcp"].reason == f"harness {name!r} cannot be given MCP servers"


async def test_pi_reads_a_skill(policy_folder: Path, tmp_path: Path) -> None:
    replies = [READ_SKILL["pi"] + END, call("bash", command="echo hello > out.txt") + END, "All done." + END]
    runtime = {"kind": "namespace", "prepare": [{"write": SKILL, "to": "skills/greeting/SKILL.md"}]}
    async with a_world(tmp_path, policy_folder, replies) as world:
        await world.run("pi", harness={"preset": "pi", "skills": ["skills"]}, runtime=runtime)
        sent = world.wire.sent.decode(errors="replace")
    assert "zqgreetqz" in sent
    assert "zqhelloqz" in sent


async def test_the_built_in_agent_calls_real_servers(
    servers: tuple[Path, Path], policy_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    task = given(servers, "/opt/skills/greeting")
    stdio = [server for server in task["mcp_servers"] if server["transport"] == "stdio"]
    now = json.dumps({"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"})
    replies = [
        call("mcp__files__write_file", path="/work/out.txt", content="hello\n")
        + call("mcp__time__convert_time", **json.loads(now))
        + END,
        call("bash", command="cat /opt/skills/greeting/SKILL.md") + END,
        "All done." + END,
    ]
    folder, node = servers
    harness = {"agent": "tools", "mcp_servers": stdio, "skills": task["skills"]}
    async with a_world(tmp_path, policy_folder, replies, allow=[folder, node.parents[2]]) as world:
        rollout = await world.run("", harness=harness, runtime=task["runtime"])
    contexts = [turn.context or "" for turn in rollout.turns]
    assert "zqgreetqz" in contexts[0]
    assert "T21:00:00+09:00" in contexts[1]
    assert "zqhelloqz" in contexts[2]
