"""Reads a verdict from what a grader returned or printed. The module is pure.

Invariant: a reward is a number within MAX_REWARD, never True or False. An unknown field of a verdict is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any, NoReturn

import msgspec

from outrider.errors import storable
from outrider.trajectory import GradedTurn, Verdict

FIELDS = frozenset(Verdict.__struct_fields__)
MAX_REASON = 65_536
"""Maximum characters of a verdict's reason. The rest is cut."""
MAX_METRICS = 10_000
MAX_METRIC_NAME = 4096
"""Maximum number of metrics of one verdict, and maximum characters of a metric's name."""
MAX_REWARD = 1e15
"""Maximum absolute value of a reward. The sum of the squares of a million such rewards still fits into a float32."""


def read_verdict(value: Any) -> Verdict:
    """Return the verdict in `value`: a number, a mapping with `reward` and other fields of a Verdict, or a Verdict. The
    indexes in `turns` and `rows` may be strings, as in JSON. Raises ValueError for anything else.
    """
    if isinstance(value, Verdict):
        value = msgspec.structs.asdict(value)
    if not isinstance(value, Mapping):
        value = {"reward": value}
    if unknown := {str(name) for name in value} - FIELDS:
        raise ValueError(f"unknown fields in the verdict: {', '.join(sorted(unknown))}")
    if "reward" not in value:
        raise ValueError("the verdict has no reward")
    metrics, reason = value.get("metrics") or {}, value.get("reason")
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise ValueError("metrics must be numbers by name")
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"the verdict has {len(metrics)} metrics, and may have {MAX_METRICS}")
    if (longest := max(map(len, metrics), default=0)) > MAX_METRIC_NAME:
        raise ValueError(f"the name of a metric has {longest} characters, and may have {MAX_METRIC_NAME}")
    if reason is not None and not isinstance(reason, str):
        raise ValueError(f"reason must be a text, not {type(reason).__name__}")
    return Verdict(
        reward=_reward(value["reward"], "reward"),
        metrics={storable(name): finite(number, f"metric {name!r}") for name, number in metrics.items()},
        reason=storable(reason[:MAX_REASON]) if reason is not None else None,
        turns=_by_index(value.get("turns") or {}, "turns"),
        rows=_by_index(value.get("rows") or {}, "rows"),
    )


def check_indexes(verdict: Verdict, calls: Collection[GradedTurn]) -> None:
    """Raise ValueError if the verdict rewards a turn or a training row that does not occur in `calls`."""
    turns, rows = {call.index for call in calls}, {call.row for call in calls if call.row is not None}
    for index in verdict.turns.keys() - turns:
        raise ValueError(f"it rewards turn {index}, and the session has {len(turns)} turns, from 0")
    for index in verdict.rows.keys() - rows:
        known = ", ".join(map(str, sorted(rows))) or "none"
        raise ValueError(f"it rewards row {index}, and the rows that train are: {known}")


def parse_verdict(text: bytes) -> Verdict:
    """Read a verdict from JSON text. Raises ValueError."""
    if not text.strip():
        raise ValueError("the verdict is empty")
    try:
        value = json.loads(text.decode(), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"the verdict is neither a number nor JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("the verdict is nested too deeply") from error
    return read_verdict(value)


def _by_index(rewards: Any, name: str) -> dict[int, float]:
    if not isinstance(rewards, Mapping):
        raise ValueError(f"{name} must be rewards by index")
    found = {}
    for index, reward in rewards.items():
        number = int(index) if isinstance(index, str) and index.isdecimal() and len(index) < 10 else index
        if isinstance(number, bool) or not isinstance(number, int) or str(number) != str(index) or number < 0:
            raise ValueError(f"{name} must be rewards by index, and {index!r} is no index")
        found[number] = _reward(reward, f"the reward of {name}[{number}]")
    return found


def _reward(value: Any, what: str) -> float:
    number = finite(value, what)
    if abs(number) > MAX_REWARD:
        raise ValueError(f"{what} must be between -{MAX_REWARD:g} and {MAX_REWARD:g}, not {number:g}")
    return number


def finite(value: Any, what: str) -> float:
    """Return the value as a finite float. Raises ValueError for anything else. `what` names the value in the
    message."""
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
