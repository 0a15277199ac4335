"""Confidence bounds of shares and differences, computed in one pass over the data and with constant memory.

All bounds are one-sided. The error probability is as low as 0.001 (`Z`), because about twenty rules are applied to each
run. Invariant: a bound is on the conservative side of its estimate, so that too little data triggers no rule.

Sources: Wilson (1927), "Probable inference, the law of succession, and statistical inference"; Kish (1965), "Survey
Sampling", for the effective sample size of clusters; Welch (1947), "The generalization of Student's problem".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, sqrt

import msgspec

Z = 3.09
"""Quantile of the normal distribution for a one-sided error probability of 0.001."""


class ClusterShare:
    """A share `part / whole`, summed over independent units, such as the share of cut replies among all replies of the
    sessions.

    A unit is a session or a group, never a call or a token, because the calls of one session depend on each other. So
    the bound is that of a ratio over clusters.
    """

    __slots__ = ("_cross", "_part_squares", "_whole_squares", "part", "units", "whole")

    def __init__(self) -> None:
        self.units = 0
        self.part = self.whole = 0.0
        self._part_squares = self._cross = self._whole_squares = 0.0

    def add(self, part: float, whole: float) -> None:
        """Add a unit. A unit with `whole` 0 is ignored. Requires 0 <= part <= whole."""
        if whole <= 0:
            return
        self.units += 1
        self.part += part
        self.whole += whole
        self._part_squares += part * part
        self._cross += part * whole
        self._whole_squares += whole * whole

    def padded(self, units: int) -> ClusterShare:
        """Return a copy with at least `units` units. An added unit has part 0 and whole 1. It stands for a session in
        which the counted event did not occur."""
        more = max(0, units - self.units)
        copy = ClusterShare()
        copy.units, copy.part, copy.whole = self.units + more, self.part, self.whole + more
        copy._part_squares, copy._cross = self._part_squares, self._cross
        copy._whole_squares = self._whole_squares + more
        return copy

    @property
    def value(self) -> float:
        return self.part / self.whole if self.whole else 0.0

    @property
    def lower(self) -> float:
        """Wilson's lower bound of the share, for the effective number of observations. 0 if there are fewer than two
        units."""
        if self.units < 2:
            return 0.0
        share = min(1.0, self.value)
        size = self._effective_size(share)
        spread = Z * sqrt(share * (1 - share) / size + Z * Z / (4 * size * size))
        return max(0.0, (share + Z * Z / (2 * size) - spread) / (1 + Z * Z / size))

    def _effective_size(self, share: float) -> float:
        """Return the number of independent observations that would give the same variance, at most `whole`.

        A share of 0 or 1 has no variance. The result is then the number of units, or less if the units differ in
        weight."""
        units = self.whole * self.whole / self._whole_squares
        squares = self._part_squares - 2 * share * self._cross + share * share * self._whole_squares
        variance = max(0.0, squares) / (self.whole * self.whole) * self.units / (self.units - 1)
        binomial = share * (1 - share)
        if binomial <= 1e-12:
            return units
        most = max(self.whole, units)
        return most if variance * most <= binomial else max(binomial / variance, 1.0)


class Moments(msgspec.Struct):
    """Count, mean and sum of squared deviations of a series of numbers (Welford's method)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        change = value - self.mean
        self.mean += change / self.count
        self.squares += change * (value - self.mean)

    @property
    def variance(self) -> float:
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Moments:
        made = cls()
        for value in values:
            made.add(value)
        return made


def least_difference(first: Moments, second: Moments) -> float:
    """Return Welch's lower bound of the difference `second.mean - first.mean`. Returns -inf if either series has fewer
    than two values."""
    if first.count < 2 or second.count < 2:
        return -inf
    parts = first.variance / first.count, second.variance / second.count
    variance = sum(parts)
    if variance <= 0:
        return second.mean - first.mean
    freedom = variance**2 / (parts[0] ** 2 / (first.count - 1) + parts[1] ** 2 / (second.count - 1))
    return second.mean - first.mean - student_quantile(freedom) * sqrt(variance)


def student_quantile(freedom: float) -> float:
    """Return the quantile of Student's distribution for the error probability of Z, from two terms of the
    Cornish-Fisher expansion. The result is 1.4 % too low at 9 degrees of freedom, and more exact above 9."""
    return Z + (Z**3 + Z) / (4 * freedom) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)


def least_rise(first: Moments, second: Moments) -> float:
    """Return the lower bound of the rise of the mean from `first` to `second`, in standard deviations of a single
    value."""
    rise = least_difference(first, second)
    deviation = sqrt((first.variance + second.variance) / 2)
    if deviation > 1e-9:
        return rise / deviation
    return inf if rise > 1e-9 else -inf


def least_fall(first: Moments, second: Moments) -> float:
    """Return the lower bound of the relative fall from `first` to `second`, whose values are logarithms. 0.25 means a
    fall of at least a quarter; a negative number means that there may be no fall."""
    fall = least_difference(second, first)
    return -inf if fall == -inf else 1 - exp(-fall)


def least_times(slow: Moments, others: Moments) -> float:
    """Return the lower bound of the ratio of `slow` to `others`. The values of both series are logarithms."""
    return exp(least_difference(others, slow))
