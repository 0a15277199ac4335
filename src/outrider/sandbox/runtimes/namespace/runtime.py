"""The default runtime. A sandbox is made of namespaces, without root privileges, and is forked from the node's zygote
in milliseconds.

The root of a sandbox consists of the host's system folders, an image, or a folder that the spec names. Changes to it
are thrown away. The only network is a loopback, with the model gateway at 127.0.0.1. Invariant: the tool server is the
first process of the sandbox's pid namespace. Its exit kills all other processes of the sandbox, and `stop` waits for
this exit.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from outrider.errors import InvalidField, RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.pythons.portable import PORTABLE_AT, portable_command, portable_python
from outrider.sandbox.rootfs.owners import MOST_USERS, ONE_OWNER, Ownership
from outrider.sandbox.rootfs.store import ImageStore, RootImage, known_image
from outrider.sandbox.runtimes.base import Availability, SandboxContext
from outrider.sandbox.runtimes.kernel import cgroups
from outrider.sandbox.runtimes.kernel.cgroups import Cgroups, ControlGroup
from outrider.sandbox.runtimes.kernel.child import Child
from outrider.sandbox.runtimes.kernel.mounts import inner_mounts
from outrider.sandbox.runtimes.limits import counted_memory, limits_in_words, rlimits, writable_bounds
from outrider.sandbox.runtimes.namespace.plan import Plan, Root, image_root, inner_of, unsupported
from outrider.sandbox.runtimes.namespace.user_ids import UserIds, user_ids
from outrider.sandbox.runtimes.namespace.zygote import ZygoteClient
from outrider.sandbox.runtimes.node_host import ID_FILES
from outrider.sandbox.runtimes.nvidia import NVIDIA, GpuFiles, NvidiaDriver
from outrider.sandbox.runtimes.probe_cache import ProbeCache
from outrider.sandbox.runtimes.tool_server.client import ToolClient
from outrider.sandbox.runtimes.tool_server.launch import (
    RunningServer,
    configure,
    connection,
    died_inside,
    rooted_setup,
    undone,
)
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox
from outrider.spec import MEBIBYTE, RuntimeSpec

LAYER_OVERHEAD = 2
"""An archive of many small files may be this many times larger than the files."""
PYTHONS = tuple(f"{folder}/python3" for folder in ("usr/local/bin", "usr/bin", "bin"))
UNSHARE_ALL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x7e020000):
    sys.exit(os.strerror(ctypes.get_errno()))
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if libc.mount(None, b"/", None, 0x44000, None) or libc.mount(b"proc", b"/proc", b"proc", 0, None):
    sys.exit("no /proc can be mounted in them (" + os.strerror(ctypes.get_errno()) + ")")
"""
"""Python code that creates all namespaces of a sandbox at once, and mounts /proc. In a container whose own /proc is
masked, this mount fails."""
NO_OVERLAY = "mount overlay"
"""Text in the error message if a sandbox's writable layer cannot be mounted."""
DEATH_SECONDS = 0.5
"""Seconds that the killed first process of a namespace has to exit, before the namespace's other processes are killed
one by one."""


class NamespaceRuntime:
    """The kind `namespace`. Paths passed to the methods of a sandbox are paths inside the sandbox. `stop` discards
    everything written."""

    saves_layers = True
    gives_gpus = True
    filters_network = True
    uses_image_store = True

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> ToolServerSandbox:
        return ToolServerSandbox(launch, spec, context)

    @classmethod
    def available(cls) -> Availability:
        return Availability.found(_found)

    @classmethod
    def check_spec(cls, spec: RuntimeSpec, *, id_files: Mapping[str, Path] = ID_FILES) -> None:
        image = None if spec.image is None else known_image(spec.image)
        try:
            ids_of(spec, image, id_files)
        except RuntimeUnavailable as error:
            raise InvalidField(error.message, field=error.field, hint=error.hint) from error


def _found() -> str:
    """Return a text about what sandboxes of this kind use on this machine. Raises RuntimeUnavailable."""
    USER_NAMESPACES.get()
    return f"user namespaces; limits by {limits_in_words(cgroups.find())}"


