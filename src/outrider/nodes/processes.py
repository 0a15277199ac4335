"""Several nodes on one machine, each a process of its own, so that sessions use more than one core.

Each process runs what a service with one process runs itself: sandboxes, agents, the model gateway, token trees, and
generations on engines that have a URL. The service keeps the queue, the store, the policy, and engines that live in its
own process. It knows nothing of what is said on a connection (`remote_node.py`). Invariants: a process that dies is
started again; none outlives the service.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from outrider.concurrency.backoff import Backoff
from outrider.concurrency.cancellation import shielded
from outrider.config import CallbacksConfig, Config
from outrider.engines.pool.sharing import PoolState
from outrider.environment import variables
from outrider.errors import ErrorRecord, ServiceError, error_from
from outrider.nodes.messages import Follow, Loads, Setup
from outrider.nodes.pipe import Pipe
from outrider.nodes.remote_node import RemoteNode, ServiceParts

log = logging.getLogger("outrider.node")

MACHINE = "local"
PREFIX = "OUTRIDER_"
HOME = "OUTRIDER_HOME"
PROGRAM = "outrider.cli.node_process"
LEAST_WARM_MB = 16
"""The least that `sandboxes.warm_memory_mb` may be."""
END_SECONDS = 10.0
"""How long a process may take to end its sandboxes, when it is to end."""

RESTARTS = Backoff(first=0.1, longest=30.0)
STEADY_SECONDS = 60.0
"""A process that has lived for so long and then dies is started again at once."""

LOADS_SECONDS = 0.1
"""How often each node is told the load that other nodes put on the engines."""


class NodeProcesses:
    """`async with NodeProcesses(config, parts) as processes`: within the block `processes.nodes` run attempts. Entering
    it raises what keeps a node from starting."""

    def __init__(self, config: Config, parts: ServiceParts) -> None:
        self._config = config
        self._parts = parts
        self.nodes = [RemoteNode(f"{MACHINE}-{number}", MACHINE, parts) for number in range(config.processes)]
        self._tasks = asyncio.TaskGroup()
        self._background: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._said: dict[str | None, PoolState] = {}

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for pool in self._parts.pools.values():
            pool.state_changed = self._changed.set
        starts: list[asyncio.Future[None]] = []
        for number, node in enumerate(self.nodes):
            started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            starts.append(started)
            self._begin(self._supervise(node, number, started), name=node.name)
        self._begin(self._say_changes(), name="pool states")
        self._begin(self._say_loads(), name="engine loads")
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    def _begin(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        self._background.append(self._tasks.create_task(work, name=name))

    async def _end(self) -> None:
        for pool in self._parts.pools.values():
            pool.state_changed = lambda: None
        for task in self._background:
            task.cancel()
        await shielded(lambda: self._tasks.__aexit__(None, None, None))

    async def _supervise(self, node: RemoteNode, number: int, started: asyncio.Future[None]) -> None:
        """Have a process for the node, one after another. `started` is set when the first one works, or to what keeps
        it from that."""
        clock = asyncio.get_running_loop().time

        def ready(error: ErrorRecord | None) -> None:
            if not started.done():
                if error is None:
                    started.set_result(None)
                else:
                    started.set_exception(error_from(error))
            elif error is not None:
                log.error("node %s cannot start: %s", node.name, error.message)

        total = self._parts.resources.total
        setup = setup_of(self._config, node.name, number, cpus=total.cpus, memory_mb=total.memory_mb)
        failures = 0
        while True:
            began = clock()
            try:
                ended = await self._one_process(node, setup, ready)
            except Exception as error:  # no process can be had now; or a bug, which must not end the other nodes
                log.exception("node %s failed", node.name)
                ended = f"failed: {error}"
            log.warning("the process of node %s %s: another one is started", node.name, ended)
            if not started.done():
                message = f"the process of node {node.name} {ended} before it was ready"
                started.set_exception(ServiceError(message, hint="its own words are above, in the log"))
            failures = 0 if clock() - began >= STEADY_SECONDS else failures + 1
            await asyncio.sleep(RESTARTS.wait(failures))

    async def _one_process(self, node: RemoteNode, setup: Setup, ready: Callable[[ErrorRecord | None], None]) -> str:
        """Have a process for the node until it ends; how it ended."""
        ours, theirs = socket.socketpair()
        pipe = await Pipe.over(ours)
        # What sets the service up is in its own settings; a node is told what it needs, and no secrets.
        kept = {name: text for name, text in variables().items() if not name.startswith(PREFIX) or name == HOME}
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    # -P: the working folder must not come before Python's own modules.
                    *(sys.executable, "-P", "-m", PROGRAM),
                    stdin=theirs.fileno(),
                    start_new_session=True,
                    env=kept,
                )
        except BaseException:
            pipe.abort()
            raise
        await node.serve(pipe, setup, ready=ready, ended=partial(_end, process, pipe))
        return f"ended with {process.returncode}"

    async def _say_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for model, pool in self._parts.pools.items():
                try:
                    state = pool.state()
                    if state != self._said.get(model):
                        for node in self.nodes:
                            node.send(Follow(model=model, state=state))
                        self._said[model] = state
                except Exception:  # an engine may be anybody's code: what it says of itself may be nothing to send
                    log.exception("the state of the engines cannot be told")

    async def _say_loads(self) -> None:
        while True:
            await asyncio.sleep(LOADS_SECONDS)
            for model, pool in self._parts.pools.items():
                for node, loads in zip(self.nodes, pool.loads([node.name for node in self.nodes]), strict=True):
                    node.send(Loads(model=model, loads=loads))


def setup_of(config: Config, name: str, number: int, *, cpus: float, memory_mb: int) -> Setup:
    """What the node of that number is told that it is, of `config.processes` that share what the settings give."""
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
        # It is told of engines as they come, and no secret that it does not need.
        "engines": (),
        "frozen": tuple(model.model_copy(update={"engines": ()}) for model in config.frozen),
        "token": None,
        "store": None,
        "callbacks": CallbacksConfig(),
    }
    return Setup(
        name=name,
        config=config.model_copy(update=changes).model_dump_json().encode(),
        path=tuple(sys.path),
        cpus=cpus,
        memory_mb=memory_mb,
        level=logging.getLogger().level,
    )


async def _end(process: asyncio.subprocess.Process, pipe: Pipe) -> None:
    """Have a process end: it does so by itself when it is alone, and is killed if it does not. So is what its plugins
    have started, and left."""
    pipe.abort()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it led a process group of its own


def _part(total: int, number: int, of: int) -> int:
    return total // of + (number < total % of)
