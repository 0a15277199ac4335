"""Several nodes on one machine, each in its own process, so that sessions use more than one core.

A node process runs sandboxes, agents, the model gateway, token trees, and generations on engines that have a URL. The
service's process has the queue, the store, the policy, and the engines without a URL. `remote_node.py` handles the
messages. Invariants: a process that exits is started again (`spawning.py` decides when). No process outlives the
service.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Self

from outrider.concurrency.cancellation import shielded
from outrider.config import Config
from outrider.errors import ErrorRecord, ServiceError, error_from
from outrider.nodes.messages import NodeSetup
from outrider.nodes.remote_node import RemoteNode, ServiceParts
from outrider.nodes.spawning import NodeProcess, one_after_another
from outrider.sessions.resources import Capacity, machine_capacity

log = logging.getLogger("outrider.node")

MACHINE = "local"
CORES_EACH = 4
"""Number of the machine's cores per node process. The process itself keeps one core busy, and the sandboxes of its
sessions need the others."""
LEAST_WARM_MB = 16
"""The smallest allowed value of `sandboxes.warm_memory_mb`, in MiB."""


def with_processes(config: Config) -> Config:
    """Return the settings. If they do not set `processes`, add the number of processes that suits this machine."""
    if "processes" in config.model_fields_set:
        return config
    return config.model_copy(update={"processes": max(1, int(machine_capacity().cpus) // CORES_EACH)})


class NodeProcesses:
    """The nodes on the service's machine: `async with NodeProcesses(config, parts) as processes`. In the block,
    `processes.nodes` run attempts. If a node cannot start, entering the block raises its error."""

    def __init__(self, config: Config, parts: ServiceParts) -> None:
        self._config = config
        self._parts = parts
        self.nodes = [RemoteNode(f"{MACHINE}-{number}", MACHINE, parts) for number in range(config.processes)]
        self._tasks = asyncio.TaskGroup()
        self._background: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        starts: list[asyncio.Future[None]] = []
        for number, node in enumerate(self.nodes):
            started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            starts.append(started)
            supervising = self._tasks.create_task(self._supervise(node, number, started), name=node.name)
            self._background.append(supervising)
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._background:
            task.cancel()
        await shielded(lambda: self._tasks.__aexit__(None, None, None))

    async def _supervise(self, node: RemoteNode, number: int, started: asyncio.Future[None]) -> None:
        """Keep a process running for the node. The future `started` is done when the first process is ready, or fails
        if this process cannot start."""

        def ready(error: ErrorRecord | None) -> None:
            if not started.done():
                if error is None:
                    started.set_result(None)
                else:
                    started.set_exception(error_from(error))
            elif error is not None:
                log.error("node %s cannot start: %s", node.name, error.message)

        def ended(how: str) -> bool:
            if not started.done():
                message = f"the process of node {node.name} {how} before it was ready"
                started.set_exception(ServiceError(message, hint="the log has the process's own error message, above"))
            return True

        setup = setup_of(self._config, node.name, number, self._parts.resources.capacity)

        async def live(process: NodeProcess) -> None:
            await node.serve(process.pipe, setup, ready=ready, ended=process.end)

        await one_after_another(node.name, live, ended, self._parts.failures)


def setup_of(config: Config, name: str, number: int, capacity: Capacity) -> NodeSetup:
    """Return the settings of node `number`. The slots of the lanes and the warm sandboxes (started in advance) are
    divided among `config.processes` nodes."""
    lanes, sandboxes, of = config.lanes, config.sandboxes, config.processes
    sizes = {"init": lanes.init, "ready": lanes.ready, "run": lanes.run, "eval": lanes.eval}
    slots = {name: max(1, _part(size, number, of)) for name, size in sizes.items() if size is not None}
    changes = {
        "lanes": lanes.model_copy(update=slots),
        "sandboxes": sandboxes.model_copy(
            update={
                "warm": _part(sandboxes.warm, number, of),
                "warm_memory_mb": max(LEAST_WARM_MB, sandboxes.warm_memory_mb // of),
            }
        ),
    }
    return NodeSetup(
        name=name,
        config=config.for_nodes().model_copy(update=changes).model_dump_json().encode(),
        path=tuple(sys.path),
        capacity=capacity,
        level=logging.getLogger().level,
        json_log=config.log_format == "json",
        file="" if config.read_from is None else str(config.read_from.absolute()),
    )


def _part(total: int, number: int, of: int) -> int:
    return total // of + (number < total % of)
