"""A table of results, and the format of its figures. Independent of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

Results = dict[str, Any]
"""The return values of `run`, by benchmark."""


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def number(value: float) -> str:
    """Format to three significant digits; for several rounds (`rounds.Figure`) with the smallest and the largest."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
