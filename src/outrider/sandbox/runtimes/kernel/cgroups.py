"""Control groups of a node, with which the kernel enforces the limits of the node's sandboxes.

With version 2, a node can make groups in a delegated unit or container. With version 1, the node must be root or own
the folders. Otherwise there are no groups. Invariants: a group is named after its node and sandbox, so that a dead
node's groups can be recognised; when `remove` returns, the group is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.node_host import PREFIX, Host, lives
from outrider.spec import MEBIBYTE, Resources

log = logging.getLogger("outrider.node")

MOUNT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
UNIFIED = ""
"""The empty name in /proc/self/cgroup. It stands for all controllers of version 2."""
CONTROLLERS = ("cpu", "memory", "pids")
CPU_PERIOD = 100_000
SOCKET_BYTES = 64 << 20
"""Maximum bytes that the kernel may hold for the sockets of one sandbox. A limit is needed because all sockets of the
host share a tenth of its memory (`net.ipv4.tcp_mem` and `udp_mem`), and slow down when this is used up. Only version 1
of control groups has this limit."""
REMOVE_SECONDS = 5.0
PAUSE_SECONDS = 0.002
OWN = "outrider-service"
"""Name of the group into which this process moves with version 2 of control groups, because a group that contains
processes cannot pass controllers on to inner groups."""


class Hierarchies(msgspec.Struct, frozen=True):
    """The folders in which this process may make control groups. Keys are controllers."""

    version: int
    folders: Mapping[str, Path]

    def __str__(self) -> str:
        return f"control groups v{self.version} ({', '.join(self.folders)})" if self.folders else "no control groups"

    @property
    def parents(self) -> list[Path]:
        """The folders without duplicates, because with version 2 all controllers have the same folder."""
        return list(dict.fromkeys(self.folders.values()))


NONE = Hierarchies(0, {})


def find(*, mount: Path = MOUNT, own: str | None = None) -> Hierarchies:
    """Return the folders in which this process can make control groups. `own` is the text of /proc/self/cgroup."""
    paths = by_controller(OWN_GROUPS.read_text() if own is None else own)
    if not (mount / "cgroup.controllers").exists():
        found = {}
        for name, path in paths.items():
            folder = mount / name / path.lstrip("/")
            if name in CONTROLLERS and os.access(folder, os.W_OK):
                found[name] = folder
        return Hierarchies(1, dict(sorted(found.items()))) if found else NONE
    # With version 2, `folder` is the group of this process, or this group's parent if the process has already moved
    # into OWN.
    folder = mount / paths.get(UNIFIED, "/").lstrip("/")
    folder = folder.parent if folder.name == OWN else folder
    try:
        offered = (folder / "cgroup.controllers").read_text().split()
    except OSError:
        return NONE
    usable = [name for name in CONTROLLERS if name in offered]
    if not usable or not os.access(folder, os.W_OK) or not os.access(folder / "cgroup.procs", os.W_OK):
        return NONE
    return Hierarchies(2, dict.fromkeys(usable, folder))


def by_controller(own: str) -> dict[str, str]:
    """Return the path of a process's group for each controller, from the text of its /proc/PID/cgroup."""
    lines = [line.split(":", 2) for line in own.splitlines()]
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def settings(version: int, resources: Resources) -> Mapping[str, Mapping[str, str]]:
    """Return the control files to write for each controller, in order, with their contents."""
    found: dict[str, dict[str, str]] = {"pids": {"pids.max": str(resources.pids)}}
    memory = str(resources.most_memory_mb * MEBIBYTE)
    if version == 2:
        found["memory"] = {"memory.max": memory, "memory.swap.max": "0"}
    else:
        # With version 1, internet sockets are counted separately, and only if they have a limit.
        sockets = str(min(resources.most_memory_mb * MEBIBYTE // 4, SOCKET_BYTES))
        found["memory"] = {
            "memory.limit_in_bytes": memory,
            "memory.memsw.limit_in_bytes": memory,
            "memory.kmem.tcp.limit_in_bytes": sockets,
        }
    if resources.cpus is not None:
        quota = str(round(resources.cpus * CPU_PERIOD))
        if version == 2:
            found["cpu"] = {"cpu.max": f"{quota} {CPU_PERIOD}"}
        else:
            found["cpu"] = {"cpu.cfs_period_us": str(CPU_PERIOD), "cpu.cfs_quota_us": quota}
    return found


UNLIMITED_CPU = {"cpu.max": "max", "cpu.cfs_quota_us": "-1"}
OPTIONAL = frozenset({"memory.memsw.limit_in_bytes", "memory.swap.max", "memory.kmem.tcp.limit_in_bytes"})
"""Files that may be missing, because the kernel does not account for swap or does not count sockets separately."""


class ControlGroup:
    """The groups of one sandbox, one in each hierarchy. The methods block for a few system calls."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self.folders = folders

    @property
    def entrances(self) -> tuple[str, ...]:
        """The control files to which a process writes "0" to enter the group. Its later children are then in the group
        too."""
        return tuple(str(folder / "cgroup.procs") for folder in self.folders)

    def ran_out(self) -> bool:
        """Return whether the kernel has killed a member because the group reached its own memory limit."""
        return any(_short_of_memory(folder) and _was_full(folder) for folder in self.folders)

    def starved(self) -> bool:
        """Return whether the kernel has killed a member for lack of memory although the group never reached its limit.
        Then the host, or an enclosing group, ran out of memory."""
        return any(_short_of_memory(folder) and not _was_full(folder) for folder in self.folders)

    def was_crowded(self) -> bool:
        """Return whether the kernel has refused a fork because the group reached its own limit of processes."""
        return any(_number(folder / "pids.events", "max") > 0 for folder in self.folders)

    def add(self, pid: int) -> None:
        for entrance in self.entrances:
            Path(entrance).write_text(str(pid))

    def kill(self) -> None:
        """SIGKILL every current member. The CPU limit is lifted first, because exiting takes CPU time."""
        for folder in self.folders:
            for file, value in UNLIMITED_CPU.items():
                with contextlib.suppress(OSError):  # there is no such file for this version or controller
                    (folder / file).write_text(value)
            _kill_members(folder)

    async def remove(self) -> None:
        """Remove the groups, and kill their remaining processes. If a group cannot be removed, the other groups are
        removed, and then RuntimeFailure is raised."""
        deadline = time.monotonic() + REMOVE_SECONDS
        left: dict[Path, str] = {}
        for folder in self.folders:
            try:
                while not _removed(folder):
                    _kill_members(folder)
                    if time.monotonic() > deadline:
                        left[folder] = "its processes do not exit"
                        break
                    await asyncio.sleep(PAUSE_SECONDS)
            except OSError as error:
                left[folder] = str(error)
        self.folders = tuple(left)
        for folder, reason in left.items():
            raise RuntimeFailure(f"the control group {folder} cannot be removed: {reason}")


def _short_of_memory(group: Path) -> bool:
    """Return whether a member was killed for lack of memory in the group, in an enclosing group, or on the host."""
    return _number(group / "memory.events", "oom_kill") > 0 or _number(group / "memory.oom_control", "oom_kill") > 0


def _was_full(group: Path) -> bool:
    """Return whether the group has ever reached its memory limit.

    Version 2 counts these events. With version 1, the peak memory use is compared with the limit. It includes page
    cache, which the kernel frees when needed, so the result may be True for a group that never lacked memory.
    (`failcnt` of version 1 stays 0 where swap is limited too.)"""
    limit = _number(group / "memory.limit_in_bytes")
    # The kernel charges memory in batches of pages, so a group may reach its limit at a slightly lower measured use.
    nearly = _number(group / "memory.max_usage_in_bytes") + MEBIBYTE
    return _number(group / "memory.events", "oom") > 0 or 0 < limit < nearly


def _number(file: Path, name: str = "") -> int:
    """Return the number in a file, or the number after `name` in a file with lines `NAME NUMBER`. Returns 0 if there is
    none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.removeprefix(name)) for line in lines if line.rpartition(" ")[0] == name), 0)


