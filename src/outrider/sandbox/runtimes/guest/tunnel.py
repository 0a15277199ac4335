"""Forwards connections from 127.0.0.1 to the model gateway, for a sandbox on another machine. The bytes travel through
the connection to the host.

The host opens the tunnel by one call. Bytes of clients are sent as parts of the reply to this call. The gateway's bytes
arrive as calls of `tunnel_data`. `runtimes/remote.py` has the host's end. Every part carries its client's number.
Invariants: numbers are never reused; a client's `CLOSED` part is its last.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.bridge import Bridge, BridgedConnection
from outrider.sandbox.runtimes.guest.poll_loop import CHUNK, POLL_READ, Loop

if TYPE_CHECKING:
    import _socket

    from outrider.sandbox.runtimes.guest.connection import Calls

READY, OPENED, DATA, ENDED, CLOSED = range(5)
"""The kinds of parts that the tunnel sends. A part begins with its kind in one byte, and the client's number in four
bytes.

- READY: the tunnel listens.
- OPENED: a client has connected.
- DATA: bytes of a client.
- ENDED: a client sends no more.
- CLOSED: a client's connection is closed."""


class Tunnel(Bridge):
    """Listens on 127.0.0.1:port until the host cancels the call with the number `call`."""

    def __init__(self, loop: Loop, port: int, calls: Calls, call: int) -> None:
        super().__init__(loop, port, "")
        self.calls = calls
        self.call = call
        self.number = 0
        self.ends: dict[int, TunnelEnd] = {}
        calls.running[call] = self.end
        self.send(READY, 0)

    def send(self, kind: int, number: int, data: bytes = b"") -> None:
        self.calls.part(self.call, bytes((kind,)) + number.to_bytes(4, "big") + data)

    def take(self, number: int, data: bytes) -> None:
        """Pass bytes from the gateway to a client. If `data` is empty, the gateway sends no more."""
        end = self.ends.get(number)
        if end is not None:
            end.take(data)

    def drop(self, number: int) -> None:
        """Close a client after its connection to the gateway was lost."""
        end = self.ends.get(number)
        if end is not None:
            end.close()

    def end(self) -> None:
        """Close the listener and all clients, and reply to the call that opened the tunnel."""
        self.calls.running.pop(self.call, None)
        self.loop.unwatch(self.listener.fileno())
        self.listener.close()
        for end in list(self.ends.values()):
            end.close()
        self.calls.fail(self.call, "ended", "the tunnel was closed")

    def _connect(self, client: _socket.socket, tries: int) -> None:
        try:
            near, far = self.socket.socketpair()
        except OSError:  # all descriptors are in use
            self._refuse(client)
            return
        near.setblocking(False)
        far.setblocking(False)
        self.number += 1
        self.send(OPENED, self.number)
        self.ends[self.number] = TunnelEnd(self, self.number, far)
        BridgedConnection(self.loop, client, near, self._closed)


class TunnelEnd:
    """The tunnel's connection to one client. `socket` is one end of a socket pair. A `BridgedConnection` joins the
    other end to the connection that the client has opened. `buffer` has bytes from the gateway that are not written to
    `socket` yet."""

    def __init__(self, tunnel: Tunnel, number: int, socket: _socket.socket) -> None:
        self.tunnel = tunnel
        self.number = number
        self.socket = socket
        self.buffer = bytearray()
        self.ended = False
        """True when the gateway sends no more."""
        self.heard_all = False
        """True when the client sends no more."""
        self._watch()

    def take(self, data: bytes) -> None:
        self.buffer += data
        self.ended = self.ended or not data
        self._push()

    def close(self) -> None:
        del self.tunnel.ends[self.number]
        self.tunnel.loop.unwatch(self.socket.fileno())
        self.socket.close()
        self.tunnel.send(CLOSED, self.number)

    def _ready(self, events: int) -> None:
        if events & POLL_READ and not self.heard_all:
            try:
                data = self.socket.recv(CHUNK)
            except BlockingIOError:
                data = None
            except OSError:
                self.close()
                return
            if data is not None:
                self.heard_all = not data
                self.tunnel.send(DATA if data else ENDED, self.number, data)
        self._push()

    def _push(self) -> None:
        try:
            while self.buffer:
                del self.buffer[: self.socket.send(self.buffer[:CHUNK])]
            if self.ended and self.heard_all:
                self.close()
                return
            if self.ended:
                self.socket.shutdown(1)  # 1 is SHUT_WR: the client gets an end of file
        except BlockingIOError:
            pass
        except OSError:  # the client has closed its connection
            self.close()
            return
        self._watch()

    def _watch(self) -> None:
        mask = (0 if self.heard_all else select.POLLIN) | (select.POLLOUT if self.buffer else 0)
        if mask:
            self.tunnel.loop.watch(self.socket.fileno(), mask, self._ready)
        else:
            self.tunnel.loop.unwatch(self.socket.fileno())
