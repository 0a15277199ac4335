"""The default runtime: a rootless sandbox of namespaces, made by bubblewrap in milliseconds.

Inside there is a throw-away root (the host's system folders, or a folder the spec names), no network but a loopback,
and the model gateway's socket behind 127.0.0.1. It does not know who uses it. Invariant: the tool server is the first
process of the sandbox's pid namespace, so that its death is the death of all, and `stop` waits for exactly that.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import sys
from pathlib import Path
from typing import Self

from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.runtimes import bubblewrap
from outrider.runtimes.base import Availability, SandboxContext
from outrider.runtimes.bundle import compiled, server_command
from outrider.runtimes.hosted import INFO_FD, HostedServer, Setup, clean_environment, shielded
from outrider.runtimes.served import ServedRuntime
from outrider.runtimes.toolclient import ToolClient
from outrider.spec import RuntimeSpec

BRIDGE_PORT = 61080
"""Where the gateway listens inside: above Linux's dynamic ports and what programs commonly choose."""
BRIDGE_SOCKET = "/run/outrider/gateway.sock"
SYSTEM_PYTHON = "/usr/bin/python3"


class NamespaceRuntime(ServedRuntime):
    """Paths are the sandbox's own. What is written anywhere is gone with `stop`."""

    endpoint = f"http://127.0.0.1:{BRIDGE_PORT}"

    def __init__(self, spec: RuntimeSpec, context: SandboxContext) -> None:
        self._spec = spec
        self._context = context
        self._server: HostedServer | None = None
        self._stopped = False
        self._stopping = asyncio.Lock()

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> Self:
        return cls(spec, context)

    @classmethod
    def available(cls) -> Availability:
        try:
            found = bubblewrap.find()
        except RuntimeUnavailable as error:
            return Availability(ok=False, detail=error.message, hint=error.hint)
        layer = "with" if found.overlay else "without"
        return Availability(ok=True, detail=f"bubblewrap {found.version} at {found.path}, {layer} overlays")

    @property
    def tools(self) -> ToolClient:
        if self._server is None or self._stopped:
            raise RuntimeFailure("the sandbox does not run")
        return self._server.tools

    def place(self, path: str) -> str:
        return posixpath.join(self._spec.workdir, path)

    def member(self, path: str) -> str:
        return posixpath.normpath(self.place(path)).lstrip("/")

    async def start(self) -> None:
        if self._server is not None or self._stopped:
            raise RuntimeFailure("a sandbox starts once")
        bwrap = await asyncio.to_thread(bubblewrap.find)
        rootfs = self._rootfs(bwrap)
        root = bubblewrap.arguments(bwrap, rootfs)
        interpreter, bound, bytecode = await asyncio.to_thread(choose_python, tuple(root), rootfs)
        command = [
            *root,
            *bubblewrap.read_only([*self._context.mounts, *bound]),
            *("--bind", str(self._context.gateway_socket), BRIDGE_SOCKET),
            *("--info-fd", str(INFO_FD)),
            "--",
            *server_command(interpreter),
        ]
        self._server = await HostedServer.start(command, bytecode, self._setup(rootfs), namespace=True)

    def _rootfs(self, bwrap: bubblewrap.Bubblewrap) -> str | None:
        """The spec's root folder, checked. An overlay can only be written to by the owner of what lies below."""
        rootfs = self._spec.rootfs
        if rootfs is None:
            return None
        if not Path(rootfs).is_dir():
            raise RuntimeUnavailable(f"rootfs {rootfs} is not a folder")
        if Path(rootfs).stat().st_uid != os.getuid():
            raise RuntimeUnavailable(
                f"rootfs {rootfs} belongs to another user", hint="unpack it as the user that runs Outrider"
            )
        return rootfs

    def _setup(self, rootfs: str | None) -> Setup:
        workdir = self._spec.workdir
        return Setup(
            env=clean_environment(self._spec.env, "/root"),
            workdir=workdir,
            files=bubblewrap.host_etc() if rootfs is None else {},
            folders=["/root", "/var/tmp", workdir],
            bridge_port=BRIDGE_PORT,
            bridge_socket=BRIDGE_SOCKET,
        )

    async def stop(self) -> None:
        await shielded(self._stop)

    async def _stop(self) -> None:
        async with self._stopping:
            server, self._server = self._server, None
            self._stopped = True
            if server is not None:
                await server.stop()


def choose_python(root: tuple[str, ...], rootfs: str | None) -> tuple[str, list[Path], bytes]:
    """The interpreter inside, the host folders it needs shown there, and the server's bytecode for it.

    The root's own Python if there is one, else the one that runs us. Blocks when it sees a root for the first time.
    """
    found = Path(rootfs or "/", SYSTEM_PYTHON.lstrip("/"))
    try:
        return SYSTEM_PYTHON, [], compiled((*root, "--"), SYSTEM_PYTHON, stamp(found))
    except RuntimeUnavailable:
        prefix = Path(sys.base_prefix)
        interpreter = prefix / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        enter = (*root, *bubblewrap.read_only([prefix]), "--")
        return str(interpreter), [prefix], compiled(enter, str(interpreter), stamp(interpreter))


def stamp(path: Path) -> tuple[int, ...]:
    """Tells one file from a later one at the same path."""
    try:
        status = path.lstat()
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_mtime_ns)
