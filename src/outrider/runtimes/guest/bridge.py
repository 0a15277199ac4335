"""From 127.0.0.1 in a sandbox without a network to a Unix socket that was put into it.

It knows nothing of HTTP. Invariant: an end of one side is passed on to the other, in each direction by itself.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from outrider.runtimes.guest.poll_loop import CHUNK, POLL_READ, Loop

if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable

BUFFER = 4 << 20
AGAIN_SECONDS = 0.01
MAX_PAIRS = 256
"""Each has a descriptor of the node, too, which has some thousands for all its sandboxes."""


class Stream:
    """One direction of a bridged connection: what was read from `source` and not yet written to `sink`."""

    def __init__(self, source: _socket.socket, sink: _socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.buffer = bytearray()
        self.ended = False
        self.closed = False

    def pull(self) -> None:
        try:
            data = self.source.recv(CHUNK)
        except BlockingIOError:
            return
        self.buffer += data
        self.ended = not data
        self.push()

    def push(self) -> None:
        try:
            while self.buffer:
                del self.buffer[: self.sink.send(self.buffer)]
        except BlockingIOError:
            return
        if self.ended and not self.closed:
            self.closed = True
            self.sink.shutdown(1)


class Pair:
    """A client's connection and the one that was made for it. `closed` is called once, when both are."""

    def __init__(
        self, loop: Loop, client: _socket.socket, upstream: _socket.socket, closed: Callable[[], object]
    ) -> None:
        self.loop = loop
        self.closed = closed
        self.streams = (Stream(client, upstream), Stream(upstream, client))
        self.masks: dict[int, int] = {}
        self.open = True
        self._watch()

    def _ready(self, inward: Stream, outward: Stream, events: int) -> None:
        """Something can be done at the end that `inward` reads from and `outward` writes to."""
        if not self.open:
            return
        try:
            if events & select.POLLOUT:
                outward.push()
            if events & POLL_READ and not inward.ended and len(inward.buffer) < BUFFER:
                inward.pull()
        except OSError:
            self._close()
        else:
            if inward.closed and outward.closed:
                self._close()
            else:
                self._watch()

    def _watch(self) -> None:
        """Ask only for what would be done: an end that waits for the other one must not wake the loop."""
        one, two = self.streams
        for inward, outward in ((one, two), (two, one)):
            fd = inward.source.fileno()
            reads = not inward.ended and len(inward.buffer) < BUFFER
            mask = (select.POLLIN if reads else 0) | (select.POLLOUT if outward.buffer else 0)
            if self.masks.get(fd) != mask:
                self.masks[fd] = mask
                self.loop.forget(fd)
                if mask:
                    self.loop.watch(fd, mask, self._handler(inward, outward))

    def _handler(self, inward: Stream, outward: Stream) -> Callable[[int], None]:
        return lambda events: self._ready(inward, outward, events)

    def _close(self) -> None:
        self.open = False
        for stream in self.streams:
            self.loop.forget(stream.source.fileno())
            stream.source.close()
        self.closed()


class Bridge:
    """127.0.0.1:port inside, the gateway's Unix socket outside. Of clients beyond MAX_PAIRS at once, each is closed."""

    def __init__(self, loop: Loop, port: int, path: str) -> None:
        import _socket  # `socket` costs as much as the interpreter itself

        self.socket = _socket
        self.loop = loop
        self.path = path
        self.clients = 0
        self.listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        self.listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", port))
        self.listener.listen(512)
        self.listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        self.loop.watch(self.listener.fileno(), POLL_READ, self._accept)

    def _accept(self, events: int) -> None:
        try:
            fd, _ = self.listener._accept()  # type: ignore[attr-defined]  # the stub lacks it
        except BlockingIOError:
            return
        except OSError:  # there is no descriptor for it, and it would be told of again at once
            self.loop.forget(self.listener.fileno())
            self.loop.at(self, AGAIN_SECONDS, self._listen)
            return
        client = self.socket.socket(fileno=fd)
        self.clients += 1
        if self.clients > MAX_PAIRS:
            self._refuse(client)
            return
        client.setblocking(False)
        client.setsockopt(self.socket.IPPROTO_TCP, self.socket.TCP_NODELAY, 1)
        self._connect(client, 200)

    def _refuse(self, client: _socket.socket) -> None:
        client.close()
        self._closed()

    def _closed(self) -> None:
        self.clients -= 1

    def _connect(self, client: _socket.socket, tries: int) -> None:
        """A Unix socket answers at once, or says EAGAIN while the listener's queue is full."""
        try:
            upstream = self.socket.socket(self.socket.AF_UNIX, self.socket.SOCK_STREAM)
        except OSError:
            self._refuse(client)
            return
        upstream.setblocking(False)
        try:
            upstream.connect(self.path)
        except BlockingIOError:
            upstream.close()
            if tries:
                self.loop.at(client, AGAIN_SECONDS, lambda: self._connect(client, tries - 1))
            else:
                self._refuse(client)
        except OSError:
            upstream.close()
            self._refuse(client)
        else:
            Pair(self.loop, client, upstream, self._closed)
