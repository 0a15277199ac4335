"""`python -m outrider.cli.node_process`: runs one node in a process of its own.

`outrider serve --processes` starts several of these processes. Without `--processes`, `outrider serve` does so only on
a machine with 8 or more processors. For a service on another machine, `outrider nodes join` starts this process.
Standard input is a socket to the starting program, which first sends the settings. The process exits when the starting
program closes the socket.
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
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

import outrider.tokens.rendering  # noqa: F401 - before `main` starts a thread: with threads, the import takes longer
from outrider.cli.event_loop import run_service, short_pauses
from outrider.cli.long_running import start_log
from outrider.concurrency.chores import Failures
from outrider.config import Config
from outrider.errors import OutriderError
from outrider.nodes.messages import MAX_MESSAGE, TO_NODE, TO_PROCESS, Join, LeaveService, NodeSetup, Ready
from outrider.nodes.service_proxy import ServiceProxy
from outrider.nodes.spawning import END_SECONDS
from outrider.sandbox.rootfs.store import ImageStore
from outrider.wire.link import Disconnected, Socket
from outrider.wire.link_protocol import encode
from outrider.wire.pipe import Pipe

log = logging.getLogger("outrider.node")


def main() -> None:
    # The process ignores both signals, because the service decides when its nodes end. The handler is not SIG_IGN,
    # because child processes would inherit SIG_IGN.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    for name in os.listdir("/proc/self/fd"):
        # If the starting program uses uvloop, this process also has copies of the descriptors that were passed to it.
        # Sandboxes must not inherit the copies.
        with suppress(OSError):
            os.set_inheritable(int(name), int(name) <= 2)
    end = socket.socket(fileno=os.dup(0))
    threading.Thread(target=_end_with_the_service, args=(os.dup(0),), daemon=True).start()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # child processes must not inherit the socket
    os.close(nothing)
    run_service(_serve(end))


def _end_with_the_service(end: int) -> None:
    """Wait until the starting program closes its end of the socket, and exit END_SECONDS later. This runs in a thread,
    so that it works even if the event loop is blocked."""
    hung_up = select.poll()
    hung_up.register(end, select.POLLRDHUP)
    hung_up.poll()
    time.sleep(END_SECONDS)
    os._exit(1)


async def _serve(end: socket.socket) -> None:
    pipe = await Pipe.over(end, MAX_MESSAGE)
    order = TO_PROCESS.decode(await pipe.receive())
    if isinstance(order, NodeSetup):
        sys.path[:] = order.path
        start_log(order.level, process=order.name, as_json=order.json_log)
        with suppress(OutriderError):  # `_work` has already sent the error to the service
            await _work(order, pipe)
    else:
        assert isinstance(order, Join)
        sys.path[:] = order.own.path
        start_log(order.own.level, process=order.own.name, as_json=order.own.json_log)
        await _join(order, Starter(pipe))


class Starter:
    """The program that started this process to join a service: `outrider nodes join` or, on a Ray cluster, its actor on
    this machine. A process that the service itself started has no `Starter`."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._service: ServiceProxy | None = None
        self._leaving = False
        self.ending = asyncio.Event()
        """Set by a SIGTERM. The same SIGTERM may also have reached the sandboxes of this process."""

    async def note_work(self, service: ServiceProxy) -> None:
        """Tell the starting program that this process now works for a service."""
        self._service = service
        if self._leaving:
            service.leave()
        await self._report(Ready())

    async def note_failure(self, error: OutriderError) -> None:
        """Tell the starting program about an error that keeps this process from working for the service."""
        await self._report(Ready(error=error.record()))

    async def read_orders(self) -> None:
        """Read the starting program's orders to leave the service, and carry them out. Returns when the starting
        program closes the socket. If no service has been joined yet, returns after the first order."""
        with suppress(Disconnected):
            while True:
                assert isinstance(TO_PROCESS.decode(await self._pipe.receive()), LeaveService)
                self.leave()
                if self._service is None:
                    return

    def leave(self) -> None:
        """Ask the service to send no more attempts to this node."""
        self._leaving = True
        if self._service is not None:
            self._service.leave()

    async def _report(self, ready: Ready) -> None:
        with suppress(Disconnected):
            await self._pipe.send(encode(ready))


