"""Defines the interface between the store and its database. The store passes each transaction to the database as a
body: a coroutine function that gets a connection.

`sqlite.py` and `postgresql.py` implement the interface. Statements use `?` placeholders, and only SQL that both
databases accept. Invariant: all changes of a transaction are committed together, before its caller gets the result. A
failed transaction changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from outrider.counts import Histogram

T = TypeVar("T")
Row = tuple[Any, ...]


class Connection(Protocol):
    """The connection that the body of a transaction gets. It is valid only until the body returns."""

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
    """Runs transactions in one database. Methods raise ServiceError if the database fails.

    A body may run on any thread, so it must await nothing but its connection. A body may run again after a rollback. If
    a body raises an error, its changes are rolled back, and the caller gets the error.

    types: the database's own SQL for the column types `blob` and `serial`. `serial` is an integer primary key: its
        numbers rise and are never reused.
    commits: the seconds of each committed transaction that writes, from the beginning of the transaction to the end of
    its commit.
    """

    types: Mapping[str, str]
    commits: Histogram

    async def open(self) -> None: ...
    async def close(self) -> None:
        """Finish the transactions that were already requested, and refuse later ones. Idempotent."""
        ...

    async def write(self, body: Body[T], *, volatile: bool = False) -> T:
        """Run a body that changes rows, isolated from all other writes. If the caller is cancelled, the body may still
        be committed.

        Committed changes survive a loss of power. With `volatile`, they survive the end of any process, but a loss of
        power may undo them until a later non-volatile write is committed.
        """
        ...

    async def read(self, body: Body[T]) -> T:
        """Run a body that only reads. The body sees one consistent snapshot with every write that has returned."""
        ...

    async def shrink(self) -> bool:
        """Return some of the space of deleted rows to the file system, if the database does not do this by itself.
        Returns True if another call would free more."""
        ...
