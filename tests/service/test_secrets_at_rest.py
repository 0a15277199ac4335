"""Secrets of a task are not readable in any database or file of the service's data folder."""

from __future__ import annotations

import asyncio
import base64
import os
import stat
import subprocess
import traceback
from pathlib import Path
from typing import Any

import pytest

from outrider.client.client import AsyncClient
from outrider.errors import Conflict, ServiceError, UnreadableTask
from outrider.lifecycle import SessionState
from outrider.service.admission import stored_group
from outrider.service.principals import OPERATOR
from outrider.service.regrading import regraded_session
from outrider.spec import RegradeSpec
from outrider.store.rows import GroupRow
from outrider.store.sqlite import sqlite_store
from outrider.store.task_key import KEY_FILE, KeyFile, TaskKey
from support.postgresql import PostgresqlServer
from support.service import running_service

from .conftest import MakeWorld
from .test_artifacts import LEAVE
from .world import put, result_of

MARK = "m4rk3d-s3cr3t"
KEY = base64.b64encode(bytes(range(32))).decode()


def secret_task() -> dict[str, Any]:
    """Return a task with a secret in each place that may have one. No name suggests that its value is secret."""
    return {
        "instruction": f"use {MARK}-instruction",
        "harness": {
            "command": ["/bin/sh", "-c", f"curl -s -o /dev/null $OPENAI_BASE_URL/models; : {MARK}-command"],
            "env": {"A": f"{MARK}-harness"},
            "files": {"/tmp/outrider-test-rc": f"{MARK}-file"},
        },
        "runtime": {
            "kind": "process",
            "env": {"B": f"{MARK}-runtime"},
            "prepare": [{"run": f": {MARK}-run", "env": {"C": f"{MARK}-step"}}],
        },
        "evaluator": {"kind": "command", "run": f": {MARK}-grader"},
        "max_attempts": 1,
    }


def holders(folder: Path) -> list[str]:
    """Return the files below a folder that contain the mark, in clear or in base64 at any offset. The key's file is
    left out."""
    forms = [MARK.encode(), *(base64.b64encode(b"x" * n + MARK.encode())[4:-4] for n in range(3))]
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and path.name != KEY_FILE and any(form in path.read_bytes() for form in forms):
            found.append(str(path))
    return found


async def run_secret_task(tmp_path: Path, **settings: Any) -> None:
    async with running_service(tmp_path=tmp_path, **settings) as (service, url), AsyncClient(url) as client:
        asked = {
            "task": secret_task(),
            "idempotency_key": "once",
            # Nothing listens there, so the address stays in the outbox.
            "callback_url": f"http://user:{MARK}-password@127.0.0.1:9/?key={MARK}-query",
        }
        submitted = await client.submit(asked)
        assert holders(tmp_path / "data") == []  # while the session runs
        [done] = await client.wait([submitted.id])
        assert done.sessions[0].state is SessionState.DONE
        assert (await client.submit(asked)).id == submitted.id
        with pytest.raises(Conflict):
            await client.submit(asked | {"n": 2})
        assert MARK in (await service.store.spec(submitted.id)).decode()
        assert holders(tmp_path / "data") == []  # with the database's write-ahead log
    assert holders(tmp_path / "data") == []


async def test_sqlite_and_the_data_folder(tmp_path: Path) -> None:
    await run_secret_task(tmp_path)
    file = tmp_path / "data" / KEY_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(base64.b64decode(file.read_text())) == 32


async def test_others_can_read_nothing_in_a_folder_that_they_can_list(world: MakeWorld, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)
    mask = os.umask(0o022)
    try:
        async with world() as w:
            await w.run("ask", LEAVE, artifacts=["other"])
            await w.service.runs.query("SELECT id FROM sessions", OPERATOR)
            # The index creates its file again if the file was removed.
            (data / "runs.sqlite3").unlink()
            await w.service.runs.query("SELECT id FROM sessions", OPERATOR)
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in data.rglob("*")}
    finally:
        os.umask(mask)
    assert {path: mode for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}
    databases = {f"{name}.sqlite3{end}" for name in ("outrider", "runs") for end in ("", "-wal", "-shm")}
    assert {path.name for path in modes} >= databases | {KEY_FILE, "artifacts", "index.json"}
    assert stat.S_IMODE(data.stat().st_mode) == 0o755, "the folder itself is the user's"


