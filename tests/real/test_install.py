"""The installer and the presets with real programs, in real sandboxes, with a scripted Chat endpoint."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from outrider.errors import HarnessError
from outrider.harnesses.base import HarnessContext, HarnessOutcome, ModelEndpoint
from outrider.harnesses.factory import make_harness
from outrider.harnesses.install import check, install, installed
from outrider.harnesses.presets import load_preset
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.sandbox.runtimes.host_process.process import ProcessRuntime
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import EvaluatorSpec, HarnessSpec, RuntimeSpec, TaskSpec

pytestmark = pytest.mark.real

INSTRUCTION = "@Write \"hi\" into {model}/out.txt - and say 'done'\n"
COMMANDS = {
    "mini-swe-agent": ["echo hi > out.txt", "cat out.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"],
    "pi": ["echo hi > out.txt", "cat out.txt"],
}
RUNTIMES: dict[str, Any] = {"process": ProcessRuntime, "namespace": NamespaceRuntime}


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with installed programs: $OUTRIDER_HOME if it is set, so that later runs are quick, or a new
    folder."""
    with pytest.MonkeyPatch.context() as patch:
        if "OUTRIDER_HOME" not in os.environ:
            patch.setenv("OUTRIDER_HOME", str(tmp_path_factory.mktemp("programs")))
        yield Path(os.environ["OUTRIDER_HOME"])


class Scripted:
    """A Chat endpoint on TCP and on a Unix socket. It calls `bash` with each of `commands`, and then replies "done". If
    `commands` is None, each request fails with status 500."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.url = ""
        self.commands: list[str] | None = []
        self.requests: list[dict[str, Any]] = []
        self.keys: set[tuple[str, str | None]] = set()

    async def start(self) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/s/{key}/v1/chat/completions", self._chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await web.UnixSite(runner, str(self.socket)).start()
        host, port = next(address for address in runner.addresses if isinstance(address, tuple))[:2]
        self.url = f"http://{host}:{port}"
        return runner

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.add((request.match_info["key"], request.headers.get("Authorization")))
        if self.commands is None:
            return web.json_response({"error": {"message": "out of order", "type": "server_error"}}, status=500)
        reply, finish = self._reply(sum(message["role"] == "assistant" for message in body["messages"]))
        head = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
        if body.get("stream"):
            return await self._stream(request, head, reply, finish)
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": reply, "finish_reason": finish}
        return web.json_response(head | {"object": "chat.completion", "choices": [choice], "usage": usage})

    def _reply(self, turn: int) -> tuple[dict[str, Any], str]:
        assert self.commands is not None
        if turn >= len(self.commands):
            return {"role": "assistant", "content": "done"}, "stop"
        function = {"name": "bash", "arguments": json.dumps({"command": self.commands[turn]})}
        call = {"index": 0, "id": f"call_{turn}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}, "tool_calls"

    async def _stream(
        self, request: web.Request, head: dict[str, Any], reply: dict[str, Any], finish: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta, reason in ((reply, None), ({}, finish)):
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            chunk = head | {"object": "chat.completion.chunk", "choices": [choice]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def model(tmp_path: Path) -> AsyncIterator[Scripted]:
    scripted = Scripted(tmp_path / "gateway.sock")
    runner = await scripted.start()
    try:
        yield scripted
    finally:
        await runner.cleanup()


async def drive(preset: str, kind: str, model: Scripted, directory: Path) -> tuple[HarnessOutcome, bytes]:
    """Run a preset in a new sandbox. Returns its outcome and the content of out.txt."""
    harness = make_harness(HarnessSpec(preset=preset))
    async with Host(directory) as host:
        sandbox = RUNTIMES[kind].create(
            RuntimeSpec(kind=kind),
            SandboxContext(
                session_id="session-1",
                attempt=1,
                directory=directory,
                host=host,
                gateway_url=model.url,
                gateway_socket=model.socket,
                mounts=harness.mounts(),
            ),
        )
        task = TaskSpec(
            instruction=INSTRUCTION, harness=HarnessSpec(preset=preset), evaluator=EvaluatorSpec(run="true")
        )
        await sandbox.start()
        try:
            endpoint = ModelEndpoint(base_url=f"{sandbox.endpoint}/s/key-1", api_key="key-1", model="policy")
            # A program in the sandbox does not use the in-process client.
            context = HarnessContext(task=task, runtime=sandbox, endpoint=endpoint, model=None)  # type: ignore[arg-type]  # not used by a program
            await harness.install(context)
            return await harness.run(context), await sandbox.read("out.txt")
        finally:
            await sandbox.stop()


@pytest.mark.parametrize("preset", sorted(COMMANDS))
def test_many_asks_install_once_and_the_program_works(preset: str) -> None:
    there = installed(preset)
    said: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: install(preset, said.append), range(8)))
    assert folders == {installed(preset)}
    assert sum(line.startswith(("making", "npm")) for line in said) == (0 if there else 1)
    assert check(preset) == load_preset(preset).install.version


# Nightly in namespace sandboxes, because test_rollouts.py also runs these programs there.
@pytest.mark.parametrize("kind", [pytest.param("namespace", marks=pytest.mark.nightly), "process"])
@pytest.mark.parametrize("preset", sorted(COMMANDS))
async def test_a_program_finishes_a_file_writing_task(
    preset: str, kind: str, model: Scripted, tmp_path_factory: pytest.TempPathFactory
) -> None:
    install(preset)
    model.commands = COMMANDS[preset]
    outcome, written = await drive(preset, kind, model, tmp_path_factory.mktemp("sandbox"))
    assert written == b"hi\n"
    assert outcome.answer == ("done" if preset == "pi" else None)
    assert model.keys == {("key-1", "Bearer key-1")}
    assert len(model.requests) == 3
    assert all(request["model"] == "policy" for request in model.requests)
    assert all(bool(request.get("stream")) is (preset == "pi") for request in model.requests)
    assert INSTRUCTION.strip() in _text(model.requests[0]["messages"][1])
    assert "hi" in _text(model.requests[2]["messages"][-1])


@pytest.mark.parametrize("preset", sorted(COMMANDS))
async def test_a_model_that_fails_makes_the_program_fail(
    preset: str, model: Scripted, tmp_path_factory: pytest.TempPathFactory
) -> None:
    install(preset)
    model.commands = None
    with pytest.raises(HarnessError, match="exited with code 1") as caught:
        await drive(preset, "process", model, tmp_path_factory.mktemp("sandbox"))
    assert "out of order" in (caught.value.log_tail or "")


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
