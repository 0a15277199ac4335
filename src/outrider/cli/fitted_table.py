"""A table without borders that fits the width of its output.

Invariant: no cell is cut off. In a wide output, such as a file, each row is one line. In a narrow output, the headers
wrap first, and then the text of the last column. Columns that still do not fit form further tables below, each of which
repeats the first column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

GAP = 2
"""Number of spaces between two columns of the table."""
TEXT_WIDTH = 24
"""The minimum width of the last column if its text is wrapped."""


class FittedTable:
    """A table of texts. A column whose name ends in ">" is aligned to the right."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], title: str | None = None) -> None:
        self._names = [name.removesuffix(">") for name in columns]
        self._right = [name.endswith(">") for name in columns]
        # A tab has no width of its own, so the columns right of it would not be aligned.
        self._rows = [[cell.expandtabs() if isinstance(cell, str) else cell for cell in row] for row in rows]
        self._title = title
        self._widths = [max(cell_len(name), *self._cells(at), 0) for at, name in enumerate(self._names)]
        """The width of each column if no cell wraps."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for number, columns in enumerate(self._parts(options.max_width)):
            if number:
                yield ""
            elif self._title is not None:
                yield Text(self._title, style="bold")
            names = [Text(name, style="bold") for name in self._names]
            yield from self._row(console, columns, names, bottom=True)
            yield Text("─" * (sum(columns.values()) + GAP * (len(columns) - 1)))
            for row in self._rows:
                yield from self._row(console, columns, row)

    def _parts(self, room: int) -> Iterator[dict[int, int]]:
        """Split the columns into tables that are at most `room` characters wide. For each table, yield the widths of
        its columns by position."""
        places = range(len(self._names))
        if sum(self._widths) + GAP * (len(places) - 1) > room and self._is_text(places[-1]):
            # If the last column has no text, leave it out. An example is the column of errors when there are no errors.
            places = places if any(self._cells(places[-1])) else places[:-1]
        columns: dict[int, int] = {}
        for at in places:
            smallest = self._smallest(at, room)
            if columns and sum(columns.values()) + GAP * len(columns) + smallest > room:
                yield self._widened(columns, room)
                columns = {0: self._repeated(room)}
            columns[at] = smallest
        yield self._widened(columns, room)

    def _is_text(self, at: int) -> bool:
        """Return whether the cells of a column may wrap. This is True only for the last column, and only if the last
        column is aligned to the left."""
        return at == len(self._names) - 1 and not self._right[at]

    def _smallest(self, at: int, room: int) -> int:
        """Return the minimum width of a column: the width of its widest cell or, if greater, of the longest word in its
        name. If the column's cells may wrap, a width of TEXT_WIDTH is enough for the cells."""
        words = max(map(cell_len, self._names[at].split()), default=0)
        width = max(words, *self._cells(at), 0)
        if self._is_text(at):
            width = min(width, max(words, TEXT_WIDTH))
        return min(width, room if at == 0 else room - self._repeated(room) - GAP)

    def _repeated(self, room: int) -> int:
        """Return the width of the first column where it is repeated: in the second and later tables. It takes at most
        half of the room."""
        return min(self._widths[0], room // 2)

    def _widened(self, columns: dict[int, int], room: int) -> dict[int, int]:
        """Widen columns from their minimum widths to their full widths, from left to right, until no room is left."""
        left = room - sum(columns.values()) - GAP * (len(columns) - 1)
        widths = {}
        for at, width in columns.items():
            more = max(0, min(left, self._widths[at] - width))
            widths[at] = width + more
            left -= more
        return widths

    def _row(
        self, console: Console, columns: dict[int, int], cells: Sequence[str | Text], *, bottom: bool = False
    ) -> Iterator[Text]:
        """Yield the lines of one row. A cell with fewer lines than the row gets blank lines below it or, with `bottom`,
        above it. rich's own Table would take five times as long."""
        folded = [self._folded(console, cells[at], at, width) for at, width in columns.items()]
        height = max(map(len, folded))
        for lines, width in zip(folded, columns.values(), strict=True):
            blank = [Text(" " * width) for _ in range(height - len(lines))]
            lines[:] = [*blank, *lines] if bottom else [*lines, *blank]
        for parts in zip(*folded, strict=True):
            line = Text(" " * GAP).join(parts)
            line.no_wrap, line.overflow = True, "ignore"
            yield line

    def _folded(self, console: Console, cell: str | Text, at: int, width: int) -> list[Text]:
        """Return the lines of a cell. Each line is padded to the width of the column."""
        text = cell.copy() if isinstance(cell, Text) else Text(cell)
        fits = "\n" not in text.plain and cell_len(text.plain) <= width
        lines = [text] if fits else list(text.wrap(console, width, overflow="fold"))
        for line in lines:
            if self._right[at]:
                line.rstrip()
                line.pad_left(max(width - cell_len(line.plain), 0))
            else:
                line.pad_right(max(width - cell_len(line.plain), 0))
        return lines

    def _cells(self, at: int) -> list[int]:
        """Return the widths of the cells of a column. The width of a cell is that of its longest line."""
        return [max(map(cell_len, str(row[at]).split("\n"))) for row in self._rows]
