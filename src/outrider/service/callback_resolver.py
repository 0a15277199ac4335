"""Looks up the host names of callbacks in threads of its own.

A tenant chooses these names, and so the name server that answers. A lookup that gets no answer occupies its thread for
many seconds. In the threads that the event loop shares, such lookups would delay the service's other blocking work, and
the lookups of its engines. Invariant: a lookup uses only threads of its resolver.

Only `delivery.py` imports this module, and only before its first request, because the module imports aiohttp.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from aiohttp.abc import AbstractResolver, ResolveResult


class ThreadResolver(AbstractResolver):
    """Looks up names in at most `threads` threads. `resolve` raises OSError for an unknown name. `close` does not wait
    for lookups."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="outrider-callback-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        look_up = partial(socket.getaddrinfo, host, port, family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        return [
            ResolveResult(
                hostname=host,
                host=_host(*address),
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _host(address: str | int, _port: object, _flow: int = 0, scope: int = 0) -> str:
    """Return the address in an entry of `getaddrinfo`. A link-local IPv6 address is useless without its interface."""
    return f"{address}%{scope}" if scope else str(address)
