"""The confidence bounds of the doctor of runs: known values, and how often a bound is above the truth."""

from __future__ import annotations

from math import inf, log
from random import Random

import pytest

from outrider.service.diagnosis.statistics import (
    ClusterShare,
    Moments,
    Z,
    least_difference,
    least_fall,
    least_rise,
    least_times,
    student_quantile,
)


def share_of(units: list[tuple[float, float]]) -> ClusterShare:
    share = ClusterShare()
    for part, whole in units:
        share.add(part, whole)
    return share


def wilson(share: float, size: float) -> float:
    """Return the lower root of (p - share)^2 = Z^2 p (1 - p) / size, found by bisection."""
    low, high = 0.0, share
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if (share - p) ** 2 > Z * Z * p * (1 - p) / size else (low, p)
    return low


@pytest.mark.parametrize(("successes", "size"), [(3, 20), (20, 20), (50, 100), (1, 1000), (400, 1000)])
def test_the_bound_of_single_observations_is_wilsons(successes: int, size: int) -> None:
    found = share_of([(float(at < successes), 1.0) for at in range(size)])
    assert found.value == successes / size
    # The variance of a sample has size - 1 in its denominator. It is 0 for shares of 0 and 1.
    effective = size if successes == size else size - 1
    assert found.lower == pytest.approx(wilson(successes / size, effective), rel=1e-6)


def test_there_is_no_bound_without_two_units() -> None:
    assert ClusterShare().lower == 0
    assert share_of([(5, 5)]).lower == 0
    assert share_of([(0, 0), (5, 5)]).units == 1


def test_the_calls_of_one_session_are_one_observation() -> None:
    alone = share_of([(100, 100), *[(0.0, 100.0)] * 9])
    spread = share_of([(10, 100)] * 10)
    assert alone.value == spread.value == 0.1
    assert alone.lower < 0.01
    assert spread.lower > 0.06
    assert share_of([(1, 1)] * 10).lower == pytest.approx(share_of([(50, 50)] * 10).lower)
    assert share_of([(90, 90), *[(1.0, 1.0)] * 9]).lower < 0.2


def test_padding_adds_sessions_without_the_ending() -> None:
    plain = share_of([(1.0, 1.0)] * 3 + [(0.0, 1.0)] * 7)
    padded = share_of([(1.0, 1.0)] * 3).padded(10)
    assert (padded.units, padded.value, padded.lower) == (plain.units, plain.value, plain.lower)
    assert plain.padded(5).units == 10


@pytest.mark.parametrize("truth", [0.02, 0.05, 0.2, 0.5, 0.7])
@pytest.mark.parametrize("units", [20, 200])
def test_a_bound_is_rarely_above_the_truth(truth: float, units: int) -> None:
    """At most 3 of 500 bounds are above the truth, for sessions whose calls depend on each other. One in a thousand is
    expected, but sums of few and rare events are skewed."""
    chance = Random(f"{truth} {units}")
    above = 0
    for _ in range(500):
        share = ClusterShare()
        for _ in range(units):
            whole = chance.randrange(1, 9)
            own = chance.betavariate(2 * truth, 2 * (1 - truth))
            share.add(sum(chance.random() < own for _ in range(whole)), whole)
        above += share.lower > truth
    assert above <= 3


def test_moments_are_those_of_the_series() -> None:
    found = Moments.of([1.0, 2.0, 4.0, 9.0])
    assert (found.count, found.mean) == (4, 4.0)
    assert found.variance == pytest.approx(38 / 3)
    assert Moments.of([5.0]).variance == 0


def test_the_bound_of_a_difference_is_rarely_above_the_truth() -> None:
    chance = Random(5)
    above = 0
    for _ in range(3000):
        first = Moments.of([chance.gauss(0, 1) for _ in range(10)])
        second = Moments.of([chance.gauss(0.5, 2) for _ in range(10)])
        above += least_difference(first, second) > 0.5
    assert above <= 9


@pytest.mark.parametrize(("freedom", "known"), [(9, 4.297), (18, 3.610), (40, 3.307), (120, 3.160), (1e9, 3.090)])
def test_the_quantile_is_students(freedom: float, known: float) -> None:
    """The known values are from tables of the distribution, for the probability 0.999."""
    assert known * 0.985 < student_quantile(freedom) <= known + 0.001


def test_a_difference_needs_two_values_on_each_side() -> None:
    one, two = Moments.of([1.0]), Moments.of([1.0, 3.0])
    assert least_difference(one, two) == least_difference(two, one) == -inf
    assert least_fall(one, two) == -inf
    assert least_times(one, two) == 0


def test_a_certain_fall_rise_and_factor() -> None:
    before, after = Moments.of([log(100.0)] * 5), Moments.of([log(75.0)] * 5)
    assert least_fall(before, after) == pytest.approx(0.25)
    assert least_fall(after, before) == pytest.approx(1 - 100 / 75)
    assert least_times(before, after) == pytest.approx(100 / 75)
    assert least_rise(after, before) == inf
    assert least_rise(before, after) == least_rise(before, before) == -inf


def test_a_rise_is_measured_in_deviations() -> None:
    chance = Random(7)
    first, second = (Moments.of([chance.gauss(mean, 0.2) for _ in range(5000)]) for mean in (0.3, 0.5))
    assert 0.85 < least_rise(first, second) < 1.0
