"""`outrider engines dial` against a service with the proxy of verl's recipe."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from api.compat.test_verl import QUESTION
from api.compat.test_verl_workers import proxy, serving
from cli.world import program
from outrider.cli.commands import run_command
from support.service import say
from support.tokenizer import write_tokenizer


@pytest.mark.deep
async def test_a_worker_serves_until_a_signal(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"replies": [say("hello")]}))
    folder = str(write_tokenizer(tmp_path / "tokenizer"))
    async with proxy(tmp_path) as (_, client, url):
        words = ["engines", "dial", url, f"scripted={script}", "--tokenizer", folder, "--renderer", "qwen3"]
        working = await program(*words, "--worker-id", "w-1")
        try:
            assert working.stdout is not None
            async with asyncio.timeout(20):
                assert await working.stdout.readline() == f"w-1 serves {url}\n".encode()
            await serving(client)
            await client.status("POST", "/sessions/one", "created")
            assert (await client.chat("one", [QUESTION]))["content"] == "hello"
            [turn] = (await client.record("one")).turns
            assert turn.worker_id == "w-1"
            assert len(turn.completion_token_ids) == len(turn.completion_logprobs) > 0
            os.kill(working.pid, signal.SIGTERM)
            async with asyncio.timeout(20):
                assert await working.wait() == 0
        finally:
            if working.returncode is None:
                working.kill()
                await working.wait()


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["proxy:8080", "vllm=http://127.0.0.1:1"], "is no address of a proxy"),
        (["http://127.0.0.1:1", "openai=http://127.0.0.1:1/v1"], "takes no token ids"),
        (["http://127.0.0.1:1", "x"], "is not KIND=WHERE"),
    ],
)
def test_what_cannot_work_is_refused(
    words: list[str], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_tokenizer(tmp_path / "tokenizer"))
    assert run_command(["engines", "dial", *words, "--tokenizer", folder]) != 0
    assert field in " ".join(capsys.readouterr().err.split())