@asynccontextmanager
async def launch(
    spec: RuntimeSpec, context: SandboxContext, *, driver: NvidiaDriver = NVIDIA
) -> AsyncIterator[RunningServer]:
    """Fork a sandbox from the node's zygote. See tool_server/launch.py."""
    name = context.directory.name
    groups = await context.host.part(Cgroups)
    # The control groups are opened before the zygote starts. With version 2, opening them moves the processes of our
    # own group to another group, one by one. A process that starts meanwhile would not be moved.
    zygote = await context.host.part(ZygoteClient)
    files = await asyncio.to_thread(_host_files, spec, context, zygote.host_root, driver)
    gpus, root = files.gpus, files.root
    shown, python = gpus.libraries, list[str]()
    if not files.has_python:
        portable = (str(await asyncio.to_thread(portable_python)), PORTABLE_AT)
        shown, python = (portable, *shown), portable_command()
    controllers = groups.hierarchies.folders
    memory = counted_memory(spec.resources, controllers)
    most_bytes, most_files = writable_bounds(spec.resources)
    if files.owners:
        most_bytes, most_files = most_bytes + files.owned.bytes, most_files + files.owned.entries
    async with AsyncExitStack() as undo:
        group = groups.make(name, spec.resources)
        undo.push_async_callback(undone, name, group.remove)
        plan = Plan(
            base=str(zygote.base),
            layers=root.layers,
            folders=root.folders,
            inner=inner_of(root, zygote.mounts()),
            shown=(*shown, *((str(path), str(path)) for path in context.mounts)),
            named=tuple((mount.source, mount.target or mount.source) for mount in spec.mounts),
            devices=gpus.devices,
            bytes=most_bytes,
            files=most_files,
            gateway=str(context.gateway_socket),
            cgroups=group.entrances,
            owners=files.owners,
            saved=str(context.layer or ""),
            rlimits=rlimits(spec.resources, controllers, own_users=True),
            memory=memory,
            **msgspec.structs.asdict(files.users),
        )
        with connection() as (ours, theirs):
            child, zygote_lives = await zygote.fork(plan, theirs)
        tools = ToolClient(ours, child.log_tail)
        undo.push_async_callback(undone, name, tools.close)
        undo.push_async_callback(undone, name, partial(_end, child, group))
        await tools.open()
        try:
            setup = rooted_setup(
                spec, context, files.image_env, memory=memory, python=python, libraries=gpus.libraries_at
            )
            await configure(tools, setup)
        except RuntimeFailure as error:
            # If a saved layer cannot be unpacked, the agent that wrote the layer is treated as the cause. There are
            # three exceptions: the zygote has exited, the host ran out of memory, or no writable layer could be
            # mounted, because a file system is mounted below /usr.
            if context.layer is not None and not group.starved() and NO_OVERLAY not in (error.log_tail or ""):
                raise error.replace(inside=error.inside or await zygote_lives()) from error.__cause__
            raise

        async def ended_inside() -> bool:
            return await zygote_lives() and died_inside(tools, group)

        layer_limit = LAYER_OVERHEAD * most_bytes + MEBIBYTE
        yield RunningServer(tools=tools, group=group, ended_inside=ended_inside, layer_limit=layer_limit)


class HostFiles(msgspec.Struct, frozen=True):
    """The host's files that make up a sandbox, and its user ids.

    - `image_env` are the variables that the image sets.
    - `owners` is the path of a list of the owners of the image's files. It is "" if root owns all files in the sandbox.
    - `owned` summarises this list."""

    gpus: GpuFiles
    root: Root
    image_env: dict[str, str]
    has_python: bool
    users: UserIds
    owners: str = ""
    owned: Ownership = Ownership()


def _host_files(spec: RuntimeSpec, context: SandboxContext, host_root: Root, driver: NvidiaDriver) -> HostFiles:
    """Find the files that the spec names. The call blocks as long as a file system of the host does not respond. Raises
    InvalidField and RuntimeUnavailable."""
    gpus, id_files = driver.shown(context.gpus), context.host.id_files
    if spec.image is None:
        root = _root(spec, host_root)
        return HostFiles(gpus, root, {}, _has_python(root), ids_of(spec, None, id_files))
    image, store = known_image(spec.image), ImageStore()
    root, ids = image_root(store.root(image).resolve()), ids_of(spec, image, id_files)
    owners = store.owners_file(image) if len(ids.uids) > 1 else None
    return HostFiles(gpus, root, image.env, _has_python(root), ids, str(owners or ""), image.owners)


