"""Logging and signal handling for commands that run until a signal stops them."""

from __future__ import annotations

import asyncio
import logging
import signal

from outrider.logs import JsonLogFormatter, LogFormatter

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start_log(level: int, *, token: str | None = None, process: str = "", as_json: bool = False) -> None:
    """Write the log to standard error. The secret `token` is removed from all lines. Each line contains
    `process`, the name of this process."""
    log = logging.StreamHandler()
    log.setFormatter((JsonLogFormatter if as_json else LogFormatter)(token, process=process))
    logging.basicConfig(level=level, handlers=[log])
    if level > logging.DEBUG:
        # Hide uvicorn's lines about the start and end of each server, and the package mcp's lines about each request.
        for name in ("uvicorn.error", "mcp"):
            logging.getLogger(name).setLevel(max(level, logging.WARNING))


class StopSignals:
    """Handles SIGINT and SIGTERM for the asyncio task that creates this object.

    `first` waits for the first signal. A second signal cancels the task. A signal that arrives before `first` is called
    also cancels the task. After this cancellation, Python's default handling applies again, so one more signal ends the
    process.
    """

    def __init__(self) -> None:
        self.came = 0
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._waiting: asyncio.Future[None] | None = None
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._stop)

    async def first(self) -> None:
        for number in SIGNALS:  # set again, because Ray replaces the handlers when it starts
            self._loop.add_signal_handler(number, self._stop)
        self._waiting = self._loop.create_future()
        await self._waiting

    def restore(self) -> None:
        """Give both signals their default handling again."""
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
