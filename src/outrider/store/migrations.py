"""The schema of the store: a list of migrations. New migrations are only ever appended.

Words in braces are column types whose names differ between databases (`Database.types`). Invariant: the version
recorded in a database is the number of migrations applied, in order, each exactly once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from outrider.errors import ServiceError
from outrider.spec import EVALUATION_LABEL
from outrider.store.database import Connection
from outrider.store.queue import bucket_of, open_share
from outrider.store.rows import receiver_of

Step = str | Callable[[Connection], Awaitable[None]]
"""A statement, or a function where SQL alone is not enough."""
Migrations = Sequence[Sequence[Step]]


async def _label_groups(tx: Connection) -> None:
    """Copy labels into their new column: before, they were read from the spec."""
    for group_id, spec in await tx.fetch("SELECT id, spec FROM groups"):
        labels = msgspec.json.decode(spec).get("task", {}).get("labels", {})
        if labels:
            await tx.execute(
                "UPDATE groups SET labels = ? WHERE id = ?", (msgspec.json.encode(labels).decode(), group_id)
            )


async def _count_outcomes(tx: Connection) -> None:
    """Fill the new counts of outcomes: before, every reader counted the results."""
    for group_id, packed in await tx.fetch("SELECT group_id, result FROM sessions WHERE result IS NOT NULL"):
        result = msgspec.msgpack.decode(packed)
        verdict = result.get("verdict")
        await tx.execute(
            """UPDATE groups SET errors = errors + ?, rewarded = rewarded + ?, reward_total = reward_total + ?
               WHERE id = ?""",
            (
                int(result.get("error") is not None),
                int(verdict is not None),
                verdict["reward"] if verdict else 0.0,
                group_id,
            ),
        )


async def _move_images(tx: Connection) -> None:
    """Move the bytes of images out of the turns: before, every turn that showed an image had a copy."""
    for attempt in await tx.fetch("SELECT DISTINCT session_id, attempt FROM turns"):
        sql = "SELECT turn_index, turn FROM turns WHERE session_id = ? AND attempt = ?"
        for index, packed in await tx.fetch(sql, attempt):
            if _IMAGE_TAG not in packed:
                continue
            turn = msgspec.msgpack.decode(packed)
            parts = (part for message in turn["messages"] for part in message.get("parts", ()))
            for image in [part for part in parts if part.get("data")]:
                data = image.pop("data")
                image["size"] = len(data)
                await tx.execute(
                    "INSERT INTO images (digest, media_type, data) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                    (image["digest"], image["media_type"], data),
                )
            await tx.execute(
                "UPDATE turns SET turn = ? WHERE session_id = ? AND attempt = ? AND turn_index = ?",
                (msgspec.msgpack.encode(turn), *attempt, index),
            )


async def _name_receivers(tx: Connection) -> None:
    """Fill the receivers (host and port) of deliveries: before, they were read from the URLs."""
    for group_id, url in await tx.fetch("SELECT group_id, url FROM outbox"):
        await tx.execute("UPDATE outbox SET receiver = ? WHERE group_id = ?", (receiver_of(url), group_id))


async def _note_image_uses(tx: Connection) -> None:
    """Record which sessions show which images: before, an image was kept for ever."""
    for table in ("turns", "frozen_turns"):
        keys = "session_id, attempt, turn_index" if table == "turns" else "session_id, attempt, model, turn_index"
        where = " AND ".join(f"{key} = ?" for key in keys.split(", "))
        for key in await tx.fetch(f"SELECT {keys} FROM {table}"):
            ((packed,),) = await tx.fetch(f"SELECT turn FROM {table} WHERE {where}", key)
            if _IMAGE_TAG not in packed:
                continue
            messages = msgspec.msgpack.decode(packed)["messages"]
            shown = {part.get("digest") for message in messages for part in message.get("parts", ())}
            sql = """INSERT INTO image_uses (session_id, digest)
                SELECT ?, digest FROM images WHERE digest = ? ON CONFLICT DO NOTHING"""
            await tx.execute_many(sql, [(key[0], digest) for digest in shown])


async def _share_queue(tx: Connection) -> None:
    """Give the sessions that wait, or may wait again, their bucket: before, buckets were not per tenant, and earlier
    still the queue was ordered by priority and age alone."""
    await tx.execute("DELETE FROM queue_shares")
    sql = "SELECT id, tenant, labels, priority, created FROM groups WHERE state = 'active' ORDER BY created, id"
    for group_id, tenant, packed, priority, created in await tx.fetch(sql):
        labels = msgspec.json.decode(packed, type=dict[str, str])
        bucket = bucket_of(tenant, labels)
        await tx.execute("UPDATE sessions SET bucket = ? WHERE group_id = ?", (bucket, group_id))
        await open_share(tx, priority, bucket, evaluation=EVALUATION_LABEL in labels, since=created)


# Turns without this tag have no images and are not decoded: there may be millions of turns.
_IMAGE_TAG = msgspec.msgpack.encode("type") + msgspec.msgpack.encode("image")

MIGRATIONS: Migrations = (
    (
        # `open_sessions` counts the sessions that are not done; `cursor` orders the done groups.
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
            cursor BIGINT UNIQUE
        )""",
        "CREATE INDEX groups_by_age ON groups (created, id)",
        "CREATE INDEX groups_by_state ON groups (state, created, id)",
        # `waiting` is 1 exactly while the session may be started. `lease_until` is set exactly while an attempt is
        # under way. `priority` and `created` are the group's, so that the queue is one index.
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
            UNIQUE (group_id, sample_index)
        )""",
        """CREATE INDEX sessions_queue ON sessions (priority DESC, created, group_id, sample_index)
            WHERE waiting = 1""",
        "CREATE INDEX sessions_leased ON sessions (lease_until) WHERE lease_until IS NOT NULL",
        "CREATE INDEX sessions_by_state ON sessions (state)",
        """CREATE TABLE turns (
            session_id TEXT NOT NULL REFERENCES sessions (id),
            attempt INTEGER NOT NULL,
            turn_index INTEGER NOT NULL,
            turn {blob} NOT NULL,
            PRIMARY KEY (session_id, attempt, turn_index)
        )""",
        """CREATE TABLE events (
            cursor {serial},
            at DOUBLE PRECISION NOT NULL,
            kind TEXT NOT NULL,
            group_id TEXT NOT NULL,
            session_id TEXT,
            data TEXT NOT NULL
        )""",
        """CREATE TABLE outbox (
            group_id TEXT PRIMARY KEY REFERENCES groups (id),
            url TEXT NOT NULL,
            tries INTEGER NOT NULL,
            next_try DOUBLE PRECISION NOT NULL
        )""",
        "CREATE INDEX outbox_due ON outbox (next_try)",
    ),
    (
        # The new columns serve the list of groups, which would otherwise have to read every spec and every session.
        "ALTER TABLE groups ADD COLUMN labels TEXT NOT NULL DEFAULT '{{}}'",
        "ALTER TABLE groups ADD COLUMN errors INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE groups ADD COLUMN rewarded INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE groups ADD COLUMN reward_total DOUBLE PRECISION NOT NULL DEFAULT 0",
        "CREATE INDEX groups_to_cancel ON groups (created, id) WHERE cancelled = 1 AND state = 'active'",
        _label_groups,
        _count_outcomes,
        # A failed attempt is not repeated before `due`; `recovered` counts attempts that lost their node.
        "ALTER TABLE sessions ADD COLUMN due DOUBLE PRECISION NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN recovered INTEGER NOT NULL DEFAULT 0",
        "DROP INDEX sessions_queue",
        """CREATE INDEX sessions_queue ON sessions (priority DESC, created, group_id, sample_index, due)
            WHERE waiting = 1""",
        "CREATE INDEX sessions_due ON sessions (due) WHERE waiting = 1 AND due > 0",
    ),
    (
        # `digest` is the SHA-256 of `data`, so an image that many sessions show many times is stored once.
        "CREATE TABLE images (digest TEXT PRIMARY KEY, media_type TEXT NOT NULL, data {blob} NOT NULL)",
        _move_images,
    ),
    (
        # `policy` has one row, once a trainer has set a version. `began_version` is the policy's version at the time
        # when a group's first session began.
        "CREATE TABLE policy (id INTEGER PRIMARY KEY CHECK (id = 1), version BIGINT NOT NULL, weights TEXT)",
        "ALTER TABLE groups ADD COLUMN began_version BIGINT",
    ),
    (
        # Frozen turns are apart from the policy's turns, so that no training code can read them by mistake.
        """CREATE TABLE frozen_turns (
            session_id TEXT NOT NULL REFERENCES sessions (id),
            attempt INTEGER NOT NULL,
            model TEXT NOT NULL,
            turn_index INTEGER NOT NULL,
            turn {blob} NOT NULL,
            PRIMARY KEY (session_id, attempt, model, turn_index)
        )""",
    ),
    (
        # `ending` is the reason to end a session, from the moment of the decision; before, only whole groups were
        # cancelled. `min_usable` is the number of verdicts that is enough for a group.
        "ALTER TABLE sessions ADD COLUMN ending TEXT",
        """UPDATE sessions SET ending = 'cancelled'
            WHERE state <> 'done' AND group_id IN (SELECT id FROM groups WHERE cancelled = 1)""",
        "CREATE INDEX sessions_to_end ON sessions (group_id) WHERE ending IS NOT NULL AND state <> 'done'",
        "DROP INDEX groups_to_cancel",
        "ALTER TABLE groups ADD COLUMN min_usable INTEGER",
    ),
    (
        # A row is a named reader of the results, which has processed the groups up to `cursor`, and made its last
        # request at `seen`.
        """CREATE TABLE consumers (
            name TEXT PRIMARY KEY,
            cursor BIGINT NOT NULL,
            created DOUBLE PRECISION NOT NULL,
            seen DOUBLE PRECISION NOT NULL
        )""",
        # `since` is the time when the group was done; `given_up` is set while the delivery is a dead letter.
        "ALTER TABLE outbox ADD COLUMN since DOUBLE PRECISION NOT NULL DEFAULT 0",
        "ALTER TABLE outbox ADD COLUMN given_up DOUBLE PRECISION",
        "ALTER TABLE outbox ADD COLUMN fault TEXT",
        "ALTER TABLE outbox ADD COLUMN receiver TEXT NOT NULL DEFAULT ''",
        "UPDATE outbox SET since = (SELECT COALESCE(finished, 0) FROM groups WHERE groups.id = outbox.group_id)",
        _name_receivers,
        "DROP INDEX outbox_due",
        "CREATE INDEX outbox_due ON outbox (next_try, group_id) WHERE given_up IS NULL",
        "CREATE INDEX outbox_dead ON outbox (given_up, group_id) WHERE given_up IS NOT NULL",
        # A row is a session that shows an image. The image is removed with the last of these sessions.
        """CREATE TABLE image_uses (
            session_id TEXT NOT NULL REFERENCES sessions (id),
            digest TEXT NOT NULL REFERENCES images (digest),
            PRIMARY KEY (session_id, digest)
        )""",
        "CREATE INDEX image_uses_by_digest ON image_uses (digest)",
        _note_image_uses,
        # `totals` has one row, written when a group is done or removed: the newest cursor, which must not repeat after
        # the removal of a group; sums over the done groups, which are too many to count; and the last cursor of a
        # removed event.
        """CREATE TABLE totals (
            id INTEGER PRIMARY KEY CHECK (id = 1),
            cursor BIGINT NOT NULL,
            sessions BIGINT NOT NULL,
            bytes BIGINT NOT NULL,
            removed_event BIGINT NOT NULL DEFAULT 0
        )""",
        # `bytes` is the size of the spec, and of the turns, results and artifacts of the sessions that are done.
        "ALTER TABLE groups ADD COLUMN bytes BIGINT NOT NULL DEFAULT 0",
        """UPDATE groups SET bytes = LENGTH(spec)
            + (SELECT COALESCE(SUM(LENGTH(result)), 0) FROM sessions WHERE sessions.group_id = groups.id)
            + (SELECT COALESCE(SUM(LENGTH(turn)), 0) FROM turns JOIN sessions ON sessions.id = turns.session_id
               WHERE sessions.group_id = groups.id AND sessions.result IS NOT NULL)
            + (SELECT COALESCE(SUM(LENGTH(turn)), 0) FROM frozen_turns
               JOIN sessions ON sessions.id = frozen_turns.session_id
               WHERE sessions.group_id = groups.id AND sessions.result IS NOT NULL)""",
        """INSERT INTO totals (id, cursor, sessions, bytes)
            SELECT 1, COALESCE(MAX(cursor), 0), COALESCE(SUM(CASE WHEN state = 'done' THEN n ELSE 0 END), 0),
                COALESCE(SUM(CASE WHEN state = 'done' THEN bytes ELSE 0 END), 0) FROM groups""",
        "CREATE INDEX groups_by_end ON groups (finished, cursor) WHERE cursor IS NOT NULL",
        "CREATE INDEX groups_under_way ON groups (n, open_sessions) WHERE state = 'active'",
        "CREATE INDEX events_by_group ON events (group_id, cursor)",
    ),
    (
        # `queue_shares` has a row for each bucket that has had sessions in the queue (see queue.py). `waiting` is 1 if
        # some may wait now, `served` orders the starts of sessions, `since` is the time when the bucket first appeared.
        """CREATE TABLE queue_shares (
            priority INTEGER NOT NULL,
            bucket TEXT NOT NULL,
            evaluation INTEGER NOT NULL,
            waiting INTEGER NOT NULL,
            served BIGINT NOT NULL,
            since DOUBLE PRECISION NOT NULL,
            PRIMARY KEY (bucket, priority)
        )""",
        "CREATE INDEX queue_shares_order ON queue_shares (priority, served, since, bucket) WHERE waiting = 1",
        """CREATE INDEX queue_shares_evaluations ON queue_shares (priority, served, since, bucket)
            WHERE waiting = 1 AND evaluation = 1""",
        "CREATE INDEX queue_shares_served ON queue_shares (served)",
        "ALTER TABLE sessions ADD COLUMN bucket TEXT NOT NULL DEFAULT ''",
        "DROP INDEX sessions_queue",
        """CREATE INDEX sessions_queue ON sessions (priority, bucket, created, group_id, sample_index, due)
            WHERE waiting = 1""",
        # A session may expire until its first start.
        "ALTER TABLE sessions ADD COLUMN expires DOUBLE PRECISION",
        "CREATE INDEX sessions_expiring ON sessions (expires) WHERE waiting = 1 AND expires IS NOT NULL",
        "CREATE TABLE drained_nodes (name TEXT PRIMARY KEY)",
    ),
    (
        # `digest` is the SHA-256 of the token (hex). A revoked token stays: groups and audit lines refer to its name.
        """CREATE TABLE tokens (
            name TEXT PRIMARY KEY,
            digest TEXT NOT NULL UNIQUE,
            role TEXT NOT NULL,
            max_queued INTEGER,
            created DOUBLE PRECISION NOT NULL,
            expires DOUBLE PRECISION,
            revoked DOUBLE PRECISION
        )""",
        "ALTER TABLE groups ADD COLUMN submitted_by TEXT",
        "CREATE INDEX groups_by_submitter ON groups (submitted_by, open_sessions) WHERE open_sessions > 0",
    ),
    (
        # `probe` has one row, which `Store.probe` changes to find out whether the database accepts writes.
        "CREATE TABLE probe (id INTEGER PRIMARY KEY CHECK (id = 1), at DOUBLE PRECISION NOT NULL)",
        "INSERT INTO probe (id, at) VALUES (1, 0)",
    ),
    (
        # The tenant of a token is by default the token's own name. Groups submitted without a token belong to the
        # operator.
        "ALTER TABLE tokens ADD COLUMN tenant TEXT NOT NULL DEFAULT ''",
        "UPDATE tokens SET tenant = name",
        "CREATE INDEX tokens_by_tenant ON tokens (tenant)",
        "ALTER TABLE groups ADD COLUMN tenant TEXT NOT NULL DEFAULT 'operator'",
        "UPDATE groups SET tenant = submitted_by WHERE submitted_by IS NOT NULL AND submitted_by <> 'local'",
        # `idempotency_key` is TENANT/KEY, so that the column stays unique: SQLite cannot drop that constraint.
        "UPDATE groups SET idempotency_key = tenant || '/' || idempotency_key WHERE idempotency_key IS NOT NULL",
        "CREATE INDEX groups_of_tenant ON groups (tenant, created, id)",
        "CREATE INDEX groups_of_tenant_by_state ON groups (tenant, state, created, id)",
        "CREATE INDEX groups_of_tenant_by_cursor ON groups (tenant, cursor) WHERE cursor IS NOT NULL",
        "DROP INDEX groups_by_end",
        "CREATE INDEX groups_by_end ON groups (finished, cursor, tenant) WHERE cursor IS NOT NULL",
        # Tables that are read by tenant without looking at other tenants' rows repeat the tenant of their group.
        "ALTER TABLE events ADD COLUMN tenant TEXT NOT NULL DEFAULT ''",
        "UPDATE events SET tenant = COALESCE((SELECT tenant FROM groups WHERE groups.id = events.group_id), '')",
        "CREATE INDEX events_of_tenant ON events (tenant, cursor)",
        "ALTER TABLE outbox ADD COLUMN tenant TEXT NOT NULL DEFAULT ''",
        "UPDATE outbox SET tenant = (SELECT tenant FROM groups WHERE groups.id = outbox.group_id)",
        "CREATE INDEX outbox_dead_of_tenant ON outbox (tenant, given_up, group_id) WHERE given_up IS NOT NULL",
        "ALTER TABLE image_uses ADD COLUMN tenant TEXT NOT NULL DEFAULT ''",
        """UPDATE image_uses SET tenant = (SELECT groups.tenant FROM sessions
            JOIN groups ON groups.id = sessions.group_id WHERE sessions.id = image_uses.session_id)""",
        "DROP INDEX image_uses_by_digest",
        "CREATE INDEX image_uses_by_digest ON image_uses (digest, tenant)",
        # `tenants` is like `totals`, with a row for each tenant that has had a done group. Tenants from before this
        # migration count as having reached all cursors given by then.
        """CREATE TABLE tenants (
            name TEXT PRIMARY KEY,
            cursor BIGINT NOT NULL,
            sessions BIGINT NOT NULL,
            removed_event BIGINT NOT NULL
        )""",
        """INSERT INTO tenants (name, cursor, removed_event, sessions)
            SELECT known.tenant, totals.cursor, totals.removed_event,
                (SELECT COALESCE(SUM(n), 0) FROM groups WHERE groups.tenant = known.tenant AND groups.state = 'done')
            FROM totals, (SELECT tenant FROM groups UNION SELECT tenant FROM tokens) AS known""",
        # `tenant` is empty for the consumers of admins, who see all tenants. The readers of earlier consumers are
        # unknown: each consumer goes on from its position, for admins and for every tenant that may acknowledge.
        "ALTER TABLE consumers RENAME TO earlier_consumers",
        """CREATE TABLE consumers (
            tenant TEXT NOT NULL,
            name TEXT NOT NULL,
            cursor BIGINT NOT NULL,
            created DOUBLE PRECISION NOT NULL,
            seen DOUBLE PRECISION NOT NULL,
            PRIMARY KEY (tenant, name)
        )""",
        """INSERT INTO consumers (tenant, name, cursor, created, seen)
            SELECT '', name, cursor, created, seen FROM earlier_consumers
            UNION ALL SELECT tenant, earlier_consumers.name, cursor, earlier_consumers.created, seen
            FROM earlier_consumers, tokens WHERE role = 'submit' AND revoked IS NULL""",
        "DROP TABLE earlier_consumers",
        "CREATE INDEX consumers_by_cursor ON consumers (tenant, cursor)",
        # The queue is shared between tenants first, then between the buckets of each.
        "ALTER TABLE queue_shares ADD COLUMN tenant TEXT NOT NULL DEFAULT ''",
        _share_queue,
        "DROP INDEX queue_shares_order",
        "DROP INDEX queue_shares_evaluations",
        """CREATE INDEX queue_shares_order ON queue_shares (priority, tenant, served, since, bucket)
            WHERE waiting = 1""",
        """CREATE INDEX queue_shares_evaluations ON queue_shares (priority, tenant, served, since, bucket)
            WHERE waiting = 1 AND evaluation = 1""",
        "CREATE INDEX queue_shares_of_tenant ON queue_shares (tenant, served)",
    ),
    (
        # `sealed` is 1 if `spec`, `callback_url` and the URL in the outbox are encrypted. `Store` encrypts those of
        # the other groups.
        "ALTER TABLE groups ADD COLUMN sealed INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX groups_to_seal ON groups (id) WHERE sealed = 0",
    ),
    (
        # A tenant's priority orders its own groups only.
        "DROP INDEX queue_shares_order",
        "DROP INDEX queue_shares_evaluations",
        """CREATE INDEX queue_shares_order ON queue_shares (tenant, priority, served, since, bucket)
            WHERE waiting = 1""",
        """CREATE INDEX queue_shares_evaluations ON queue_shares (tenant, priority, served, since, bucket)
            WHERE waiting = 1 AND evaluation = 1""",
    ),
    (
        # `pace` is the time that the engine usually takes, as JSON (`RememberedPace`).
        "CREATE TABLE engine_paces (engine TEXT PRIMARY KEY, pace TEXT NOT NULL, kept DOUBLE PRECISION NOT NULL)",
    ),
)
SEALING = 12
"""The version that introduced the encryption of tasks."""


async def migrate(tx: Connection, types: Mapping[str, str], now: float, migrations: Migrations = MIGRATIONS) -> int:
    """Bring the schema up to date inside one transaction. Returns the number of migrations applied.

    Raises ServiceError when the database is newer than this program.
    """
    await tx.execute("CREATE TABLE IF NOT EXISTS migrations (version INTEGER PRIMARY KEY, applied DOUBLE PRECISION)")
    version: int = (await tx.fetch("SELECT COALESCE(MAX(version), 0) FROM migrations"))[0][0]
    if version > len(migrations):
        raise ServiceError(
            f"the database has schema version {version}, this Outrider knows versions up to {len(migrations)}",
            hint="upgrade Outrider to the version that wrote the database, or give it another data folder",
        )
    for number, statements in enumerate(migrations[version:], start=version + 1):
        for statement in statements:
            if isinstance(statement, str):
                await tx.execute(statement.format_map(types))
            else:
                await statement(tx)
        await tx.execute("INSERT INTO migrations (version, applied) VALUES (?, ?)", (number, now))
    return len(migrations) - version
