"""Keeps a trainer's own engine attached to a service, by a relay worker in a thread.

The module works for any trainer. Invariant: when `attach` returns, the service has accepted a worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack

from outrider.errors import OutriderError
from outrider.relay import Worker

log = logging.getLogger("outrider.relay")


class RelayThread:
    """A relay worker in a thread. `attach` replaces a worker that has ended, for example because its engine was removed
    from the service. `make` makes a worker. The methods block, and can be called from any thread."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self.worker: Worker | None = None
        """The newest worker that the service has accepted."""
        self._make = make
        self._held = ExitStack()
        # The lock is needed because the thread of a cancelled asynchronous caller still runs `attach`.
        self._lock = threading.RLock()

    def attach(self) -> None:
        """Start a worker unless one is running, and return when the service has accepted it. Raises the errors of
        `Worker.in_thread`."""
        with self._lock:
            if self.worker is None or not self.worker.running:
                self.close()
                self.worker = self._held.enter_context(self._make().in_thread())

    def close(self) -> None:
        """Detach the engine from the service."""
        with self._lock:
            try:
                self._held.close()
            except OutriderError as error:  # closing raises the error that ended the worker
                log.warning("the worker had given up: %s", error)
