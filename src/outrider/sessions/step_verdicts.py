"""The verdict on a task of several steps, made from the verdicts on its steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from outrider.trajectory import Verdict


def verdict_on_steps(verdicts: Sequence[Verdict], reward: Literal["mean", "final"]) -> Verdict:
    """Return the mean of the verdicts, metric by metric, with 0 for a metric that a step lacks; or the final verdict.
    Both repeat each step's numbers as metrics `step1.reward`, `step1.NAME` and so on. Rewards of turns are added up."""
    final = verdicts[-1]
    names = {name for verdict in verdicts for name in verdict.metrics}
    metrics = {name: fmean(verdict.metrics.get(name, 0.0) for verdict in verdicts) for name in sorted(names)}
    turns: dict[int, float] = {}
    rows: dict[int, float] = {}
    each: dict[str, float] = {}
    for number, verdict in enumerate(verdicts, start=1):
        each |= {f"step{number}.{name}": value for name, value in {**verdict.metrics, "reward": verdict.reward}.items()}
        for index, value in verdict.turns.items():
            turns[index] = turns.get(index, 0.0) + value
        rows |= verdict.rows
    return Verdict(
        reward=fmean(verdict.reward for verdict in verdicts) if reward == "mean" else final.reward,
        metrics={**(metrics if reward == "mean" else final.metrics), **each},
        turns=turns,
        rows=rows,
        reason=final.reason,
    )
