"""The policy for every operation that is tried again: the number of attempts, and the waits between them.

The waits grow exponentially with full jitter, so that clients that failed together do not return together.
docs/failure.md lists all policies.
"""

from __future__ import annotations

import random

import msgspec

MAX_DOUBLINGS = 32
"""`first` is doubled at most this many times. The wait has long reached `longest` by then, and a huge integer would not
convert to float."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds. Wait number n (from 0) is drawn between 0 and `first` * 2^n, but is at most `longest`.
    `attempts` is the maximum number of attempts in all; None if the operation, or its caller, sets the end."""

    first: float
    longest: float
    attempts: int | None = None

    def wait(self, n: int, requested: float | None = None) -> float:
        """Return wait number n. If the other side has `requested` a wait, this wait is returned instead, up to
        `longest`."""
        if requested is not None:
            return min(requested, self.longest)
        return random.uniform(0, min(self.first * 2 ** min(n, MAX_DOUBLINGS), self.longest))
