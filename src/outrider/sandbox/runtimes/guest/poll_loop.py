"""A single-threaded event loop for ready descriptors, timers, and exits of child processes.

It replaces asyncio, whose import would take several times as long as starting the interpreter. Invariant: the loop
collects the exit code of every child, also of adopted orphans.
"""

from __future__ import annotations

import posix
import select
import time
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.processes import exit_code, send_signal

if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable
else:
    import _signal  # importing `signal` would make the start longer by half

POLL_READ = select.POLLIN | select.POLLHUP | select.POLLERR
CHUNK = 1 << 18
"""Maximum bytes of one read or write: large enough to need few system calls, and small enough that no call delays the
loop."""

REST_FACTOR = 20
"""The pause after a scan of processes or sockets is at least this many times as long as the scan. So even slow scans
use little CPU time."""


class Loop:
    """The event loop.

    handlers: the function that is called with the events of a descriptor, by descriptor.
    exits: the function that is called once with the exit code of a child, by pid.
    timers: a deadline, in seconds of the monotonic clock, and the function to call then, by key. A key has at most one
        timer.
    """

    def __init__(self) -> None:
        self.poll = select.poll()
        self.handlers: dict[int, Callable[[int], object]] = {}
        self.timers: dict[object, tuple[float, Callable[[], object]]] = {}
        self.exits: dict[int, Callable[[int], object]] = {}
        self.watchers: list[Callable[[int, int], object]] = []
        """Functions that are called with the pid and the exit code of each child that was reaped."""
        self.stopped = False
        # SIGCHLD writes a byte into this pipe, which wakes `poll`. So a signal just before the call of `poll` is not
        # lost.
        reader, writer = posix.pipe()
        posix.set_blocking(reader, False)
        posix.set_blocking(writer, False)
        _signal.set_wakeup_fd(writer)
        _signal.signal(_signal.SIGCHLD, lambda number, frame: None)
        self.watch(reader, POLL_READ, lambda events: self._reap(reader))

    def watch(self, fd: int, events: int, handler: Callable[[int], object]) -> None:
        self.handlers[fd] = handler
        self.poll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def at(self, key: object, seconds: float, action: Callable[[], object]) -> None:
        self.timers[key] = (time.monotonic() + seconds, action)

    def stop(self) -> None:
        self.stopped = True

    def run(self) -> None:
        while not self.stopped:
            timeout = None
            soonest = float("inf")
            if self.timers:
                soonest = min(deadline for deadline, _ in self.timers.values())
                # 0.5, because `poll` truncates to whole milliseconds
                timeout = max(0.0, (soonest - time.monotonic()) * 1000) + 0.5
            for fd, events in self.poll.poll(timeout):
                handler = self.handlers.get(fd)  # another handler may have just removed it
                if handler is not None:
                    handler(events)
            now = time.monotonic()
            if soonest <= now:
                for key, (deadline, action) in list(self.timers.items()):
                    # Another timer's function may have just removed or replaced this timer.
                    if deadline <= now and self.timers.get(key) == (deadline, action):
                        del self.timers[key]
                        action()

    def _reap(self, wakeup: int) -> None:
        read_ready(wakeup)
        while True:
            try:
                pid, status = posix.waitpid(-1, posix.WNOHANG)
            except OSError:
                return
            if pid == 0:
                return
            # the child has called PTRACE_TRACEME, and nothing will resume it
            if posix.WIFSTOPPED(status):
                send_signal(pid, _signal.SIGKILL)
                continue
            for note in self.watchers:
                note(pid, exit_code(status))
            watcher = self.exits.pop(pid, None)
            if watcher is not None:
                watcher(exit_code(status))


class PipeWriter:
    """Writes data into a pipe as fast as its reader reads. `fd` is non-blocking, or -1 for a closed pipe.
    `written(False)` is called whenever all data has been written. `written(True)` is called if nobody reads the pipe
    any more. The rest of the data is then dropped."""

    def __init__(self, loop: Loop, fd: int, written: Callable[[bool], object] = lambda gone: None) -> None:
        self.loop = loop
        self.fd = fd
        self.written = written
        self.left = memoryview(b"")

    def write(self, data: bytes) -> None:
        self.left = memoryview(bytes(self.left) + data)
        self._ready(0)

    def close(self) -> None:
        """Close the pipe. Data not yet written is dropped. Idempotent."""
        if self.fd >= 0:
            self.loop.unwatch(self.fd)
            posix.close(self.fd)
            self.fd = -1

    def _ready(self, events: int) -> None:
        gone = False
        try:
            if self.left:  # one write per event: with a fast reader, the pipe never fills, so a loop would not end
                self.left = self.left[posix.write(self.fd, self.left[:CHUNK]) :]
        except BlockingIOError:
            pass
        except OSError:
            self.left = self.left[:0]
            gone = True
        if self.left:
            self.loop.watch(self.fd, select.POLLOUT, self._ready)
            return
        self.loop.unwatch(self.fd)
        self.written(gone)


def read_ready(fd: int) -> bytes | None:
    """Return the data that can be read now. Returns b"" if there is none yet, and None at the end. An error also counts
    as the end, such as EIO from a terminal whose other end is closed."""
    try:
        return posix.read(fd, CHUNK) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None
