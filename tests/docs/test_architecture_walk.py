"""docs/architecture.md: each name of the walk is defined in its file and called in the file of the row that the table
names; each word of the glossary has the one class that the page names.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .pages import ROOT, page

PACKAGE = ROOT / "src" / "outrider"
MOST_FILES = 15
[WALK] = page("docs/architecture.md").tables("#")
ROWS = [dict(zip(WALK.columns, row, strict=True)) for row in WALK.rows]


def file_of(row: dict[str, str]) -> Path:
    return PACKAGE / row["File"].partition("`")[2].partition("`")[0]


def name_of(row: dict[str, str]) -> str:
    return row["Name"].strip("`")


def defined(tree: ast.AST, name: str) -> bool:
    """Return whether a module has a function, class or method of this dotted name, at any depth."""
    first, _, rest = name.partition(".")
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == first]
    return any(not rest or defined(node, rest) for node in found)


def calls(path: Path, name: str) -> bool:
    """Return whether a file, or a file in a folder, calls the last part of this name, or passes it to a call by
    keyword, as in `Dialect(parse=parse_request)`."""
    last = name.rpartition(".")[2]
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                for named in (node.func, *(given.value for given in node.keywords)):
                    if last in (getattr(named, "id", ""), getattr(named, "attr", "")):
                        return True
    return False


def test_it_is_short_and_in_order() -> None:
    assert [row["#"] for row in ROWS] == [str(number) for number in range(1, len(ROWS) + 1)]
    assert len({file_of(row) for row in ROWS}) == len(ROWS) <= MOST_FILES


@pytest.mark.parametrize("row", ROWS, ids=lambda row: name_of(row))
def test_a_name_is_in_its_file_and_called_by_the_row_that_says_so(row: dict[str, str]) -> None:
    assert defined(ast.parse(file_of(row).read_text()), name_of(row))
    caller = row["Called by"]
    if caller == "HTTP":
        return
    if caller.isdigit():
        assert int(caller) < int(row["#"])
        source = file_of(ROWS[int(caller) - 1])
    else:
        [folder] = re.findall(r"`([\w/]+)/`", caller)
        source = PACKAGE / folder
    assert calls(source, name_of(row)), f"{source.name} does not call {name_of(row)}"


def test_a_name_that_is_not_there_would_be_seen() -> None:
    tree = ast.parse("class A:\n    def b(self): return c.d()")
    assert defined(tree, "A.b")
    assert not defined(tree, "A.d")
    assert not defined(tree, "b.A")


def test_each_word_has_one_class() -> None:
    [words] = page("docs/architecture.md").tables("Word")
    kinds = [kind for file in PACKAGE.rglob("*.py") for kind in re.findall(r"^ *class (\w+)", file.read_text(), re.M)]
    named = {row[0]: row[2].strip("`") for row in words.rows}
    assert {kind: kinds.count(kind) for kind in named.values()} == dict.fromkeys(named.values(), 1)
    for word, kind in named.items():
        own = "".join(part.capitalize() for part in word.split())
        assert own == kind or own not in kinds, f"{own} is not what the page calls a {word}"
