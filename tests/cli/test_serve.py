"""`outrider serve` as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cli.world import REPLIES, TASK, Cli, program, write_task
from outrider.client.client import AsyncClient
from outrider.errors import ServiceStopping
from outrider.schemas import ServiceStatus
from outrider.store.sqlite import sqlite_store
from support.service import call, say
from support.tokenizer import write_tokenizer

TRUSTED = TASK.replace('"memory"', '"process"').replace(
    'kind = "callable"\npath = "cli.world:grade"', 'run = "cat out.txt"'
)


def flags(folder: Path, replies: Sequence[Any] = REPLIES) -> list[str]:
    (folder / "script.json").write_text(json.dumps({"replies": replies}))
    write_tokenizer(folder / "tokenizer")
    engine = f"scripted={folder / 'script.json'}"
    return [
        *("--port", "0", "--data", str(folder / "data"), "--engine", engine),
        *("--tokenizer", str(folder / "tokenizer"), "--renderer", "qwen3"),
    ]


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_a_signal_comes(cli: Cli, tmp_path: Path, number: signal.Signals) -> None:
    process = await program("serve", *flags(tmp_path))
    assert process.stdout is not None
    ready, how = [(await process.stdout.readline()).decode() for _ in range(2)]
    url = ready.split()[-1]
    ran = await cli("run", write_task(tmp_path, TRUSTED), "--url", url, "--json")
    process.send_signal(number)
    out, err = await process.communicate()
    assert ready == f"outrider is ready at {url}\n"
    assert how == f"submit a task: outrider run TASK.toml -n 8 --url {url}\n"
    assert ran.document["sessions"][0]["result"]["verdict"]["reward"] == 1.0
    assert (process.returncode, out) == (0, b"")
    assert b"outrider.scheduler: session s-" in err
    assert err.endswith(b"stopped\n")
    assert b"Traceback" not in err


@asynccontextmanager
async def serving_a_slow_agent(
    folder: Path, *more: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, AsyncClient, str]]:
    """Yield the service's process, a client, and the id of a group of four sessions. The agent of one session has
    begun, and ends once `gate` is in the folder."""
    wait = f"touch {folder}/begun; until test -e {folder}/gate; do sleep 0.05; done; echo hi > out.txt"
    words = [*flags(folder, [call(wait), say("done")]), *more]
    process = await program("serve", *words, "--init-lane", "1", "--run-lane", "1", "--eval-lane", "1")
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().split()[-1]
    async with AsyncClient(url) as client:
        group = {"task": tomllib.loads(TRUSTED), "n": 4}
        first = await client.submit(group)
        while not (folder / "begun").exists():
            assert (await client.group(first.id)).finished is None
        yield process, client, first.id
    if process.returncode is None:
        process.kill()
        await process.wait()


async def until_stopping(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while not (line := await process.stderr.readline()).startswith(b"stopping: "):
        assert line, "the service ended"


@pytest.mark.deep
async def test_sessions_under_way_end_before_a_stopped_service_does(tmp_path: Path) -> None:
    async with serving_a_slow_agent(tmp_path) as (process, client, group_id):
        process.terminate()
        await until_stopping(process)
        async with AsyncClient(client.url, patience=0) as impatient:
            with pytest.raises(ServiceStopping):
                await impatient._call("GET", "/readyz", ServiceStatus)
        begun = sum(session.state != "queued" for session in (await client.group(group_id)).sessions)
        later = await client.submit({"task": tomllib.loads(TRUSTED)})
        (tmp_path / "gate").touch()
        _, err = await process.communicate()
    assert (process.returncode, err.splitlines()[-1]) == (0, b"stopped")
    async with sqlite_store(tmp_path / "data" / "outrider.sqlite3") as store:
        sessions = await store.sessions(group_id)
        assert [session.state for session in sessions] == ["done"] * begun + ["queued"] * (4 - begun)
        assert {session.result.stop_reason for session in sessions if session.result} == {"completed"}
        assert [session.state for session in await store.sessions(later.id)] == ["queued"]


@pytest.mark.deep
async def test_a_second_signal_interrupts_them(tmp_path: Path) -> None:
    async with serving_a_slow_agent(tmp_path) as (process, _, group_id):
        process.send_signal(signal.SIGINT)
        await until_stopping(process)
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err.splitlines()[-1]) == (0, b"stopped")
    assert b"Traceback" not in err
    async with sqlite_store(tmp_path / "data" / "outrider.sqlite3") as store:
        assert [session.result for session in await store.sessions(group_id)] == [None] * 4


def descendants(pid: int) -> list[int]:
    """Return the process and all of its descendants."""
    found = [pid]
    for parent in found:
        for thread in Path(f"/proc/{parent}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


@pytest.mark.deep
async def test_a_signal_for_all_processes_is_no_reward(tmp_path: Path) -> None:
    """systemd signals all processes of a unit. The signal ends the agent's sandbox, too."""
    async with serving_a_slow_agent(tmp_path, "--stop-seconds", "4") as (process, _, group_id):
        for pid in descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        _, err = await process.communicate()
    assert (process.returncode, err.splitlines()[-1]) == (0, b"stopped")
    async with sqlite_store(tmp_path / "data" / "outrider.sqlite3") as store:
        assert [session.result for session in await store.sessions(group_id)] == [None] * 4


@pytest.mark.deep
async def test_its_settings_come_from_a_file_too(tmp_path: Path) -> None:
    words = flags(tmp_path)
    (tmp_path / "outrider.toml").write_text(f'[model]\ntokenizer = "{tmp_path / "tokenizer"}"\nrenderer = "qwen3"\n')
    process = await program("serve", "--config", tmp_path / "outrider.toml", *words[:6])
    assert process.stdout is not None
    async with asyncio.timeout(30):
        assert (await process.stdout.readline()).startswith(b"outrider is ready at http://127.0.0.1:")
    process.terminate()
    await process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ([], 2, "error: model.tokenizer: no tokenizer is set"),
        (["--port", "70000"], 2, "error: setting 'port'"),
        (["--token", ""], 2, "error: --token is empty"),
        (["--engine", "vllm"], 2, "error: engine: 'vllm' is not KIND=WHERE"),
        (["--engine", "embeded=/models"], 2, "error: unknown engine 'embeded'"),
        (["--config", "/nowhere.toml"], 2, "error: cannot read config file"),
        (["--tokenizer", "/nowhere"], 2, "error: model.tokenizer: cannot load a tokenizer"),
    ],
)
def test_what_cannot_be_served_names_its_setting(
    cli: Cli, tmp_path: Path, words: list[str], code: int, error: str
) -> None:
    ran = cli.run("serve", "--data", tmp_path / "data", *words)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith(error)


@pytest.mark.deep
async def test_an_engine_that_does_not_answer_ends_it(tmp_path: Path) -> None:
    process = await program("serve", *flags(tmp_path), "--engine", "vllm=http://127.0.0.1:9")
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"error: " in err
    assert b"Traceback" not in err
