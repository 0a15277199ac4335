"""Waits between tries: exponential, with full jitter, so that clients that failed together do not return together."""

from __future__ import annotations

import random

import msgspec

MAX_DOUBLINGS = 32
"""2**n is computed no further: the wait has long reached `longest`, and a huge integer would not convert to float."""


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds. The n-th wait (from 0) is drawn between 0 and `first` * 2^n, but at most `longest`."""

    first: float
    longest: float

    def wait(self, n: int) -> float:
        return random.uniform(0, min(self.first * 2 ** min(n, MAX_DOUBLINGS), self.longest))
