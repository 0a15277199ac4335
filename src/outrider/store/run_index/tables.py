"""Defines the tables of the index of runs, and the views that users can query with SQL.

A query can read only the views in VIEWS (`query_program.py`). The names of the tables that the views read begin with
`kept_`. A change of TABLES needs no migration, because a file with different tables is replaced.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

SECONDS = ("queued", "init", "ready", "run", "eval_wait", "eval", "stop")
"""Names of a session's stages (`trajectory.StageSeconds`)."""

# The columns `created`, `group_id` and `tenant` of `kept_sessions` repeat values of the session's group. So an index on
# `kept_sessions` alone can sort the list of sessions.
TABLES = (
    """CREATE TABLE kept_groups (
        no INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, created REAL NOT NULL, finished REAL,
        state TEXT NOT NULL, cancelled INTEGER NOT NULL, n INTEGER NOT NULL, done INTEGER NOT NULL,
        errors INTEGER NOT NULL, rewarded INTEGER NOT NULL, mean_reward REAL, priority INTEGER NOT NULL,
        harness TEXT NOT NULL, labels TEXT NOT NULL, task TEXT, submitted_by TEXT)""",
    "CREATE INDEX kept_groups_of_tenant ON kept_groups (tenant, created DESC, id DESC)",
    "CREATE INDEX kept_groups_by_age ON kept_groups (created DESC, id DESC)",
    """CREATE TABLE kept_labels (name TEXT NOT NULL, value TEXT NOT NULL, group_no INTEGER NOT NULL,
        PRIMARY KEY (name, value, group_no)) WITHOUT ROWID""",
    "CREATE INDEX kept_labels_of_group ON kept_labels (group_no)",
    f"""CREATE TABLE kept_sessions (
        no INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, group_no INTEGER NOT NULL, tenant TEXT NOT NULL,
        group_id TEXT NOT NULL, created REAL NOT NULL, sample_index INTEGER NOT NULL, state TEXT NOT NULL,
        attempt INTEGER NOT NULL, node TEXT, updated REAL NOT NULL, harness TEXT NOT NULL, stop_reason TEXT,
        error_code TEXT, error_boundary TEXT, error_message TEXT, reward REAL, turns INTEGER, samples INTEGER,
        forks INTEGER, tokens_sampled INTEGER, tokens_trained INTEGER, tokens_masked INTEGER, tokens_dropped INTEGER,
        tokens_unsure INTEGER, tokens_drift INTEGER, {", ".join(f"seconds_{stage} REAL" for stage in SECONDS)},
        model_seconds REAL, exit_code INTEGER, artifact_bytes INTEGER, min_version INTEGER, max_version INTEGER)""",
    "CREATE INDEX kept_sessions_of_tenant ON kept_sessions (tenant, created DESC, group_id DESC, sample_index)",
    "CREATE INDEX kept_sessions_by_age ON kept_sessions (created DESC, group_id DESC, sample_index)",
    "CREATE INDEX kept_sessions_of_group ON kept_sessions (group_no)",
    # Each row is the searchable text of a session, in lower case: the error message, the end of the agent's output, and
    # the end of the answer.
    "CREATE TABLE kept_texts (session_no INTEGER PRIMARY KEY, text TEXT NOT NULL)",
    """CREATE TABLE kept_rewards (session_no INTEGER NOT NULL, name TEXT NOT NULL, value REAL NOT NULL,
        PRIMARY KEY (session_no, name)) WITHOUT ROWID""",
    """CREATE TABLE kept_errors (session_no INTEGER NOT NULL, attempt INTEGER NOT NULL, final INTEGER NOT NULL,
        at REAL NOT NULL, boundary TEXT NOT NULL, code TEXT NOT NULL, message TEXT NOT NULL, hint TEXT,
        PRIMARY KEY (session_no, attempt, final)) WITHOUT ROWID""",
    """CREATE TABLE kept_turns (session_no INTEGER NOT NULL, model TEXT NOT NULL, turn_index INTEGER NOT NULL,
        parent INTEGER, step INTEGER NOT NULL, engine TEXT NOT NULL, dialect TEXT NOT NULL, kind TEXT NOT NULL,
        label TEXT NOT NULL, depth INTEGER NOT NULL, joined TEXT NOT NULL, cause TEXT, mode TEXT NOT NULL,
        prompt_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, cached_tokens INTEGER,
        drift_tokens INTEGER NOT NULL, tool_calls INTEGER NOT NULL, malformed_calls INTEGER NOT NULL,
        received REAL NOT NULL, first_token REAL, finished REAL NOT NULL, finish TEXT NOT NULL,
        min_version INTEGER, max_version INTEGER, PRIMARY KEY (session_no, model, turn_index)) WITHOUT ROWID""",
    # Each row is a session whose turns must still be copied from the store.
    "CREATE TABLE unread_turns (place INTEGER PRIMARY KEY AUTOINCREMENT, session_no INTEGER NOT NULL)",
    "CREATE TABLE marks (name TEXT PRIMARY KEY, value REAL NOT NULL)",
)
GROUP_TABLES = ("kept_labels", "kept_sessions")
SESSION_TABLES = ("kept_texts", "kept_rewards", "kept_errors", "kept_turns", "unread_turns")
READ_TABLES = tuple(sql.split()[2] for sql in TABLES if sql.startswith("CREATE TABLE kept_"))
"""The tables from which the views select."""

