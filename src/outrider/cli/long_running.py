"""The log and the signals of programs that run until a signal, or the program that started them, ends them."""

from __future__ import annotations

import asyncio
import logging
import signal

from outrider.logs import JsonLogFormatter, LogFormatter

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start_log(level: int, *, token: str | None = None, process: str = "", as_json: bool = False) -> None:
    """Write the log to standard error, with the name of the `process` in each line."""
    log = logging.StreamHandler()
    log.setFormatter((JsonLogFormatter if as_json else LogFormatter)(token, process=process))
    logging.basicConfig(level=level, handlers=[log])
    if level > logging.DEBUG:
        # Uvicorn logs the start and end of each of our servers, and the package mcp each request: hide these lines.
        for name in ("uvicorn.error", "mcp"):
            logging.getLogger(name).setLevel(max(level, logging.WARNING))


class StopSignals:
    """The effects of SIGINT and SIGTERM on the task that makes this object. The first signal makes `first` return. The
    second signal, or any signal before `first` is called, cancels the task and restores the usual effect of signals, so
    that the next signal ends the process."""

    def __init__(self) -> None:
        self.came = 0
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._waiting: asyncio.Future[None] | None = None
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._stop)

    async def first(self) -> None:
        for number in SIGNALS:  # the handlers are set a second time, because Ray replaces them when it starts
            self._loop.add_signal_handler(number, self._stop)
        self._waiting = self._loop.create_future()
        await self._waiting

    def restore(self) -> None:
        """Restore the usual effect of the signals."""
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
