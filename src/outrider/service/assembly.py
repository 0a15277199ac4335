"""Opens a service on this machine with all its parts, in the order in which they need one another.

The one place that knows which store, engines and node a service has. Invariant: whatever fails while it opens, what was
opened before is closed again, last first.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from outrider.concurrency.backoff import Backoff
from outrider.concurrency.offload import OffloadThread
from outrider.config import Config
from outrider.engines.pool.policy import KnownPolicy
from outrider.engines.pool.pool import EnginePool
from outrider.errors import InvalidField, ServiceError
from outrider.sandboxes.warm_pool import WarmLimits
from outrider.service.retry_store import retry_store
from outrider.service.scheduler import PAUSES
from outrider.service.service import Service
from outrider.service.tokenizer_check import TokenizerCheck
from outrider.sessions.calls.call import ModelBackend
from outrider.sessions.lanes import Lanes
from outrider.sessions.node import LocalNode
from outrider.sessions.resources import NodeResources, ResourceAmount, machine_capacity
from outrider.store.artifacts import ArtifactStore
from outrider.store.sqlite import sqlite_store
from outrider.tokens.rendering.renderer import make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer


class Opened(NamedTuple):
    """An open service and the node in this process that runs its sessions."""

    service: Service
    node: LocalNode


@asynccontextmanager
async def open_service(config: Config, *, pauses: Backoff = PAUSES) -> AsyncIterator[Opened]:
    """A service with one node, both in this process. `pauses` are the waits between a session's failed attempts.

    Raises InvalidField for settings that cannot work on this machine, and ServiceError if the data folder is in use.
    """
    if config.model.tokenizer is None:
        raise InvalidField(
            "no tokenizer is set",
            field="model.tokenizer",
            hint="give the model's folder: --tokenizer DIR (the one that holds tokenizer.json)",
        )
    tokenizer = Tokenizer.load(config.model.tokenizer)
    renderer = make_renderer(tokenizer, config.model.renderer)
    machine = machine_capacity()
    sandboxes = config.sandboxes
    async with AsyncExitStack() as stack:
        config.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A lock of the kernel and not a file with a process id: it is released however the process dies.
        lock = os.open(config.data / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            hint = "stop it, or give this one a folder of its own: --data DIR"
            raise ServiceError(f"another service is using {config.data}", hint=hint) from error
        offload = OffloadThread()
        stack.push_async_callback(offload.close)
        store = await stack.enter_async_context(sqlite_store(config.data / "outrider.sqlite3"))
        artifacts = ArtifactStore(config.data / "artifacts")
        kept = await store.policy()

        async def keep(known: KnownPolicy) -> None:
            await retry_store(lambda: store.keep_policy(known.version, known.weights))

        pool = await stack.enter_async_context(
            EnginePool(
                tokenizer=config.model.tokenizer,
                vocabulary=tokenizer.vocabulary,
                text=tokenizer.stream,
                check=TokenizerCheck(tokenizer),
                known=None if kept is None else KnownPolicy(kept.version, kept.weights),
                keep=keep,
            )
        )
        for engine in config.engines:
            await pool.add(engine)
        backend = ModelBackend(
            renderer=renderer,
            pool=pool,
            model=config.model.name,
            context_tokens=config.model.context_tokens,
            offload=offload,
        )
        node = await stack.enter_async_context(
            LocalNode(
                "local",
                backend=backend,
                store=store,
                artifacts=artifacts,
                lanes=Lanes(init=config.lanes.init, run=config.lanes.run, evaluate=config.lanes.eval),
                resources=NodeResources(
                    ResourceAmount(
                        cpus=machine.cpus if sandboxes.cpus is None else sandboxes.cpus,
                        memory_mb=machine.memory_mb if sandboxes.memory_mb is None else sandboxes.memory_mb,
                    )
                ),
                files=config.files,
                warm=WarmLimits(each=sandboxes.warm, memory_mb=sandboxes.warm_memory_mb),
            )
        )
        service = Service(
            config,
            store=store,
            artifacts=artifacts,
            pool=pool,
            node=node,
            tokenizer=tokenizer,
            offload=offload,
            pauses=pauses,
        )
        yield Opened(service, node)
