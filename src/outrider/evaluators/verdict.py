"""Reads a verdict from what a grader returns or writes. Pure.

Invariant: a reward is a finite number, never True or False, and nothing that a grader says is ignored silently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NoReturn

from outrider.errors import storable
from outrider.trajectory import Verdict

FIELDS = frozenset({"reward", "metrics", "reason"})
MAX_REASON = 65_536
"""Characters of a reason that are kept."""


def read_verdict(value: Any) -> Verdict:
    """The verdict in a number, in a mapping with `reward` and optionally `metrics` (numbers by name) and `reason`, or
    in a Verdict. Raises ValueError that says what is wrong.
    """
    if isinstance(value, Verdict):
        return _verdict(value.reward, value.metrics, value.reason)
    if not isinstance(value, Mapping):
        return _verdict(value, {}, None)
    if unknown := {str(name) for name in value} - FIELDS:
        raise ValueError(f"unknown fields in the verdict: {', '.join(sorted(unknown))}")
    if "reward" not in value:
        raise ValueError("the verdict has no reward")
    return _verdict(value["reward"], value.get("metrics") or {}, value.get("reason"))


def parse_verdict(text: bytes) -> Verdict:
    """`read_verdict` of JSON text. Raises ValueError (UnicodeDecodeError is one)."""
    if not text.strip():
        raise ValueError("the verdict is empty")
    try:
        value = json.loads(text.decode(), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"the verdict is neither a number nor JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("the verdict is nested too deeply") from error
    return read_verdict(value)


def _verdict(reward: Any, metrics: Any, reason: Any) -> Verdict:
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise ValueError("metrics must be numbers by name")
    if reason is not None and not isinstance(reason, str):
        raise ValueError(f"reason must be a text, not {type(reason).__name__}")
    return Verdict(
        reward=_finite(reward, "reward"),
        metrics={storable(name): _finite(value, f"metric {name!r}") for name, value in metrics.items()},
        reason=storable(reason[:MAX_REASON]) if reason is not None else None,
    )


def _finite(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{what} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{what} is too large") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, not {number}")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
