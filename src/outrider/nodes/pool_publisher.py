"""Sends the states of the service's engine pools to nodes in other processes. The nodes copy the states into their own
pools.

Invariant: each change of a pool is sent to every node in `nodes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from outrider.concurrency.chores import Chores, Failures
from outrider.engines.pool.leader import loads_elsewhere, pool_state
from outrider.engines.pool.placement import PoolState
from outrider.nodes.remote_node import Pools, RemoteNode

LOADS_SECONDS = 0.1
"""Seconds between two messages that inform a node about the load that other nodes put on the engines."""


class PoolPublisher:
    """Sends the states and the loads of engine pools to every node in `nodes`: `async with PoolPublisher(pools) as
    publisher`."""

    def __init__(self, pools: Pools, failures: Failures | None = None) -> None:
        self.nodes: list[RemoteNode] = []
        self._pools = pools
        self._changed = asyncio.Event()
        self._subscriptions: list[Callable[[], None]] = []
        self._published: dict[str | None, PoolState] = {}
        self._chores = Chores(failures or Failures())

    async def __aenter__(self) -> Self:
        await self._chores.__aenter__()
        for pool in self._pools.values():
            self._subscriptions.append(pool.changes.subscribe(lambda _: self._changed.set()))
        self._chores.begin("tell nodes of engines", self._publish_changes)
        self._chores.begin("tell nodes of loads", self._publish_loads, every=LOADS_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._subscriptions:
            self._subscriptions.pop()()
        await self._chores.__aexit__(None, None, None)

    async def _publish_changes(self) -> None:
        await self._changed.wait()
        self._changed.clear()
        failure: Exception | None = None
        for model, pool in self._pools.items():
            try:
                state = pool_state(pool)
                if state != self._published.get(model):
                    for node in self.nodes:
                        node.send_pool_state(model, state)
                    self._published[model] = state
            except Exception as error:  # an engine may be third-party code, whose state may not be encodable
                failure = error  # the error is raised after the states of the other pools are sent
        if failure is not None:
            self._changed.set()  # the next run of this chore sends the missing state
            raise failure

    async def _publish_loads(self) -> None:
        names = [node.name for node in self.nodes]
        for model, pool in self._pools.items():
            for node, loads in zip(self.nodes, loads_elsewhere(pool, names), strict=True):
                node.send_loads(model, loads)
