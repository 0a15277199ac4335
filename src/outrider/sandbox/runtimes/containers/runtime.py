"""The runtimes `docker`, `podman` and `gvisor`. A sandbox is one container, which the daemon's API creates. Our tool
server is its first process.

`docker` and `podman` differ only in their daemon. `gvisor` is docker with the OCI runtime runsc. Invariant: when `stop`
returns, the daemon has confirmed that the sandbox's container is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from outrider.errors import InvalidField
from outrider.sandbox.pythons.portable import PORTABLE_AT
from outrider.sandbox.runtimes.base import Availability, SandboxContext
from outrider.sandbox.runtimes.containers.create_request import ContainerRequest, HostMount
from outrider.sandbox.runtimes.containers.daemon import (
    DOCKER_ENGINE,
    NODE_LABEL,
    PODMAN_ENGINE,
    SESSION_LABEL,
    ContainerEngine,
)
from outrider.sandbox.runtimes.containers.tool_socket import TOOLS_AT, ToolSocket, command
from outrider.sandbox.runtimes.kernel.mounts import inner_mounts
from outrider.sandbox.runtimes.limits import counted_memory
from outrider.sandbox.runtimes.tool_server.bundle import portable_server
from outrider.sandbox.runtimes.tool_server.launch import (
    GATEWAY,
    RunningServer,
    ToolServerSetup,
    died_inside,
    rooted_setup,
    undone,
)
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox
from outrider.spec import MEBIBYTE, RuntimeSpec

if TYPE_CHECKING:
    from outrider.sandbox.runtimes.containers.docker_api import LocalImage

BRIDGE_SOCKET = f"{TOOLS_AT}/{GATEWAY}"


@dataclass(frozen=True)
class ContainerRuntime:
    """A kind whose sandboxes are containers of `engine`. `oci_runtime` is the OCI runtime that starts them, or None for
    the daemon's default. The methods of a sandbox take paths in the container. `stop` discards all files that programs
    have written."""

    engine: ContainerEngine
    oci_runtime: str | None = None
    gives_gpus: ClassVar[bool] = True
    filters_network: ClassVar[bool] = True

    def create(self, spec: RuntimeSpec, context: SandboxContext) -> ToolServerSandbox:
        return ToolServerSandbox(partial(launch, self), spec, context)

    def available(self) -> Availability:
        can = self.engine.available()
        if not can.ok or self.oci_runtime is None or self.oci_runtime in self.engine.oci_runtimes():
            return can
        return Availability(
            ok=False,
            detail=f"no runtime {self.oci_runtime} in {can.detail}",
            hint="install gVisor and name it in dockerd's daemon.json, with runtimeArgs --host-uds=open",
        )

    def check_spec(self, spec: RuntimeSpec) -> None:
        self.image_name(spec)

    def image_name(self, spec: RuntimeSpec) -> str:
        """Return the name of the spec's image. Raises InvalidField if the spec has no image."""
        if spec.rootfs is not None:
            raise InvalidField(
                f"{spec.kind!r} sandboxes are made of images",
                field="task.runtime.rootfs",
                hint="name an image in task.runtime.image, or use runtime kind 'namespace'",
            )
        if spec.image is None:
            raise InvalidField(
                f"{spec.kind!r} sandboxes need an image",
                field="task.runtime.image",
                hint=f"name an image that `{self.engine.name} images` lists",
            )
        return spec.image


DOCKER = ContainerRuntime(DOCKER_ENGINE)
PODMAN = ContainerRuntime(PODMAN_ENGINE)
GVISOR = ContainerRuntime(DOCKER_ENGINE, oci_runtime="runsc")
"""The kind `gvisor`. gVisor is a kernel written in Go, which runs between the sandbox and the host's kernel."""


@asynccontextmanager
async def launch(kind: ContainerRuntime, spec: RuntimeSpec, context: SandboxContext) -> AsyncIterator[RunningServer]:
    """Run a container with the daemon. See tool_server/launch.py."""
    image_name = kind.image_name(spec)
    daemon = await context.host.part(kind.engine.daemon)
    image = await daemon.image(image_name)
    python, bytecode = await asyncio.to_thread(portable_server)
    memory = counted_memory(spec.resources, ("memory",) if daemon.limits else ())
    setup = rooted_setup(spec, context, image.env, memory=memory, bridge_socket=BRIDGE_SOCKET)
    async with AsyncExitStack() as undo:
        server = ToolSocket(context.directory / "tools", context.gateway_socket)
        undo.push_async_callback(undone, context.directory.name, server.close)
        ours = [HostMount(python, PORTABLE_AT), HostMount(server.folder, TOOLS_AT)]
        plan = await asyncio.to_thread(_plan, kind, spec, context, image, setup, ours, limits=daemon.limits)
        name = f"{context.host.name}-{context.directory.name}"
        # Registered before `run`, because a `run` that fails may have created the container.
        undo.push_async_callback(undone, context.directory.name, partial(daemon.remove, name))
        await daemon.run(name, plan)
        tools = await server.connect(bytecode, setup, partial(daemon.runs, name))

        async def ended_inside() -> bool:
            out_of_memory = await daemon.out_of_memory(name)
            # None means that the daemon does not respond or that somebody removed the container. In both cases, the
            # cause was outside the sandbox.
            return out_of_memory is not None and (out_of_memory or died_inside(tools, None))

        async def image_is_current() -> bool:
            return (await daemon.image(image_name)).id == image.id

        yield RunningServer(tools=tools, ended_inside=ended_inside, image_is_current=image_is_current)


def _plan(
    kind: ContainerRuntime,
    spec: RuntimeSpec,
    context: SandboxContext,
    image: LocalImage,
    setup: ToolServerSetup,
    ours: Sequence[HostMount],
    *,
    limits: bool,
) -> ContainerRequest:
    """Return the request for a container. The call blocks, because it reads this machine's list of mounts."""
    shown = [
        *(HostMount(path, str(path)) for path in context.mounts),
        *(HostMount(Path(one.source), one.target or one.source) for one in spec.mounts),
        *ours,
    ]
    inner = inner_mounts((one.source, one.target) for one in shown)
    shown = [*(HostMount(source, target) for source, target in inner), *shown]
    return ContainerRequest(
        image=image.id,
        command=command(spec.resources.disk_mb * MEBIBYTE, setup.memory),
        env=setup.marking(),
        labels={NODE_LABEL: context.host.name, SESSION_LABEL: context.session_id},
        shown=tuple({one.target: one for one in shown}.values()),
        resources=spec.resources,
        limits=limits,
        users=spec.users or 1,
        oci_runtime=kind.oci_runtime,
        gpus=context.gpus,
    )
