"""Comparing two checkouts: figures by name, medians of the rounds."""

from __future__ import annotations

import io
import runpy
from pathlib import Path

from rich.console import Console

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "compare_bench.py"))


def test_every_number_has_a_name() -> None:
    results = {"gateway": {"rate": {"whole": 2.0}, "points": [{"ms": 1}], "quick": True, "kind": "x", "none": None}}
    assert dict(SCRIPT["leaves"](results)) == {"gateway.rate.whole": 2.0, "gateway.points.0.ms": 1.0}


def test_the_medians_of_what_both_have_are_compared() -> None:
    before = {"a.ms": [1.0, 9.0, 2.0], "b.ms": [1.0], "c.ms": [1.0], "a.s": [0.0]}
    after = {"a.ms": [1.0, 1.0, 7.0], "b.ms": [4.0], "a.s": [1.0]}
    written = io.StringIO()
    Console(file=written, width=100).print(SCRIPT["compared"](before, after, "ms"))
    lines = [line.split() for line in written.getvalue().splitlines() if ".ms" in line]
    cells = [[cell for cell in line if cell != "│"] for line in lines]
    assert cells == [["a.ms", "2", "1", "0.50"], ["b.ms", "1", "4", "4.00"]]
