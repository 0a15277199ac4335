"""`outrider serve` as a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from cli.world import REPLIES, TASK, Cli, program, write_task
from support.tokenizer import write_tokenizer

TRUSTED = TASK.replace('"memory"', '"process"').replace(
    'kind = "callable"\npath = "cli.world:grade"', 'run = "cat out.txt"'
)


def flags(folder: Path) -> list[str]:
    (folder / "script.json").write_text(json.dumps({"replies": REPLIES}))
    write_tokenizer(folder / "tokenizer")
    engine = f"scripted={folder / 'script.json'}"
    return [
        *("--port", "0", "--data", str(folder / "data"), "--engine", engine),
        *("--tokenizer", str(folder / "tokenizer"), "--renderer", "qwen3"),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
        (["--host", "0.0.0.0"], 2, "error: 0.0.0.0 can be reached from other machines"),
        (["--engine", "vllm"], 2, "error: engine: 'vllm' is not KIND=WHERE"),
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


async def test_an_engine_that_does_not_answer_ends_it(cli: Cli, tmp_path: Path) -> None:
    process = await program("serve", *flags(tmp_path), "--engine", "vllm=http://127.0.0.1:9")
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"error: " in err
    assert b"Traceback" not in err
