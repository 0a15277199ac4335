"""Runs the benchmarks of two checkouts in turn, and prints how the figures of the second compare with the first's.

    python scripts/compare_bench.py ../before . gateway turns --rounds 5

Each checkout runs with its own `.venv` (`make venv` in it first). The rounds alternate, in an order that changes with
each, so that whatever else the machine does disturbs both alike; a figure is the median of its rounds. Figures that
only one checkout has are left out. A ratio below 1 means that the second checkout has the smaller figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = dict[str, list[float]]
"""By dotted name, the values of the rounds."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another checkout")
    parser.add_argument("names", nargs="+", metavar="NAME", help="benchmarks, as `python -m bench` names them")
    parser.add_argument("--rounds", type=int, default=3, help="how often each runs (default: 3)")
    parser.add_argument("--full", action="store_true", help="full runs instead of quick ones")
    parser.add_argument("--only", default="", metavar="TEXT", help="only figures whose name holds this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all values there, too")
    options = parser.parse_args(arguments)
    trees = {"before": options.before, "after": options.after}
    found: dict[str, Figures] = {side: {} for side in trees}
    console = Console(stderr=True)
    for number in range(options.rounds):
        for side in (*trees,) if number % 2 == 0 else (*reversed(trees),):
            with console.status(f"round {number + 1} of {options.rounds}: {side}"):
                results = measured(trees[side], options.names, full=options.full)
            for name, value in leaves(results):
                found[side].setdefault(name, []).append(value)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    Console().print(compared(found["before"], found["after"], options.only))


def measured(tree: Path, names: Sequence[str], *, full: bool) -> dict[str, Any]:
    """The results of one run of the benchmarks in a checkout."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [str(tree.resolve() / ".venv/bin/python"), "-m", "bench", *names, "--json", file.name]
        done = subprocess.run(
            command if full else [*command, "--quick"], cwd=tree, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed in {tree}:\n{done.stderr[-2000:]}")
        results: dict[str, Any] = json.loads(Path(file.name).read_bytes())["results"]
        return results


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number, by its dotted name."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from leaves(inner, f"{name}.{key}" if name else str(key))


def compared(before: Figures, after: Figures, only: str) -> Table:
    table = Table("figure", title="after / before", title_justify="left")
    for column in ("before", "after", "ratio"):
        table.add_column(column, justify="right")
    for name in before:
        if name in after and only in name:
            old, new = statistics.median(before[name]), statistics.median(after[name])
            if old > 0:
                table.add_row(name, f"{old:.4g}", f"{new:.4g}", f"{new / old:.2f}")
    return table


if __name__ == "__main__":
    main()
