"""Defines the interface between the store and a database. A database runs transactions. The body of a transaction is a
coroutine function that gets a connection.

SQLite (`sqlite.py`) and PostgreSQL (`postgresql.py`) implement the interface. Statements use `?` placeholders and the
SQL common to both databases. A database with other placeholders translates `?`. Invariant: all changes of a transaction
are committed together, before the caller gets the result; a failed transaction changes nothing.
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
    """Transactions over one database.

    `types` has the names of two column types that differ between databases: `blob`, and `serial` for a primary key that
    grows and never repeats. A body must use and await only its connection, because a body may run on any thread, and
    may run again after a rollback. An error in a body rolls the body's changes back, and is raised to the caller. A
    failure of the database raises ServiceError. `commits` has the seconds of each committed transaction that writes,
    from its begin to the end of its commit.
    """

    types: Mapping[str, str]
    commits: Histogram

    async def open(self) -> None: ...
    async def close(self) -> None:
        """Finish the transactions already requested and refuse later ones. Idempotent."""
        ...

    async def write(self, body: Body[T], *, volatile: bool = False) -> T:
        """Run a body, isolated from all other writes. The body may still be committed after its caller was cancelled.

        The committed changes survive a loss of power. The exception is a `volatile` body: its changes survive the end
        of any process, but a loss of power may undo the changes until a later write that is not volatile has been
        committed.
        """
        ...

    async def read(self, body: Body[T]) -> T:
        """Run a body that only reads. The body sees a consistent snapshot, which includes every finished write."""
        ...

    async def shrink(self) -> bool:
        """Free a part of the disk space of deleted rows, unless the database does so by itself. Returns True if another
        call would free more."""
        ...
