"""The control groups of a node. With them, the kernel enforces the limits of the node's sandboxes.

With version 2 of control groups, a node can make groups in a delegated systemd unit or a container. With version 1, the
node must be root or own the folders. In all other cases there are no groups. Invariants: a group is named after its
node and sandbox, so that a dead node's groups can be recognised. When `remove` returns, the group no longer exists.
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
"""The empty name in /proc/self/cgroup, which stands for all controllers of version 2."""
CONTROLLERS = ("cpu", "memory", "pids")
CPU_PERIOD = 100_000
SOCKET_BYTES = 64 << 20
"""Maximum bytes that the kernel may hold for the sockets of one sandbox. All sockets of the host share a tenth of its
memory (`net.ipv4.tcp_mem` and `udp_mem`), and they become slow when this tenth is used up. Only version 1 of control
groups can limit the sockets of a group separately."""
REMOVE_SECONDS = 5.0
PAUSE_SECONDS = 0.002
OWN = "outrider-service"
"""Name of an inner group. With version 2 of control groups, this process moves into it, because a group that contains
processes cannot pass its controllers on to inner groups."""


class Hierarchies(msgspec.Struct, frozen=True):
    """The folders in which this process may make control groups, by controller."""

    version: int
    folders: Mapping[str, Path]

    def __str__(self) -> str:
        return f"control groups v{self.version} ({', '.join(self.folders)})" if self.folders else "no control groups"

    @property
    def parents(self) -> list[Path]:
        """The folders, each listed once. With version 2, all controllers have the same folder."""
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
    """Return the path of a process's control group for each controller. `own` is the text of the process's
    /proc/PID/cgroup."""
    lines = [line.split(":", 2) for line in own.splitlines()]
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def settings(version: int, resources: Resources) -> Mapping[str, Mapping[str, str]]:
    """Return the control files to write and their contents, by controller. The files must be written in the returned
    order."""
    found: dict[str, dict[str, str]] = {"pids": {"pids.max": str(resources.pids)}}
    memory = str(resources.most_memory_mb * MEBIBYTE)
    if version == 2:
        found["memory"] = {"memory.max": memory, "memory.swap.max": "0"}
    else:
        # With version 1, memory of internet sockets is counted separately, and only if it has a limit.
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
"""Control files that may be missing, because the kernel does not count swap, or does not count sockets separately."""


class ControlGroup:
    """The control groups of one sandbox, one in each hierarchy. A method blocks for a few system calls."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self.folders = folders

    @property
    def entrances(self) -> tuple[str, ...]:
        """Paths of control files. A process enters the group by writing "0" to each of these files. Children that the
        process starts later are then also in the group."""
        return tuple(str(folder / "cgroup.procs") for folder in self.folders)

    def ran_out(self) -> bool:
        """Return whether the kernel has killed a process of the group because the group reached its own memory
        limit."""
        return any(_short_of_memory(folder) and _was_full(folder) for folder in self.folders)

    def starved(self) -> bool:
        """Return whether the kernel has killed a process of the group for lack of memory, although the group never
        reached its own limit. In this case, the host or an enclosing group ran out of memory."""
        return any(_short_of_memory(folder) and not _was_full(folder) for folder in self.folders)

    def was_crowded(self) -> bool:
        """Return whether the kernel has refused a fork because the group reached its own limit of processes."""
        return any(_number(folder / "pids.events", "max") > 0 for folder in self.folders)

    def add(self, pid: int) -> None:
        for entrance in self.entrances:
            Path(entrance).write_text(str(pid))

    def kill(self) -> None:
        """Send SIGKILL to all processes of the group. The CPU limit is removed first, because exiting takes CPU
        time."""
        for folder in self.folders:
            for file, value in UNLIMITED_CPU.items():
                with contextlib.suppress(OSError):  # this version or controller has no such file
                    (folder / file).write_text(value)
            _kill_members(folder)

    async def remove(self) -> None:
        """Remove the groups, and kill their remaining processes. If some groups cannot be removed, raises
        RuntimeFailure after removing the others."""
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
    """Return whether the kernel killed a process of the group because the group, an enclosing group or the host ran out
    of memory."""
    return _number(group / "memory.events", "oom_kill") > 0 or _number(group / "memory.oom_control", "oom_kill") > 0


def _was_full(group: Path) -> bool:
    """Return whether the group has ever reached its memory limit.

    Version 2 counts how often the group reaches its limit. With version 1, the highest memory use so far is compared
    with the limit. This use includes page cache, which the kernel frees when needed, so the result may be True for a
    group that never lacked memory. (`failcnt` of version 1 is no help, because it stays 0 if swap is also limited.)"""
    limit = _number(group / "memory.limit_in_bytes")
    # The kernel counts memory in batches of pages, so a group may reach its limit when its measured use is slightly
    # lower.
    nearly = _number(group / "memory.max_usage_in_bytes") + MEBIBYTE
    return _number(group / "memory.events", "oom") > 0 or 0 < limit < nearly


def _number(file: Path, name: str = "") -> int:
    """Return the number in a file. In a file with lines `NAME NUMBER`, return the number after `name`. Returns 0 if
    there is no such file or line."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.removeprefix(name)) for line in lines if line.rpartition(" ")[0] == name), 0)


class Cgroups:
    """Makes the control groups of a node's sandboxes. All sandboxes of the node share this object (see
    node_host.py)."""

    def __init__(self, host: Host, *, hierarchies: Hierarchies | None = None) -> None:
        self._name = host.name
        self.hierarchies = find() if hierarchies is None else hierarchies

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._open)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await asyncio.to_thread(_remove_node, self.hierarchies.parents, self._name)

    def make(self, sandbox: str, resources: Resources) -> ControlGroup:
        """Make the control group of a sandbox. It enforces each limit in `resources` for which this process has a
        controller. Raises RuntimeFailure."""
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
                # A group that contains processes cannot pass its controllers on to inner groups. So the processes of
                # our own group move into an inner group.
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
    """Remove the control groups of dead nodes, and kill the processes in them. Returns the number of nodes whose groups
    were removed. The call blocks."""
    parents = find().parents
    names = {folder.name for parent in parents for folder in parent.glob(f"{PREFIX}*")}
    ended = 0
    for name in names:
        if lives(name):
            continue
        try:
            _remove_node(parents, name)
            ended += 1
        # If the groups of one node cannot be removed, for example because they belong to another user, the groups of
        # other nodes are still removed.
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
    """Send SIGKILL to the processes of a group. The function opens a pidfd of each process, and then checks again that
    the process is in the group. So no signal reaches a process outside the group that got the pid of a dead member."""
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
    except OSError:  # if the file is missing, the error is EACCES, because writing would create it
        if file.name not in OPTIONAL or file.exists():
            raise