def ids_of(spec: RuntimeSpec, image: RootImage | None, id_files: Mapping[str, Path]) -> UserIds:
    """Return the user ids of a sandbox. Their number is `spec.users`. If this is not set, the number is MOST_USERS for
    an image whose files need several users, and 1 otherwise. Raises InvalidField if the image's files cannot keep their
    owners. Raises RuntimeUnavailable if `id_files` (this machine's ID_FILES) set too few ids aside."""
    owned = Ownership() if image is None else image.owners
    count = spec.users or (MOST_USERS if owned.foreign else 1)
    if count > 1 and (owned.unkept or owned.highest >= count):
        raise InvalidField(
            f"the image {spec.image!r} cannot have the owners of its files:"
            f" {owned.unkept or f'an id of {owned.highest}, and the task names {count} users'}",
            field="task.runtime.users",
            hint=f"give its files to fewer users, or to ids below {MOST_USERS}; {ONE_OWNER}",
        )
    try:
        return user_ids(count, id_files)
    except RuntimeUnavailable as error:
        if spec.users is not None:
            raise
        raise RuntimeUnavailable(
            f"the image {spec.image!r} has {owned.foreign}, so its sandboxes need several users, and {error.message}",
            field=error.field,
            hint=f"{error.hint}; {ONE_OWNER}",
        ) from error


def _root(spec: RuntimeSpec, host_root: Root) -> Root:
    """Return the root for a spec without an image: `spec.rootfs`, or the host's root. Raises RuntimeUnavailable."""
    if spec.rootfs is None:
        return host_root
    folder = Path(spec.rootfs)
    if not folder.is_dir():
        raise RuntimeUnavailable(f"rootfs {folder} is not a folder")
    # Only the owner of the files below an overlay can write to them through the overlay. If another user owns them,
    # even `touch` fails.
    if folder.stat().st_uid != os.geteuid():
        raise RuntimeUnavailable(
            f"rootfs {folder} belongs to another user", hint="unpack it as the user that runs Outrider"
        )
    if mounted := inner_mounts([(folder, "/")]):
        raise RuntimeUnavailable(
            f"a file system is mounted in rootfs {folder}: {mounted[0][0]}",
            hint="unmount it: a sandbox has its own /proc and /dev, and gets other folders by task.runtime.mounts",
        )
    return image_root(folder)


def _has_python(root: Root) -> bool:
    if root.folders or root.layers[1:]:  # these roots contain the host's folders, and so the host's Python
        return True
    folder = root.layers[0][0]
    return any(os.path.lexists(f"{folder}/{path}") for path in PYTHONS)


async def _end(child: Child, group: ControlGroup) -> None:
    """Kill the first process of the sandbox, and wait for its exit. The kernel kills all other processes with it.

    The first process exits only after all others have exited. This takes long if there are many processes and the CPU
    limit is low. So after DEATH_SECONDS, the CPU limit is lifted and the processes are killed one by one."""
    child.kill()
    while not await child.ends_within(DEATH_SECONDS):
        await asyncio.to_thread(group.kill)
    child.reap()


def probe_user_namespaces() -> None:
    """Raise RuntimeUnavailable if this user cannot make the namespaces of a sandbox on this machine. The call
    blocks."""
    if missing := unsupported():
        raise RuntimeUnavailable(missing, hint="use another runtime, such as docker or apptainer")
    command = (sys.executable, "-I", "-c", UNSHARE_ALL)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeUnavailable(f"cannot find out whether user namespaces work: {error}") from error
    if done.returncode != 0:
        raise RuntimeUnavailable(
            f"user namespaces do not work here: {done.stderr.strip() or f'exit code {done.returncode}'}",
            hint="sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces=10000, "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container, allow unshare and mount (seccomp), and "
            "leave /proc unmasked; or use runtime kind 'process-landlock', which isolates less",
        )


USER_NAMESPACES = ProbeCache(probe_user_namespaces)
