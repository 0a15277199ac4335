"""The session proxy as a process with the recipe's own settings, killed and started again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from cli.world import program
from support.service import say
from support.tokenizer import write_tokenizer

from .test_verl import QUESTION, TIMES, Recipe


@asynccontextmanager
async def served(
    folder: Path, *words: str, ends_by: signal.Signals, **variables: str
) -> AsyncIterator[tuple[Recipe, list[bytes]]]:
    """Yield a client of a service, and a list. At the end of the block the service gets the signal, and its log is
    appended to the list."""
    common = ("serve", "--compat", "verl", "--data", str(folder / "data"), "--tokenizer", str(folder / "tokenizer"))
    engine = ("--renderer", "qwen3", "--engine", f"scripted={folder / 'script.json'}")
    process = await program(*common, *engine, *words, env={**os.environ, **variables})
    assert process.stdout is not None
    log: list[bytes] = []
    try:
        url = (await process.stdout.readline()).decode().split()[-1]
        async with aiohttp.ClientSession() as http:
            yield Recipe(http, url), log
    finally:
        process.send_signal(ends_by)
        log.append((await process.communicate())[1])


@pytest.mark.deep
async def test_deletions_and_timings_outlive_a_killed_service(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "script.json").write_text(json.dumps({"replies": [say("one"), say("two"), say("three")]}))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("proxy_server:\n  host: 127.0.0.1\n  port: 1\n  debug: true\n")
    async with served(tmp_path, ends_by=signal.SIGKILL, PROXY_PORT="0", LOG_LEVEL="DEBUG") as (client, log):
        for name in ("a", "b"):
            await client.status("POST", f"/sessions/{name}", "created")
            await client.chat(name, [QUESTION])
        await client.status("DELETE", "/sessions/a", "deleted")
        assert (await client.ask("POST", "/training/timing", TIMES))[0] == 200
    assert b"uvicorn.error" in log[0], "these messages are in the log of the level debug alone"
    words = ("--config", str(recipe), "--log-level", "error")
    async with served(tmp_path, *words, ends_by=signal.SIGTERM, PROXY_PORT="0") as (client, log):
        assert (await client.ask("GET", "/sessions/a"))[0] == 404
        assert (await client.ask("POST", "/sessions/a"))[0] == 409
        [turn] = (await client.record("b")).turns
        assert turn.completion_text == "one"
        assert json.loads((await client.ask("GET", "/training/timing/0/7"))[1]) == TIMES
    assert b"uvicorn.error" not in log[0]
    assert b" INFO " not in log[0]
