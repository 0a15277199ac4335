"""What a runtime needs of this machine, looked for once: what is installed does not change under a running service.

Invariant: what was found is kept; after a failure it is looked for again, though not more often than every
AGAIN_SECONDS, for people repair what they are told to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from outrider.errors import RuntimeUnavailable

AGAIN_SECONDS = 10.0

T = TypeVar("T")


class Finder(Generic[T]):
    """`look` returns it or raises RuntimeUnavailable. It may block; threads that ask meanwhile wait for it."""

    def __init__(self, look: Callable[[], T]) -> None:
        self._look = look
        self._found: list[T] = []
        self._fault: RuntimeUnavailable | None = None
        self._looked = 0.0
        self._looking = threading.Lock()

    def find(self) -> T:
        """Raises RuntimeUnavailable with what to do about it."""
        with self._looking:
            if not self._found:
                if self._fault is not None and time.monotonic() - self._looked < AGAIN_SECONDS:
                    raise RuntimeUnavailable(self._fault.message, hint=self._fault.hint)
                try:
                    self._found.append(self._look())
                except RuntimeUnavailable as fault:
                    self._fault, self._looked = fault, time.monotonic()
                    raise
            return self._found[0]
