"""Fake services for the runtimes `e2b` and `kubernetes` in this process, with the faults that tests inject."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
from aiohttp import web

from outrider.config import PodsConfig, SandboxesConfig
from outrider.lab.fakes.e2b_server.app import FakeE2B
from outrider.lab.fakes.kubernetes.api_server import ApiFailure, FakeApiServer, fake_cluster
from outrider.sandbox.runtimes.kubernetes.rights import RULES
from runtimes.clusters import IMAGE, needs_machine, python_image
from support.e2b import e2b

NODE = "outrider.node"
SESSION = "outrider.session"
PODS = PodsConfig(namespace="rl", queue_seconds=60)
AT_ONCE = {"Retry-After": "0"}


def abort(request: web.Request) -> None:
    """Break the connection of a request."""
    if request.transport is not None:
        request.transport.abort()


class Elsewhere(Protocol):
    """A fake service. `runtime` is the runtime of a task that uses the service. `busy` is the HTTP status with which
    the service refuses a sandbox for lack of room."""

    kind: str
    runtime: dict[str, Any]
    busy: int

    def labels(self) -> dict[str, Mapping[str, str]]:
        """Return the labels of all existing sandboxes, by name."""
        ...

    def made(self) -> int:
        """Return the number of sandboxes that were ever made."""
        ...

    def limit(self, room: int) -> None:
        """Allow at most `room` sandboxes."""
        ...

    async def lose(self, name: str) -> None:
        """End a sandbox, as a service may do without a request."""
        ...

    async def cut(self) -> None:
        """Break the connections to all tool servers."""
        ...

    def refuse(self, status: int, times: int) -> None:
        """Refuse the next `times` requests to make a sandbox."""
        ...

    def delay(self, seconds: float) -> None:
        """Delay the next request to make a sandbox."""
        ...

    def die(self) -> None:
        """Break all connections, now and until `revive`, without a reply."""
        ...

    def revive(self) -> None: ...


@dataclass
class BreakableE2B(FakeE2B):
    """A fake E2B server that breaks every connection while it is `dead`. `streams` has the requests that carry the
    output of tool servers."""

    dead: bool = False
    streams: list[web.Request] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.dead:
            abort(request)
            return web.Response()
        if request.path.endswith("/Start"):
            self.streams.append(request)
        return await super().handle(request)


class E2BElsewhere:
    kind = "e2b"
    busy = 429

    def __init__(self, server: BreakableE2B) -> None:
        self.server = server
        self.runtime: dict[str, Any] = {"kind": self.kind}

    def labels(self) -> dict[str, Mapping[str, str]]:
        return {id: one.metadata for id, one in self.server.sandboxes.items()}

    def made(self) -> int:
        return self.server.made

    def limit(self, room: int) -> None:
        self.server.room = room

    async def lose(self, name: str) -> None:
        await self.server.end(name)

    async def cut(self) -> None:
        for stream in self.server.streams:
            abort(stream)

    def refuse(self, status: int, times: int) -> None:
        async def fault(request: web.Request, reply: object) -> web.StreamResponse:
            return web.json_response({"code": status, "message": "not now"}, status=status, headers=AT_ONCE)

        self.server.faults["POST /sandboxes"].extend([fault] * times)

    def delay(self, seconds: float) -> None:
        async def fault(request: web.Request, reply: Callable[[], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
            await asyncio.sleep(seconds)
            return await reply()

        self.server.faults["POST /sandboxes"].append(fault)

    def die(self) -> None:
        self.server.dead = True
        for stream in self.server.streams:
            abort(stream)

    def revive(self) -> None:
        self.server.dead = False


class PodsElsewhere:
    kind = "kubernetes"
    busy = 503

    def __init__(self, server: FakeApiServer) -> None:
        self.server = server
        self.runtime: dict[str, Any] = {"kind": self.kind, "image": IMAGE}

    def labels(self) -> dict[str, Mapping[str, str]]:
        return {name: pod["metadata"]["labels"] for (_, name), pod in self.server.pods.items()}

    def made(self) -> int:
        return len(self.server.created)

    def limit(self, room: int) -> None:
        self.server.rules.quota = room

    async def lose(self, name: str) -> None:
        """Evict the pod, as a machine with too little memory does."""
        pod = self.server.pods["rl", name]
        await self.server.machine.kill(pod["metadata"]["uid"])
        status = {**pod["status"], "phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
        self.server._report(pod, status)

    async def cut(self) -> None:
        await self.server.machine.cut()

    def refuse(self, status: int, times: int) -> None:
        left = [times]

        def fault(request: web.Request) -> None:
            if request.method == "POST" and left[0]:
                left[0] -= 1
                raise ApiFailure(status, "Busy", "not now", Retry_After="0")

        self.server.rules.faults.append(fault)

    def delay(self, seconds: float) -> None:
        left = [seconds]

        async def fault(request: web.Request) -> None:
            if request.method == "POST" and left:
                await asyncio.sleep(left.pop())

        self.server.rules.faults.append(fault)

    def die(self) -> None:
        def fault(request: web.Request) -> web.Response:
            abort(request)
            return web.Response()

        self.server.rules.faults.append(fault)
        for request in (*self.server.watches, *self.server.machine.sockets.values()):
            abort(request)

    def revive(self) -> None:
        self.server.rules.faults.clear()


@asynccontextmanager
async def service_elsewhere(kind: str, environment: pytest.MonkeyPatch, folder: Path) -> AsyncIterator[Elsewhere]:
    """Yield a fake service of this kind. The environment leads clients to the service. Checks at the end that no
    sandbox is left."""
    here: Elsewhere
    if kind == "e2b":
        server = BreakableE2B()
        here = E2BElsewhere(server)
        async with e2b(environment, server=server):
            yield here
            assert here.labels() == {}
    else:
        needs_machine()
        async with fake_cluster({IMAGE: python_image()}) as cluster:
            cluster.rules.role = RULES
            config = folder / "kubeconfig"
            await asyncio.to_thread(config.write_text, cluster.kubeconfig())
            environment.setenv("KUBECONFIG", str(config))
            here = PodsElsewhere(cluster)
            yield here
            assert here.labels() == {}


def sandboxes(kind: str, **fields: Any) -> SandboxesConfig:
    """Return the settings of a node that uses this kind of sandbox."""
    pods = PODS if kind == "kubernetes" else PodsConfig()
    return SandboxesConfig(**{"kubernetes": pods, "starts_per_second": 100.0, **fields})
