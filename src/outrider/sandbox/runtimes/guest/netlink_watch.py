"""Limits the kernel memory that netlink sockets use in a sandbox with its own network.

If a program sends requests to the kernel and never reads the replies, the kernel keeps up to 1 MiB for each socket.
Control groups do not count this memory. Without this module, only the limit on open files would bound it. The maximum
MOST is the same for every task, and ordinary programs stay far below it. Invariant: if a check finds more than MOST
bytes in the sockets, all programs of the sandbox are killed, because the owner of a socket cannot always be determined.
"""

from __future__ import annotations

import posix
import time
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.poll_loop import REST_FACTOR
from outrider.sandbox.runtimes.guest.processes import kill_tree, read_or_empty

if TYPE_CHECKING:
    from outrider.sandbox.runtimes.guest.poll_loop import Loop

SOCKETS = "/proc/self/net/netlink"
"""The kernel's table of netlink sockets in this network: a line of headings, then one line for each socket."""
HELD = (4, 5)
"""Indexes of the columns of SOCKETS that count bytes received but not read, and bytes sent but not received."""
MOST = 64 << 20
PAUSE = 1.0


class NetlinkWatch:
    """Checks the netlink sockets as long as the loop runs."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.look()

    def look(self) -> None:
        began = time.monotonic()
        if held_bytes(read_or_empty(SOCKETS)) > MOST:
            kill_tree({posix.getpid()})
        self.loop.at(self, max(PAUSE, REST_FACTOR * (time.monotonic() - began)), self.look)


def held_bytes(table: bytes) -> int:
    """Return the sum of the columns HELD in all lines of the table SOCKETS."""
    return sum(int(words[place]) for words in map(bytes.split, table.splitlines()[1:]) for place in HELD)
