"""scripts/shape.py on packages so small that every number can be counted by eye."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "shape.py"
MAIN = runpy.run_path(str(SCRIPT))["main"]


@pytest.fixture
def shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that returns the numbers of a package with the given modules. The modules are given by their paths."""

    def measured(**sources: str) -> Any:
        written(tmp_path, sources)
        MAIN([str(tmp_path / "pkg"), "--json"])
        [found] = json.loads(capsys.readouterr().out)
        return found

    return measured


def written(folder: Path, sources: dict[str, str]) -> None:
    for name, source in sources.items():
        path = folder / "pkg" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, "utf-8")


def test_sizes(shape: Any) -> None:
    functions = (
        "@cache\ndef f():\n    'Docs.'\n\n    def inner():\n        return 1\n    return inner\n\nasync def g(): ...\n"
    )
    found = shape(**{"__init__": "", "a": functions, "inner/b": "x = 1"})
    assert (found["package"], found["files"], found["lines"]) == ("pkg", 3, 0 + 9 + 1)
    assert found["file_lines"] == {"median": 1, "p90": 9}
    # f without its decorator 6, inner 2, g 1
    assert found["functions"] == 3
    assert found["function_lines"] == {"median": 2, "p90": 6}


def test_sizes_of_nothing(shape: Any) -> None:
    found = shape(__init__="")
    assert found["function_lines"] == {"median": 0, "p90": 0}
    assert (found["comments_per_100_code_lines"], found["helpers_used_once_percent"]) == (0, 0)


COMMENTS = '''#!/usr/bin/env python
# -*- coding: utf-8 -*-
"""The heading,
of two lines."""
# a reason
#
import os  # trailing
import re  # noqa: F401
LIMIT = 3  # type: ignore[misc]  # with a reason

"""Maximum bytes of a body."""
TEXT = """
# no comment
"""
class A:
    """A docstring."""
    size: int = 0
    "What it is."
    def f(self):  # pragma: no cover
        x = 1
        "neither a docstring nor below a constant"
        self.x = x
        "What the attribute is."
'''


def test_comments_and_code(shape: Any) -> None:
    found = shape(a=COMMENTS)
    # two imports, LIMIT, the three lines of TEXT, class, size, def, x, the lone string and self.x
    assert found["code_lines"] == 12
    # the reason, the empty comment below it, the trailing one, the one behind `type: ignore`, three strings
    assert found["comments_per_100_code_lines"] == pytest.approx(100 * 7 / 12)


HELPERS = """
def _once(): ...
def _passed(): ...
def _twice(): ...
def _never(): ...
def _recursive(): _recursive()
def __mangled(): ...
@app.get
def _registered(): ...
@functools.cache
def _cached(): ...
def _imported(): ...
def _by_module(): ...
class A:
    def _method(self): self._override()
    def _override(self): ...
    @property
    def _shared(self): ...
class B(A):
    def _override(self): self._method()
    def run(self): return self._shared
_once(), _twice(), _twice(), _recursive(), __mangled(), _registered(), _cached()
use(_passed)
"""


def test_helpers_used_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: Any) -> None:
    other = "from pkg import a\nfrom pkg.a import _imported\nfrom pkg.a import _twice\n_imported()\na._by_module()\n"
    found = shape(a=HELPERS, b=other, c="thing._shared")
    once = ["_once", "_passed", "_cached", "_imported", "_by_module", "_method", "_shared"]
    assert found["functions"] == 15
    assert found["helpers_used_once_percent"] == pytest.approx(100 * len(once) / 15)
    # c uses the name `_shared`, too
    assert found["unique_helpers_used_once_percent"] == pytest.approx(100 * (len(once) - 1) / 15)
    MAIN([str(tmp_path / "pkg"), "--list"])
    printed = capsys.readouterr().out
    assert [line.split()[1] for line in printed.splitlines() if "/a.py:" in line] == once
    assert f"{tmp_path / 'pkg' / 'a.py'}:2 _once" in printed


def test_the_longest_import_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: Any) -> None:
    found = shape(
        **{
            "__init__": "from pkg.top import run",
            "top": "if TYPE_CHECKING or lazy():\n    import pkg.far\nelse:\n    from pkg import left",
            "left": "from . import right",
            "right": "from .left import x\ntry:\n    import pkg.sub.low\nexcept ImportError: ...",
            "sub/__init__": "",
            "sub/low": "from ..base import *\ndef f():\n    import pkg.far",
            "base": "import os",
            "far": "import pkg",
        }
    )
    # far, pkg, top, the cycle of left and right, low, base; low imports far late, and top only for types
    assert found["longest_import_chain"] == 6
    MAIN([str(tmp_path / "pkg"), "--list"])
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    first = printed.index("pkg.far")
    chain = ["pkg.far", "pkg", "pkg.top", "pkg.left = pkg.right", "pkg.sub.low", "pkg.base"]
    assert printed[first : first + 6] == chain


def test_the_table_has_a_column_per_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, {"__init__": "", "a": "x = 1  # why\n" * 2, "sub/__init__": "import pkg.sub\n"})
    MAIN([str(tmp_path / "pkg"), str(tmp_path / "pkg" / "sub")])
    rows = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["pkg", "pkg.sub"]
    assert ["files", "3", "1"] in rows
    assert ["comments per 100 code lines", "66.7", "0.0"] in rows


@pytest.mark.parametrize("source", [{}, {"a": "def"}], ids=["no files", "no Python"])
def test_a_package_that_cannot_be_read(tmp_path: Path, source: dict[str, str]) -> None:
    written(tmp_path, source)
    with pytest.raises(SystemExit, match="a package cannot be read: "):
        MAIN([str(tmp_path / "pkg")])
