"""A cache for the result of a probe. Runtimes probe whether this machine supports them.

Invariant: a successful result is kept forever, because installed programs do not change under a running service. After
a failure, the probe runs again, but at most once in RETRY_SECONDS. So a repair is noticed without a restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from outrider.errors import RuntimeUnavailable

RETRY_SECONDS = 10.0

T = TypeVar("T")


class ProbeCache(Generic[T]):
    """The cached result of `probe`. The probe returns a value, or raises RuntimeUnavailable. It may block. Other
    threads that call `get` meanwhile wait for the same result. After a failure, the probe does not run again before
    `retry_seconds` have passed."""

    def __init__(self, probe: Callable[[], T], *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._probe = probe
        self._retry_seconds = retry_seconds
        self._found: list[T] = []
        self._failure: RuntimeUnavailable | None = None
        self._failed_at = 0.0
        self._probing = threading.Lock()

    def get(self) -> T:
        """Return the probe's result. Raises RuntimeUnavailable with a hint on how to repair the installation. The call
        may block."""
        with self._probing:
            if not self._found:
                if self._failure is not None and time.monotonic() - self._failed_at < self._retry_seconds:
                    # A new exception is raised each time, because the traceback of a reused one would grow.
                    raise RuntimeUnavailable(self._failure.message, hint=self._failure.hint)
                try:
                    self._found.append(self._probe())
                except RuntimeUnavailable as failure:
                    self._failure, self._failed_at = failure, time.monotonic()
                    raise
            return self._found[0]
