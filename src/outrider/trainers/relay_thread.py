"""Keeps a trainer's own engine attached to a service. A relay worker in a thread passes the service's model calls to
the engine. Invariant: when `attach` returns, the service has accepted a worker.
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
    """A relay worker in a thread. `make` creates the worker. `attach` creates another worker if the last worker has
    ended, for example because the worker's engine was removed from the service. The methods block, and can be called
    from any thread."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self.worker: Worker | None = None
        """The newest worker that the service has accepted."""
        self._make = make
        self._held = ExitStack()
        # If an asynchronous caller is cancelled, the caller's thread still runs `attach`. Without the lock, the next
        # call of `attach` could run at the same time.
        self._lock = threading.RLock()

    def attach(self) -> None:
        """Start a worker, unless one is running. Returns when the service has accepted the worker. Raises the errors of
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
