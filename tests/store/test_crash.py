"""A process that hammers the store is killed again and again; what it was told was stored is there."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
KILLS = 4
MAX_LINES = 300


@dataclass
class Acknowledged:
    """The writes that the killed processes were told had been stored."""

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


def hammer(path: Path, seed: int, *mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "store.hammer", str(path), str(seed), *mode]
    return subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True)


def hammer_and_kill(path: Path, seed: int, lines: int) -> list[str]:
    """The whole lines that it printed until it was killed, some time after the given number of them."""
    with hammer(path, seed) as process:
        assert process.stdout is not None
        try:
            said = [process.stdout.readline() for _ in range(lines)]
        finally:
            process.kill()
        said += process.stdout.readlines()
    return [line for line in said if line.endswith("\n")]


def test_nothing_acknowledged_is_lost_by_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "outrider.db"
    told = Acknowledged()
    history: dict[str, list[Any]] = {"events": [], "results": []}
    chance = random.Random(20_26)
    for seed in range(KILLS):
        for line in hammer_and_kill(path, seed, chance.randrange(1, MAX_LINES)):
            told.add(line)
        check(path, told, history)
    with hammer(path, KILLS, "drain") as process:
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0
    for line in output.splitlines():
        told.add(line)
    check(path, told, history)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT id FROM groups WHERE state <> 'done'").fetchall() == []
    assert len(told.groups) > KILLS
    assert told.turns


def check(path: Path, told: Acknowledged, history: dict[str, list[Any]]) -> None:
    with closing(sqlite3.connect(path)) as database:
        query = database.execute
        assert query("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert query("PRAGMA foreign_key_check").fetchall() == []
        check_acknowledged(database, told)
        check_groups(database)
        check_turns(database)
        now = {
            "events": query("SELECT cursor, kind, group_id, session_id FROM events ORDER BY cursor").fetchall(),
            "results": query("SELECT id, cursor FROM groups WHERE state = 'done' ORDER BY cursor").fetchall(),
        }
    for name, before in history.items():
        assert now[name][: len(before)] == before, f"{name} that a consumer may have read have changed"
    history.update(now)
    assert [cursor for _, cursor in now["results"]] == list(range(1, len(now["results"]) + 1))


def check_acknowledged(database: sqlite3.Connection, told: Acknowledged) -> None:
    groups = dict(database.execute("SELECT id, state FROM groups"))
    assert told.groups <= groups.keys()
    assert {groups[id] for id in told.done} <= {"done"}
    assert told.turns <= set(database.execute("SELECT session_id, attempt, turn_index FROM turns"))


def check_groups(database: sqlite3.Connection) -> None:
    """Each group agrees with its sessions, and tells of its end exactly once, everywhere."""
    rows = database.execute(
        """SELECT id, state, n, open_sessions, cursor,
               (SELECT COUNT(*) FROM sessions WHERE group_id = groups.id),
               (SELECT COUNT(*) FROM sessions WHERE group_id = groups.id AND state <> 'done'),
               (SELECT COUNT(*) FROM sessions WHERE group_id = groups.id AND result IS NOT NULL),
               (SELECT COUNT(*) FROM events WHERE group_id = groups.id AND kind = 'group.done'),
               (SELECT COUNT(*) FROM events WHERE group_id = groups.id AND kind = 'session.done'),
               (SELECT COUNT(*) FROM outbox WHERE group_id = groups.id)
           FROM groups"""
    )
    for id, state, n, counter, cursor, sessions, left, results, group_events, session_events, deliveries in rows:
        done = int(left == 0)
        assert (sessions, counter, results, session_events) == (n, left, n - left, n - left), id
        assert (state == "done", cursor is not None) == (done, done), id
        assert (group_events, deliveries) == (done, done), id


def check_turns(database: sqlite3.Connection) -> None:
    """No attempt stored a turn after a newer one did, or before it was started."""
    stored: dict[str, list[int]] = {}
    for session, attempt in database.execute("SELECT session_id, attempt FROM turns ORDER BY rowid"):
        stored.setdefault(session, []).append(attempt)
    newest = dict(database.execute("SELECT id, attempt FROM sessions"))
    for session, attempts in stored.items():
        assert all(before <= after for before, after in pairwise(attempts)), session
        assert attempts[-1] <= newest[session], session
