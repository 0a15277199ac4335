"""Verdicts are read from Python values and from text, and wrong verdicts are refused."""

from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from outrider.evaluators.verdict import MAX_METRIC_NAME, MAX_METRICS, parse_verdict, read_verdict
from outrider.trajectory import Verdict


@pytest.mark.parametrize("value", [0.5, Fraction(1, 2), np.float32(0.5), {"reward": 0.5}, Verdict(reward=0.5)])
def test_numbers_of_any_kind(value: Any) -> None:
    assert read_verdict(value) == Verdict(reward=0.5)


def test_a_whole_verdict() -> None:
    verdict = read_verdict({"reward": 1, "metrics": {"passed": 3}, "reason": "3 of 4"})
    assert verdict == Verdict(reward=1.0, metrics={"passed": 3.0}, reason="3 of 4")
    assert type(verdict.reward) is float
    assert parse_verdict(b' {"reward": -2e3, "metrics": null, "reason": null}\n') == Verdict(reward=-2000.0)


def test_metrics_are_bounded() -> None:
    """The service refuses results with very many metrics, and cuts off the node that sends one."""
    metrics = {f"case{number}": 1.0 for number in range(MAX_METRICS)}
    assert len(read_verdict({"reward": 1, "metrics": metrics}).metrics) == MAX_METRICS
    with pytest.raises(ValueError, match="10001 metrics, and may have 10000"):
        read_verdict({"reward": 1, "metrics": metrics | {"another": 1.0}})
    with pytest.raises(ValueError, match="has 4097 characters, and may have 4096"):
        read_verdict({"reward": 1, "metrics": {"x" * (MAX_METRIC_NAME + 1): 1.0}})


def test_rewards_of_turns_and_rows() -> None:
    verdict = parse_verdict(b'{"reward": 1, "turns": {"0": 0.5, "12": -1}, "rows": {"1": 0}}')
    assert verdict == Verdict(reward=1.0, turns={0: 0.5, 12: -1.0}, rows={1: 0.0})
    assert read_verdict(verdict) == verdict
    # The store packs verdicts in this form. A verdict that was stored before turns and rows existed can still be read.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict) == verdict
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict
    old = {"reward": 0.5, "metrics": {}, "reason": None}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=Verdict) == Verdict(reward=0.5)


@pytest.mark.parametrize(
    "value",
    [
        True,
        None,
        "1.0",
        [1.0],
        float("nan"),
        float("-inf"),
        10**400,
        1 + 0j,
        np.bool_(True),
        {},
        {"reward": None},
        {"reward": False},
        {"reward": 1, "score": 2},
        {"reward": 1, "metrics": {"a": float("nan")}},
        {"reward": 1, "metrics": {"a": True}},
        {"reward": 1, "metrics": [1]},
        {"reward": 1, "metrics": {1: 1}},
        {"reward": 1, "reason": 3},
        {"reward": 1, "turns": [0.5]},
        {"reward": 1, "turns": {"first": 0.5}},
        {"reward": 1, "turns": {"01": 0.5}},
        {"reward": 1, "turns": {-1: 0.5}},
        {"reward": 1, "turns": {True: 0.5}},
        {"reward": 1, "turns": {0.0: 0.5}},
        {"reward": 1, "turns": {0: float("nan")}},
        {"reward": 1, "rows": {"9" * 5000: 0.5}},
        {"reward": 1, "rows": {0: None}},
        Verdict(reward=1.0, turns={0: float("inf")}),
        Verdict(reward=float("inf")),
        Verdict(reward=True),
        Verdict(reward=0.0, metrics={"a": float("inf")}),
    ],
)
def test_what_is_no_verdict_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_verdict(value)


@pytest.mark.parametrize(
    "text",
    [b"", b" \n", b"NaN", b"-Infinity", b"1e999", b"true", b"pass", b"1 2", b"\xff", b"9" * 5000, b"[" * 100_000],
)
def test_text_that_is_no_verdict_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_verdict(text)
