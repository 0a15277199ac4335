"""Combines the verdicts on the steps of a task into one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from outrider.errors import EvaluatorError
from outrider.trajectory import Verdict

MAX_METRICS = 50_000
"""Maximum number of metrics of the verdict on all steps. The service refuses a result with more than twice this number
from a node, and closes the node's connection."""


def verdict_on_steps(verdicts: Sequence[Verdict], reward: Literal["mean", "final"]) -> Verdict:
    """Combine the verdicts on the steps of a task into one verdict.

    `mean`: the reward and each metric is the mean over the steps. A step without the metric counts as 0.
    `final`: the reward and the metrics are those of the last step.

    In both cases the numbers of each step are added as metrics `step1.reward`, `step1.NAME` and so on. If several steps
    give rewards for one turn, their sum counts. If several steps give rewards for one training row, the row's reward
    from the last of these steps counts. Raises EvaluatorError if there are more than MAX_METRICS metrics.
    """
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
    metrics = {**(metrics if reward == "mean" else final.metrics), **each}
    if len(metrics) > MAX_METRICS:
        raise EvaluatorError(f"the verdicts on the steps give {len(metrics)} metrics, and may give {MAX_METRICS}")
    return Verdict(
        reward=fmean(verdict.reward for verdict in verdicts) if reward == "mean" else final.reward,
        metrics=metrics,
        turns=turns,
        rows=rows,
        reason=final.reason,
    )
