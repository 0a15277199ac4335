"""What goes into programs, and their output, kept up to a bound: the first and the last part of it.

Invariant: for output memory stays below 1.5 times the bound however much is written.
"""

from __future__ import annotations

import posix
import select
from typing import TYPE_CHECKING

from outrider.runtimes.guest.poll_loop import POLL_READ, Loop, read_ready

if TYPE_CHECKING:
    pass


class Capture:
    """Keeps the first and the last half of `cap` bytes of a stream; after `take`, nothing."""

    def __init__(self, cap: int) -> None:
        self.half = max(1, cap // 2)
        self.head = bytearray()
        self.tail = bytearray()
        self.cut = 0

    def add(self, data: bytes) -> None:
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data and self.half:
            self.tail += data
            if len(self.tail) > 2 * self.half:
                self._trim()

    def _trim(self) -> None:
        extra = len(self.tail) - self.half
        if extra > 0:
            del self.tail[:extra]
            self.cut += extra

    def take(self) -> bytes:
        self._trim()
        note = b"\n[... %d bytes cut ...]\n" % self.cut if self.cut else b""
        whole = bytes(self.head + note + self.tail)
        self.half = 0
        self.head = self.tail = bytearray()
        return whole


class Drain:
    """Reads a descriptor to its end into a capture."""

    def __init__(self, loop: Loop, fd: int, capture: Capture) -> None:
        self.loop = loop
        self.fd = fd
        self.capture = capture
        self.open = True
        posix.set_blocking(fd, False)
        loop.watch(fd, POLL_READ, self.ready)

    def ready(self, events: int) -> bool:
        """Takes one piece; whether there was any."""
        data = read_ready(self.fd) if self.open else b""
        if data is None:
            self.open = False
            self.loop.forget(self.fd)
            posix.close(self.fd)
        elif data:
            self.capture.add(data)
        return bool(data)

    def finish(self) -> bytes:
        """All that was written up to now. A pipe holds at most 1 MiB, so later writers cannot keep us here."""
        for _ in range(16):
            if not self.ready(0):
                break
        return self.capture.take()


class Feed:
    """Writes data into a pipe, as its reader takes it, until all is written or nobody reads any more."""

    def __init__(self, loop: Loop, fd: int, data: bytes) -> None:
        self.loop = loop
        self.fd = fd
        self.left = memoryview(data)
        posix.set_blocking(fd, False)
        loop.watch(fd, select.POLLOUT, self.ready)

    def ready(self, events: int) -> None:
        try:
            self.left = self.left[posix.write(self.fd, self.left) :]
        except BlockingIOError:
            return
        except OSError:
            self.left = self.left[:0]
        if not self.left:
            self.loop.forget(self.fd)
            posix.close(self.fd)
