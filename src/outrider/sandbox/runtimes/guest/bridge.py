"""Forwards connections from 127.0.0.1, in a sandbox without a network, to the Unix socket of the model gateway outside.

The bridge does not parse HTTP. Invariant: if one side stops sending, the other side sees the end of the data, and can
still send.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.poll_loop import CHUNK, POLL_READ, Loop

if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable

BUFFER_BYTES = 4 << 20
"""The size of a stream's buffer at which reading pauses. The buffer holds bytes that were read but not yet written."""
RETRY_SECONDS = 0.01
CONNECT_TRIES = 200
MAX_PAIRS = 256
"""Maximum number of connected clients. Further clients are disconnected, because each client takes a file descriptor of
the node. The node has only some thousands for all its sandboxes."""


class Stream:
    """One direction of a bridged connection.

    - `buffer` holds bytes that were read from `source` but not yet written to `sink`.
    - `ended` is True when `source` has no more data.
    - `closed` is True when `sink` is shut down for writing."""

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
            self.sink.shutdown(1)  # 1 is SHUT_WR: the receiver gets an end of file


class BridgedConnection:
    """A client's connection to the bridge, and the matching connection to the gateway. When both are closed, `closed`
    is called once."""

    def __init__(
        self, loop: Loop, client: _socket.socket, upstream: _socket.socket, closed: Callable[[], object]
    ) -> None:
        self.loop = loop
        self.closed = closed
        self.streams = (Stream(client, upstream), Stream(upstream, client))
        self._watch()

    def _ready(self, inward: Stream, outward: Stream, events: int) -> None:
        """Handle events of a socket. `inward` is the stream that reads from the socket, and `outward` the stream that
        writes to it."""
        try:
            if events & select.POLLOUT:
                outward.push()
            if events & POLL_READ and not inward.ended and len(inward.buffer) < BUFFER_BYTES:
                inward.pull()
        except OSError:
            self._close()
        else:
            if inward.closed and outward.closed:
                self._close()
            else:
                self._watch()

    def _watch(self) -> None:
        one, two = self.streams
        self._watch_socket(one, two)
        self._watch_socket(two, one)

    def _watch_socket(self, inward: Stream, outward: Stream) -> None:
        """Watch the socket that `inward` reads from and `outward` writes to. Only ask for events that can be handled
        now, because `poll` would report an unhandled event again at once, in an endless loop."""
        fd = inward.source.fileno()
        reads = not inward.ended and len(inward.buffer) < BUFFER_BYTES
        mask = (select.POLLIN if reads else 0) | (select.POLLOUT if outward.buffer else 0)
        if mask:
            self.loop.watch(fd, mask, lambda events: self._ready(inward, outward, events))
        else:
            self.loop.unwatch(fd)

    def _close(self) -> None:
        for stream in self.streams:
            self.loop.unwatch(stream.source.fileno())
            stream.source.close()
        self.closed()


class Bridge:
    """Listens on 127.0.0.1:port, and connects each client to the Unix socket at `path`. If no gateway listens there,
    the client's connection is closed."""

    def __init__(self, loop: Loop, port: int, path: str) -> None:
        import _socket  # importing `socket` takes as long as starting the interpreter

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
            fd, _ = self.listener._accept()  # type: ignore[attr-defined]  # `_socket` has `_accept`, which its stub lacks
        except BlockingIOError:
            return
        except OSError:  # all descriptors are in use; `poll` would report the waiting client again at once
            self.loop.unwatch(self.listener.fileno())
            self.loop.at(self, RETRY_SECONDS, self._listen)
            return
        client = self.socket.socket(fileno=fd)
        self.clients += 1
        if self.clients > MAX_PAIRS:
            self._refuse(client)
            return
        client.setblocking(False)
        # Without TCP_NODELAY, Nagle's algorithm would delay each small piece of a streamed reply until the previous one
        # is acknowledged.
        client.setsockopt(self.socket.IPPROTO_TCP, self.socket.TCP_NODELAY, 1)
        self._connect(client, CONNECT_TRIES)

    def _refuse(self, client: _socket.socket) -> None:
        client.close()
        self._closed()

    def _closed(self) -> None:
        self.clients -= 1

    def _connect(self, client: _socket.socket, tries: int) -> None:
        """Connect to the gateway. A Unix socket connects at once, or fails with EAGAIN if too many connections wait for
        the gateway."""
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
                self.loop.at(client, RETRY_SECONDS, lambda: self._connect(client, tries - 1))
            else:
                self._refuse(client)
        except OSError:  # no gateway listens at `path`
            upstream.close()
            self._refuse(client)
        else:
            BridgedConnection(self.loop, client, upstream, self._closed)
