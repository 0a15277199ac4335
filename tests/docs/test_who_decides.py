"""docs/architecture.md, "Who decides": each name is defined in its file, and every folder of the package has a row."""

from __future__ import annotations

import ast
from pathlib import Path

from .pages import ROOT, page

PACKAGE = ROOT / "src" / "outrider"
[TABLE] = page("docs/architecture.md").tables("Question")
ROWS = [(row[1].partition("`")[2].partition("`")[0], row[2].strip("`")) for row in TABLE.rows if row[1]]


def definitions(body: list[ast.stmt]) -> set[str]:
    """Return the dotted names of functions, classes, methods, constants and attributes."""
    names: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names.add(node.name)
            case ast.ClassDef():
                names |= {node.name, *(f"{node.name}.{name}" for name in definitions(node.body))}
            case ast.Assign():
                targets = [target for one in node.targets for target in getattr(one, "elts", [one])]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def defines(path: Path, name: str) -> bool:
    text = path.read_text()
    if path.suffix == ".py":
        return name in definitions(ast.parse(text).body)
    return any(line.startswith((f"{name} =", f"{name}() {{")) for line in text.splitlines())


def test_the_name_is_defined_in_the_file() -> None:
    assert [row for row in ROWS if not defines(PACKAGE / row[0], row[1])] == []


def test_every_room_decides_something() -> None:
    rooms = {folder.name for folder in PACKAGE.iterdir() if folder.is_dir() and (folder / "__init__.py").exists()}
    assert rooms == {file.partition("/")[0] for file, _ in ROWS if "/" in file}


def test_a_name_that_is_not_there_would_be_seen(tmp_path: Path) -> None:
    module = tmp_path / "a.py"
    module.write_text("A, B = 1, 2\nC: int = 3\nclass D:\n    def e(self): F = 1\n")
    assert all(defines(module, name) for name in ("A", "B", "C", "D", "D.e"))
    assert not any(defines(module, name) for name in ("E", "F", "e", "D.F"))
