"""One stream of frames to and from the host, without blocking.

It knows frames, not what is in them. Invariant: frames leave in the order they were given.
"""

from __future__ import annotations

import posix
import select
from typing import TYPE_CHECKING

from outrider.runtimes.guest.msgpack import pack
from outrider.runtimes.guest.poll_loop import CHUNK, POLL_READ, Loop, read_ready

if TYPE_CHECKING:
    from collections.abc import Callable


class Connection:
    """`fd_in` and `fd_out` may be one socket. The end of either stops the loop."""

    def __init__(self, loop: Loop, fd_in: int, fd_out: int) -> None:
        self.loop = loop
        self.fd_in = fd_in
        self.fd_out = fd_out
        self.received = bytearray()
        self.outgoing = bytearray()
        self.on_frame: Callable[[bytes], object] = len
        for fd in {fd_in, fd_out}:
            posix.set_blocking(fd, False)
        self._watch()

    def send(self, message: object) -> None:
        start = len(self.outgoing)
        self.outgoing += b"\0\0\0\0"
        pack(message, self.outgoing)
        self.outgoing[start : start + 4] = (len(self.outgoing) - start - 4).to_bytes(4, "big")
        if start == 0:
            self._flush()

    def _watch(self) -> None:
        writes = select.POLLOUT if self.outgoing else 0
        if self.fd_in == self.fd_out:
            self.loop.watch(self.fd_in, POLL_READ | writes, self._ready)
        else:
            self.loop.watch(self.fd_in, POLL_READ, self._ready)
            self.loop.forget(self.fd_out)
            if writes:
                self.loop.watch(self.fd_out, writes, self._ready)

    def _flush(self) -> None:
        try:
            while self.outgoing:
                del self.outgoing[: posix.write(self.fd_out, self.outgoing[:CHUNK])]
        except BlockingIOError:
            self._watch()
        except OSError:
            self.loop.stopped = True

    def _ready(self, events: int) -> None:
        if events & select.POLLOUT:
            self._flush()
            self._watch()
        if events & POLL_READ:
            data = read_ready(self.fd_in)
            if data is None:
                self.loop.stopped = True
            else:
                self.received += data
                self._deliver()

    def _deliver(self) -> None:
        while len(self.received) >= 4:
            size = int.from_bytes(self.received[:4], "big")
            if len(self.received) < 4 + size:
                return
            frame = bytes(self.received[4 : 4 + size])
            del self.received[: 4 + size]
            self.on_frame(frame)
