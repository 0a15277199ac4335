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
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from outrider.errors import RequestError, RuntimeFailure, RuntimeUnavailable
from outrider.rootfs.store import ImageStore
from outrider.runtimes import bubblewrap
from outrider.runtimes.base import Availability, SandboxContext
from outrider.runtimes.bundle import compiled, server_command
from outrider.runtimes.hosted import INFO_FD, HostedServer, Setup, clean_environment, shielded
from outrider.runtimes.marks import mark_of
from outrider.runtimes.served import ServedRuntime
from outrider.runtimes.toolclient import ToolClient
from outrider.spec import RuntimeSpec

BRIDGE_PORT = 61080
"""Where the gateway listens inside: above Linux's dynamic ports and what programs commonly choose."""
BRIDGE_SOCKET = "/run/outrider/gateway.sock"
SYSTEM_PYTHON = "/usr/bin/python3"
MAX_KNOWN = 64


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
        bwrap = bubblewrap.FINDER.known
        if bwrap is None:
            bwrap = await asyncio.to_thread(bubblewrap.find)
        rootfs, env = self._root()
        root = bubblewrap.arguments(bwrap, rootfs)
        place = PYTHONS.known(root, rootfs)
        if place is None:
            place = await asyncio.to_thread(PYTHONS.choose, root, rootfs)
        setup = self._setup(rootfs, env)
        command = [
            *root,
            *bubblewrap.read_only([*self._context.mounts, *place.mounts]),
            *("--bind", str(self._context.gateway_socket), BRIDGE_SOCKET),
            *(word for name, value in setup.marking().items() for word in ("--setenv", name, value)),
            *("--info-fd", str(INFO_FD)),
            "--",
            *server_command(place.interpreter),
        ]
        self._server = await HostedServer.start(command, place.bytecode, setup, namespace=True)

    def _root(self) -> tuple[str | None, dict[str, str]]:
        """The root folder that the spec asks for, None for the host's system folders, and what its image sets."""
        if self._spec.image is None:
            return self._rootfs(), {}
        store = ImageStore()
        try:
            image = store.image(self._spec.image)
        except RequestError as error:
            raise RuntimeUnavailable(error.message, hint=error.hint) from error
        return str(store.root(image)), image.env

    def _rootfs(self) -> str | None:
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

    def _setup(self, rootfs: str | None, env: Mapping[str, str]) -> Setup:
        workdir = self._spec.workdir
        return Setup(
            env=clean_environment({**env, **self._spec.env}, "/root"),
            workdir=workdir,
            files=bubblewrap.host_etc() if rootfs is None else {},
            folders=["/root", "/var/tmp", workdir],
            bridge_port=BRIDGE_PORT,
            bridge_socket=BRIDGE_SOCKET,
            mark=mark_of(self._context.directory),
        )

    async def stop(self) -> None:
        await shielded(self._stop)

    async def _stop(self) -> None:
        async with self._stopping:
            server, self._server = self._server, None
            self._stopped = True
            if server is not None:
                await server.stop()


class Python(msgspec.Struct, frozen=True):
    """What runs the tool server in a root: the interpreter's path inside, the host folders shown there for it, and the
    server's bytecode."""

    interpreter: str
    mounts: tuple[Path, ...]
    bytecode: bytes


class Pythons:
    """The interpreter of each root: its own Python if there is one, else the one that runs us."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, ...], tuple[int, ...]], Python] = {}

    def known(self, root: tuple[str, ...], rootfs: str | None) -> Python | None:
        """What was chosen for this root, if its own Python has not changed since."""
        return self._known.get((root, stamp(_own(rootfs))))

    def choose(self, root: tuple[str, ...], rootfs: str | None) -> Python:
        """Looks inside, and blocks for it. Raises RuntimeUnavailable."""
        own = stamp(_own(rootfs))
        try:
            chosen = Python(SYSTEM_PYTHON, (), compiled((*root, "--"), SYSTEM_PYTHON, own))
        except RuntimeUnavailable:
            prefix = Path(sys.base_prefix)
            interpreter = prefix / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
            enter = (*root, *bubblewrap.read_only([prefix]), "--")
            chosen = Python(str(interpreter), (prefix,), compiled(enter, str(interpreter), stamp(interpreter)))
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[root, own] = chosen
        return chosen


PYTHONS = Pythons()


def _own(rootfs: str | None) -> Path:
    return Path(rootfs or "/", SYSTEM_PYTHON.lstrip("/"))


def stamp(path: Path) -> tuple[int, ...]:
    """Tells one file from a later one at the same path."""
    try:
        status = path.lstat()
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_mtime_ns)