async def _join(join: Join, starter: Starter) -> None:
    """Join a service, and run its attempts until the service or the starting program closes the connection.

    SIGTERM also ends this work. Batch systems and systemd send SIGTERM to all processes of a job or unit at once, also
    to those in sandboxes. So the results of the running attempts may be wrong after a SIGTERM.
    """
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, starter.ending.set)
    async with asyncio.TaskGroup() as tasks:
        lives = [
            tasks.create_task(starter.read_orders(), name="starter"),
            tasks.create_task(_work_elsewhere(join, starter), name="node"),
            tasks.create_task(starter.ending.wait(), name="signal"),
        ]
        await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
        starter.leave()
        for each in lives:
            each.cancel()


async def _work_elsewhere(join: Join, starter: Starter) -> None:
    from outrider.nodes.dialling import Dialled
    from outrider.nodes.joined_settings import merged_settings

    dialled = Dialled(join)
    try:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(dialled.open())
            order = TO_NODE.decode(await dialled.socket.receive())
            assert isinstance(order, NodeSetup)
            setup = await stack.enter_async_context(merged_settings(order, join.own))
            await _work(msgspec.structs.replace(setup, service_url=join.url), dialled.socket, starter)
    except OutriderError as error:
        await starter.note_failure(error)
    except Disconnected as end:
        log.warning("the service is gone: %s", end)


async def _work(setup: NodeSetup, socket: Socket, starter: Starter | None = None) -> None:
    """Run attempts until the service closes the connection. If an error keeps the node from starting, send the error to
    the service and raise it."""
    images = None if starter is None else ImageStore().names
    service = ServiceProxy(socket, setup.capacity, images=images, ending=None if starter is None else starter.ending)
    async with service.connected() as hung_up:
        failure: OutriderError | None = None
        try:
            await _run(setup, service, hung_up, starter)
        except OutriderError as error:
            failure = error
            service.fail(error)
            await asyncio.wait([hung_up])
    if failure is not None:
        raise failure


async def _run(setup: NodeSetup, service: ServiceProxy, hung_up: asyncio.Task[Any], starter: Starter | None) -> None:
    # Imported here, because the caller must first set the module search path that the service has sent.
    from outrider.api.gateway_server import serving_gateway
    from outrider.engines.pool.follower import PoolFollower
    from outrider.sandbox.host_paths import HostPaths
    from outrider.service.model_backends import open_models
    from outrider.sessions.node import LocalNode
    from outrider.store.artifacts import ArtifactStore

    config = Config.model_validate_json(setup.config).as_read_from(Path(setup.file) if setup.file else None)
    paths = await asyncio.to_thread(HostPaths.checked, config)
    failures = Failures()
    async with AsyncExitStack() as stack:
        models = await stack.enter_async_context(open_models(config, leader=service.leader, failures=failures))
        followers = {
            model: await stack.enter_async_context(PoolFollower(pool, service.forwarded(model), failures))
            for model, pool in models.pools.items()
        }
        node = await stack.enter_async_context(
            LocalNode(
                setup.name,
                config,
                backend=models.policy,
                frozen=models.frozen,
                store=service.store,
                # A node on another machine shares no folder with the service, so the node sends its artifacts to the
                # service.
                artifacts=ArtifactStore(config.data / "artifacts") if starter is None else service.artifacts,
                resources=service.resources,
                paths=paths,
                service_silence=service.silence,
                service_url=setup.service_url,
                failures=failures,
            )
        )
        await stack.enter_async_context(serving_gateway(node))
        await stack.enter_async_context(short_pauses(lambda: not node.stats().sessions, failures))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(service.run(node, followers), name="node")
            if starter is not None:
                await starter.note_work(service)
            await asyncio.wait([hung_up])
            if starter is not None:
                log.info("the service has hung up: %s", hung_up.result())
            running.cancel()


if __name__ == "__main__":
    main()
