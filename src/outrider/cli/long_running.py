"""What the commands have in common that run until a signal ends them: their log, and what signals do.

The only place that configures logging, but for the processes of nodes.
"""

from __future__ import annotations

import asyncio
import logging
import signal

from outrider.printable import indented
from outrider.redaction import SHORTEST, redacted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start_log(token: str | None, *, verbose: bool) -> None:
    log = logging.StreamHandler()
    log.setFormatter(LogFormatter(token))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[log])


class LogFormatter(logging.Formatter):
    """Records of the log, tracebacks included, without secrets and control characters. All but the first line of each
    is indented: a message with the text of an agent in it must not look like two. `process` names the process."""

    def __init__(self, token: str | None = None, *, process: str = "") -> None:
        named = f"{process.replace('%', '%%')} " if process else ""
        super().__init__(f"%(asctime)s %(levelname)-7s {named}%(name)s: %(message)s")
        self._secrets = [token] if token and len(token) >= SHORTEST else []

    def format(self, record: logging.LogRecord) -> str:
        return indented(redacted(super().format(record), self._secrets))


class StopSignals:
    """What SIGINT and SIGTERM do to the task that makes this. The first one ends `first`, or cancels the task if it
    does not wait there yet; the second one cancels it; the third one ends the process as usual."""

    def __init__(self) -> None:
        self.came = 0
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._waiting: asyncio.Future[None] | None = None
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._stop)

    async def first(self) -> None:
        for number in SIGNALS:  # again: Ray, when it starts, has put its own in their place
            self._loop.add_signal_handler(number, self._stop)
        self._waiting = self._loop.create_future()
        await self._waiting

    def restore(self) -> None:
        """From now on, a signal has its usual effect."""
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.came += 1
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
            return
        self.restore()
        assert self._task is not None
        self._task.cancel()
