"""Keeps a trainer's own engine attached to a service, by a relay worker in a thread.

The module is independent of the trainer. Invariant: `attach` returns only while a worker serves.
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
    """A relay worker in a thread. The worker is replaced after the service has refused it, for example because its
    engine was removed. `make` makes a worker. The methods block, and can be called from any thread."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self.worker: Worker | None = None
        """The newest worker that the service has accepted."""
        self._make = make
        self._held = ExitStack()
        # The lock is needed because the thread of a cancelled asynchronous caller still runs `attach`.
        self._lock = threading.RLock()

    def attach(self) -> None:
        """Start a worker if none serves, and return when the service has accepted the worker. Raises the errors of
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
