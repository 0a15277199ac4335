"""Waits between retries: exponential with full jitter, so that clients that failed together do not retry together."""

from __future__ import annotations

import random

import msgspec

MAX_DOUBLINGS = 32
"""Largest exponent of two that is computed. By then the wait has long reached `longest`, and a huge integer would not
convert to float."""


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds. Wait number n (from 0) is drawn uniformly between 0 and the smaller of `first` * 2^n and
    `longest`."""

    first: float
    longest: float

    def wait(self, n: int) -> float:
        return random.uniform(0, min(self.first * 2 ** min(n, MAX_DOUBLINGS), self.longest))
