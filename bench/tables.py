"""A table of results, and the format of its figures. The module is independent of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

Results = dict[str, Any]
"""The return values of `run`, by benchmark."""


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """One table of a report: title, columns, rows and notes."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def number(value: float) -> str:
    """Format a number to three significant digits. A figure of several rounds (`rounds.Figure`) is followed by the
    smallest and the largest round."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