VERSION = int(hashlib.sha256("".join(TABLES).encode()).hexdigest()[:7], 16)
"""Digest of TABLES. It is stored in the header of the file (`PRAGMA user_version`)."""


class ViewColumn(NamedTuple):
    """A column of a view: its name, the SQL expression that computes it, and a description."""

    name: str
    sql: str
    about: str


class View(NamedTuple):
    """A view that users can query. `source` is its FROM clause. `tenant` is the column that limits the rows to one
    tenant."""

    name: str
    about: str
    columns: tuple[ViewColumn, ...]
    source: str
    tenant: str

    def select(self, tenant: str | None) -> str:
        """Return the view's SELECT statement for the rows of one tenant. If `tenant` is None, it selects all rows."""
        own = ">= ''" if tenant is None else "= '" + tenant.replace("'", "''") + "'"
        columns = ", ".join(f"{column.sql} AS {column.name}" for column in self.columns)
        return f"SELECT {columns} FROM {self.source} WHERE {self.tenant} {own}"


def _columns(alias: str, abouts: dict[str, str]) -> tuple[ViewColumn, ...]:
    """Return a view column for each name in `abouts`, which maps names to descriptions. The table `alias` has columns
    of the same names."""
    return tuple(ViewColumn(name, f"{alias}.{name}", about) for name, about in abouts.items())


_OF_SESSION = (
    ViewColumn("session_id", "s.id", "the session"),
    ViewColumn("group_id", "s.group_id", "its group"),
)
# For each of its tables, a view compares a column other than the row number, such as `tenant` here. Otherwise, if a
# query used only the row number of a table, SQLite would report that the table is read outside of any view.
_WITH_GROUP = "kept_sessions AS s JOIN kept_groups AS g ON g.no = s.group_no AND g.tenant = s.tenant"

