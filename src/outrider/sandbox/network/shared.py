"""Resources for the networks of all sandboxes of a node: the threads that resolve names, and the limit of bytes per
second.

Invariants: a slow look-up of a host name delays nothing else on the node; the look-up of a host name that a program
chose delays no look-up of a host name that a task declares; the proxies take a bounded share of the event loop's time,
however much the sandboxes download.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address

from outrider.sandbox.network.addresses import Address
from outrider.sandbox.runtimes.node_host import Host

LOOKUP_THREADS = 64
"""Maximum number of threads in each of two pools. One pool resolves the hosts that tasks name, and the other pool
resolves all other hosts."""
LOOKUPS = 2
"""Maximum number of hosts that one sandbox resolves at once in each of the two pools of threads. A hostile name server
may answer slowly, and each look-up occupies a thread of the node until the answer."""
NODE_RATE = 192 << 20
"""Maximum bytes per second that pass through the proxies of all sandboxes of a node. A chunk of 64 KiB takes about 0.1
ms of the event loop's time, so at this rate the proxies take about a third of that time."""
SANDBOX_RATE = 64 << 20
"""Maximum bytes per second of one sandbox, so that the other sandboxes get a share."""
LEAST_PAUSE = 0.002


class BytePace:
    """Limits a flow of bytes to `rate` bytes per second."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._free = 0.0
        """The event loop's time at which the next bytes are due."""

    def pause(self, number: int) -> float:
        """Count bytes that have passed. Returns the seconds to wait before the next bytes."""
        now = asyncio.get_running_loop().time()
        self._free = max(self._free, now) + number / self._rate
        return self._free - now


class Lookups:
    """The look-ups of one sandbox. `look_up` runs in a thread of the pool `named` for a host that the task names, and
    in a thread of `others` for any other host. A look-up counts against LOOKUPS until its thread ends, even if no
    request still waits for the result."""

    def __init__(
        self,
        named: ThreadPoolExecutor,
        others: ThreadPoolExecutor,
        look_up: Callable[[str, int], Sequence[str]],
    ) -> None:
        self._kinds = {kind: (pool, asyncio.Semaphore(LOOKUPS)) for kind, pool in ((True, named), (False, others))}
        self._look_up = look_up
        self._running: dict[tuple[str, int], asyncio.Future[Sequence[str]]] = {}

    async def resolve(self, host: str, port: int, named: bool) -> Sequence[Address]:
        """Return the addresses of a host. Concurrent requests for the same host share one look-up. Raises OSError."""
        key = host, port
        if key not in self._running:
            pool, slots = self._kinds[named]
            await slots.acquire()
            if key in self._running:  # another request has begun this look-up meanwhile
                slots.release()
            else:
                self._begin(key, pool, slots)
        return [ip_address(address) for address in await asyncio.shield(self._running[key])]

    def _begin(self, key: tuple[str, int], pool: ThreadPoolExecutor, slots: asyncio.Semaphore) -> None:
        loop = asyncio.get_running_loop()
        try:
            thread = pool.submit(self._look_up, *key)
        except RuntimeError as error:
            slots.release()
            raise OSError("the node stops") from error

        def ended() -> None:
            slots.release()
            del self._running[key]

        def end(_: object) -> None:
            with suppress(RuntimeError):  # the event loop has ended before the thread
                loop.call_soon_threadsafe(ended)

        # `end` is added before the callback of `wrap_future`. Otherwise a request just after the result would share the
        # old result.
        thread.add_done_callback(end)
        self._running[key] = asyncio.wrap_future(thread)


class SharedNetwork:
    """The part of the network that all sandboxes of a node share. It is a part of the node's `Host`; `open` creates
    it."""

    def __init__(self, named: ThreadPoolExecutor, others: ThreadPoolExecutor) -> None:
        self._named = named
        self._others = others
        self.pace = BytePace(NODE_RATE)

    @classmethod
    @asynccontextmanager
    async def open(cls, host: Host) -> AsyncIterator[SharedNetwork]:
        named, others = (ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="outrider-names") for _ in range(2))
        try:
            yield cls(named, others)
        finally:
            for pool in (named, others):
                pool.shutdown(wait=False, cancel_futures=True)

    def lookups(self) -> Lookups:
        """Return the look-ups of a new sandbox."""
        return Lookups(self._named, self._others, _addresses)


def _addresses(host: str, port: int) -> list[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos))
