"""The default runtime: a rootless sandbox of namespaces, forked from the node's zygote in milliseconds.

Inside there is a throw-away root (the host's system folders, an image, or a folder the spec names), no network but a
loopback, and the model gateway behind 127.0.0.1. It does not know who uses it. Invariant: the tool server is the first
process of the sandbox's pid namespace, so that its death is the death of all, and `stop` waits for exactly that.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from outrider.errors import InvalidField, RequestError, RuntimeFailure, RuntimeUnavailable
from outrider.pythons.portable import PORTABLE_AT, portable_command, portable_python
from outrider.rootfs.store import ImageStore, known_image
from outrider.runtimes.base import Availability
from outrider.runtimes.kernel import cgroups
from outrider.runtimes.kernel.cgroups import Cgroups, Group
from outrider.runtimes.kernel.child import Child
from outrider.runtimes.kernel.process_marks import mark_of
from outrider.runtimes.namespace import plan as plans
from outrider.runtimes.namespace.user_ids import users
from outrider.runtimes.namespace.zygote import Zygote
from outrider.runtimes.probe_cache import Finder
from outrider.runtimes.sandbox_life import RootedRuntime
from outrider.runtimes.tool_server.client import ToolClient
from outrider.runtimes.tool_server.download import save_parts
from outrider.runtimes.tool_server.launch import BRIDGE_PORT, Setup, clean_environment, configure
from outrider.spec import MEBIBYTE, RuntimeSpec

LAYER_OVERHEAD = 2
"""An archive of many small files is larger than what they hold."""
PYTHONS = tuple(f"{folder}/python3" for folder in ("usr/local/bin", "usr/bin", "bin"))
TRY = """
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).unshare(0x7e020000):
    sys.exit(os.strerror(ctypes.get_errno()))
"""
PATIENCE_SECONDS = 0.5
PROBE = (sys.executable, "-I", "-c", TRY)
"""All the namespaces of a sandbox at once."""


class NamespaceRuntime(RootedRuntime):
    """Paths are the sandbox's own. What is written anywhere is gone with `stop`."""

    endpoint = f"http://127.0.0.1:{BRIDGE_PORT}"

    @classmethod
    def available(cls) -> Availability:
        try:
            POSSIBLE.find()
        except RuntimeUnavailable as error:
            return Availability(ok=False, detail=error.message, hint=error.hint)
        return Availability(ok=True, detail=f"user namespaces; limits by {limits_by(cgroups.find())}")

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        if spec.image is not None:
            known_image(spec.image)
        try:
            users(spec.users)
        except RuntimeUnavailable as error:
            raise InvalidField(error.message, field=error.field, hint=error.hint) from error

    async def _start(self) -> ToolClient:
        context = self._context
        host = context.host
        groups = await host.part(Cgroups)
        zygote = await host.part(Zygote)  # after them: a process that starts meanwhile would be in the way
        root, env = self._root(zygote)
        root, python = await _with_python(root)
        group = groups.make(context.directory.name, self._spec.resources)
        self._held.push_async_callback(group.remove)
        self._group = group
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                child, self._zygote_stands = await zygote.fork(self._plan(zygote, groups, root, group), theirs)
            except BaseException:  # also a cancel: what was begun is undone
                ours.close()
                raise
        tools = ToolClient(ours, child.log_tail)
        self._held.push_async_callback(tools.close)
        self._held.push_async_callback(_end, child, group)
        await tools.open()
        try:
            await configure(tools, self._setup(env, python, groups))
        except RuntimeFailure as error:
            if context.layer is not None and not self.starved():  # else it is nobody's but the host's
                error.inside = error.inside or await self._host_stands()
            raise
        return tools

    async def _host_stands(self) -> bool:
        return await self._zygote_stands()

    def _plan(self, zygote: Zygote, groups: Cgroups, root: plans.Root, group: Group) -> plans.Plan:
        spec, context = self._spec, self._context
        size, files = plans.room(spec.resources)
        several = users(spec.users)
        return plans.Plan(
            base=str(zygote.base),
            layers=root.layers,
            shown=(
                *root.shown,
                *((str(path), str(path)) for path in context.mounts),
                *((mount.source, mount.target or mount.source) for mount in spec.mounts),
            ),
            bytes=size,
            files=files,
            gateway=str(context.gateway_socket),
            cgroups=group.entrances,
            saved=str(context.layer or ""),
            rlimits=plans.rlimits(spec.resources, groups.hierarchies.folders, own_users=True),
            memory=plans.counted_memory(spec.resources, groups.hierarchies.folders),
            **(msgspec.structs.asdict(several) if several else {}),
        )

    def _root(self, zygote: Zygote) -> tuple[plans.Root, dict[str, str]]:
        """The root that the spec asks for, and what its image sets."""
        if self._spec.image is None and self._spec.rootfs is None:
            return zygote.host_root, {}
        if self._spec.image is None:
            return plans.image_root(self._rootfs(Path(self._spec.rootfs or ""))), {}
        store = ImageStore()
        try:
            image = store.image(self._spec.image)
        except RequestError as error:
            raise RuntimeUnavailable(error.message, hint=error.hint) from error
        return plans.image_root(store.root(image)), image.env

    def _rootfs(self, rootfs: Path) -> Path:
        """The spec's root folder, checked. An overlay can only be written to by the owner of what lies below."""
        if not rootfs.is_dir():
            raise RuntimeUnavailable(f"rootfs {rootfs} is not a folder")
        if rootfs.stat().st_uid != os.geteuid():
            raise RuntimeUnavailable(
                f"rootfs {rootfs} belongs to another user", hint="unpack it as the user that runs Outrider"
            )
        return rootfs

    def _setup(self, env: Mapping[str, str], python: list[str], groups: Cgroups) -> Setup:
        return Setup(
            env=clean_environment({**env, **self._spec.env}, "/root"),
            workdir=self._spec.workdir,
            folders=["/root", "/tmp", "/var/tmp", self._spec.workdir],
            bridge_port=BRIDGE_PORT,
            python=python,
            memory=plans.counted_memory(self._spec.resources, groups.hierarchies.folders),
            lifetime=self._spec.lifetime_seconds,
            mark=mark_of(self._context.directory),
        )

    async def save_layer(self, target: Path) -> None:
        """As in `Layered`; what runs inside is ended first. The file is only this user's."""
        size, _ = plans.room(self._spec.resources)
        await save_parts(self.tools, "save_layer", {}, target, limit=LAYER_OVERHEAD * size + MEBIBYTE)


