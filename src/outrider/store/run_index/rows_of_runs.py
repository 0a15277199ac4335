"""Converts rows of the store into rows of the index of runs, and writes them. The functions run in the index's writer
thread.

They use neither the store nor a clock. Invariant: writing the same rows a second time changes nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

import msgspec

from outrider.errors import ErrorRecord
from outrider.lifecycle import SessionState
from outrider.store import rows
from outrider.store.rows import GroupRow, SessionRow
from outrider.store.run_index.tables import GROUP_TABLES, SECONDS, SESSION_TABLES
from outrider.store.run_reader import Retry
from outrider.tokens.branches.classify import lineages
from outrider.trajectory import SessionResult, Turn

FROZEN = "frozen"
"""Value of the column `kind` for turns of frozen models, which are not trained."""
SEARCHED_ERROR, SEARCHED_OUTPUT, SEARCHED_ANSWER = 1000, 2000, 1000
"""How many characters a text search covers: the first characters of the error message, and the last characters of the
agent's output and of the answer. The numbers are small, because a search reads the texts of all sessions."""
MAX_MESSAGE = 8192


class _Instruction(msgspec.Struct, frozen=True):
    instruction: str = ""


class _TaskOnly(msgspec.Struct, frozen=True):
    task: _Instruction = _Instruction()


def instruction_of(spec: bytes) -> str | None:
    """Return the instruction in a group's spec, or None if the spec cannot be decoded."""
    try:
        return msgspec.json.decode(spec, type=_TaskOnly).task.instruction
    except msgspec.DecodeError:
        return None


def write_group(db: sqlite3.Connection, group: GroupRow, task: str | None) -> None:
    """Insert or update a group. If `task` is None, the stored task of the group is kept."""
    mean = group.reward_total / group.rewarded if group.rewarded else None
    values = {
        "id": group.id,
        "tenant": group.tenant,
        "created": group.created,
        "finished": group.finished,
        "state": group.state.value,
        "cancelled": int(group.cancelled),
        "n": group.n,
        "done": group.done,
        "errors": group.errors,
        "rewarded": group.rewarded,
        "mean_reward": mean,
        "priority": group.priority,
        "harness": group.harness,
        "labels": rows.pack_data(group.labels),
        "task": storable_text(task),
        "submitted_by": group.submitted_by,
    }
    no = _upsert(db, "kept_groups", values, keep_if_none=("task",))
    pairs = [(storable_text(name), storable_text(value), no) for name, value in group.labels.items()]
    db.executemany("INSERT OR IGNORE INTO kept_labels (name, value, group_no) VALUES (?, ?, ?)", pairs)


def write_session(db: sqlite3.Connection, session: SessionRow) -> bool:
    """Insert or update a session. If the index does not have the session's group, write nothing and return False."""
    found = db.execute("SELECT no, tenant, harness FROM kept_groups WHERE id = ?", (session.group_id,)).fetchone()
    if found is None:
        return False
    group_no, tenant, harness = found
    values: dict[str, object] = {
        "id": session.id,
        "group_no": group_no,
        "tenant": tenant,
        "group_id": session.group_id,
        "created": session.created,
        "sample_index": session.sample_index,
        "state": session.state.value,
        "attempt": session.attempt,
        "node": session.node,
        "updated": session.updated,
        "harness": harness,
    }
    result = session.result
    if result is not None:
        error, verdict, tokens, seconds = result.error, result.verdict, result.tokens, result.seconds
        values |= {
            "stop_reason": result.stop_reason.value,
            "error_code": error.code if error else None,
            "error_boundary": error.boundary.value if error else None,
            "error_message": storable_text(error.message[:MAX_MESSAGE]) if error else None,
            "reward": verdict.reward if verdict else None,
            "turns": result.turns,
            "samples": result.samples,
            "forks": sum(result.forks.values()),
            "tokens_sampled": tokens.sampled,
            "tokens_trained": tokens.trained,
            "tokens_masked": tokens.masked,
            "tokens_dropped": tokens.dropped,
            "tokens_unsure": tokens.unsure,
            "tokens_drift": tokens.drift,
            **{f"seconds_{stage}": getattr(seconds, stage) for stage in SECONDS},
            "model_seconds": result.model_seconds,
            "exit_code": result.harness_exit.code if result.harness_exit else None,
            "artifact_bytes": result.artifact_bytes,
        }
    no = _upsert(db, "kept_sessions", values, keep_if_none=())
    if result is None or session.state is not SessionState.DONE:
        return True
    rewards = []
    if result.verdict is not None:
        rewards = [("reward", result.verdict.reward)]
        rewards += [(f"metrics.{storable_text(name)}", value) for name, value in result.verdict.metrics.items()]
    sql = "INSERT OR REPLACE INTO kept_rewards (session_no, name, value) VALUES (?, ?, ?)"
    db.executemany(sql, [(no, name, value) for name, value in rewards])
    if result.error is not None:
        _write_error(db, no, result.attempt, True, session.updated, result.error)
    if text := searched_text(result):
        sql = "INSERT OR REPLACE INTO kept_texts (session_no, text) VALUES (?, ?)"
        db.execute(sql, (no, storable_text(text)))
    db.execute("INSERT INTO unread_turns (session_no) VALUES (?)", (no,))
    return True


