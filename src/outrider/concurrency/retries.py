"""Retry policies: the number of attempts of an operation, and the waits between attempts. Every operation that is
retried has a policy.

The waits grow exponentially with full jitter, so that clients that failed at the same time do not retry at the same
time. docs/failure.md lists all policies.
"""

from __future__ import annotations

import random

import msgspec

MAX_DOUBLINGS = 32
"""`first` is doubled at most this many times. By then the wait has long reached `longest`. Without this limit the
factor would become too large for a float."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The waits between the attempts of an operation, in seconds. Wait number n (from 0) is drawn between 0 and `first`
    * 2^n, but is at most `longest`. `attempts` is the maximum number of attempts, including the first; None if the
    operation or its caller decides when to stop."""

    first: float
    longest: float
    attempts: int | None = None

    def wait(self, n: int, requested: float | None = None) -> float:
        """Return wait number n in seconds. If the other side has requested a wait of `requested` seconds, that number
        is returned instead, up to `longest`."""
        if requested is not None:
            return min(requested, self.longest)
        return random.uniform(0, min(self.first * 2 ** min(n, MAX_DOUBLINGS), self.longest))