VIEWS = (
    View(
        "groups",
        "one row for each group",
        _columns(
            "g",
            {
                "id": "the group's id",
                "tenant": "its owner",
                "state": "`active` or `done`",
                "cancelled": "1 if the group was cancelled",
                "n": "number of sessions",
                "done": "sessions that are done",
                "errors": "done sessions with an error",
                "rewarded": "done sessions with a reward",
                "mean_reward": "mean reward of these",
                "priority": "the group's priority",
                "harness": "name of the harness",
                "labels": "JSON object",
                "task": "the label `task`, or else a digest of the instruction: equal tasks have equal values",
                "submitted_by": "name of the token",
                "created": "time",
                "finished": "time; NULL while active",
            },
        ),
        "kept_groups AS g",
        "g.tenant",
    ),
    View(
        "sessions",
        "one row for each session; the columns of the result are NULL while the session waits or runs",
        (
            *_columns(
                "s",
                {
                    "id": "the session's id",
                    "group_id": "its group",
                    "sample_index": "its place in the group, from 0",
                    "attempt": "number of the newest attempt; 0 before the first",
                    "state": "`queued`, `initializing`, `ready`, `running`, `evaluating` or `done`",
                    "stop_reason": "why the session ended",
                    "error_code": "code of its error; NULL without an error",
                    "error_boundary": "what failed: `engine`, `runtime`, `harness`, ...",
                    "error_message": "message of its error",
                    "reward": "the verdict's reward; NULL without a verdict",
                    "turns": "model calls of the policy",
                    "samples": "training rows",
                    "forks": "forks of its token tree",
                    "tokens_sampled": "sampled tokens = trained + masked + dropped",
                    "tokens_trained": "sampled tokens that train",
                    "tokens_masked": "sampled tokens in rows, masked",
                    "tokens_dropped": "sampled tokens in no row",
                    "tokens_unsure": "sampled tokens of turns of the kind `unsure`",
                    "tokens_drift": "ids that the engine reported otherwise than recorded",
                    **{f"seconds_{stage}": f"seconds in the stage `{stage}`" for stage in SECONDS},
                    "model_seconds": "seconds with a model call under way",
                    "exit_code": "non-zero exit code of an agent whose work was graded",
                    "artifact_bytes": "size of kept files",
                    "min_version": "oldest policy version among its sampled tokens",
                    "max_version": "newest policy version among its sampled tokens",
                    "node": "the node of the newest attempt",
                    "harness": "name of the harness",
                },
            ),
            ViewColumn("labels", "g.labels", "the group's labels, JSON object"),
            ViewColumn("task", "g.task", "as in `groups`"),
            ViewColumn("tenant", "s.tenant", "owner of the group"),
            ViewColumn("created", "s.created", "time at which the group was submitted"),
            ViewColumn("finished", "CASE s.state WHEN 'done' THEN s.updated END", "time; NULL until done"),
            ViewColumn("updated", "s.updated", "time of the newest change of the state"),
        ),
        _WITH_GROUP,
        "s.tenant",
    ),
    View(
        "turns",
        "one row for each model call of the last attempt of a session that is done; no texts and no ids",
        (
            *_OF_SESSION,
            *_columns(
                "t",
                {
                    "turn_index": "its number among the turns of one model",
                    "parent": "turn whose prompt and output its prompt begins with",
                    "step": "step of the task, from 0",
                    "model": "name of a frozen model; empty for the policy",
                    "engine": "name of the engine",
                    "dialect": "wire format of the call",
                    "kind": "kind of its [branch](branches.md); `frozen` for frozen models",
                    "label": "more specific name of the branch, or empty",
                    "depth": "0 in the main conversation",
                    "joined": "how the call joined the token tree: `root`, `append`, `fork`, `retry`",
                    "cause": "cause of a fork",
                    "mode": "`tokens`, `capture` or `text`",
                    "prompt_tokens": "length of the prompt",
                    "output_tokens": "sampled tokens",
                    "cached_tokens": "prompt tokens from the engine's cache; NULL if not reported",
                    "drift_tokens": "ids that the engine reported otherwise",
                    "tool_calls": "tool calls in the reply",
                    "malformed_calls": "tool calls that could not be read",
                    "received": "time",
                    "first_token": "time; NULL without a token",
                    "finished": "time",
                    "finish": "`stop`, `length` or `abort`",
                    "min_version": "oldest policy version in the output",
                    "max_version": "newest policy version in the output",
                },
            ),
        ),
        "kept_turns AS t JOIN kept_sessions AS s ON s.no = t.session_no",
        "s.tenant",
    ),
    View(
        "errors",
        "one row for each attempt that ended with an error",
        (
            *_OF_SESSION,
            *_columns(
                "e",
                {
                    "attempt": "number of the attempt",
                    "final": "1 if the session ended with the error, 0 if it was queued again",
                    "at": "time",
                    "boundary": "what failed",
                    "code": "the error's code",
                    "message": "the error's message",
                    "hint": "what to do about it",
                },
            ),
        ),
        "kept_errors AS e JOIN kept_sessions AS s ON s.no = e.session_no",
        "s.tenant",
    ),
    View(
        "rewards",
        "one row for the reward of a graded session, and one for each of its metrics",
        (
            *_OF_SESSION,
            ViewColumn("name", "r.name", "`reward`, or `metrics.` and the metric's name"),
            ViewColumn("value", "r.value", "the number"),
        ),
        "kept_rewards AS r JOIN kept_sessions AS s ON s.no = r.session_no",
        "s.tenant",
    ),
    View(
        "tokens",
        "up to three rows for each session that is done: its sampled tokens by their use in training",
        (
            *_OF_SESSION,
            ViewColumn("training", "f.column1", "`trained`, `masked` or `dropped`"),
            ViewColumn(
                "tokens",
                "CASE f.column1 WHEN 'trained' THEN s.tokens_trained WHEN 'masked' THEN s.tokens_masked"
                " ELSE s.tokens_dropped END",
                "number of sampled tokens",
            ),
        ),
        "kept_sessions AS s CROSS JOIN (VALUES ('trained'), ('masked'), ('dropped')) AS f",
        "s.tokens_sampled IS NOT NULL AND s.tenant",
    ),
)
