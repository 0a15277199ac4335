"""Finds sessions and groups in the index of runs, and divides long lists into pages.

The functions run in the index's reader thread. Lists begin with the newest group; a group's sessions are in sample
order. A page's cursor is the id of the page's last session or group. The next page continues after this session or
group, even if groups were added meanwhile. Invariant: with a `tenant`, only the rows of this tenant are found.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from outrider.errors import NotFound
from outrider.store.run_index.rows_of_runs import storable_text
from outrider.store.run_index.tables import SECONDS

Condition = tuple[str, list[Any]]
"""A condition for a WHERE clause, and the values of its placeholders."""


class SessionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A filter for sessions. A session must match all given fields, so an empty filter matches every session.

    ids, groups: ids of sessions, and ids of groups.
    states: names of states, such as `done`.
    labels: the group must have all of these labels.
    min_reward, max_reward: inclusive bounds. Sessions without a reward do not match.
    error: code of the session's error.
    since, until: the group was submitted at `since` or later, and before `until` (seconds since the epoch).
    text: this text occurs in the error, the end of the agent's output, or the answer. Case is ignored.
    """

    ids: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    harness: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    stop_reason: str | None = None
    error: str | None = None
    since: float | None = None
    until: float | None = None
    text: str | None = None

    @property
    def empty(self) -> bool:
        return self == SessionFilter()


