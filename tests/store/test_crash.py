"""Acknowledged writes survive if the process that writes to the store is killed, if PostgreSQL crashes, and if the disk
loses power. A loss of power may undo only turns of sessions that run again."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from outrider.schemas import ArtifactList
from outrider.store.artifacts import ArtifactStore
from support.disk import Disk
from support.postgresql import PostgresqlServer

TESTS = Path(__file__).parent.parent
KILLS = 4
MAX_LINES = 300


@dataclass
class Acknowledged:
    """The writes that the store acknowledged to the killed processes."""

    groups: set[str] = field(default_factory=set)
    turns: set[tuple[str, int, int]] = field(default_factory=set)
    done: set[str] = field(default_factory=set)

    def add(self, line: str) -> None:
        match line.split():
            case ["group", group]:
                self.groups.add(group)
            case ["turn", session, attempt, index]:
                self.turns.add((session, int(attempt), int(index)))
            case ["done", group]:
                self.done.add(group)
            case _:
                raise AssertionError(f"the hammer said {line!r}")


Rows = Callable[[str], list[Any]]
"""Function that runs a query and returns its rows."""


class SqliteFile:
    def __init__(self, path: Path) -> None:
        self.place = str(path)

    def crash(self) -> None:
        """Do nothing. SQLite runs in the process that the test kills."""

    @contextmanager
    def opened(self) -> Iterator[Rows]:
        with closing(sqlite3.connect(self.place)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert database.execute("PRAGMA foreign_key_check").fetchall() == []
            yield lambda sql: database.execute(sql).fetchall()


class PostgresqlServerDatabase:
    def __init__(self, server: PostgresqlServer) -> None:
        self._server = server
        self.place = asyncio.run(server.new_database())
        self._name = urlsplit(self.place).path.removeprefix("/")

    def crash(self) -> None:
        self._server.restart()

    @contextmanager
    def opened(self) -> Iterator[Rows]:
        yield lambda sql: [
            tuple(row) for row in asyncio.run(self._server.execute(sql.replace("rowid", "ctid"), self._name))
        ]


Place = SqliteFile | PostgresqlServerDatabase


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.deep)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return SqliteFile(tmp_path / "outrider.db")
    return PostgresqlServerDatabase(request.getfixturevalue("postgresql"))


def hammer(place: Place, seed: int, *mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "store.hammer", place.place, str(seed), *mode]
    return subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True)


def hammer_and_kill(place: Place, seed: int, lines: int) -> list[str]:
    """Run the hammer, and kill it after it has printed at least `lines` lines. After half of the lines, the database
    server crashes, if there is one. Returns the complete lines that the hammer printed."""
    with hammer(place, seed) as process:
        assert process.stdout is not None
        try:
            said = [process.stdout.readline() for _ in range(lines // 2)]
            place.crash()
            said += [process.stdout.readline() for _ in range(lines - lines // 2)]
        finally:
            process.kill()
        said += process.stdout.readlines()
    return [line for line in said if line.endswith("\n")]


@pytest.mark.deep
def test_nothing_acknowledged_is_lost_by_kill_9(place: Place) -> None:
    told = Acknowledged()
    history: dict[str, list[Any]] = {"events": [], "results": []}
    chance = random.Random(20_26)
    for seed in range(KILLS):
        for line in hammer_and_kill(place, seed, chance.randrange(1, MAX_LINES)):
            told.add(line)
        check(place, told, history)
    with hammer(place, KILLS, "drain") as process:
        output, _ = process.communicate(timeout=150)
        assert process.returncode == 0
    for line in output.splitlines():
        told.add(line)
    check(place, told, history)
    with place.opened() as rows:
        assert rows("SELECT id FROM groups WHERE state <> 'done'") == []
    assert len(told.groups) > KILLS
    assert told.turns


@pytest.mark.deep
def test_a_loss_of_power_undoes_nothing_but_turns_of_sessions_that_run_again(disk: Disk) -> None:
    place, told = SqliteFile(disk.folder / "outrider.db"), Acknowledged()
    history: dict[str, list[Any]] = {"events": [], "results": []}
    chance = random.Random(20_26)
    for seed in range(KILLS):
        for line in hammer_and_kill(place, seed, chance.randrange(1, MAX_LINES)):
            told.add(line)
        disk.lose_power()
        with place.opened() as rows:
            done = {id for (id,) in rows("SELECT id FROM sessions WHERE state = 'done'")}
        told.turns = {turn for turn in told.turns if turn[0] in done}
        check(place, told, history)
    assert len(told.groups) > KILLS
    assert told.turns


def test_artifacts_that_are_listed_survive_a_loss_of_power(disk: Disk) -> None:
    kept = ArtifactStore(disk.folder / "artifacts")
    name = kept.put("s-1", 1, bytes(100_000))
    listed = ArtifactList(session_id="s-1", attempt=1, artifacts=(), left_out=())
    kept.index(listed)
    disk.lose_power()
    assert kept.listed("s-1") == listed
    assert (disk.folder / "artifacts" / "s-1" / "1" / name).read_bytes() == bytes(100_000)


def check(place: Place, told: Acknowledged, history: dict[str, list[Any]]) -> None:
    with place.opened() as rows:
        check_acknowledged(rows, told)
        check_groups(rows)
        check_turns(rows)
        now = {
            "events": rows("SELECT cursor, kind, group_id, session_id FROM events ORDER BY cursor"),
            "results": rows("SELECT id, cursor FROM groups WHERE state = 'done' ORDER BY cursor"),
        }
    for name, before in history.items():
        assert now[name][: len(before)] == before, f"{name} that a consumer may have read have changed"
    history.update(now)
    assert [cursor for _, cursor in now["results"]] == list(range(1, len(now["results"]) + 1))


def check_acknowledged(rows: Rows, told: Acknowledged) -> None:
    groups = dict(rows("SELECT id, state FROM groups"))
    assert told.groups <= groups.keys()
    assert {groups[id] for id in told.done} <= {"done"}
    assert told.turns <= set(rows("SELECT session_id, attempt, turn_index FROM turns"))


def check_groups(rows: Rows) -> None:
    """Check that each group agrees with its sessions, and that the end of a group appears exactly once among the
    events, the results and the deliveries."""
    found = rows(
        """SELECT id, state, n, open_sessions, cursor,
               (SELECT COUNT(*) FROM sessions WHERE group_id = groups.id),
               (SELECT COUNT(*) FROM sessions WHERE group_id = groups.id AND state <> 'done'),
               (SELECT COUNT(*) FROM sessions WHERE group_id = groups.id AND result IS NOT NULL),
               (SELECT COUNT(*) FROM events WHERE group_id = groups.id AND kind = 'group.done'),
               (SELECT COUNT(*) FROM events WHERE group_id = groups.id AND kind = 'session.done'),
               (SELECT COUNT(*) FROM outbox WHERE group_id = groups.id)
           FROM groups"""
    )
    for id, state, n, counter, cursor, sessions, left, results, group_events, session_events, deliveries in found:
        done = int(left == 0)
        assert (sessions, counter, results, session_events) == (n, left, n - left, n - left), id
        assert (state == "done", cursor is not None) == (done, done), id
        assert (group_events, deliveries) == (done, done), id


def check_turns(rows: Rows) -> None:
    """Check that no attempt stored a turn after a newer attempt did, or before its own start."""
    stored: dict[str, list[int]] = {}
    for session, attempt in rows("SELECT session_id, attempt FROM turns ORDER BY rowid"):
        stored.setdefault(session, []).append(attempt)
    newest = dict(rows("SELECT id, attempt FROM sessions"))
    for session, attempts in stored.items():
        assert all(before <= after for before, after in pairwise(attempts)), session
        assert attempts[-1] <= newest[session], session
