"""Agents in containers outlive the service that started them: the next one goes on with their sessions, token by token.

The service is the program `outrider serve`, killed with SIGKILL; engine and containers are not its children.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import pytest
from campaign.engine import Call, LoggedEngine
from campaign.seams import Knobs
from campaign.service import TOKENIZER
from campaign.tasks import PROGRAM

from outrider.client.client import AsyncClient
from outrider.lab.fakes.engine_servers.app import engine_app, serving
from outrider.lab.fakes.engine_servers.asgi import ServeSettings
from outrider.lifecycle import GroupState, StopReason
from outrider.sandbox.runtimes.apptainer.runtime import ApptainerRuntime
from outrider.sandbox.runtimes.kernel.process_marks import marked
from outrider.schemas import GroupView
from outrider.tokens.rendering.tokenizer import Tokenizer
from runtimes import engines, sif_images
from support.node_folders import temporary

from .world import result_of

__all__ = ["temporary"]

pytestmark = pytest.mark.real

TURNS = 12
SESSIONS = 3


def sandbox_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if kind == "apptainer":
        if not (can := ApptainerRuntime.available()).ok:
            pytest.skip(f"{kind}: {can.detail}")
        return {"kind": kind, "rootfs": str(sif_images.python_root())}
    image = engines.image(kind)
    variable = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}[kind]
    monkeypatch.setenv(variable, os.environ[engines.RUNTIMES[kind].engine.variable])
    return {"kind": kind, "image": image}


@asynccontextmanager
async def an_engine(log: Path) -> AsyncIterator[str]:
    tokenizer = Tokenizer.load(TOKENIZER)
    settings = ServeSettings(tokenizer=tokenizer)
    engine = cast(Any, LoggedEngine(log, tokenizer, Knobs(log.with_name("knobs"))))
    async with serving(engine_app(engine, "vllm", settings)) as url:
        yield url


class Served:
    """`async with Served(...)`: `outrider serve`, which may be killed and started again. Leaving ends it."""

    def __init__(self, folder: Path, engine: str, *more: str) -> None:
        self._folder = folder
        self._command = [
            *(sys.executable, "-m", "outrider.cli", "serve", "--data", str(folder / "data")),
            *("--engine", f"vllm={engine}", "--tokenizer", str(TOKENIZER), "--renderer", "template:qwen3"),
            *("--allow-path", str(sif_images.folder()), "--port", "0", *more),
        ]
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.kill(signal.SIGTERM)

    async def start(self) -> AsyncClient:
        """A client of it, once it is ready."""
        log = os.open(self._folder / "service.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "TMPDIR": str(self._folder / "tmp")},
            )
        finally:
            os.close(log)
        assert self._process.stdout is not None
        ready = (await self._process.stdout.readline()).decode()
        return AsyncClient(ready.split()[-1])

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        await self._process.wait()


def calls_of(log: Path) -> list[Call]:
    return [msgspec.json.decode(line, type=Call) for line in log.read_bytes().splitlines()] if log.exists() else []


async def until_called(log: Path, times: int) -> None:
    async with asyncio.timeout(120):
        while len(await asyncio.to_thread(calls_of, log)) < times:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.05)


def check_exact(group: GroupView, told: Sequence[str], log: Path) -> None:
    """Each token that the agents were given is in a row of theirs, and each row's tokens are the engine's."""
    calls = calls_of(log)
    for session, replies in zip(group.sessions, told, strict=True):
        result = result_of(session)
        assert result.stop_reason is StopReason.COMPLETED
        assert result.tokens.drift == 0
        samples = [one for one in group.samples or () if one.session_id == session.id]
        sampled = {tuple(call.ids) for call in calls if call.session.startswith(f"{session.id}-")}
        trained = [tuple(sample.ids[start:end]) for sample in samples for start, end in sample.turn_spans]
        tokenizer = Tokenizer.load(TOKENIZER)
        assert set(trained) <= sampled
        texts = {tokenizer.decode(ids[:-1]) for ids in trained}
        assert len(replies.split()) == TURNS
        assert set(replies.split()) <= texts


@pytest.mark.parametrize("kind", ["docker", "podman", "apptainer"])
@pytest.mark.parametrize("processes", [1, 2])
async def test_a_killed_service(
    kind: str, processes: int, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = sandbox_of(kind, monkeypatch)
    (tmp_path / "tmp").mkdir(mode=0o711)
    os.chmod(tmp_path, 0o711)
    task = {
        "instruction": "Say something.",
        "harness": {"command": ["bash", "-c", PROGRAM, "agent", str(TURNS), "true", "100"]},
        "runtime": runtime,
        "evaluator": {"run": "test -s notes.json"},
        "artifacts": ["notes.json"],
        "max_attempts": 1,
    }
    log = tmp_path / "engine.log"
    async with (
        asyncio.timeout(170),
        an_engine(log) as engine,
        Served(tmp_path, engine, "--processes", str(processes)) as service,
    ):
        client = await service.start()
        async with client:
            group = await client.submit({"task": task, "n": SESSIONS})
            await until_called(log, 4 * SESSIONS)
        await service.kill()
        client = await service.start()
        async with client:
            while (done := await client.group(group.id, wait=30, samples=True)).state is not GroupState.DONE:
                """It goes on."""
            assert [result_of(session).attempt for session in done.sessions] == [2] * SESSIONS
            told = []
            for session in done.sessions:
                [kept] = (await client.artifacts(session.id)).artifacts
                told.append(msgspec.json.decode(await client.artifact(session.id, kept.path))["told"])
            check_exact(done, told, log)
        # Nobody began anew.
        prompts = [call.prompt for call in calls_of(log)]
        assert prompts.count(prompts[0]) == SESSIONS
    assert not await asyncio.to_thread(marked, str(tmp_path))
