"""`outrider query`: run an SQL query over the runs of a service."""

from __future__ import annotations

import csv
import sys
from typing import Annotated

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.fitted_table import FittedTable
from outrider.cli.options import command
from outrider.cli.terminal import Terminal, printable
from outrider.client.client import Client
from outrider.errors import InvalidField
from outrider.schemas import QueryReply


@command
def query(
    terminal: Terminal,
    service: Client,
    sql: Annotated[str, CliArgument(metavar="SQL", help="One SELECT, or - to read it from standard input.")],
    as_csv: Annotated[bool, CliOption("--csv", help="Write the rows as CSV.")] = False,
) -> None:
    """Run an SQL query over groups, sessions, turns, errors, rewards, tokens.

    docs/queries.md describes the views and their columns. A query can only
    read. It returns at most 10,000 rows, and is stopped after 5 seconds.

    Examples:

        outrider query "SELECT stop_reason, count(*) FROM sessions GROUP BY 1"

        outrider query --csv "SELECT * FROM turns LIMIT 1000"
    """
    if as_csv and terminal.json:
        raise InvalidField("--csv and --json exclude each other", field="--csv")
    reply = service.query(sys.stdin.read() if sql == "-" else sql)
    if as_csv:
        writer = csv.writer(terminal.out.file, lineterminator="\n")
        for row in (reply.columns, *reply.rows):
            if terminal.out.is_terminal:  # a file or a program gets the texts themselves
                row = tuple(printable(cell) if isinstance(cell, str) else cell for cell in row)
            writer.writerow(row)
    else:
        terminal.show(reply, _table(reply))
    if reply.truncated:
        terminal.note(f"only the first {len(reply.rows)} rows are shown: narrow the query, or add up")


def _table(reply: QueryReply) -> FittedTable:
    """Return the reply as a table. Columns of numbers are aligned to the right."""
    numeric = [
        any(row[at] is not None for row in reply.rows)
        and all(row[at] is None or isinstance(row[at], int | float) for row in reply.rows)
        for at in range(len(reply.columns))
    ]
    names = [printable(name) + (">" if right else "") for name, right in zip(reply.columns, numeric, strict=True)]
    rows = [tuple("-" if cell is None else printable(_text(cell)) for cell in row) for row in reply.rows]
    return FittedTable(names, rows)


def _text(cell: object) -> str:
    return f"{cell:.6g}" if isinstance(cell, float) and abs(cell) < 1e6 else str(cell)
