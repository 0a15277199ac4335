"""Puts invalid values into valid messages, for tests of messages from other programs."""

from __future__ import annotations

from math import nan
from typing import Any

ODD: list[Any] = [None, True, -1, 2**63, 1e308, nan, "", "x" * 300, "../../x", b"", b"123", [], {}, [[]] * 50, {"": 1}]
"""The invalid values."""


def mutated(thing: Any, at: int, odd: Any) -> Any:
    """Return a copy of `thing` in which value number `at` is `odd`. The values of all levels are counted, depth first,
    `thing` itself as 0. The values of keys named `type` are not counted."""
    count = at

    def walk(value: Any) -> Any:
        nonlocal count
        if count == 0:
            count -= 1
            return odd
        count -= 1
        if isinstance(value, dict):
            return {key: walk(each) if key != "type" else each for key, each in value.items()}
        if isinstance(value, list):
            return [walk(each) for each in value]
        return value

    return walk(thing)