class ComparedSession(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a session that a comparison of runs needs. `seconds` is the sum over all stages, including
    waits."""

    id: str
    group_id: str
    task: str | None
    created: float
    sample_index: int
    state: str
    stop_reason: str | None
    error_code: str | None
    reward: float | None
    turns: int | None
    tokens_sampled: int | None
    tokens_trained: int | None
    seconds: float | None
    model_seconds: float | None


def find_sessions(
    db: sqlite3.Connection, wanted: SessionFilter, tenant: str | None, *, after: str | None, limit: int
) -> list[str]:
    """Return the ids of up to `limit` sessions that follow `after`, the id of a session or a group. (A group's id
    stands for its last session.) Raises NotFound for an unknown id."""
    where, values = _joined(_conditions(wanted, tenant, "kept_sessions"))
    if after is not None:
        created, group_id, index = _place(db, after, tenant)
        where += """ AND created <= ? AND (created < ? OR group_id < ? OR (group_id = ? AND sample_index > ?))"""
        values += [created, created, group_id, group_id, index]
    sql = f"SELECT id FROM kept_sessions WHERE {where} ORDER BY created DESC, group_id DESC, sample_index LIMIT ?"
    return [id for (id,) in db.execute(sql, (*values, limit)).fetchall()]


def matching(db: sqlite3.Connection, wanted: SessionFilter, tenant: str | None) -> list[tuple[str, str, str]]:
    """Return the id, group and state of each session that matches. The newest group comes first."""
    where, values = _joined(_conditions(wanted, tenant, "kept_sessions"))
    order = "created DESC, group_id DESC, sample_index"
    return db.execute(
        f"SELECT id, group_id, state FROM kept_sessions WHERE {where} ORDER BY {order}", values
    ).fetchall()


def find_groups(
    db: sqlite3.Connection, wanted: SessionFilter, tenant: str | None, *, after: str | None, limit: int
) -> list[str]:
    """Return the ids of up to `limit` groups that follow the group `after`.

    In the filter `wanted`, `states` are states of groups, and the bounds of the reward apply to a group's mean reward.
    If `stop_reason`, `error` or `text` are given, one session of the group must match all of them. `ids` is ignored."""
    of_group = msgspec.structs.replace(wanted, stop_reason=None, error=None, text=None, ids=())
    conditions = _conditions(of_group, tenant, "kept_groups")
    of_session = SessionFilter(stop_reason=wanted.stop_reason, error=wanted.error, text=wanted.text)
    if not of_session.empty:
        where, values = _joined(_conditions(of_session, tenant, "kept_sessions"))
        conditions.append((f"no IN (SELECT group_no FROM kept_sessions WHERE {where})", values))
    where, values = _joined(conditions)
    if after is not None:
        created, group_id, _ = _place(db, after, tenant)
        where += " AND (created, id) < (?, ?)"
        values += [created, group_id]
    sql = f"SELECT id FROM kept_groups WHERE {where} ORDER BY created DESC, id DESC LIMIT ?"
    return [id for (id,) in db.execute(sql, (*values, limit)).fetchall()]


def compared_sessions(
    db: sqlite3.Connection, wanted: SessionFilter, tenant: str | None, *, limit: int
) -> list[ComparedSession]:
    """Return up to `limit` sessions for a comparison of runs, oldest first."""
    where, values = _joined(_conditions(wanted, tenant, "kept_sessions"))
    computed = {
        "seconds": " + ".join(f"seconds_{stage}" for stage in SECONDS),
        "task": "(SELECT task FROM kept_groups WHERE no = group_no)",
    }
    columns = ", ".join(computed.get(name, name) for name in ComparedSession.__struct_fields__)
    sql = f"SELECT {columns} FROM kept_sessions WHERE {where} ORDER BY created, group_id, sample_index LIMIT ?"
    names = ComparedSession.__struct_fields__
    return [
        ComparedSession(**dict(zip(names, row, strict=True))) for row in db.execute(sql, (*values, limit)).fetchall()
    ]


def _place(db: sqlite3.Connection, after: str, tenant: str | None) -> tuple[float, str, int]:
    """Return the values by which lists order a session: creation time, group and sample index. For a group's id, return
    a position after its last session."""
    for table, index, group_id in (("kept_sessions", "sample_index", "group_id"), ("kept_groups", "n", "id")):
        sql = f"SELECT created, {group_id}, {index} FROM {table} WHERE id = ? AND tenant = COALESCE(?, tenant)"
        if found := db.execute(sql, (storable_text(after), tenant)).fetchall():
            created, group, place = found[0]
            return created, group, place
    raise NotFound(
        f"no session and no group {after!r}, at which a page could begin",
        field="after",
        hint="it may have been removed: begin the list again without `after`",
    )


def _conditions(wanted: SessionFilter, tenant: str | None, table: str) -> list[Condition]:
    """Translate the filter into SQL conditions for the table `kept_sessions` or `kept_groups`."""
    groups = table == "kept_groups"
    number, group_id, reward = ("no", "id", "mean_reward") if groups else ("group_no", "group_id", "reward")
    found: list[Condition] = []
    simple = (
        ("tenant = ?", tenant),
        ("harness = ?", wanted.harness),
        (f"{reward} >= ?", wanted.min_reward),
        (f"{reward} <= ?", wanted.max_reward),
        ("stop_reason = ?", wanted.stop_reason),
        ("error_code = ?", wanted.error),
        ("created >= ?", wanted.since),
        ("created < ?", wanted.until),
    )
    found += [(sql, [storable_text(v) if isinstance(v, str) else v]) for sql, v in simple if v is not None]
    for column, names in (("id", wanted.ids), (group_id, wanted.groups), ("state", wanted.states)):
        if names:
            marks = ", ".join("?" * len(names))
            found.append((f"{column} IN ({marks})", [storable_text(name) for name in names]))
    for name, value in wanted.labels.items():
        sql = f"{number} IN (SELECT group_no FROM kept_labels WHERE name = ? AND value = ?)"
        found.append((sql, [storable_text(name), storable_text(value)]))
    if wanted.text:
        sql = "no IN (SELECT session_no FROM kept_texts WHERE instr(text, ?))"
        found.append((sql, [storable_text(wanted.text.lower())]))
    return found


def _joined(conditions: list[Condition]) -> Condition:
    where = " AND ".join(sql for sql, _ in conditions) or "1"
    return where, [value for _, values in conditions for value in values]
