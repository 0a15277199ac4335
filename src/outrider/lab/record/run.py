"""Runs a program outside a sandbox and records its model calls. A service in this process answers the calls, with a
scripted model or a real engine.

Invariant: when `record` returns, the service has ended and its data have been removed. The transcript has every call.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from outrider.api.gateway import Gateway
from outrider.api.gateway_server import HttpServer, listener_at, running, url_of
from outrider.api.server import serving
from outrider.client.client import AsyncClient, ExternalSession
from outrider.config import Config, ModelConfig
from outrider.environment import variables
from outrider.errors import InvalidField
from outrider.harnesses.base import ModelEndpoint, SessionIds
from outrider.harnesses.endpoint_variables import endpoint_environment
from outrider.harnesses.placeholders import fill, fill_file
from outrider.harnesses.presets import Certify
from outrider.lab.certify.rows import CertificationRow, ModelAction, ScriptedStep
from outrider.lab.certify.scripted_model import ScriptedModel
from outrider.lab.demo.dialogue import POLICY
from outrider.lab.record.draft import FED
from outrider.lab.record.wire_transcript import WireTranscript
from outrider.redaction import secrets_in
from outrider.service.assembly import open_service
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.wire.file_descriptors import EACH_MOST

RENDERER = "qwen3"
MODEL = "outrider-record"
TURNS = 500
"""Maximum model calls of a recorded run."""
RUN_SECONDS = 86_400
"""Maximum seconds of a recorded run. The limit is long, because the user may think between two model calls."""

SCRIPT = CertificationRow(
    name="record",
    what="run a command without effect, and report",
    steps=(ScriptedStep(text="I will look.", actions=(ModelAction(command="echo hello"),)), ScriptedStep(text="Done.")),
    check="true",
)
"""The scripted model's replies. The program does not run in a sandbox, so the tool call in these replies must change
nothing."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program to run. `command`, `env` and the texts of `files` may contain placeholders.

    - `stdin`: True if the program reads the instruction from standard input. Otherwise its standard input is the
      terminal.
    - `files`: texts by path below HOME. They are written into a new folder, which becomes the program's HOME. Without
      files, the program gets the user's HOME.
    """

    command: tuple[str, ...]
    instruction: str
    env: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    stdin: bool = False


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a recorded run. `dialects` are the dialects of the successful model calls. `refused` has the
    number of failed calls by method, path, status and reason."""

    exit_code: int
    calls: int
    refused: Mapping[str, int]
    dialects: tuple[str, ...]
    streamed: bool
    user_texts: tuple[str, ...]


async def record(
    program: Program, transcript: IO[str], *, settings: Config | None = None, stdout: IO[str] | None = None
) -> RecordedRun:
    """Run the program until it ends, and write its model calls to `transcript`. The engines of `settings` reply, or a
    scripted model if `settings` is None. The program's output goes to `stdout`, by default that of this process. Raises
    InvalidField for a program that cannot be run."""
    with tempfile.TemporaryDirectory(prefix="outrider-record-") as folder:
        data = Path(folder) / "data"
        scripted = Config(model=ModelConfig(tokenizer=str(POLICY), renderer=RENDERER, name=MODEL))
        config = (settings or scripted).model_copy(update={"host": "127.0.0.1", "port": 0, "data": data})
        async with open_service(config) as opened, serving(*opened) as url, AsyncClient(url) as client:
            if settings is None:
                tokenizer = await asyncio.to_thread(Tokenizer.load, POLICY)
                model = ScriptedModel(tokenizer, str(POLICY), Certify(), ".", _sent, unmarked=SCRIPT)
                await opened.service.pool.add_engine(model)
            fields: dict[str, Any] = {
                "instruction": program.instruction,
                "limits": {"turns": TURNS, "session_seconds": RUN_SECONDS},
                "idle_seconds": RUN_SECONDS,
                "labels": {"by": "outrider harness record"},
            }
            async with client.external_session(fields) as session:
                secrets = [session.key, *secrets_in(variables().items())]
                wire = WireTranscript(Gateway(opened.service.external), transcript, secrets)
                with listener_at("127.0.0.1", 0) as port:
                    async with running(HttpServer(wire, EACH_MOST), port):
                        code = await _run(program, session, url_of(port, tls=False), Path(folder) / "home", stdout)
                turns = await client.turns(session.id)
                if code == 0:
                    await session.complete(reward=1.0)
                else:
                    await session.complete(error=f"the program ended with exit code {code}")
            return RecordedRun(
                exit_code=code,
                calls=wire.calls,
                refused=dict(wire.refused),
                dialects=tuple(dict.fromkeys(turn.dialect for turn in turns)),
                streamed=wire.streamed,
                user_texts=wire.user_texts,
            )


async def _sent(word: str) -> bool:
    return True


async def _run(program: Program, session: ExternalSession, url: str, home: Path, stdout: IO[str] | None) -> int:
    """Run the program and return its exit code, or -N if signal N ended it. Ctrl-C stops only the program; this process
    ignores it."""
    endpoint = ModelEndpoint(base_url=f"{url}/s/{session.key}", api_key=session.key, model=session.model)
    words = {
        "base_url": endpoint.base_url,
        "api_key": endpoint.api_key,
        "model": endpoint.model,
        "instruction": program.instruction,
    }
    command = [fill(word, words) for word in program.command]
    env = {**variables(), **{name: fill(text, words) for name, text in program.env.items()}}
    env |= endpoint_environment(endpoint, program.instruction, SessionIds(session_id=session.id))
    if program.files:
        await asyncio.to_thread(_write, home, program.files, words)
        env["HOME"] = str(home)
    try:
        # A shell makes the pipe for standard input, as in the drafted task. asyncio may make a socket instead of a
        # pipe, and some programs do not read from a socket.
        process = await asyncio.create_subprocess_exec(
            *(FED if program.stdin else ()), *command, env=env, stdout=stdout
        )
    except OSError as error:
        raise InvalidField(
            f"{command[0]!r} cannot be run: {error.strerror}", field="COMMAND", hint="give a program after --"
        ) from error
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    try:
        await process.wait()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode


def _write(home: Path, files: Mapping[str, str], words: Mapping[str, str]) -> None:
    for path, text in files.items():
        place = home / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(fill_file(path, text, words), "utf-8")


def files_below(folder: Path, *, most: int = 64, most_bytes: int = 1 << 20) -> dict[str, str]:
    """Return the texts of the files below a folder, by relative path. The call blocks. Raises InvalidField for files
    that a task cannot have: too many, too large, or not text."""
    found: dict[str, str] = {}
    for place, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(place) / name
            relative = str(path.relative_to(folder))
            try:
                size = path.stat().st_size
                text = path.read_text("utf-8") if size <= most_bytes else None
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidField(f"{path} cannot be read as text: {error}", field="--home") from error
            if text is None or len(found) == most:
                has = f"a file of {size} bytes, {relative}" if text is None else f"more than {most} files"
                raise InvalidField(
                    f"{folder} has {has}",
                    field="--home",
                    hint="give a folder with the program's settings files alone",
                )
            found[relative] = text
    return found
