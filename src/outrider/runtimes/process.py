"""Trusted code on the host itself: no isolation, the same tool server, and nothing left behind.

It does not know what it runs. Invariant: after `stop` every process that was started through it is dead, also one
that left its session and its parents.
"""

from __future__ import annotations

import asyncio
import posixpath
import sys
from typing import Self

from outrider.errors import RuntimeFailure
from outrider.runtimes.base import Availability, SandboxContext
from outrider.runtimes.bundle import compiled, server_command
from outrider.runtimes.hosted import HostedServer, Setup, clean_environment, shielded
from outrider.runtimes.marks import mark_of
from outrider.runtimes.served import ServedRuntime
from outrider.runtimes.toolclient import ToolClient
from outrider.spec import RuntimeSpec


class ProcessRuntime(ServedRuntime):
    """The folder `work` of the sandbox's own directory stands for the spec's workdir: a relative path, or an absolute
    one at or below the workdir, is mapped into it. Any other absolute path is the host's own, and so is every path
    that a command itself uses. `rootfs` is refused."""

    def __init__(self, spec: RuntimeSpec, context: SandboxContext) -> None:
        self._spec = spec
        self._work = str(context.directory / "work")
        self._mark = mark_of(context.directory)
        self._server: HostedServer | None = None
        self._stopped = False
        self._stopping = asyncio.Lock()
        self.endpoint = context.gateway_url.rstrip("/")

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> Self:
        return cls(spec, context)

    @classmethod
    def available(cls) -> Availability:
        if sys.platform != "linux":
            return Availability(ok=False, detail="needs Linux", hint="run Outrider on Linux, or in a Linux VM")
        return Availability(ok=True, detail="runs programs on this host, without isolation: trusted code only")

    @property
    def tools(self) -> ToolClient:
        if self._server is None or self._stopped:
            raise RuntimeFailure("the sandbox does not run")
        return self._server.tools

    def place(self, path: str) -> str:
        seen = self._seen(path)
        inside = posixpath.relpath(seen, self._spec.workdir)
        return seen if inside.startswith("..") else posixpath.normpath(posixpath.join(self._work, inside))

    def member(self, path: str) -> str:
        return self._seen(path).lstrip("/")

    def _seen(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._spec.workdir, path))

    async def start(self) -> None:
        if self._server is not None or self._stopped:
            raise RuntimeFailure("a sandbox starts once")
        if self._spec.rootfs is not None or self._spec.image is not None:
            raise RuntimeFailure("the process runtime has no root of its own", hint="use runtime kind 'namespace'")
        bytecode = await asyncio.to_thread(compiled, (), sys.executable, ())
        setup = Setup(
            env=clean_environment(self._spec.env, self._work),
            workdir=self._work,
            folders=[self._work],
            subreaper=True,
            mark=self._mark,
        )
        command = server_command(sys.executable)
        self._server = await HostedServer.start(command, bytecode, setup, namespace=False)

    async def stop(self) -> None:
        await shielded(self._stop)

    async def _stop(self) -> None:
        async with self._stopping:
            server, self._server = self._server, None
            self._stopped = True
            if server is not None:
                await server.stop()
