"""A bound on what the kernel holds for the netlink sockets of a sandbox that has a network of its own.

A program that asks the kernel and does not read the answers has the kernel keep up to a MiB for each socket. No control
group counts that, of whatever version, and no limit of the kernel bounds it but that of open files. It knows no limits
of the task. Invariant: while such sockets hold more than MOST bytes, all programs of the sandbox are killed: whose a
socket is cannot always be seen, and no honest program comes near.
"""

from __future__ import annotations

import posix
import time
from typing import TYPE_CHECKING

from outrider.runtimes.guest.processes import kill_tree, read_or_empty

if TYPE_CHECKING:
    from outrider.runtimes.guest.poll_loop import Loop

SOCKETS = "/proc/self/net/netlink"
"""One line for each netlink socket of this network, after a line of headings."""
HELD = (4, 5)
"""The columns of bytes received and not read, and of bytes sent and not received."""
MOST = 64 << 20
PAUSE = 1.0
REST_FACTOR = 20
"""A pause is at least 20 times as long as the look before it: there may be many sockets."""


class NetlinkWatch:
    """Looks as long as the loop runs."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.look()

    def look(self) -> None:
        began = time.monotonic()
        if held_bytes(read_or_empty(SOCKETS)) > MOST:
            kill_tree({posix.getpid()})
        self.loop.at(self, max(PAUSE, REST_FACTOR * (time.monotonic() - began)), self.look)


def held_bytes(table: bytes) -> int:
    """The sum of HELD over the lines of SOCKETS."""
    return sum(int(words[place]) for words in map(bytes.split, table.splitlines()[1:]) for place in HELD)