async def _with_python(root: plans.Root) -> tuple[plans.Root, list[str]]:
    """Shows the portable interpreter in a root that has no Python of its own; how to start it there."""
    if root.shown or root.layers[1:] or _has_python(root.layers[0][0]):
        return root, []
    shown = (str(await asyncio.to_thread(portable_python)), PORTABLE_AT)
    return plans.Root(root.layers, (*root.shown, shown)), portable_command()


def _has_python(folder: str) -> bool:
    return any(os.path.lexists(f"{folder}/{path}") for path in PYTHONS)


async def _end(child: Child, group: Group) -> None:
    """The first process takes the others with it. Where that is slow, because they have made it wait for its turn
    behind them all, they are killed one by one."""
    child.kill()
    while not await child.ends_within(PATIENCE_SECONDS):
        await asyncio.to_thread(group.kill)
    child.bury()


def possible() -> None:
    """Raises RuntimeUnavailable when this user cannot make the namespaces of a sandbox here. Blocks."""
    if missing := plans.supported():
        raise RuntimeUnavailable(missing, hint="use another runtime, such as docker or apptainer")
    try:
        done = subprocess.run(PROBE, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeUnavailable(f"cannot see whether user namespaces work: {error}") from error
    if done.returncode != 0:
        raise RuntimeUnavailable(
            f"user namespaces are off here: {done.stderr.strip() or f'exit code {done.returncode}'}",
            hint="sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces=10000, "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container, allow unshare and mount (seccomp); "
            "or use runtime kind 'process-landlock', which isolates less",
        )


POSSIBLE = Finder(possible)


def limits_by(found: cgroups.Hierarchies) -> str:
    """Which limits are in force, in words."""
    missing = [name for name in cgroups.CONTROLLERS if name not in found.folders]
    instead = {
        "cpu": "cpus not limited",
        "memory": "memory counted by the tool server, and per process by rlimits",
        "pids": "processes by rlimits" if os.geteuid() else "processes not limited",
    }
    return "; ".join([str(found), *(instead[name] for name in missing)])
