"""`python -m outrider.cli.node_process`: a node in a process of its own. `outrider serve --processes` starts it.

Its standard input is a socket to the service, and tells it what it is. It ends when the service has hung up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import AsyncExitStack

from outrider.cli.event_loop import run_service, shorten_pauses
from outrider.config import Config
from outrider.errors import OutriderError
from outrider.nodes.messages import TO_NODE, Setup
from outrider.nodes.pipe import Pipe
from outrider.nodes.processes import END_SECONDS
from outrider.nodes.service_end import ServiceEnd
from outrider.sessions.resources import ResourceAmount


def main() -> None:
    # The service decides when its nodes end. The signals are not ignored, which programs started here would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    end = socket.socket(fileno=os.dup(0))
    threading.Thread(target=_end_with_the_service, args=(os.dup(0),), daemon=True).start()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # what this process starts must not have the socket
    os.close(nothing)
    run_service(_serve(end))


def _end_with_the_service(end: int) -> None:
    """End this process some time after the service has hung up, also if its event loop is blocked."""
    hung_up = select.poll()
    hung_up.register(end, select.POLLRDHUP)
    hung_up.poll()
    time.sleep(END_SECONDS)
    os._exit(1)


async def _serve(end: socket.socket) -> None:
    pipe = await Pipe.over(end)
    setup = TO_NODE.decode(await pipe.receive())
    assert isinstance(setup, Setup)
    sys.path[:] = setup.path
    logging.basicConfig(
        level=setup.level, format=f"%(asctime)s %(levelname)-7s {setup.name} %(name)s: %(message)s", stream=sys.stderr
    )
    service = ServiceEnd(pipe, ResourceAmount(cpus=setup.cpus, memory_mb=setup.memory_mb))
    async with service.connected() as hung_up:
        try:
            await _run(setup, service, hung_up)
        except OutriderError as error:
            service.fail(error)
            await asyncio.wait([hung_up])


async def _run(setup: Setup, service: ServiceEnd, hung_up: asyncio.Task[object]) -> None:
    """Run attempts until the service hangs up. Raises what keeps the node from starting."""
    # Imported here, with the paths of the service.
    from outrider.api.server import serving_gateway
    from outrider.engines.pool.follower import PoolFollower
    from outrider.service.assembly import local_node, open_models
    from outrider.store.artifacts import ArtifactStore

    config = Config.model_validate_json(setup.config)
    async with AsyncExitStack() as stack:
        models = await stack.enter_async_context(open_models(config, leader=service.leader))
        followers = {
            model: await stack.enter_async_context(PoolFollower(pool, service.forwarded(model)))
            for model, pool in models.pools.items()
        }
        artifacts = ArtifactStore(config.data / "artifacts")
        node = await stack.enter_async_context(
            local_node(
                setup.name,
                config,
                models,
                store=service.store,
                artifacts=artifacts,
                resources=service.resources,
                service_silence=service.silence,
            )
        )
        await stack.enter_async_context(serving_gateway(node))
        shorten_pauses()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(service.run(node, followers), name="node")
            await asyncio.wait([hung_up])
            running.cancel()


if __name__ == "__main__":
    main()
