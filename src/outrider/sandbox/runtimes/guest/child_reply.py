"""Runs slow work in a forked child process, and sends its output to the host in parts.

Searching and archiving may take long. They run in a child, so that other calls need not wait. Invariant: a call ends in
"ok" only if the child wrote everything, exited with 0, and stayed within its byte limit.
"""

from __future__ import annotations

import errno
import posix
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.connection import Calls
from outrider.sandbox.runtimes.guest.poll_loop import POLL_READ, read_ready
from outrider.sandbox.runtimes.guest.process_watch import stat_of
from outrider.sandbox.runtimes.guest.processes import SIGKILL, fork_with_pipe, send_signal

if TYPE_CHECKING:
    from collections.abc import Callable

OUTGOING_MAX = 4 << 20
"""While more than this many bytes wait to be sent to the host, the child's pipe is not read. Otherwise the server would
hold a whole archive in memory if the host is slow."""
PAUSE_SECONDS = 0.005
CHECK_SECONDS = 1.0
"""Seconds between two checks whether the child is stopped."""


class ChildReply:
    """Runs `write(descriptor)` in a forked child, and sends the written data to the host.

    `limit` is the maximum number of bytes. `failed` is the error message for a child that fails. After `seconds`, the
    child is killed. It is also killed if two checks in a row find it stopped by a signal, because a program of an agent
    could otherwise make the host wait for it.
    """

    def __init__(
        self,
        calls: Calls,
        call: int,
        write: Callable[[int], object],
        *,
        limit: int,
        failed: str,
        seconds: float | None = None,
    ) -> None:
        self.calls = calls
        self.call = call
        self.limit = self.left = limit
        self.failed = failed
        self.code: int | None = None
        self.stopped = False
        self.pid, self.fd = fork_with_pipe(write)
        calls.running[call] = self.cancel
        calls.loop.exits[self.pid] = self._exited
        calls.loop.watch(self.fd, POLL_READ, self._ready)
        calls.loop.at((self, "check"), CHECK_SECONDS, self._check)
        if seconds is not None:
            calls.loop.at((self, "limit"), seconds, self.cancel)

    def cancel(self) -> None:
        if self.code is None:  # after its exit, the child's pid may belong to another process
            send_signal(self.pid, SIGKILL)

    def _check(self) -> None:
        before, stat = self.stopped, stat_of(self.pid)
        self.stopped = stat is not None and stat.state in (b"T", b"t")  # stopped by a signal or by a debugger
        if before and self.stopped:
            self.cancel()
        self.calls.loop.at((self, "check"), CHECK_SECONDS, self._check)

    def _ready(self, events: int) -> None:
        if len(self.calls.connection.outgoing) > OUTGOING_MAX:
            self.calls.loop.unwatch(self.fd)
            self.calls.loop.at(self, PAUSE_SECONDS, self._resume)
            return
        data = read_ready(self.fd)
        if data is None:
            self.calls.loop.unwatch(self.fd)
            posix.close(self.fd)
            self.fd = -1
            self._finish()
        elif data:
            self.left -= len(data)
            if self.left < 0:
                self.cancel()
                return
            self.calls.part(self.call, data)

    def _resume(self) -> None:
        self.calls.loop.watch(self.fd, POLL_READ, self._ready)

    def _exited(self, code: int) -> None:
        self.code = code
        self.calls.loop.timers.pop((self, "check"), None)
        self._finish()

    def _finish(self) -> None:
        """Reply once the child has exited and its pipe has ended. Either event may come first."""
        if self.code is None or self.fd >= 0:
            return
        self.calls.loop.timers.pop((self, "limit"), None)
        self.calls.running.pop(self.call, None)
        # A child whose output was dropped may have exited with 0, because the pipe took the rest of its output.
        # EFBIG: the child stopped, because its output became too large.
        if self.left < 0 or self.code == errno.EFBIG:
            too_large = f"the result has more than {self.limit} bytes, the maximum taken out of a sandbox"
            self.calls.fail(self.call, "failed", too_large)
        elif self.code == 0:
            self.calls.reply(self.call, {})
        else:
            self.calls.fail(self.call, "failed", self.failed)
