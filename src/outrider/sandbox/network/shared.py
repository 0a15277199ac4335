"""Resources that the networks of all sandboxes of a node share: threads that resolve host names, and a limit of bytes
per second.

Invariants: a slow name server never blocks the node; a host name that a program invents never delays one that a task
declares; the proxies use a bounded share of the event loop's time.
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
"""Maximum number of threads in each of two thread pools. One pool resolves the hosts that tasks declare, and the other
pool resolves all other hosts."""
LOOKUPS = 2
"""Maximum number of hosts that one sandbox resolves at once in each pool. A look-up occupies a thread until the name
server answers, and a hostile name server may answer slowly."""
NODE_RATE = 192 << 20
"""Maximum bytes per second for the proxies of all sandboxes of a node together. A chunk of 64 KiB takes about 0.1 ms of
the event loop's time. So at this rate, the proxies use about a third of that time."""
SANDBOX_RATE = 64 << 20
"""Maximum bytes per second for one sandbox, so that it does not use the whole NODE_RATE."""
LEAST_PAUSE = 0.002


class BytePace:
    """Limits traffic to `rate` bytes per second."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._free = 0.0
        """The time, by the event loop's clock, at which the next bytes may be transferred."""

    def pause(self, number: int) -> float:
        """Count `number` transferred bytes. Returns how many seconds to wait before the next transfer."""
        now = asyncio.get_running_loop().time()
        self._free = max(self._free, now) + number / self._rate
        return self._free - now


class Lookups:
    """Resolves host names for one sandbox, with at most LOOKUPS look-ups at once in each thread pool. The pool `named`
    is for hosts that the task declares, and `others` is for all other hosts.

    A look-up counts until its thread has finished, even if no request waits for it any more.
    """

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
        """Return the addresses of a host. Simultaneous requests for the same host and port share one look-up. Raises
        OSError."""
        key = host, port
        if key not in self._running:
            pool, slots = self._kinds[named]
            await slots.acquire()
            if key in self._running:  # another request has begun the same look-up in the meantime
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
            with suppress(RuntimeError):  # the event loop may already be closed
                loop.call_soon_threadsafe(ended)

        # `end` must run before the callback of `wrap_future`, so that the look-up leaves `_running` before its result
        # arrives. Otherwise, a request right after the result would reuse this look-up instead of beginning a new one.
        thread.add_done_callback(end)
        self._running[key] = asyncio.wrap_future(thread)


class SharedNetwork:
    """Network resources that all sandboxes of a node share. The node's `Host` creates one instance with `open`, and
    holds it."""

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
        """Return a `Lookups` for a new sandbox."""
        return Lookups(self._named, self._others, _addresses)


def _addresses(host: str, port: int) -> list[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos))
