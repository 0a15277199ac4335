"""Opens a service on this machine with all its parts, in the order of their dependencies.

The store, engines and node of a service are chosen only here. Invariant: if a part fails to open, the parts opened
before are closed again, last first.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from outrider.concurrency.chores import Failures
from outrider.concurrency.retries import RetryPolicy
from outrider.config import Config
from outrider.engines.pool.policy import KnownPolicy
from outrider.environment import install_command
from outrider.errors import InvalidField, ServiceError
from outrider.nodes.joined import JoinedNodes
from outrider.nodes.pool_publisher import PoolPublisher
from outrider.nodes.processes import MACHINE, NodeProcesses
from outrider.nodes.remote_node import ServiceParts
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.runtimes.node_host import Host
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
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store
from outrider.store.task_key import KEY_FILE, KeyFile, given_key

DATABASE = "outrider.sqlite3"
"""The database's file in the data folder."""


class Opened(NamedTuple):
    """An open service, and the node of this process, which runs the sessions. `node` is None if other processes run the
    sessions."""

    service: Service
    node: LocalNode | None

    @property
    def own_node(self) -> LocalNode:
        """The node in this process. Raises AssertionError if there is none."""
        assert self.node is not None
        return self.node


@asynccontextmanager
async def open_store(config: Config, failures: Failures | None = None) -> AsyncIterator[Store]:
    """Open the store, and lock the data folder while the block runs. Raises ServiceError if another service uses the
    data folder, and InvalidField if the data folder cannot be used."""
    try:
        config.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A lock of the kernel is released however the process ends. A file with a process id would be left behind.
        lock = os.open(config.data / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise InvalidField(
            f"{config.data} cannot be used as the data folder: {error.strerror}",
            field="data",
            hint="give a folder that this user can write to, with room for groups and results: --data DIR",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            hint = "stop it, or give this one a folder of its own: --data DIR"
            raise ServiceError(f"another service is using {config.data}", hint=hint) from error
        raise InvalidField(
            f"the data folder {config.data} cannot be locked: {error.strerror}",
            field="data",
            hint="give a folder on a file system with locks, such as a local disk: --data DIR",
        ) from error
    try:
        async with _store(config, failures) as store:
            yield store
    finally:
        os.close(lock)


@asynccontextmanager
async def open_service(config: Config, *, pauses: RetryPolicy = PAUSES) -> AsyncIterator[Opened]:
    """Open a service. The settings decide whether sessions run on a node in this process, or on nodes in other
    processes. `pauses` are the waits between a session's failed attempts.

    Raises InvalidField for settings that cannot work on this machine, and ServiceError if the data folder or the
    database is in use or cannot be used.
    """
    async with AsyncExitStack() as stack:
        failures = Failures()
        store = await stack.enter_async_context(open_store(config, failures))
        index = await stack.enter_async_context(RunIndex(store, config.data / "runs.sqlite3"))
        paths = await asyncio.to_thread(HostPaths.checked, config)
        artifacts = ArtifactStore(config.data / "artifacts")
        kept = await store.policy()

        async def keep(known: KnownPolicy) -> None:
            await retry_store(lambda: store.keep_policy(known.version, known.weights), failures)

        known = None if kept is None else KnownPolicy(kept.version, kept.weights)
        paces = await remembered_paces(store)
        models = await stack.enter_async_context(open_models(config, known=known, keep=keep, paces=paces))
        await stack.enter_async_context(remember_paces(store, models.pools.values(), paces, failures))
        resources = NodeResources(capacity_of(config.sandboxes))
        node: LocalNode | None = None
        parts = ServiceParts(store, artifacts, models.pools, resources, failures)
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
        host = node.host if node is not None else await stack.enter_async_context(Host(config.data))
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


def _store(config: Config, failures: Failures | None) -> Store:
    key = KeyFile(config.data / KEY_FILE) if config.task_key is None else given_key(config.task_key)
    if config.store is None:
        return sqlite_store(config.data / DATABASE, failures, key=key)
    try:
        from outrider.store.postgresql import postgresql_store
    except ImportError as error:
        hint = install_command("postgresql")
        raise InvalidField("a store in PostgreSQL needs asyncpg", field="store", hint=hint) from error
    return postgresql_store(config.store, key=key)
