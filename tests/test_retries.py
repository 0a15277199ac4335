"""Waits between tries."""

from __future__ import annotations

from outrider.concurrency.retries import RetryPolicy


def test_waits_grow_and_are_bounded() -> None:
    backoff = RetryPolicy(first=1.0, longest=8.0)
    for n in (0, 1, 2, 3, 50, 10_000):
        assert 0 <= backoff.wait(n) <= min(2.0 ** min(n, 10), 8.0)
    assert max(backoff.wait(3) for _ in range(200)) > 4
