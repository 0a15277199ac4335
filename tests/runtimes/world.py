"""Helpers that create sandboxes for tests, with a private folder and a model gateway on a Unix socket and on a port."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from outrider.config import PodsConfig
from outrider.sandbox.runtimes.base import Availability, Runtime, RuntimeKind, SandboxContext
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.runtimes.remote import RemoteLaunch
from outrider.sandbox.runtimes.tool_server.launch import Launch
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox
from outrider.spec import RuntimeSpec
from support.e2b import E2BProcess

from . import clusters, engines, sif_images

CONTAINERS = ("docker", "podman", "podman-rootless")
"""Kinds that `make test-real` runs, where `.ci/sandboxes` has started their engines."""
IN_CONTAINERS = [
    *(pytest.param(kind, marks=pytest.mark.real) for kind in ("docker", "podman-rootless", "apptainer")),
    # Nightly only, because podman has its user in common with docker and its engine in common with podman-rootless.
    pytest.param("podman", marks=[pytest.mark.real, pytest.mark.nightly]),
]
POD = pytest.param("kubernetes", marks=pytest.mark.real)
"""On the fake cluster, whose machine neither limits nor isolates."""
IN_E2B = pytest.param("e2b", marks=pytest.mark.deep)
ISOLATING = ["namespace", *IN_CONTAINERS]
"""Kinds that isolate untrusted programs from the host and from each other."""
KINDS = {
    "process": "outrider.sandbox.runtimes.host_process.process:ProcessRuntime",
    "process-landlock": "outrider.sandbox.runtimes.host_process.landlock:LandlockRuntime",
    "namespace": "outrider.sandbox.runtimes.namespace.runtime:NamespaceRuntime",
    "kubernetes": "outrider.sandbox.runtimes.kubernetes.runtime:KubernetesRuntime",
    "memory": "outrider.lab.fakes.memory_runtime.runtime:MemoryRuntime",
    "apptainer": "outrider.sandbox.runtimes.apptainer.runtime:ApptainerRuntime",
    "docker": "runtimes.engines:DOCKER",
    "gvisor": "runtimes.engines:GVISOR",
    "podman": "runtimes.engines:PODMAN",
    "podman-rootless": "runtimes.engines:ROOTLESS_PODMAN",
    "e2b": "outrider.sandbox.runtimes.e2b.runtime:E2BRuntime",
}
E2B = E2BProcess()


async def snapshot(sandbox: Runtime, folder: Path, *paths: str, alone: bool = False) -> bytes:
    """Return a sandbox's snapshot as bytes. `folder` is a folder of the test for the file."""
    target = folder / "snapshot"
    await sandbox.snapshot(paths, target, alone=alone)
    data = target.read_bytes()
    target.unlink()
    return data


@dataclass(frozen=True)
class KindOf:
    """A kind of runtime with a launch of the test's own. Its sandboxes are of the class `sandbox`."""

    launch: Launch | RemoteLaunch
    sandbox: Callable[[Any, RuntimeSpec, SandboxContext], ToolServerSandbox] = ToolServerSandbox

    def create(self, spec: RuntimeSpec, context: SandboxContext) -> ToolServerSandbox:
        return self.sandbox(self.launch, spec, context)

    def available(self) -> Availability:
        return Availability(ok=True, detail="")

    def check_spec(self, spec: RuntimeSpec) -> None: ...


class World:
    """Creates sandboxes below the host's folder. `made` lists all of them, and the fixture stops them."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.folder = host.folder
        self.socket = self.folder / "gateway.sock"
        self.socket.touch()
        self.url = "http://127.0.0.1:1"
        self.made: list[Runtime] = []
        self.environment = pytest.MonkeyPatch()

    def create(self, kind: str, **fields: Any) -> Runtime:
        """Return a sandbox that has not started."""
        module, name = KINDS[kind].split(":")
        runtime: RuntimeKind = getattr(importlib.import_module(module), name)
        if module == "runtimes.engines":
            fields = {"image": engines.prepared(kind, self.environment), **fields}
            self.folder.chmod(0o711)  # an engine of another user must be able to reach what it mounts
        if kind == "e2b":
            for variable, value in E2B.start().items():
                self.environment.setenv(variable, value)
        if kind == "kubernetes":
            self.environment.setenv("KUBECONFIG", str(clusters.kubeconfig(self.folder)))
            fields = {"image": clusters.IMAGE, **fields}
            if fields.get("mounts"):
                self.host.pods = PodsConfig(tools_image=clusters.TOOLS_IMAGE)
        if not (can := runtime.available()).ok:
            told = pytest.fail if kind == "namespace" and "CI" in os.environ else pytest.skip
            told(f"{kind}: {can.detail}")
        if kind == "apptainer" and not fields.keys() & {"image", "rootfs"}:
            fields["rootfs"] = str(sif_images.python_root())
        return self.create_with(runtime, kind=kind, **fields)

    def create_with(self, by: RuntimeKind, /, **fields: Any) -> Runtime:
        directory = self.folder / f"s{len(self.made)}"
        directory.mkdir()
        context = SandboxContext(
            session_id=directory.name,
            attempt=1,
            directory=directory,
            host=self.host,
            gateway_url=self.url,
            gateway_socket=self.socket,
            mounts=fields.pop("mounts", ()),
            layer=fields.pop("layer", None),
            gpus=fields.pop("gpus", ()),
        )
        fields["mounts"] = fields.pop("named", [])
        runtime = by.create(RuntimeSpec(**fields), context)
        self.made.append(runtime)
        return runtime

    async def start(self, kind: str, **fields: Any) -> Runtime:
        runtime = self.create(kind, **fields)
        await runtime.start()
        return runtime

    @contextlib.asynccontextmanager
    async def gateway(self, handler: Callable[[web.Request], Any]) -> AsyncIterator[None]:
        """Serve `handler` at every path, on the socket and on a port of this host."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        self.socket.unlink()
        await web.UnixSite(runner, str(self.socket)).start()
        port = web.TCPSite(runner, "127.0.0.1", 0)
        await port.start()
        assert port._server is not None
        self.url = f"http://127.0.0.1:{port._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]  # asyncio's server, typed abstractly
        try:
            yield
        finally:
            await runner.cleanup()