class Cgroups:
    """The part of a node's host (see node_host.py) that makes the control groups of sandboxes."""

    def __init__(self, host: Host, *, hierarchies: Hierarchies | None = None) -> None:
        self._name = host.name
        self.hierarchies = find() if hierarchies is None else hierarchies

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._open)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await asyncio.to_thread(_remove_node, self.hierarchies.parents, self._name)

    def make(self, sandbox: str, resources: Resources) -> ControlGroup:
        """Make the group of a sandbox. It enforces the limits in `resources` for which this process has a controller.
        Raises RuntimeFailure."""
        wanted = settings(self.hierarchies.version, resources)
        folders: dict[Path, None] = {}
        try:
            for controller, parent in self.hierarchies.folders.items():
                if controller in wanted:
                    folder = parent / self._name / sandbox
                    folders[folder] = None
                    with contextlib.suppress(FileExistsError):
                        folder.mkdir()
                    for file, value in wanted[controller].items():
                        _set(folder / file, value)
        except OSError as error:
            for folder in folders:
                with contextlib.suppress(OSError):
                    _removed(folder)
            raise RuntimeFailure(f"the sandbox's limits cannot be set: {error}") from error
        return ControlGroup(tuple(folders))

    def _open(self) -> None:
        try:
            if self.hierarchies.version == 2:
                # Move the processes of our own group into an inner group, because a group that contains processes
                # cannot pass its controllers on to inner groups.
                (folder,) = self.hierarchies.parents
                own = folder / OWN
                own.mkdir(exist_ok=True)
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        _set(own / "cgroup.procs", pid)
                wanted = " ".join(f"+{name}" for name in self.hierarchies.folders)
                _set(folder / "cgroup.subtree_control", wanted)
                (folder / self._name).mkdir(exist_ok=True)
                _set(folder / self._name / "cgroup.subtree_control", wanted)
            for folder in self.hierarchies.parents:
                (folder / self._name).mkdir(exist_ok=True)
        except OSError:
            self.hierarchies = NONE  # the folders looked writable but are not


