"""A table of results, and how its figures are written. It knows none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

Results = dict[str, Any]
"""By benchmark: what its `run` gave."""


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def number(value: float) -> str:
    """Three digits that mean something; of several rounds (`rounds.Figure`) also the smallest and the largest."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
