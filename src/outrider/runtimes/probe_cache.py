"""What a runtime needs of this machine, probed once: what is installed does not change under a running service.

It does not know what is probed. Invariant: a result is kept for good; after a failure the probe runs again, but at most
once in RETRY_SECONDS, so that what people repair is found without a restart.
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
    """`probe` returns a finding or raises RuntimeUnavailable. It may block; threads that ask meanwhile wait for it."""

    def __init__(self, probe: Callable[[], T]) -> None:
        self._probe = probe
        self._found: list[T] = []
        self._failure: RuntimeUnavailable | None = None
        self._failed_at = 0.0
        self._probing = threading.Lock()

    def get(self) -> T:
        """The finding. Raises RuntimeUnavailable with a hint what to do about it. Blocks."""
        with self._probing:
            if not self._found:
                if self._failure is not None and time.monotonic() - self._failed_at < RETRY_SECONDS:
                    # A new one: a traceback would grow each time the same error is raised.
                    raise RuntimeUnavailable(self._failure.message, hint=self._failure.hint)
                try:
                    self._found.append(self._probe())
                except RuntimeUnavailable as failure:
                    self._failure, self._failed_at = failure, time.monotonic()
                    raise
            return self._found[0]
