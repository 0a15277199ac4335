"""`outrider run` with a data set: rollouts for training, continuation after an interruption, and the export of the
rows.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
from pathlib import Path

import pytest

from cli.world import PROGRAM, REPLIES, STALLED, TASK, Cli, write_task
from outrider.client.client import AsyncClient
from outrider.client.rollout import RUN_LABEL, roll_out
from support.service import running_service

ROWS = 20
TEMPLATE = TASK.replace("Write hi", "{row.question}: write hi") + '\n[rows]\nfile = "rows.jsonl"\nid = "name"\n'


def write_set(folder: Path, rows: int = ROWS) -> Path:
    lines = [json.dumps({"name": f"row-{number}", "question": f"Question {number}"}) for number in range(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return write_task(folder, TEMPLATE, "set.toml")


@pytest.mark.deep
async def test_a_data_set_is_rolled_out_and_its_rows_exported_by_the_command_it_names(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=list(REPLIES)) as (_, url), AsyncClient(url) as client:
        before = await cli("run", write_task(tmp_path), "--url", url)
        ran = await cli("run", write_set(tmp_path), "-n", "4", "--url", url)
        named = ran.err.split("its training rows: ")[1].splitlines()[0]
        words = shlex.split(named)
        assert words[0] == "outrider"
        file = tmp_path / "rows-out.jsonl"
        words[words.index("-o") + 1] = str(file)
        exported = await cli(*words[1:])
        groups = [each for each in await client.groups(limit=100) if RUN_LABEL in each.labels]
    assert (before.code, ran.code, exported.code) == (0, 0, 0), ran.err
    assert ran.out.split()[-8:-4] == ["20", "80", "80", "1.00"]
    assert "--after 1" in named  # the group before the run is not read
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == ROWS * 4
    assert {row["group_id"] for row in rows} == {group.id for group in groups}
    assert len(groups) == ROWS
    assert f"{ROWS * 4} of {ROWS * 4} sessions ended" in ran.err


@pytest.mark.deep
async def test_a_run_of_a_data_set_goes_on_after_it_was_killed(cli: Cli, tmp_path: Path) -> None:
    words = ("run", str(write_set(tmp_path, 6)), "-n", "2", "--resume", "first", "--url")
    async with running_service(tmp_path=tmp_path, replies=[STALLED]) as (_, url), AsyncClient(url) as client:
        killed = await asyncio.create_subprocess_exec(*PROGRAM, *words, url, stderr=asyncio.subprocess.PIPE)
        while len(await client.groups()) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
        await killed.wait()
    async with running_service(tmp_path=tmp_path, replies=list(REPLIES)) as (_, url), AsyncClient(url) as client:
        ran = await cli(*words, url, "--json")
        lines = (tmp_path / "rows.jsonl").read_text().splitlines()
        moved = [json.dumps({"name": "new", "question": "New"}), *reversed(lines)]
        (tmp_path / "rows.jsonl").write_text("\n".join(moved) + "\n")
        again = await cli(*words, url, "--json")
        groups = await client.groups()
        other = await cli(*words[:3], "3", *words[4:], url)
    assert (ran.code, ran.document["result"]["graded"], len(ran.document["result"]["groups"])) == (0, 12, 6)
    assert len(groups) == 7  # the six rows are recognised in another order; the new row adds a group
    assert (again.document["result"]["earlier"], again.document["result"]["graded"]) == (6, 14)
    assert other.code == 2
    assert "error: resume: the run 'first' has this task with another number of sessions" in other.err


@pytest.mark.deep
async def test_ctrl_c_leaves_a_data_set_to_the_service(tmp_path: Path) -> None:
    words = ("run", str(write_set(tmp_path, 3)), "--resume", "first", "--url")
    async with running_service(tmp_path=tmp_path, replies=[STALLED]) as (_, url), AsyncClient(url) as client:
        process = await asyncio.create_subprocess_exec(*PROGRAM, *words, url, stderr=asyncio.subprocess.PIPE)
        while len(await client.groups()) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        groups = await client.groups()
    assert process.returncode == 130
    assert b"go on with the same command and --resume first" in err
    assert not any(group.cancelled for group in groups)


async def test_a_wrong_row_is_named_before_anything_is_submitted(cli: Cli, tmp_path: Path) -> None:
    source = write_set(tmp_path, 2)
    source.write_text(TEMPLATE.replace('"Write hi', '"').replace("[labels]\n", '[labels]\nmore = "{row.more}"\n'))
    lines = [{"name": "good", "question": "x", "more": "y"}, {"name": "bad", "question": "x", "more": 7}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        ran = await cli("run", source, "--url", url)
        groups = await client.groups()
    assert (ran.code, groups) == (2, ())
    assert "task 'bad' of" in ran.err
    assert "task.labels.more" in ran.err


async def test_equal_tasks_have_groups_of_their_own(tmp_path: Path) -> None:
    task = {"instruction": "Write hi.", "harness": {"agent": "tools"}, "runtime": {"kind": "memory"}}
    task["evaluator"] = {"kind": "callable", "path": "cli.world:grade"}
    async with running_service(tmp_path=tmp_path, replies=list(REPLIES)) as (_, url), AsyncClient(url) as client:
        done = await roll_out(client, [task, task], run="twins", samples=2)
    assert (len(set(done.groups)), done.sessions, done.mixed) == (2, 4, 0)
