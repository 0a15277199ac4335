"""The wait for the next host, in a sandbox that may outlive its host.

The next host listens on a Unix socket that appears in a shared folder. Any program in the sandbox could connect to this
socket, so the server authenticates itself with a secret received from the previous host. Invariant: if no host accepts
a connection in time and keeps it open, the loop stops, which ends the sandbox.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.connection import HostConnection
from outrider.sandbox.runtimes.guest.poll_loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_EVERY = 0.1


class NextHost:
    """Looks for a host that listens at `path`, for up to `seconds`."""

    def __init__(self, loop: Loop, path: str, secret: str, seconds: float) -> None:
        import _socket  # imported now: an import takes descriptors, which may be used up later

        self.socket = _socket
        self.loop = loop
        self.path = path
        self.secret = secret
        self.seconds = seconds

    def look_for(self, newest_call: int, found: Callable[[HostConnection, bytes], object]) -> None:
        """Call `found` with the connection to a host that has sent a frame, and this frame. `newest_call` is sent to
        the host first: the numbers of its own calls must be higher."""
        deadline = time.monotonic() + self.seconds

        def look() -> None:
            if time.monotonic() > deadline:
                self.loop.stop()
                return
            end = None
            try:
                end = self.socket.socket(self.socket.AF_UNIX, self.socket.SOCK_STREAM)
                end.connect(self.path)
            except OSError:  # nobody listens, or no descriptor is free
                if end is not None:
                    end.close()
                self.loop.at(self, LOOK_EVERY, look)
                return
            fd = end.detach()
            connection = HostConnection(self.loop, fd, fd)
            # A peer that disconnects before its first frame is no host, or is a host that has exited, too. The search
            # goes on until the deadline.
            connection.attach(
                on_frame=lambda frame: found(connection, frame), on_end=lambda: self.loop.at(self, LOOK_EVERY, look)
            )
            connection.send([newest_call, "here", {"secret": self.secret}])

        look()
