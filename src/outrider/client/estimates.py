"""Computes statistics from the rewards of sessions: pass@k, and confidence intervals over tasks. Equal values always
give equal results."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean, stdev

RESAMPLES = 2000
CONFIDENCE = 0.95
MOST_RESAMPLED = 500
"""Maximum number of values for which an interval is computed by resampling. With more values, the normal approximation
is as good as resampling."""
NORMAL_QUANTILE = 1.959964
"""Number of standard errors that the interval extends to each side of the mean, for CONFIDENCE."""


def pass_at(k: int, passes: int, samples: int) -> float:
    """Return the probability that at least one of `k` samples passes, if they are drawn without replacement from
    `samples` samples of which `passes` pass."""
    # The quotient of two binomial coefficients, computed as a product with as few factors as possible. Computing a
    # coefficient itself may take 0.3 seconds, because of its many digits, and blocks all other threads.
    fewer, more = min(k, passes), max(k, passes)
    # A factor of 0 stands for a certain pass.
    return 1.0 - math.prod(max(0, samples - more - drawn) / (samples - drawn) for drawn in range(fewer))


def bootstrap_interval(means: Sequence[float]) -> tuple[float, float] | None:
    """Return the confidence interval of the mean of `means`, by the percentile bootstrap. Returns None for fewer than
    two values."""
    if len(means) < 2:
        return None
    draw = random.Random(0)
    resampled = sorted(fmean(draw.choices(means, k=len(means))) for _ in range(RESAMPLES))
    aside = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    return resampled[aside], resampled[-1 - aside]


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the confidence interval of the mean of `values`. It comes from `bootstrap_interval` for up to
    MOST_RESAMPLED values, and from the normal approximation for more. Returns None for fewer than two values."""
    if len(values) <= MOST_RESAMPLED:
        return bootstrap_interval(values)
    half = NORMAL_QUANTILE * stdev(values) / math.sqrt(len(values))
    middle = fmean(values)
    return middle - half, middle + half


def difference_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Return the confidence interval of mean(second) - mean(first), for two independent sets of values. Returns None if
    a set has fewer than two values."""
    if min(len(first), len(second)) < 2:
        return None
    if max(len(first), len(second)) > MOST_RESAMPLED:
        half = NORMAL_QUANTILE * math.sqrt(stdev(first) ** 2 / len(first) + stdev(second) ** 2 / len(second))
        middle = fmean(second) - fmean(first)
        return middle - half, middle + half
    draw = random.Random(0)
    resampled = sorted(
        fmean(draw.choices(second, k=len(second))) - fmean(draw.choices(first, k=len(first))) for _ in range(RESAMPLES)
    )
    aside = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    return resampled[aside], resampled[-1 - aside]
