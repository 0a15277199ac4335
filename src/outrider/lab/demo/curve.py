"""Plots a training run over its steps: reward, group spread, staleness, log-probability gap and idle time.

The module needs matplotlib, an optional dependency.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.lab.demo.train import ENDS_ABOVE, LARGEST_GAP, STARTS_BELOW, SeedRun, TrainStep

SERIES: tuple[tuple[str, Callable[[TrainStep], float]], ...] = (
    ("mean reward of all groups", lambda step: step.stats.reward),
    ("spread of reward within a group (standard deviation)", lambda step: step.stats.spread),
    ("mean age of trained tokens (versions)", lambda step: step.stats.staleness_mean),
    ("largest log-probability gap, sampler to trainer", lambda step: step.stats.logprob_gap or 0.0),
    ("idle share of the run lane", lambda step: step.idle),
    ("seconds the trainer waited for a batch", lambda step: step.stats.waited),
)


def draw(runs: Sequence[SeedRun], path: Path) -> Path | None:
    """Write the plot as PNG and return its path. Without matplotlib, write nothing and return None."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    panels: Any = figure.subplots(3, 2)
    for panel, (title, value) in zip(panels.flat, SERIES, strict=True):
        for run in runs:
            panel.plot([value(step) for step in run.steps], label=f"seed {run.seed}", linewidth=1.2)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    reward, _, _, gap, *_ = panels.flat
    reward.set_ylim(0, 1)
    for level in (STARTS_BELOW, ENDS_ABOVE):
        reward.axhline(level, color="grey", linestyle=":", linewidth=1)
    reward.legend(fontsize=8)
    gap.set_yscale("log")
    gap.axhline(LARGEST_GAP, color="grey", linestyle=":", linewidth=1)
    figure.savefig(path, dpi=110)
    return path
