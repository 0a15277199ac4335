"""Defines the interface between the store and a database, which runs transactions. The store gives each transaction as
a body: a coroutine function that gets a connection.

SQLite (`sqlite.py`) and PostgreSQL (`postgresql.py`) implement the interface. Statements use `?` placeholders and the
SQL common to both databases. `postgresql.py` replaces `?` by its own placeholders. Invariant: all changes of a
transaction are committed together, before the caller gets the result; a failed transaction changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from outrider.counts import Histogram

T = TypeVar("T")
Row = tuple[Any, ...]


class Connection(Protocol):
    """The connection that a transaction's body gets. Valid only until the body returns."""

    async def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run a statement that changes rows. Returns the number of changed rows."""
        ...

    async def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        """Run one statement for each row of values. Returns the total number of changed rows."""
        ...

    async def fetch(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """Run a query. Returns all its rows."""
        ...


Body = Callable[[Connection], Coroutine[Any, Any, T]]


class Database(Protocol):
    """Runs transactions over one database. If the database fails, ServiceError is raised.

    A body must use and await only its connection, because it may run on any thread, and may run again after a rollback.
    If a body raises an error, its changes are rolled back, and the caller gets the error.

    types: the database's own names for the column types `blob` and `serial`. `serial` is a primary key that grows and
        never repeats.
    commits: the durations of committed writes in seconds.
    """

    types: Mapping[str, str]
    commits: Histogram

    async def open(self) -> None: ...
    async def close(self) -> None:
        """Finish the transactions already requested and refuse later ones. Idempotent."""
        ...

    async def write(self, body: Body[T], *, volatile: bool = False) -> T:
        """Run a body, isolated from all other writes. If the caller is cancelled, the body may still be committed.

        The committed changes survive a loss of power, unless `volatile` is set. Volatile changes survive the end of any
        process. A loss of power may undo them until a later non-volatile write is committed.
        """
        ...

    async def read(self, body: Body[T]) -> T:
        """Run a body that only reads. The body sees a consistent snapshot, which includes every finished write."""
        ...

    async def shrink(self) -> bool:
        """Free a part of the disk space of deleted rows, if the database does not do so by itself. Returns True if
        another call would free more."""
        ...
