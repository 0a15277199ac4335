"""The docker and podman runtimes: a container per sandbox, by the daemon's API, with our tool server as its first
process.

The two differ in the daemon only; `gvisor` is docker with the runtime runsc. It does not know who uses it. Invariant:
what `start` asked a daemon for is gone, by that daemon's own word, when `stop` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from outrider.errors import InvalidField, RuntimeUnavailable
from outrider.pythons.portable import PORTABLE_AT
from outrider.runtimes.base import Availability
from outrider.runtimes.containers import server as container_server
from outrider.runtimes.containers.body import ContainerPlan, Shown
from outrider.runtimes.containers.daemon import (
    NODE_LABEL,
    SESSION_LABEL,
    ContainerDaemon,
    DockerDaemon,
    PodmanDaemon,
)
from outrider.runtimes.containers.server import TOOLS_AT, ContainedServer
from outrider.runtimes.kernel.process_marks import mark_of
from outrider.runtimes.namespace.plan import counted_memory
from outrider.runtimes.namespace.submounts import inner_mounts
from outrider.runtimes.sandbox_life import RootedRuntime
from outrider.runtimes.tool_server.client import ToolClient
from outrider.runtimes.tool_server.launch import BRIDGE_PORT, Setup, clean_environment
from outrider.spec import MEBIBYTE, RuntimeSpec

if TYPE_CHECKING:
    from outrider.runtimes.containers.client import LocalImage

HOME = "/root"
BRIDGE_SOCKET = "/run/outrider/gateway.sock"


class ContainerRuntime(RootedRuntime):
    """Paths are the container's own. What is written anywhere is gone with `stop`."""

    endpoint = f"http://127.0.0.1:{BRIDGE_PORT}"
    daemon: ClassVar[type[ContainerDaemon]]
    oci_runtime: ClassVar[str | None] = None
    _image_id = ""

    @classmethod
    def available(cls) -> Availability:
        return cls.daemon.available()

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        if spec.rootfs is not None:
            raise InvalidField(
                f"{spec.kind!r} sandboxes are made of images",
                field="task.runtime.rootfs",
                hint="name one in task.runtime.image, or use runtime kind 'namespace'",
            )
        if spec.image is None:
            raise InvalidField(
                f"{spec.kind!r} sandboxes need an image",
                field="task.runtime.image",
                hint=f"name one that `{cls.daemon.name} images` lists",
            )

    async def _start(self) -> ToolClient:
        image = self._image()
        daemon = await self._context.host.part(self.daemon)
        found = await daemon.image(image)
        self._image_id = found.id
        folder, bytecode = await asyncio.to_thread(container_server.interpreter)
        server = ContainedServer(self._context.directory / "tools")
        self._held.push_async_callback(server.close)
        memory = counted_memory(self._spec.resources, ("memory",) if daemon.limits else ())
        setup = msgspec.structs.replace(self._setup(found), memory=memory)
        plan = self._plan(found, setup, [Shown(folder, PORTABLE_AT), Shown(server.folder, TOOLS_AT)], daemon.limits)
        name = f"{self._context.host.name}-{self._context.directory.name}"
        try:
            await daemon.run(name, plan.body)
        finally:  # also where the daemon has only half made it
            self._held.push_async_callback(daemon.remove, name)
        self._out_of_memory = partial(daemon.out_of_memory, name)
        return await server.connect(bytecode, setup, lambda: daemon.runs(name))

    async def _host_stands(self) -> bool:
        return await self._out_of_memory() is not None

    async def _died_inside(self) -> bool:
        return await self._out_of_memory() or await super()._died_inside()

    async def current(self) -> bool:
        daemon = await self._context.host.part(self.daemon)
        return (await daemon.image(self._image())).id == self._image_id

    def _image(self) -> str:
        if self._spec.rootfs is not None:
            raise RuntimeUnavailable(
                f"the {self.daemon.name} runtime has images, no root folders", hint="use runtime kind 'namespace'"
            )
        if self._spec.image is None:
            raise RuntimeUnavailable(
                f"the {self.daemon.name} runtime needs an image",
                field="task.runtime.image",
                hint=f"name one that `{self.daemon.name} images` lists",
            )
        return self._spec.image

    def _setup(self, image: LocalImage) -> Setup:
        return Setup(
            env=clean_environment({**image.env, **self._spec.env}, HOME),
            workdir=self._spec.workdir,
            folders=[HOME, "/tmp", "/var/tmp", self._spec.workdir],
            bridge_port=BRIDGE_PORT,
            bridge_socket=BRIDGE_SOCKET,
            lifetime=self._spec.lifetime_seconds,
            mark=mark_of(self._context.directory),
        )

    def _plan(self, image: LocalImage, setup: Setup, ours: list[Shown], limits: bool) -> ContainerPlan:
        context = self._context
        with contextlib.suppress(PermissionError):  # its folder is private, and root inside may be another user
            context.gateway_socket.chmod(0o666)
        shown = [
            *(Shown(path, str(path)) for path in context.mounts),
            *(Shown(Path(one.source), one.target or one.source) for one in self._spec.mounts),
            Shown(context.gateway_socket, BRIDGE_SOCKET),
            *ours,
        ]
        inner = inner_mounts((one.source, one.target) for one in shown)
        shown = [*(Shown(source, target) for source, target in inner), *shown]
        return ContainerPlan(
            image=image.id,
            command=container_server.command(self._spec.resources.disk_mb * MEBIBYTE, setup.memory),
            env=setup.marking(),
            labels={NODE_LABEL: context.host.name, SESSION_LABEL: context.session_id},
            shown=tuple({one.target: one for one in shown}.values()),
            resources=self._spec.resources,
            limits=limits,
            users=self._spec.users,
            oci_runtime=self.oci_runtime,
        )


class DockerRuntime(ContainerRuntime):
    daemon = DockerDaemon


class PodmanRuntime(ContainerRuntime):
    daemon = PodmanDaemon


class GvisorRuntime(ContainerRuntime):
    """A kernel of its own, written in Go, between the sandbox and the host's."""

    daemon = DockerDaemon
    oci_runtime = "runsc"

    @classmethod
    def available(cls) -> Availability:
        can = super().available()
        if not can.ok or cls.oci_runtime in cls.daemon.oci_runtimes():
            return can
        return Availability(
            ok=False,
            detail=f"no runtime {cls.oci_runtime} in {can.detail}",
            hint="install gVisor and name it in dockerd's daemon.json, with runtimeArgs --host-uds=open",
        )
