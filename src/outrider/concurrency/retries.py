"""Retry policies: the number of attempts of an operation, and the waits between them.

The waits grow exponentially and are random (full jitter), so that clients that failed together do not retry together.
docs/failure.md lists all policies.
"""

from __future__ import annotations

import random

import msgspec

MAX_DOUBLINGS = 32
"""The maximum number of doublings of `first`. It is large enough to reach `longest`, and prevents the factor from
overflowing a float."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The waits between the attempts of an operation, in seconds.

    Wait number n, counted from 0, is a random time between 0 and the smaller of `first` * 2^n and `longest`.
    `attempts` is the maximum number of attempts, including the first. With None, the operation or its caller decides
    when to stop."""

    first: float
    longest: float
    attempts: int | None = None

    def wait(self, n: int, requested: float | None = None) -> float:
        """Return wait number n in seconds. If the other side has requested a wait of `requested` seconds, return that
        wait instead, but at most `longest`."""
        if requested is not None:
            return min(requested, self.longest)
        return random.uniform(0, min(self.first * 2 ** min(n, MAX_DOUBLINGS), self.longest))
