"""Counters since the start of a process: histograms of durations, and the counts that a node reports to its service.

Invariants: counts only grow; the number of counters is bounded, because their names are from a fixed set or are OTHER.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from operator import add

import msgspec

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0),
)
"""Upper bounds, in seconds, of the buckets for durations. One more bucket, without an upper bound, follows."""

OTHER = "other"
"""The name of the counter for everything that has no counter of its own."""


class Distribution(msgspec.Struct, frozen=True):
    """The values in a histogram. `counts` has the number of values in each bucket, not cumulative. `counts` may be
    empty if there are no values. `total` is the sum of all values."""

    counts: tuple[int, ...] = ()
    total: float = 0.0

    def plus(self, other: Distribution) -> Distribution:
        """Return the sum of two distributions. Both must have the same buckets."""
        if not (self.counts and other.counts):
            return self if self.counts else other
        return Distribution(tuple(map(add, self.counts, other.counts)), self.total + other.total)


class Histogram:
    """Counts values in buckets. `bounds` are the upper bounds of the buckets."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value. A negative duration, which occurs if the clock was set back, counts as 0."""
        if value < 0.0:
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def read(self) -> Distribution:
        return Distribution(tuple(self.counts), self.total)


class SandboxCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox starts of one runtime. `started` has the durations of successful starts, in seconds, including the
    prepare steps. `failed` is the number of failed starts."""

    started: Distribution = Distribution()
    failed: int = 0

    def plus(self, other: SandboxCounts) -> SandboxCounts:
        return SandboxCounts(started=self.started.plus(other.started), failed=self.failed + other.failed)


class NodeCounts(msgspec.Struct, frozen=True, kw_only=True):
    """A node's sandbox starts by runtime, and its failed model calls by dialect and then by error code."""

    sandboxes: dict[str, SandboxCounts] = {}
    failed_calls: dict[str, dict[str, int]] = {}

    def plus(self, other: NodeCounts) -> NodeCounts:
        sandboxes, failed = dict(self.sandboxes), {name: dict(codes) for name, codes in self.failed_calls.items()}
        for runtime, counts in other.sandboxes.items():
            sandboxes[runtime] = sandboxes.get(runtime, SandboxCounts()).plus(counts)
        for dialect, codes in other.failed_calls.items():
            known = failed.setdefault(dialect, {})
            for code, number in codes.items():
                known[code] = known.get(code, 0) + number
        return NodeCounts(sandboxes=sandboxes, failed_calls=failed)


class CallFailures:
    """Counts the model calls that a gateway has answered with an error."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}

    def note(self, dialect: str, code: str) -> None:
        """Count a failed call. `dialect` and `code` must be from a fixed set of names."""
        codes = self._counts.setdefault(dialect, {})
        codes[code] = codes.get(code, 0) + 1

    def read(self) -> dict[str, dict[str, int]]:
        return {dialect: dict(codes) for dialect, codes in self._counts.items()}


class SandboxStarts:
    """Counts the starts of a node's sandboxes, by runtime. All runtimes that are not in `named` share one counter."""

    def __init__(self, named: Mapping[str, object]) -> None:
        self._named = named
        self._started: dict[str, Histogram] = {}
        self._failed: dict[str, int] = {}

    def note(self, runtime: str, seconds: float | None) -> None:
        """Count the start of a sandbox. `seconds` is its duration, or None for a failed start."""
        name = runtime if runtime in self._named else OTHER
        if seconds is None:
            self._failed[name] = self._failed.get(name, 0) + 1
        else:
            self._started.setdefault(name, Histogram()).add(seconds)

    def read(self) -> dict[str, SandboxCounts]:
        return {
            name: SandboxCounts(
                started=self._started[name].read() if name in self._started else Distribution(),
                failed=self._failed.get(name, 0),
            )
            for name in self._started.keys() | self._failed.keys()
        }
