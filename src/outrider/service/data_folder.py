"""Opens the database of a data folder, without starting a service or a node.

Invariant: while the database is open, the data folder is locked, so that no other service uses it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.concurrency.chores import Failures
from outrider.config import Config
from outrider.environment import install_command
from outrider.errors import InvalidField, ServiceError
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store
from outrider.store.task_key import KEY_FILE, KeyFile, given_key

DATABASE = "outrider.sqlite3"
"""Name of the database file in the data folder."""
RUNS = "runs.sqlite3"
"""Name of the file of the index of runs (`store/run_index/`). Every service makes this file within seconds of its
start, whichever database its store uses."""


@asynccontextmanager
async def open_store(config: Config, failures: Failures | None = None) -> AsyncIterator[Store]:
    """Open the store, and keep the data folder locked while the block runs. Raises ServiceError if another service uses
    the data folder, and InvalidField if the folder cannot be used."""
    try:
        config.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A lock is used, and not a file with a process id, because the kernel releases a lock even if the process is
        # killed.
        lock = os.open(config.data / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise InvalidField(
            f"{config.data} cannot be used as the data folder: {error.strerror}",
            field="data",
            hint="give a folder that this user can write to, with room for groups and results: --data DIR",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            hint = "stop it, or give this one a folder of its own: --data DIR"
            raise ServiceError(f"another service is using {config.data}", hint=hint) from error
        raise InvalidField(
            f"the data folder {config.data} cannot be locked: {error.strerror}",
            field="data",
            hint="give a folder on a file system with locks, such as a local disk: --data DIR",
        ) from error
    try:
        async with _store(config, failures) as store:
            yield store
    finally:
        os.close(lock)


def _store(config: Config, failures: Failures | None) -> Store:
    key = KeyFile(config.data / KEY_FILE) if config.task_key is None else given_key(config.task_key)
    if config.store is None:
        return sqlite_store(config.data / DATABASE, failures, key=key)
    try:
        from outrider.store.postgresql import postgresql_store
    except ImportError as error:
        hint = install_command("postgresql")
        raise InvalidField("a store in PostgreSQL needs asyncpg", field="store", hint=hint) from error
    return postgresql_store(config.store, key=key)
