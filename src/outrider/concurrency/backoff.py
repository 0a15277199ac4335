"""Waits between tries: exponential, with full jitter, so that many clients do not come back together."""

from __future__ import annotations

import random

import msgspec

MAX_DOUBLINGS = 32


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """The n-th wait (from 0) is drawn between 0 and `first` * 2^n, at most `longest` seconds."""

    first: float
    longest: float

    def wait(self, n: int) -> float:
        return random.uniform(0, min(self.first * 2 ** min(n, MAX_DOUBLINGS), self.longest))
