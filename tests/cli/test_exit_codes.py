"""The exit codes of the command line: one module defines them, the commands use its names, and the docs list them."""

from __future__ import annotations

import ast
from pathlib import Path

from outrider.cli import exit_codes

ROOT = Path(__file__).parents[2]
CODES = {name: code for name, code in vars(exit_codes).items() if name.isupper()}


def test_no_other_module_defines_a_code() -> None:
    for path in sorted((ROOT / "src/outrider/cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="Exit"), args=[given]):
                    numbers = [each.value for each in ast.walk(given) if isinstance(each, ast.Constant)]
                    assert not [each for each in numbers if isinstance(each, int)], f"{path}:{node.lineno}"
                case ast.Assign(targets=[ast.Name(id=name)]) if name in CODES:
                    assert path.name == "exit_codes.py", f"{path}:{node.lineno}"


def test_the_docs_list_every_code() -> None:
    section = (ROOT / "docs/failure.md").read_text("utf-8").partition("## Exit codes of the command line")[2]
    listed = [line.split("|")[1].strip() for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    assert listed[2:] == [str(code) for code in sorted(CODES.values())]
