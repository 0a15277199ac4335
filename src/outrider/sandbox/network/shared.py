"""Resources for the networks of all sandboxes of a node: the threads that resolve names, and the pace of bytes.

Invariants: a slow look-up delays nothing else on the node; the proxies take a bounded share of the event loop's time,
however much the sandboxes download.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from ipaddress import ip_address

from outrider.sandbox.network.addresses import Address
from outrider.sandbox.runtimes.node_host import Host

LOOKUP_THREADS = 16
NODE_RATE = 192 << 20
"""Maximum bytes per second of all sandboxes of a node. A chunk of 64 KiB takes about 0.1 ms of the event loop's
time."""
SANDBOX_RATE = 64 << 20
"""Maximum bytes per second of one sandbox, so that the other sandboxes get a share."""
LEAST_PAUSE = 0.002


class BytePace:
    """Spreads bytes over time, at most `rate` per second."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._free = 0.0
        """The event loop's time at which the next bytes are due."""

    def pause(self, number: int) -> float:
        """Count bytes that have passed. Returns the seconds to wait before the next bytes."""
        now = asyncio.get_running_loop().time()
        self._free = max(self._free, now) + number / self._rate
        return self._free - now


class SharedNetwork:
    """The part of the network that all sandboxes of a node share. It is a part of the node's `Host`; `open` creates
    it."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.pace = BytePace(NODE_RATE)

    @classmethod
    @asynccontextmanager
    async def open(cls, host: Host) -> AsyncIterator[SharedNetwork]:
        pool = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="outrider-names")
        try:
            yield cls(pool)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        """Return the addresses of a name. Raises OSError."""
        found = await asyncio.get_running_loop().run_in_executor(self._pool, _addresses, host, port)
        return [ip_address(address) for address in found]


def _addresses(host: str, port: int) -> list[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos))
