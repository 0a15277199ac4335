"""Defines the database schema as a list of migrations, and applies the migrations that a database lacks. Never change a
released migration: append a new one.

The first migration creates most tables. Its number is FIRST instead of 1, because older migrations were deleted before
the first release. `{blob}` and `{serial}` stand for column types that differ between databases (`Database.types`).
Invariants: each migration is applied exactly once; the version in a database is the number of its newest migration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.errors import ServiceError
from outrider.store.database import Connection

FIRST = 14
Migrations = Sequence[Sequence[str]]
"""Each item is one migration: SQL statements."""

MIGRATIONS: Migrations = (
    (
        # open_sessions: number of sessions that are not done.
        # cursor: a done group's position in the order of results.
        # idempotency_key: TENANT/KEY.
        # spec, callback_url: encrypted.
        # labels, errors, rewarded, reward_total: copies, so that a list of groups need not read every spec and session.
        # began_version: the policy version at which the group's first session started.
        # min_usable: the group's other sessions are ended once this many sessions have a reward.
        # bytes: size of the spec, and of the turns, timelines, results and artifacts of done sessions.
        """CREATE TABLE groups (
            id TEXT PRIMARY KEY,
            spec {blob} NOT NULL,
            n INTEGER NOT NULL,
            priority INTEGER NOT NULL,
            idempotency_key TEXT UNIQUE,
            callback_url TEXT,
            state TEXT NOT NULL,
            cancelled INTEGER NOT NULL,
            open_sessions INTEGER NOT NULL,
            created DOUBLE PRECISION NOT NULL,
            finished DOUBLE PRECISION,
            cursor BIGINT UNIQUE,
            labels TEXT NOT NULL,
            errors INTEGER NOT NULL DEFAULT 0,
            rewarded INTEGER NOT NULL DEFAULT 0,
            reward_total DOUBLE PRECISION NOT NULL DEFAULT 0,
            began_version BIGINT,
            min_usable INTEGER,
            bytes BIGINT NOT NULL,
            submitted_by TEXT,
            tenant TEXT NOT NULL
        )""",
        "CREATE INDEX groups_by_age ON groups (created, id)",
        "CREATE INDEX groups_by_state ON groups (state, created, id)",
        "CREATE INDEX groups_under_way ON groups (n, open_sessions) WHERE state = 'active'",
        "CREATE INDEX groups_by_submitter ON groups (submitted_by, open_sessions) WHERE open_sessions > 0",
        "CREATE INDEX groups_by_end ON groups (finished, cursor, tenant) WHERE cursor IS NOT NULL",
        "CREATE INDEX groups_of_tenant ON groups (tenant, created, id)",
        "CREATE INDEX groups_of_tenant_by_state ON groups (tenant, state, created, id)",
        "CREATE INDEX groups_of_tenant_by_cursor ON groups (tenant, cursor) WHERE cursor IS NOT NULL",
        # waiting: 1 if the session is queued, no pause holds it and `ending` is NULL; otherwise 0.
        # lease_until: set while an attempt is in progress.
        # priority, created: copies of the group's columns, so that one index orders the queue.
        # due: earliest start of the next attempt. Set after a failed attempt.
        # recovered: number of attempts that were lost with their node.
        # ending: why the session is to be ended. Set once this is decided.
        # expires: if the session has not started by this time, it is ended. NULL after the first start. While a pause
        #     holds the session, the seconds that are left for its start.
        """CREATE TABLE sessions (
            id TEXT PRIMARY KEY,
            group_id TEXT NOT NULL REFERENCES groups (id),
            sample_index INTEGER NOT NULL,
            state TEXT NOT NULL,
            attempt INTEGER NOT NULL,
            node TEXT,
            lease_until DOUBLE PRECISION,
            priority INTEGER NOT NULL,
            created DOUBLE PRECISION NOT NULL,
            updated DOUBLE PRECISION NOT NULL,
            waiting INTEGER NOT NULL,
            last_error {blob},
            result {blob},
            due DOUBLE PRECISION NOT NULL DEFAULT 0,
            recovered INTEGER NOT NULL DEFAULT 0,
            ending TEXT,
            bucket TEXT NOT NULL,
            expires DOUBLE PRECISION,
            UNIQUE (group_id, sample_index)
        )""",
        """CREATE INDEX sessions_queue ON sessions (priority, bucket, created, group_id, sample_index, due)
            WHERE waiting = 1""",
        "CREATE INDEX sessions_leased ON sessions (lease_until) WHERE lease_until IS NOT NULL",
        "CREATE INDEX sessions_by_state ON sessions (state)",
        "CREATE INDEX sessions_due ON sessions (due) WHERE waiting = 1 AND due > 0",
        "CREATE INDEX sessions_to_end ON sessions (group_id) WHERE ending IS NOT NULL AND state <> 'done'",
        "CREATE INDEX sessions_expiring ON sessions (expires) WHERE waiting = 1 AND expires IS NOT NULL",
        # A row stands for one bucket of sessions in the queue at one priority (see queue.py). `waiting` is 1 if
        # sessions of the bucket may be waiting at this priority. When a session starts, `served` in the row of the
        # session's bucket and priority becomes the new highest number. The row with the lowest number was therefore
        # served least recently. `since` is the creation time of the row's first group.
        """CREATE TABLE queue_shares (
            priority INTEGER NOT NULL,
            bucket TEXT NOT NULL,
            evaluation INTEGER NOT NULL,
            waiting INTEGER NOT NULL,
            served BIGINT NOT NULL,
            since DOUBLE PRECISION NOT NULL,
            tenant TEXT NOT NULL,
            PRIMARY KEY (bucket, priority)
        )""",
        "CREATE INDEX queue_shares_served ON queue_shares (served)",
        "CREATE INDEX queue_shares_of_tenant ON queue_shares (tenant, served)",
        """CREATE INDEX queue_shares_order ON queue_shares (tenant, priority, served, since, bucket)
            WHERE waiting = 1""",
        """CREATE INDEX queue_shares_evaluations ON queue_shares (tenant, priority, served, since, bucket)
            WHERE waiting = 1 AND evaluation = 1""",
        """CREATE TABLE turns (
            session_id TEXT NOT NULL REFERENCES sessions (id),
            attempt INTEGER NOT NULL,
            turn_index INTEGER NOT NULL,
            turn {blob} NOT NULL,
            PRIMARY KEY (session_id, attempt, turn_index)
        )""",
        # Frozen models are not trained. Their turns have a table of their own, so that training code cannot read them
        # by mistake.
        """CREATE TABLE frozen_turns (
            session_id TEXT NOT NULL REFERENCES sessions (id),
            attempt INTEGER NOT NULL,
            model TEXT NOT NULL,
            turn_index INTEGER NOT NULL,
            turn {blob} NOT NULL,
            PRIMARY KEY (session_id, attempt, model, turn_index)
        )""",
        # `digest` is the SHA-256 of `data`. The digest identifies an image, so each image is stored once.
        "CREATE TABLE images (digest TEXT PRIMARY KEY, media_type TEXT NOT NULL, data {blob} NOT NULL)",
        # Each row records that a session uses an image. The image is removed together with the last session that uses
        # it. Here and in other tables, `tenant` is a copy of the group's tenant. With this copy, a query for one tenant
        # can skip the rows of other tenants.
        """CREATE TABLE image_uses (
            session_id TEXT NOT NULL REFERENCES sessions (id),
            digest TEXT NOT NULL REFERENCES images (digest),
            tenant TEXT NOT NULL,
            PRIMARY KEY (session_id, digest)
        )""",
        "CREATE INDEX image_uses_by_digest ON image_uses (digest, tenant)",
        """CREATE TABLE events (
            cursor {serial},
            at DOUBLE PRECISION NOT NULL,
            kind TEXT NOT NULL,
            group_id TEXT NOT NULL,
            session_id TEXT,
            data TEXT NOT NULL,
            tenant TEXT NOT NULL
        )""",
        "CREATE INDEX events_by_group ON events (group_id, cursor)",
        "CREATE INDEX events_of_tenant ON events (tenant, cursor)",
        # Each row is a finished group whose result must still be sent to its callback URL. `given_up` is set once the
        # service stops trying (a "dead letter"). `since` is the time when the group was done, or when its dead letter
        # was last made due again.
        """CREATE TABLE outbox (
            group_id TEXT PRIMARY KEY REFERENCES groups (id),
            url TEXT NOT NULL,
            receiver TEXT NOT NULL,
            tries INTEGER NOT NULL,
            next_try DOUBLE PRECISION NOT NULL,
            since DOUBLE PRECISION NOT NULL,
            given_up DOUBLE PRECISION,
            fault TEXT,
            tenant TEXT NOT NULL
        )""",
        "CREATE INDEX outbox_due ON outbox (next_try, group_id) WHERE given_up IS NULL",
        "CREATE INDEX outbox_dead ON outbox (given_up, group_id) WHERE given_up IS NOT NULL",
        "CREATE INDEX outbox_dead_of_tenant ON outbox (tenant, given_up, group_id) WHERE given_up IS NOT NULL",
        # Each row is a named consumer of the results, which has processed the groups up to `cursor`. `seen` is the time
        # of its last request. `tenant` is empty for consumers of the admins, who see all tenants.
        """CREATE TABLE consumers (
            tenant TEXT NOT NULL,
            name TEXT NOT NULL,
            cursor BIGINT NOT NULL,
            created DOUBLE PRECISION NOT NULL,
            seen DOUBLE PRECISION NOT NULL,
            PRIMARY KEY (tenant, name)
        )""",
        "CREATE INDEX consumers_by_cursor ON consumers (tenant, cursor)",
        # `totals` has one row, which changes when a group is done or removed:
        # cursor: the newest cursor given to a group. It is stored, so that the cursor of a removed group is not used
        #     again.
        # sessions, bytes: sums over the done groups. Computing them for each request would be slow.
        # removed_event: the newest cursor of a removed event.
        #
        # `tenants` has a row for each tenant that ever had a done group, with the same columns except `bytes`.
        """CREATE TABLE totals (
            id INTEGER PRIMARY KEY CHECK (id = 1),
            cursor BIGINT NOT NULL,
            sessions BIGINT NOT NULL,
            bytes BIGINT NOT NULL,
            removed_event BIGINT NOT NULL
        )""",
        "INSERT INTO totals VALUES (1, 0, 0, 0, 0)",
        """CREATE TABLE tenants (
            name TEXT PRIMARY KEY,
            cursor BIGINT NOT NULL,
            sessions BIGINT NOT NULL,
            removed_event BIGINT NOT NULL
        )""",
        # `digest` is the SHA-256 of the token (hex). Revoked tokens stay in the table, because groups and the audit log
        # refer to tokens by name.
        """CREATE TABLE tokens (
            name TEXT PRIMARY KEY,
            digest TEXT NOT NULL UNIQUE,
            role TEXT NOT NULL,
            max_queued INTEGER,
            created DOUBLE PRECISION NOT NULL,
            expires DOUBLE PRECISION,
            revoked DOUBLE PRECISION,
            tenant TEXT NOT NULL
        )""",
        "CREATE INDEX tokens_by_tenant ON tokens (tenant)",
        # `policy` is empty until a trainer sets a version. From then on, it has one row.
        "CREATE TABLE policy (id INTEGER PRIMARY KEY CHECK (id = 1), version BIGINT NOT NULL, weights TEXT)",
        "CREATE TABLE drained_nodes (name TEXT PRIMARY KEY)",
        # `pace` is JSON that says how long the engine's calls usually take (`RememberedPace`).
        "CREATE TABLE engine_paces (engine TEXT PRIMARY KEY, pace TEXT NOT NULL, kept DOUBLE PRECISION NOT NULL)",
        # `probe` has one row. `Store.probe` updates it to check that the database accepts writes.
        "CREATE TABLE probe (id INTEGER PRIMARY KEY CHECK (id = 1), at DOUBLE PRECISION NOT NULL)",
        "INSERT INTO probe (id, at) VALUES (1, 0)",
    ),
    (
        # `kind` is the number of a QueueKind.
        "ALTER TABLE queue_shares RENAME COLUMN evaluation TO kind",
        """CREATE INDEX queue_shares_external ON queue_shares (tenant, priority, served, since, bucket)
            WHERE waiting = 1 AND kind = 2""",
        "ALTER TABLE groups ADD COLUMN harness TEXT NOT NULL DEFAULT ''",
        # Each row is the report with which a client completes a session whose agent runs outside Outrider.
        "CREATE TABLE session_reports (session_id TEXT PRIMARY KEY REFERENCES sessions (id), report {blob} NOT NULL)",
        # Each row holds the failed model calls of a session for one model, as JSON. A failed call is dropped once a
        # later call makes up for it or replaces it (see `FailedCalls`). `model` is empty for the policy.
        """CREATE TABLE failed_calls (
            session_id TEXT NOT NULL REFERENCES sessions (id),
            model TEXT NOT NULL,
            calls {blob} NOT NULL,
            PRIMARY KEY (session_id, model)
        )""",
    ),
    (
        # `translator` names the rollout system whose API was used to submit the group (NULL for Outrider's own API). If
        # `usable_trains` is 1, `min_usable` counts only sessions with tokens to train on.
        "ALTER TABLE groups ADD COLUMN translator TEXT",
        "ALTER TABLE groups ADD COLUMN usable_trains INTEGER NOT NULL DEFAULT 0",
        # Each row is an idempotency key, written TENANT/KEY. `create_group` refuses this key until the time `until`.
        """CREATE TABLE refused_keys (
            idempotency_key TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            until DOUBLE PRECISION NOT NULL
        )""",
    ),
    (
        # A row is the newest run of a session at an external agent service. `name` is the name that Outrider chose for
        # the run. `run` is the id that the service returned for the run.
        """CREATE TABLE remote_runs (
            session_id TEXT PRIMARY KEY REFERENCES sessions (id),
            name TEXT NOT NULL,
            run TEXT NOT NULL
        )""",
    ),
    (
        # `entries` is one part of an attempt's timeline (`timeline.py`): encrypted MessagePack.
        """CREATE TABLE timelines (
            session_id TEXT NOT NULL REFERENCES sessions (id),
            attempt INTEGER NOT NULL,
            part INTEGER NOT NULL,
            entries {blob} NOT NULL,
            PRIMARY KEY (session_id, attempt, part)
        )""",
        # `reader`, a part of the service, has processed the events up to `cursor`.
        "CREATE TABLE positions (reader TEXT PRIMARY KEY, cursor BIGINT NOT NULL)",
        "ALTER TABLE groups ADD COLUMN traceparent TEXT",
    ),
    (
        # `record` is JSON: how long each phase of one trainer step took (`training_timings.py`).
        """CREATE TABLE training_timings (
            tenant TEXT NOT NULL,
            epoch BIGINT NOT NULL,
            step BIGINT NOT NULL,
            record {blob} NOT NULL,
            stored DOUBLE PRECISION NOT NULL,
            PRIMARY KEY (tenant, epoch, step)
        )""",
        "CREATE INDEX training_timings_by_age ON training_timings (tenant, stored, epoch, step)",
    ),
    (
        # While a pause matches the group of a queued session, the session has `held` = 1 and `waiting` = 0. In
        # `pauses`, an empty `tenant` means all tenants, and an empty `harness` means any harness. `labels` is a JSON
        # object with sorted keys.
        "ALTER TABLE sessions ADD COLUMN held INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX sessions_held ON sessions (group_id) WHERE held = 1",
        """CREATE TABLE pauses (
            tenant TEXT NOT NULL,
            labels TEXT NOT NULL,
            harness TEXT NOT NULL,
            since DOUBLE PRECISION NOT NULL,
            who TEXT NOT NULL,
            PRIMARY KEY (tenant, labels, harness)
        )""",
    ),
    (
        # `expires` of a held session was a time until now.
        "UPDATE sessions SET expires = expires - created WHERE held = 1",
    ),
    ("CREATE INDEX sessions_held_in_queue ON sessions (priority, bucket) WHERE held = 1",),
)


async def migrate(tx: Connection, types: Mapping[str, str], now: float, migrations: Migrations = MIGRATIONS) -> int:
    """Apply the missing migrations in one transaction. Returns how many were applied.

    Raises ServiceError if the version in the database is higher than the newest migration, or lower than FIRST.
    """
    await tx.execute("CREATE TABLE IF NOT EXISTS migrations (version INTEGER PRIMARY KEY, applied DOUBLE PRECISION)")
    version: int = (await tx.fetch("SELECT COALESCE(MAX(version), 0) FROM migrations"))[0][0]
    newest = FIRST + len(migrations) - 1
    if version > newest:
        raise ServiceError(
            f"the database has schema version {version}, this Outrider knows versions up to {newest}",
            hint="upgrade Outrider to the version that wrote the database, or give it another data folder",
        )
    if 0 < version < FIRST:
        raise ServiceError(
            f"the database has schema version {version}, from before the first release",
            hint="give Outrider another data folder",
        )
    pending = [(number, statements) for number, statements in enumerate(migrations, FIRST) if number > version]
    for number, statements in pending:
        for statement in statements:
            await tx.execute(statement.format_map(types))
        await tx.execute("INSERT INTO migrations (version, applied) VALUES (?, ?)", (number, now))
    return len(pending)
