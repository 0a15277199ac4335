"""Real programs reach a real MCP server outside of their sandbox, by HTTP through the proxy of the task's network. The
server runs on this machine, and the operator allows it by the machine's name."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.config import NetworkConfig
from outrider.harnesses.install import install
from support.ports import free_port

from .rollout import END, a_world, call
from .test_mcp_and_skills import PROGRAMS, called, servers

__all__ = ["servers"]

pytestmark = pytest.mark.real

WRITE = {
    "claude-code": call("Bash", command="echo hello > out.txt", description="Write"),
    "codex": call("exec_command", cmd="echo hello > out.txt"),
    "gemini-cli": call("run_shell_command", command="echo hello > out.txt"),
    "opencode": call("bash", command="echo hello > out.txt", description="Write"),
    "openhands": call("terminal", command="echo hello > out.txt", security_risk="LOW"),
    "qwen-code": call("run_shell_command", command="echo hello > out.txt", is_background=False),
}


@asynccontextmanager
async def everything(servers: tuple[Path, Path]) -> AsyncIterator[int]:
    """Run `server-everything` on this machine. Yields its port."""
    folder, node = servers
    index = folder / "node_modules/@modelcontextprotocol/server-everything/dist/index.js"
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        str(node),
        str(index),
        "streamableHttp",
        env={**os.environ, "PORT": str(port)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                except OSError:
                    await asyncio.sleep(0.1)
        yield port
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("name", sorted(WRITE.keys() & set(PROGRAMS)))
async def test_a_program_calls_a_server_outside_of_its_sandbox(
    name: str, servers: tuple[Path, Path], policy_folder: Path, tmp_path: Path
) -> None:
    await asyncio.to_thread(install, name)
    echo = called(name, "web", "echo", message="zqmessageqz")
    if name == "openhands":  # OpenHands leaves out the name of a server if there is only one
        echo = call("echo", message="zqmessageqz", security_risk="LOW")
    replies: list[str | dict[str, Any]] = [
        {"when": "Generate a title for this conversation", "reply": "A greeting" + END},
        "First the server." + echo + END,
        WRITE[name] + END,
        "All done." + END,
    ]
    async with everything(servers) as port:
        place = f"{socket.gethostname()}:{port}"
        network = NetworkConfig(allow=(place,), internal=(place,))
        harness = {
            "preset": name,
            "mcp_servers": [{"name": "web", "transport": "streamable-http", "url": f"http://{place}/mcp"}],
        }
        runtime = {"kind": "namespace", "network": {"agent": [place]}}
        async with a_world(tmp_path, policy_folder, replies, network=network) as world:
            rollout = await world.run(name, harness=harness, runtime=runtime)
            session = rollout.session.id
            async with asyncio.timeout(20):
                while True:
                    spans = (await world.client.timeline(session)).spans
                    used = {span.name: span.data for span in spans if span.kind == "network"}
                    if used.get(place, {}).get("requests") and not any("cut_off" in data for data in used.values()):
                        break
                    await asyncio.sleep(0.2)
    contexts = [turn.context or "" for turn in rollout.turns]
    assert any("Echo: zqmessageqz" in context for context in contexts), used
    assert used[place]["refused"] == 0, used[place]
    others = {server: data["requests"] for server, data in used.items() if server != place}
    assert not any(others.values()), "no other server is reached"
