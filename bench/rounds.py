"""Combines several rounds of the benchmarks: each figure is the median of its rounds, and keeps its range.

In a round, each benchmark is a process of its own, so that no benchmark starts with the memory of another. This module
depends on no benchmark. Invariant: arithmetic on figures is done round by round, so that a ratio to a floor is the
median of the rounds' ratios.
"""

from __future__ import annotations

import json
import operator
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from rich.table import Table

from bench.tables import Results


class Figure(float):
    """The median of `rounds`, as a number; arithmetic on it is done round by round."""

    rounds: tuple[float, ...]

    def __new__(cls, rounds: Sequence[float]) -> Self:
        made = super().__new__(cls, statistics.median(rounds))
        made.rounds = tuple(rounds)
        return made

    def __format__(self, spec: str) -> str:
        """Format the median, followed by the smallest and the largest round in brackets unless these two look the
        same."""
        middle, low, high = (
            format(value, spec or ",.10g") for value in (float(self), min(self.rounds), max(self.rounds))
        )
        return middle if low == high else f"{middle} ({low} to {high})"

    def __str__(self) -> str:
        return format(self)

    def __abs__(self) -> float:
        return abs(float(self))

    def __add__(self, other: float) -> Figure:
        return self._with(other, operator.add)

    def __sub__(self, other: float) -> Figure:
        return self._with(other, operator.sub)

    def __mul__(self, other: float) -> Figure:
        return self._with(other, operator.mul)

    def __truediv__(self, other: float) -> Figure:
        return self._with(other, operator.truediv)

    def __rmul__(self, other: float) -> Figure:
        return self._with(other, operator.mul)

    def __rtruediv__(self, other: float) -> Figure:
        return self._with(other, lambda own, given: given / own)

    def _with(self, other: float, step: Callable[[float, float], float]) -> Figure:
        others = other.rounds if isinstance(other, Figure) else (other,) * len(self.rounds)
        return Figure([step(*pair) for pair in zip(self.rounds, others, strict=True)])


def combined(rounds: Sequence[Any]) -> Any:
    """Combine the results of the rounds. Numbers that differ become a Figure. Mappings are combined by the keys that
    all of them have, and lists item by item. For other values, and for lists of different lengths, the last round's
    value is taken."""
    last = rounds[-1]
    if all(one == last for one in rounds):
        return last
    if all(isinstance(one, dict) for one in rounds):
        return {key: combined([one[key] for one in rounds]) for key in last if all(key in one for one in rounds)}
    if all(isinstance(one, list) and len(one) == len(last) for one in rounds):
        return [combined(items) for items in zip(*rounds, strict=True)]
    if all(isinstance(one, int | float) and not isinstance(one, bool) for one in rounds):
        return Figure(rounds)
    return last


def medians(value: Any) -> Any:
    """Return the results with each Figure replaced by its median, a plain number."""
    match value:
        case Figure():
            return float(value)
        case dict():
            return {key: medians(inner) for key, inner in value.items()}
        case list():
            return [medians(inner) for inner in value]
        case _:
            return value


def one_round(python: str, tree: Path, name: str, *, quick: bool) -> dict[str, Any]:
    """Run a benchmark of a checkout in a process of its own and return its results. Raises RuntimeError if it fails."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [python, "-m", "bench", name, "--json", file.name, *(["--quick"] if quick else [])]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed in {tree}:\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(Path(file.name).read_bytes())["results"][name]
        return found


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number with its dotted name."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield name, value
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from leaves(inner, f"{name}.{key}" if name else str(key))


def compared(before: Results, after: Results, only: str) -> Table:
    """Return a table of the figures that are in both results and whose names contain `only`, with the ratio of after to
    before."""
    table = Table("figure", title="after / before", title_justify="left")
    for column in ("before", "after", "ratio"):
        table.add_column(column, justify="right")
    newer = dict(leaves(after))
    for name, old in leaves(before):
        if name in newer and only in name and old > 0:
            table.add_row(name, f"{old:.4g}", f"{newer[name]:.4g}", f"{float(newer[name]) / float(old):.2f}")
    return table
