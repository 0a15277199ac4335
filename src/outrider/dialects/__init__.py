"""The wire formats that the gateway speaks."""

from __future__ import annotations

from outrider.dialects.base import Dialect
from outrider.dialects.chat import ChatDialect


def dialects() -> list[Dialect]:
    """One of each, in the order in which they are asked for a route; the last one refuses what none of them knows."""
    return [ChatDialect()]
