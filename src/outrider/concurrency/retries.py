"""The policy of everything that is tried again: how often, and with which waits.

The waits grow exponentially with full jitter, so that clients that failed together do not return together.
docs/failure.md lists all policies.
"""

from __future__ import annotations

import random

import msgspec

MAX_DOUBLINGS = 32
"""2**n is computed no further: the wait has long reached `longest`, and a huge integer would not convert to float."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds. Wait number n (from 0) is drawn between 0 and `first` * 2^n, but is at most `longest`.
    `attempts` is the maximum number of attempts in all; None if the operation, or its caller, sets the end."""

    first: float
    longest: float
    attempts: int | None = None

    def wait(self, n: int, requested: float | None = None) -> float:
        """Return wait number n. A wait that the other side has `requested` takes its place, up to `longest`."""
        if requested is not None:
            return min(requested, self.longest)
        return random.uniform(0, min(self.first * 2 ** min(n, MAX_DOUBLINGS), self.longest))
