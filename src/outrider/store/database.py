"""The database seam: transactions as plain functions, run by whatever database is behind it.

It knows no table and no word of rollouts. Statements use `?` placeholders and the SQL that SQLite and PostgreSQL
share; a database with another placeholder translates.
Invariant: a body's changes are committed whole before its caller sees the result, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]


class Connection(Protocol):
    """What a body sees of its transaction. Valid only until the body returns."""

    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run a statement that changes rows; how many it changed."""
        ...

    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        """Run one statement for each row of values; how many rows changed in all."""
        ...

    def fetch(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """Every row of a query."""
        ...


Body = Callable[[Connection], T]


class Database(Protocol):
    """Transactions over one database.

    `types` are the column types that databases spell differently: `blob`, and `serial` for a growing primary
    key that never repeats. A body is a plain function, touches nothing but its connection, and may be run
    again after a rollback; it may run on any thread. What it raises rolls it back and reaches the caller; a
    failure of the database itself is a ServiceError.
    """

    types: Mapping[str, str]

    async def open(self) -> None: ...
    async def close(self) -> None:
        """Commit what was asked for before, refuse what comes after. Idempotent."""
        ...

    async def write(self, body: Body[T]) -> T:
        """Run a body as if no other writer existed. When the caller is cancelled it may still be committed."""
        ...

    async def read(self, body: Body[T]) -> T:
        """Run a body that changes nothing on one consistent snapshot, no older than every finished write."""
        ...
