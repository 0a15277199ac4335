"""The documentation as data: its pages with their links, code blocks, code spans and tables. Only the Markdown that
these pages use is parsed, and nothing here is specific to Outrider.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

_FENCE = re.compile(r"^```(.*)$")
_HEADING = re.compile(r"^#+ (.*)$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`([^`\n]+)`")
_CELL = re.compile(r"(?<!\\)\|")
_RULE = re.compile(r"^\|[\s:|-]+\|$")


@dataclass(frozen=True)
class Block:
    """A fenced block: the words behind its opening fence, its text, and its page and first line."""

    info: str
    text: str
    where: str


@dataclass(frozen=True)
class Table:
    """`columns` are the cells of the header, `rows` the cells of the other lines, without outer spaces."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def column(self, name: str) -> list[str]:
        return [row[self.columns.index(name)] for row in self.rows]


class Page:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path.relative_to(ROOT))
        self.text = path.read_text("utf-8")

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def blocks(self) -> list[Block]:
        return [found for found in self._parts if isinstance(found, Block)]

    @cached_property
    def prose(self) -> list[str]:
        """The lines outside of fenced blocks."""
        return [found for found in self._parts if isinstance(found, str)]

    @property
    def links(self) -> list[str]:
        return _LINK.findall("\n".join(self.prose))

    @property
    def spans(self) -> list[str]:
        """Inline code. The backslash before a pipe, which tables need, is removed."""
        return [found.replace("\\|", "|") for line in self.prose for found in _SPAN.findall(line)]

    @property
    def anchors(self) -> set[str]:
        """The anchors that GitHub makes of the page's headings."""
        return {slug(found[1]) for line in self.prose if (found := _HEADING.match(line))}

    def tables(self, first: str) -> list[Table]:
        """The tables whose first column is called `first`, in order."""
        found: list[Table] = []
        group: list[tuple[str, ...]] = []
        for line in [*self.prose, ""]:
            if line.startswith("|"):
                if not _RULE.match(line):
                    group.append(tuple(cell.strip() for cell in _CELL.split(line)[1:-1]))
            elif group:
                found.append(Table(group[0], tuple(group[1:])))
                group = []
        return [table for table in found if table.columns[0] == first]

    @cached_property
    def _parts(self) -> list[Block | str]:
        return list(self._read())

    def _read(self) -> Iterator[Block | str]:
        info: str | None = None
        start = 0
        text: list[str] = []
        for number, line in enumerate(self.text.splitlines(), 1):
            fence = _FENCE.match(line)
            if info is None and fence is None:
                yield line
            elif info is None and fence is not None:
                info, start, text = fence[1].strip(), number, []
            elif fence is not None and info is not None:
                yield Block(info, "".join(text), f"{self.name}:{start}")
                info = None
            else:
                text.append(line + "\n")
        assert info is None, f"{self.name}:{start}: the block is not closed"


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def code(cell: str) -> str:
    """The code span that a cell consists of."""
    found = _SPAN.fullmatch(cell)
    assert found, f"{cell!r} is no code span"
    return found[1]


def page(name: str) -> Page:
    return Page(ROOT / name)


DOCS = [Page(path) for path in sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page("README.md"), page("CONTRIBUTING.md"), page("CHANGELOG.md"), *DOCS]