@pytest.mark.deep
async def test_postgresql(tmp_path: Path, postgresql: PostgresqlServer) -> None:
    url = await postgresql.new_database()
    await run_secret_task(tmp_path, store=url, task_key=KEY)
    assert not (tmp_path / "data" / KEY_FILE).exists()
    dump = await asyncio.to_thread(subprocess.check_output, ["pg_dump", "--inserts", url])
    assert b"groups" in dump
    for form in (MARK.encode(), MARK.encode().hex().encode()):
        assert form not in dump
    await postgresql.execute("CHECKPOINT")
    assert holders(postgresql.data) == []


async def test_a_service_without_its_key_does_not_start(world: MakeWorld, tmp_path: Path) -> None:
    async with world() as w:
        await w.run("ask")
    file = tmp_path / "data" / KEY_FILE
    kept = file.read_text()
    file.unlink()
    for _ in range(2):
        with pytest.raises(ServiceError, match=r"their key is not in .*task\.key") as refused:
            async with world():
                pass
        assert "openssl rand -base64 32 >" in (refused.value.hint or "")
        assert not file.exists()
    file.write_text("rubbish")
    with pytest.raises(ServiceError, match=r"holds no key"):
        async with world():
            pass
    file.write_text(kept)
    async with world() as w:
        await w.run("ask")


async def test_queued_sessions_of_a_lost_key_end_with_an_error_and_no_reward(world: MakeWorld, tmp_path: Path) -> None:
    async with world() as w:
        finished = await w.run("ask")
    async with sqlite_store(tmp_path / "data" / "outrider.sqlite3") as store:
        await put(store, "old", "s1", "s2", callback_url="http://127.0.0.1:9/")
    (tmp_path / "data" / KEY_FILE).write_text(KEY)
    async with world() as w:
        for session in (await w.done("old")).sessions:
            error = result_of(session).error
            assert error is not None
            assert (error.code, error.retryable) == ("unreadable_task", False)
            assert "another key" in error.message
            assert KEY_FILE in (error.hint or "")
            assert result_of(session).verdict is None
        [delivery] = await w.service.store.deliveries(now=1e12, limit=10)
        assert (delivery.group_id, delivery.url) == ("old", "")
        with pytest.raises(UnreadableTask):
            await regraded_session(w.service.store, finished.id, RegradeSpec())
        assert result_of(await w.run("ask")).error is None


async def test_the_log_does_not_quote_a_stored_task_that_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    """Another version of Outrider had other fields, for example another form of the environment."""
    spec = b'{"task": {"instruction": "x", "runtime": {"kind": "process", "env": [["A", "%s"]]}}}' % MARK.encode()
    async with sqlite_store(None) as store:
        await store.create_group(GroupRow(id="g", n=1, priority=0, created=1.0), spec, ["s"])
        with pytest.raises(UnreadableTask) as refused:
            await stored_group(store, "g")
    logged = caplog.text + "".join(traceback.format_exception(refused.value))
    assert "task.runtime.env" in logged
    assert MARK not in logged


async def test_a_key_is_given_in_the_settings(world: MakeWorld, tmp_path: Path) -> None:
    async with world(task_key=KEY) as w:
        await w.run("ask")
    assert not (tmp_path / "data" / KEY_FILE).exists()
    async with sqlite_store(tmp_path / "data" / "outrider.sqlite3", key=TaskKey.parse(KEY)) as store:
        [group] = await store.groups()
        assert b'"instruction"' in await store.spec(group.id)


def test_what_is_sealed_can_be_opened_with_its_key_at_its_place_only(tmp_path: Path) -> None:
    key = KeyFile(tmp_path / KEY_FILE).make()
    sealed = key.seal(b"data", "here")
    again = KeyFile(tmp_path / KEY_FILE).load()
    assert again is not None
    assert again.open(sealed, "here") == b"data"
    assert key.seal(b"data", "here") != sealed
    for damaged, place, opener in (
        (sealed, "there", key),
        (sealed[:-1] + bytes([sealed[-1] ^ 1]), "here", key),
        (sealed[:20], "here", key),
        (b"{}", "here", key),
        (sealed, "here", TaskKey.new()),
    ):
        with pytest.raises(UnreadableTask):
            opener.open(damaged, place)
