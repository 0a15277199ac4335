"""Creates a service on this machine with all its components, in the order of their dependencies.

Only this module chooses the store, the engines and the node of a service. Invariant: if a component cannot be opened,
those that are already open are closed in reverse order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from outrider.concurrency.chores import Failures
from outrider.concurrency.retries import RetryPolicy
from outrider.config import Config
from outrider.engines.pool.policy import KnownPolicy
from outrider.errors import InvalidField
from outrider.nodes.joined import JoinedNodes
from outrider.nodes.pool_publisher import PoolPublisher
from outrider.nodes.processes import MACHINE, NodeProcesses
from outrider.nodes.remote_node import WAITS as NODE_WAITS
from outrider.nodes.remote_node import NodeWaits, ServiceParts
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.runtimes.node_host import Host
from outrider.service.data_folder import RUNS, open_store
from outrider.service.engine_paces import remember_paces, remembered_paces
from outrider.service.model_backends import open_models
from outrider.service.retry_store import retry_store
from outrider.service.scheduler import PAUSES
from outrider.service.service import Service
from outrider.sessions.attempt import Node
from outrider.sessions.node import LocalNode
from outrider.sessions.resources import NodeResources, capacity_of
from outrider.store.artifacts import ArtifactStore
from outrider.store.run_index.index import RunIndex


class Opened(NamedTuple):
    """A running service. `node` runs its sessions in this process; it is None if other processes run the sessions."""

    service: Service
    node: LocalNode | None

    @property
    def own_node(self) -> LocalNode:
        """The node in this process. Raises AssertionError if there is none."""
        assert self.node is not None
        return self.node


@asynccontextmanager
async def open_service(
    config: Config, *, pauses: RetryPolicy = PAUSES, node_waits: NodeWaits = NODE_WAITS
) -> AsyncIterator[Opened]:
    """Open a service. The settings decide whether its sessions run on a node in this process or in other processes.
    `pauses` are the waits before a failed session is tried again. `node_waits` are the waits for nodes in other
    processes.

    Raises InvalidField for settings that cannot work on this machine. Raises ServiceError if the data folder or the
    database cannot be used or is in use.
    """
    async with AsyncExitStack() as stack:
        failures = Failures()
        store = await stack.enter_async_context(open_store(config, failures))
        index = await stack.enter_async_context(RunIndex(store, config.data / RUNS))
        paths = await asyncio.to_thread(HostPaths.checked, config)
        artifacts = ArtifactStore(config.data / "artifacts")
        kept = await store.policy()

        async def keep(known: KnownPolicy) -> None:
            await retry_store(lambda: store.keep_policy(known.version, known.weights), failures)

        known = None if kept is None else KnownPolicy(kept.version, kept.weights)
        paces = await remembered_paces(store)
        models = await stack.enter_async_context(
            open_models(config, known=known, keep=keep, paces=paces, failures=failures)
        )
        await stack.enter_async_context(remember_paces(store, models.pools.values(), paces, failures))
        resources = NodeResources(capacity_of(config.sandboxes))
        node: LocalNode | None = None
        parts = ServiceParts(store, artifacts, models.pools, resources, failures, node_waits)
        publisher = await stack.enter_async_context(PoolPublisher(models.pools, failures))
        nodes: Sequence[Node]
        if config.processes == 1:
            node = await stack.enter_async_context(
                LocalNode(
                    MACHINE,
                    config,
                    backend=models.policy,
                    frozen=models.frozen,
                    store=store,
                    artifacts=artifacts,
                    resources=resources,
                    paths=paths,
                )
            )
            nodes = [node]
        else:
            processes = NodeProcesses(config, parts)
            publisher.nodes += processes.nodes
            nodes = (await stack.enter_async_context(processes)).nodes
        joined = JoinedNodes(config, parts, publisher, own={each.name for each in nodes})
        await stack.enter_async_context(joined)
        host = node.host if node is not None else await stack.enter_async_context(Host(config.data, failures=failures))
        service = Service(
            config,
            store=store,
            index=index,
            artifacts=artifacts,
            backend=models.policy,
            frozen=models.frozen,
            nodes=nodes,
            joined=joined,
            host=host,
            paths=paths,
            pauses=pauses,
            failures=failures,
        )
        for each in publisher.nodes:
            each.room.subscribe(lambda _: service.scheduler.wake())
        for spec in config.engines:
            await service.add_engine(spec)
        for at, model in enumerate(config.frozen):
            for spec in model.engines:
                if spec.serves not in (None, model.name):
                    raise InvalidField(
                        f"an engine of the frozen model {model.name!r} cannot serve {spec.serves!r}",
                        field=f"frozen.{at}.engines",
                        hint="leave `serves` out",
                    )
                await service.add_engine(spec.model_copy(update={"serves": model.name}))
        yield Opened(service, node)