def searched_text(result: SessionResult) -> str:
    """Return the text of a session that a text search covers, in lower case."""
    texts = [(result.answer or "")[-SEARCHED_ANSWER:]]
    for log_tail in (result.harness_exit and result.harness_exit.log_tail, result.error and result.error.log_tail):
        texts.append((log_tail or "")[-SEARCHED_OUTPUT:])
    if result.error is not None:
        texts.append(result.error.message[:SEARCHED_ERROR])
    return "\n".join(filter(None, texts)).lower()


def write_retries(db: sqlite3.Connection, retries: Iterable[Retry]) -> None:
    for retry in retries:
        for (no,) in db.execute("SELECT no FROM kept_sessions WHERE id = ?", (retry.session_id,)).fetchall():
            _write_error(db, no, retry.attempt, False, retry.at, retry.error)


def write_turns(db: sqlite3.Connection, session_no: int, packed: Sequence[tuple[str, bytes]]) -> None:
    """Replace a session's turns. Each item of `packed` is a pair: the name of the model (empty for the policy) and an
    encoded turn."""
    db.execute("DELETE FROM kept_turns WHERE session_no = ?", (session_no,))
    own = rows.StoredTurns([turn for model, turn in packed if not model]).turns()
    found = [("", turn) for turn in own] + [(model, rows.turn_from(turn)) for model, turn in packed if model]
    placed = {turn.index: lineage for turn, lineage in zip(own, lineages(own), strict=True)}
    written = []
    for model, turn in found:
        lineage = None if model else placed[turn.index]
        kind, label, depth = (FROZEN, "", 0) if lineage is None else (lineage.kind.value, lineage.label, lineage.depth)
        written.append(_turn_values(session_no, model, turn, kind, label, depth))
    marks = ", ".join("?" * 25)
    db.executemany(f"INSERT INTO kept_turns VALUES ({marks})", written)
    versions = [span.version for turn in own for span in turn.versions if span.end > span.start]
    sql = "UPDATE kept_sessions SET min_version = ?, max_version = ? WHERE no = ?"
    db.execute(sql, (min(versions, default=None), max(versions, default=None), session_no))


def remove_groups(db: sqlite3.Connection, group_ids: Iterable[str]) -> None:
    for group_id in group_ids:
        for (no,) in db.execute("SELECT no FROM kept_groups WHERE id = ?", (group_id,)).fetchall():
            for table in SESSION_TABLES:
                sql = f"DELETE FROM {table} WHERE session_no IN (SELECT no FROM kept_sessions WHERE group_no = ?)"
                db.execute(sql, (no,))
            for table in GROUP_TABLES:
                db.execute(f"DELETE FROM {table} WHERE group_no = ?", (no,))
            db.execute("DELETE FROM kept_groups WHERE no = ?", (no,))


def storable_text(text: str | None) -> str | None:
    """Replace each surrogate in the text by `?`, because SQLite cannot store surrogates."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def _turn_values(no: int, model: str, turn: Turn, kind: str, label: str, depth: int) -> tuple[object, ...]:
    versions = [span.version for span in turn.versions if span.end > span.start]
    return (
        no,
        model,
        turn.index,
        turn.parent,
        turn.step,
        turn.engine,
        turn.dialect,
        kind,
        storable_text(label),
        depth,
        turn.join.value,
        turn.cause.value if turn.cause else None,
        turn.mode.value,
        turn.prompt_length,
        len(turn.output_ids) // 4,
        turn.cached_tokens,
        turn.drift_tokens,
        len(turn.reply.tool_calls) if turn.reply else 0,
        turn.malformed_calls,
        turn.timings.received,
        turn.timings.first_token,
        turn.timings.finished,
        turn.finish.value,
        min(versions, default=None),
        max(versions, default=None),
    )


def _write_error(db: sqlite3.Connection, no: int, attempt: int, final: bool, at: float, error: ErrorRecord) -> None:
    db.execute(
        "INSERT OR REPLACE INTO kept_errors VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            no,
            attempt,
            int(final),
            at,
            error.boundary.value,
            error.code,
            storable_text(error.message[:MAX_MESSAGE]),
            storable_text(error.hint),
        ),
    )


def _upsert(db: sqlite3.Connection, table: str, values: dict[str, object], *, keep_if_none: Sequence[str]) -> int:
    """Insert a row, or update the row with the same `id`. Returns the row's number `no`. Columns in `keep_if_none` keep
    their value if the new value is None."""
    names = list(values)
    changes = ", ".join(
        f"{name} = COALESCE(excluded.{name}, {name})" if name in keep_if_none else f"{name} = excluded.{name}"
        for name in names
        if name != "id"
    )
    sql = f"""INSERT INTO {table} ({", ".join(names)}) VALUES ({", ".join("?" * len(names))})
        ON CONFLICT (id) DO UPDATE SET {changes} RETURNING no"""
    no: int = db.execute(sql, list(values.values())).fetchone()[0]
    return no
