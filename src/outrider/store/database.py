"""What the store needs of a database: to run transactions, each of them a coroutine function of a connection.

It knows no table. SQLite (`sqlite.py`) and PostgreSQL (`postgresql.py`) implement it. Statements use `?` placeholders
and the SQL that both share; a database with other placeholders translates them.
Invariant: the changes of a transaction are committed as a whole before its caller sees the result, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]


class Connection(Protocol):
    """The transaction that a body runs in. Valid only until the body returns."""

    async def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run a statement that changes rows; the number of changed rows."""
        ...

    async def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        """Run one statement for each row of values; the total number of changed rows."""
        ...

    async def fetch(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """All rows of a query."""
        ...


Body = Callable[[Connection], Coroutine[Any, Any, T]]


class Database(Protocol):
    """Transactions over one database.

    `types` are the column types whose names differ between databases: `blob`, and `serial` for a growing primary key
    that never repeats. A body must touch and await nothing but its connection: it may run on any thread, and again
    after a rollback. An error that it raises rolls it back and reaches the caller; if the database itself fails,
    ServiceError is raised.
    """

    types: Mapping[str, str]

    async def open(self) -> None: ...
    async def close(self) -> None:
        """Finish the transactions already asked for and refuse later ones. Idempotent."""
        ...

    async def write(self, body: Body[T], *, volatile: bool = False) -> T:
        """Run a body as if no other writer existed. It may still be committed after its caller was cancelled.

        What it changed survives a loss of power. What a `volatile` body changed survives the death of any process,
        and a loss of power only if a write that is not volatile came after it.
        """
        ...

    async def read(self, body: Body[T]) -> T:
        """Run a body that changes nothing on a consistent snapshot that includes every finished write."""
        ...

    def overwriting(self) -> AbstractAsyncContextManager[None]:
        """What is overwritten within it shall not be left in the database's files after it. PostgreSQL keeps it there
        until it has vacuumed, and in its log."""
        ...

    async def shrink(self) -> bool:
        """Return a little of the room that deleted rows had to the file system, unless the database does that by
        itself; whether to call it again for more."""
        ...
