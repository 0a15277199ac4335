"""Tells nodes in other processes how the service's engine pools stand, so that theirs can follow.

It knows no connection. Invariant: whoever is in `nodes` when a pool changes is told of it.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Self

from outrider.engines.pool.sharing import PoolState
from outrider.nodes.remote_node import Pools, RemoteNode

log = logging.getLogger("outrider.node")

LOADS_SECONDS = 0.1
"""How often each node is told the load that other nodes put on the engines."""


class Telling:
    """`async with Telling(pools) as telling`: within the block all of `telling.nodes` are told."""

    def __init__(self, pools: Pools) -> None:
        self.nodes: list[RemoteNode] = []
        self._pools = pools
        self._changed = asyncio.Event()
        self._said: dict[str | None, PoolState] = {}
        self._tasks = asyncio.TaskGroup()
        self._background: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for pool in self._pools.values():
            pool.state_changed = self._changed.set
        self._background = [
            self._tasks.create_task(self._say_changes(), name="pool states"),
            self._tasks.create_task(self._say_loads(), name="engine loads"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools.values():
            pool.state_changed = lambda: None
        for task in self._background:
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def _say_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for model, pool in self._pools.items():
                try:
                    state = pool.state()
                    if state != self._said.get(model):
                        for node in self.nodes:
                            node.tell(model, state)
                        self._said[model] = state
                except Exception:  # an engine may be anybody's code: what it says of itself may be nothing to send
                    log.exception("the state of the engines cannot be told")

    async def _say_loads(self) -> None:
        while True:
            await asyncio.sleep(LOADS_SECONDS)
            names = [node.name for node in self.nodes]
            for model, pool in self._pools.items():
                for node, loads in zip(self.nodes, pool.loads(names), strict=True):
                    node.weigh(model, loads)