def sweep() -> int:
    """Remove the control groups of dead nodes, and kill the processes in them. Returns the number of these nodes.
    Blocks."""
    parents = find().parents
    names = {folder.name for parent in parents for folder in parent.glob(f"{PREFIX}*")}
    ended = 0
    for name in names:
        if lives(name):
            continue
        try:
            _remove_node(parents, name)
            ended += 1
        # An error, such as for groups of another user, must not prevent the removal of other nodes' groups.
        except OSError as error:
            log.warning("the control groups of the dead node %s cannot be removed: %s", name, error)
    return ended


def _remove_node(parents: Iterable[Path], name: str) -> None:
    for parent in parents:
        for path, _, _ in os.walk(parent / name, topdown=False):
            folder = Path(path)
            deadline = time.monotonic() + REMOVE_SECONDS
            while not _removed(folder) and time.monotonic() < deadline:
                _kill_members(folder)
                time.sleep(PAUSE_SECONDS)


def _kill_members(folder: Path) -> None:
    """SIGKILL the members of a group. Each process is held by a pidfd and its membership is then checked again, so that
    no signal reaches another process with a reused pid."""
    for pid in _members(folder):
        with contextlib.suppress(OSError):
            held = os.pidfd_open(pid)
            try:
                if pid in _members(folder):
                    signal.pidfd_send_signal(held, signal.SIGKILL)
            finally:
                os.close(held)


def _members(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True


def _set(file: Path, value: str) -> None:
    try:
        file.write_text(value)
    except OSError:  # for a missing file the error is EACCES, because the write would create it
        if file.name not in OPTIONAL or file.exists():
            raise
