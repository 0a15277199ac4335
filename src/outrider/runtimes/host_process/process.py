"""Trusted code on the host itself: no isolation, the same tool server, and nothing left behind.

It does not know what it runs. Invariant: after `stop` every process that was started through it is dead, also one
that left its session and its parents.
"""

from __future__ import annotations

import asyncio
import posixpath
import sys
from collections.abc import Mapping, Sequence

import msgspec

from outrider.errors import InvalidField
from outrider.runtimes.base import Availability, SandboxContext
from outrider.runtimes.kernel.cgroups import Cgroups
from outrider.runtimes.kernel.process_marks import mark_of
from outrider.runtimes.namespace.plan import counted_memory, rlimits
from outrider.runtimes.sandbox_life import HeldRuntime
from outrider.runtimes.tool_server.bundle import compiled, server_command
from outrider.runtimes.tool_server.client import ToolClient
from outrider.runtimes.tool_server.launch import HostedServer, Setup, clean_environment
from outrider.spec import RuntimeSpec


class ProcessRuntime(HeldRuntime):
    """The folder `work` of the sandbox's own directory stands for the spec's workdir: a relative path, or an absolute
    one at or below the workdir, is mapped into it. Any other absolute path is the host's own, and so is every path
    that a command itself uses. `rootfs`, `image` and `mounts` are refused."""

    killable = True

    def __init__(self, spec: RuntimeSpec, context: SandboxContext) -> None:
        super().__init__(spec, context)
        self._work = str(context.directory / "work")
        self.scratch = str(context.directory / "tmp")
        self.endpoint = context.gateway_url.rstrip("/")

    @classmethod
    def available(cls) -> Availability:
        if sys.platform != "linux":
            return Availability(ok=False, detail="needs Linux", hint="run Outrider on Linux, or in a Linux VM")
        return Availability(ok=True, detail="runs programs on this host, without isolation: trusted code only")

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        for name in ("rootfs", "image", "mounts", "users"):
            if getattr(spec, name) != RuntimeSpec.model_fields[name].get_default(call_default_factory=True):
                raise InvalidField(
                    f"{spec.kind!r} sandboxes have the host's own files and user",
                    field=f"task.runtime.{name}",
                    hint="leave it out, or use runtime kind 'namespace'",
                )

    def place(self, path: str) -> str:
        seen = self._seen(path)
        inside = posixpath.relpath(seen, self._spec.workdir)
        return seen if f"{inside}/".startswith("../") else posixpath.normpath(posixpath.join(self._work, inside))

    def member(self, path: str) -> str:
        return self._seen(path).lstrip("/")

    def _seen(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._spec.workdir, path))

    def outermost(self, paths: Sequence[str]) -> list[str]:
        """Without those that are the host's own: another sandbox has them already."""
        return [path for path in super().outermost(paths) if f"{self.place(path)}/".startswith(f"{self._work}/")]

    async def _start(self) -> ToolClient:
        groups = await self._context.host.part(Cgroups)
        group = groups.make(self._context.directory.name, self._spec.resources)
        self._held.push_async_callback(group.remove)
        self._group = group
        bytecode = await asyncio.to_thread(compiled, (), sys.executable, ())
        resources, controllers = self._spec.resources, groups.hierarchies.folders
        setup = msgspec.structs.replace(self._setup(), memory=counted_memory(resources, controllers))
        command, code = self._program(bytecode, rlimits(resources, controllers), setup.memory)
        server = await HostedServer.start(command, code, setup, group=group)
        self._held.push_async_callback(server.stop)
        self._server = server
        return server.tools

    def _server_stopped(self) -> bool:
        return self._server.stopped_by_signal()

    def _program(self, bytecode: bytes, limits: Mapping[str, int], memory: int) -> tuple[list[str], bytes]:
        """The command that becomes the tool server, and its code. `memory` is what `Setup.memory` says."""
        return server_command(sys.executable), bytecode

    def _setup(self) -> Setup:
        return Setup(
            env=clean_environment({"TMPDIR": self.scratch, **self._spec.env}, self._work),
            workdir=self._work,
            folders=[self._work, self.scratch],
            subreaper=True,
            lifetime=self._spec.lifetime_seconds,
            mark=mark_of(self._context.directory),
        )
