"""The interface of a database for the store. A database runs transactions, each a coroutine function of a connection.

SQLite (`sqlite.py`) and PostgreSQL (`postgresql.py`) implement the interface. Statements use `?` placeholders and the
SQL common to both databases. A database with other placeholders translates `?`. Invariant: the changes of a
transaction are committed as a whole before the caller sees the result, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]


class Connection(Protocol):
    """The transaction in which a body runs. Valid only until the body returns."""

    async def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run a statement that changes rows. Returns the number of changed rows."""
        ...

    async def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        """Run one statement for each row of values. Returns the total number of changed rows."""
        ...

    async def fetch(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """Return all rows of a query."""
        ...


Body = Callable[[Connection], Coroutine[Any, Any, T]]


class Database(Protocol):
    """Transactions over one database.

    `types` are the column types whose names differ between databases: `blob`, and `serial` for a growing primary key
    without repeats. A body must touch and await nothing but the connection: a body may run on any thread, and again
    after a rollback. An error in a body rolls the changes back and reaches the caller. ServiceError is raised for a
    failure of the database.
    """

    types: Mapping[str, str]

    async def open(self) -> None: ...
    async def close(self) -> None:
        """Finish the transactions already requested and refuse later ones. Idempotent."""
        ...

    async def write(self, body: Body[T], *, volatile: bool = False) -> T:
        """Run a body as if no other writer existed. The body may still be committed after its caller was cancelled.

        The changes survive a loss of power. The changes of a `volatile` body survive the end of any process. They
        survive a loss of power only once a later write that is not volatile has been committed.
        """
        ...

    async def read(self, body: Body[T]) -> T:
        """Run a body that changes nothing on a consistent snapshot that includes every finished write."""
        ...

    async def shrink(self) -> bool:
        """Free a little of the disk space of deleted rows, unless the database does so by itself. Returns True if
        another call would free more."""
        ...
