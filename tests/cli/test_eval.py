"""`outrider eval`: figures for a source of tasks, and runs that continue after an interruption."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from outrider.client.client import AsyncClient
from support.service import running_service

from .world import PROGRAM, REPLIES, STALLED, TASK, Cli

TASKS = 6


def write_tasks(folder: Path) -> Path:
    folder.mkdir()
    for number in range(TASKS):
        (folder / f"{number}.toml").write_text(TASK)
    return folder


@pytest.mark.deep
async def test_a_source_is_evaluated(cli: Cli, tmp_path: Path) -> None:
    source = write_tasks(tmp_path / "tasks")
    async with running_service(tmp_path=tmp_path, replies=list(REPLIES)) as (_, url):
        ran = await cli("eval", source, "-n", "2", "--url", url, "--json")
        shown = await cli("eval", source, "--limit", "3", "--url", url)
    found = ran.document
    assert ran.code == 0
    assert (found["graded"], found["failures"], len(found["groups"])) == (2 * TASKS, {}, TASKS)
    assert (found["reward"]["mean"], found["reward"]["interval"]) == (1.0, [1.0, 1.0])
    assert found["reward"]["pass_at"] == {"1": 1.0, "2": 1.0}
    assert found["metrics"]["bytes"]["mean"] == 3.0
    assert "3 sessions graded" in shown.out
    assert "1.00 to 1.00" in shown.out


@pytest.mark.deep
async def test_a_run_that_was_killed_goes_on(cli: Cli, tmp_path: Path) -> None:
    source = write_tasks(tmp_path / "tasks")
    words = ("eval", str(source), "-n", "2", "--resume", "held-out", "--url")
    async with running_service(tmp_path=tmp_path, replies=[STALLED]) as (_, url), AsyncClient(url) as client:
        killed = await asyncio.create_subprocess_exec(*PROGRAM, *words, url, stderr=asyncio.subprocess.PIPE)
        while len(await client.groups()) < TASKS:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
        await killed.wait()
    async with running_service(tmp_path=tmp_path, replies=list(REPLIES)) as (_, url), AsyncClient(url) as client:
        ran = await cli(*words, url, "--json")
        again = await cli(*words, url, "--json")
        assert len(await client.groups()) == TASKS
        other = await cli("eval", source / "0.toml", "-n", "3", "--resume", "held-out", "--url", url)
    assert (ran.document["graded"], ran.document["reward"]["mean"]) == (2 * TASKS, 1.0)
    for name in ("reward", "metrics", "graded", "failures"):
        assert again.document[name] == ran.document[name]
    assert other.code != 0
    assert "idempotency" in other.err
