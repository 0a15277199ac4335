"""Control groups of a node, by which the kernel keeps the limits of its sandboxes.

It uses version 2 where this process may make groups (a delegated unit or container), version 1 where it may (root, or
chowned folders), and nothing otherwise. It knows no runtime. Invariants: a group is named after its node and its
sandbox, so that what a dead node left can be told for certain; and after `remove` it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from outrider.errors import RuntimeFailure
from outrider.runtimes.node_host import PREFIX, Host, lives, same_folder
from outrider.spec import MEBIBYTE, Resources

log = logging.getLogger("outrider.node")

MOUNT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
UNIFIED = ""
"""What /proc/self/cgroup calls the controllers of version 2."""
CONTROLLERS = ("cpu", "memory", "pids")
CPU_PERIOD = 100_000
SOCKET_BYTES = 64 << 20
"""Maximum bytes that the kernel holds for one sandbox's sockets, by control groups of version 1. All sockets of the
host share `net.ipv4.tcp_mem` and `udp_mem`, a tenth of its memory, and slow down when that is used up."""
REMOVE_SECONDS = 5.0
PAUSE_SECONDS = 0.002
OWN = "outrider-service"
"""The group that this process moves into on version 2, where a group that has members can pass no controllers on."""


class Hierarchies(msgspec.Struct, frozen=True):
    """Where this process may make groups: the folder of each controller that it can set limits with."""

    version: int
    folders: Mapping[str, Path]

    def __str__(self) -> str:
        return f"control groups v{self.version} ({', '.join(self.folders)})" if self.folders else "no control groups"


NONE = Hierarchies(0, {})


def find(*, mount: Path = MOUNT, own: str | None = None) -> Hierarchies:
    """The hierarchies that this process can use. `own` is the text of /proc/self/cgroup."""
    paths = by_controller(OWN_GROUPS.read_text() if own is None else own)
    if not (mount / "cgroup.controllers").exists():
        found = {}
        for name, path in paths.items():
            folder = mount / name / path.lstrip("/")
            if name in CONTROLLERS and os.access(folder, os.W_OK):
                found[name] = folder
        return Hierarchies(1, dict(sorted(found.items()))) if found else NONE
    # Version 2: our own group, or the one above if this process has moved into OWN before.
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
    """The path of a process's group for each controller, from the text of its /proc/PID/cgroup."""
    lines = [line.split(":", 2) for line in own.splitlines()]
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def settings(version: int, resources: Resources) -> Mapping[str, Mapping[str, str]]:
    """By controller: the files to write, in order, and their text."""
    found: dict[str, dict[str, str]] = {"pids": {"pids.max": str(resources.pids)}}
    memory = str(resources.most_memory_mb * MEBIBYTE)
    if version == 2:
        found["memory"] = {"memory.max": memory, "memory.swap.max": "0"}
    else:
        # Sockets of the Internet's families are counted by themselves, and only where they have a limit.
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
"""Missing where the kernel does not account for swap, or for sockets by themselves."""


class Group:
    """The groups of one sandbox, one in each hierarchy. Its methods block for a few system calls."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self._folders = folders

    @property
    def folders(self) -> tuple[Path, ...]:
        return self._folders

    @property
    def entrances(self) -> tuple[str, ...]:
        """The files to which a process writes "0" to enter the group, with all that it starts from then on."""
        return tuple(str(folder / "cgroup.procs") for folder in self._folders)

    def ran_out(self) -> bool:
        """Whether the kernel has killed a member because the group was at its own limit of memory."""
        return any(_short_of_memory(folder) and _was_full(folder) for folder in self._folders)

    def starved(self) -> bool:
        """Whether the kernel has killed a member for want of memory although the group never was at its limit: the
        host, or a group around this one, had no more."""
        return any(_short_of_memory(folder) and not _was_full(folder) for folder in self._folders)

    def add(self, pid: int) -> None:
        for entrance in self.entrances:
            Path(entrance).write_text(str(pid))

    def kill(self) -> None:
        """SIGKILL every process that is in it now. The limit of processor time is taken off first: dying takes some."""
        for folder in self._folders:
            for file, value in UNLIMITED_CPU.items():
                with contextlib.suppress(OSError):  # of the other version, or of another controller
                    (folder / file).write_text(value)
            _kill_members(folder)

    async def remove(self) -> None:
        """Remove the groups, and kill what still runs in them. Raises RuntimeFailure when one cannot be removed; the
        others are."""
        deadline = time.monotonic() + REMOVE_SECONDS
        left: dict[Path, str] = {}
        for folder in self._folders:
            try:
                while not _removed(folder):
                    _kill_members(folder)
                    if time.monotonic() > deadline:
                        left[folder] = "something still runs in it"
                        break
                    await asyncio.sleep(PAUSE_SECONDS)
            except OSError as error:
                left[folder] = str(error)
        self._folders = tuple(left)
        for folder, reason in left.items():
            raise RuntimeFailure(f"the control group {folder} cannot be removed: {reason}")


def _short_of_memory(group: Path) -> bool:
    """Whether a member was killed for want of memory, whoever had no more: the group, one around it, or the host."""
    return _number(group / "memory.events", "oom_kill") > 0 or _number(group / "memory.oom_control", "oom_kill") > 0


def _was_full(group: Path) -> bool:
    """Whether the group was at its limit once. Version 2 counts that; in version 1 it may as well have been with cached
    files, which go when more is wanted: the kernel does not tell. (Its `failcnt` stays 0 where swap is limited too.)"""
    limit = _number(group / "memory.limit_in_bytes")
    nearly = _number(group / "memory.max_usage_in_bytes") + MEBIBYTE  # memory is charged in batches of pages
    return _number(group / "memory.events", "oom") > 0 or 0 < limit < nearly


def _number(file: Path, name: str = "") -> int:
    """The number in a file, or the one after `name` where its lines are `NAME NUMBER`; 0 if there is none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.removeprefix(name)) for line in lines if line.rpartition(" ")[0] == name), 0)


class Cgroups:
    """A part of a node's host (see node_host.py) that makes the groups of its sandboxes."""

    def __init__(self, host: Host, *, hierarchies: Hierarchies | None = None) -> None:
        self._name = host.name
        self.hierarchies = find() if hierarchies is None else hierarchies

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._open)
        return self

    async def __aexit__(self, *_: Any) -> None:
        parents = self._parents()
        # Its own, and those of earlier nodes whose sandboxes it has taken over.
        names = {folder.name for parent in parents for folder in parent.glob(f"{PREFIX}*")}
        for name in {self._name} | {name for name in names if same_folder(name, self._name)}:
            await asyncio.to_thread(_remove_node, parents, name)

    def make(self, sandbox: str, resources: Resources) -> Group:
        """A group with those limits of `resources` for which there are controllers. Raises RuntimeFailure."""
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
        return Group(tuple(folders))

    def _open(self) -> None:
        try:
            if self.hierarchies.version == 2:
                # Move this process's group out of the way: only a group without members can pass its controllers on to
                # groups below it.
                (folder,) = self._parents()
                own = folder / OWN
                own.mkdir(exist_ok=True)
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        _set(own / "cgroup.procs", pid)
                wanted = " ".join(f"+{name}" for name in self.hierarchies.folders)
                _set(folder / "cgroup.subtree_control", wanted)
                (folder / self._name).mkdir(exist_ok=True)
                _set(folder / self._name / "cgroup.subtree_control", wanted)
            for folder in self._parents():
                (folder / self._name).mkdir(exist_ok=True)
        except OSError:
            self.hierarchies = NONE  # what looked writable is not

    def _parents(self) -> list[Path]:
        return _parents(self.hierarchies)


def sweep() -> int:
    """End what dead nodes left in control groups; returns how many such nodes there were. Blocks."""
    parents = _parents(find())
    names = {folder.name for parent in parents for folder in parent.glob(f"{PREFIX}*")}
    ended = 0
    for name in names:
        if lives(name):
            continue
        try:
            _remove_node(parents, name)
            ended += 1
        except OSError as error:  # another user's, perhaps: the others are removed all the same
            log.warning("the control groups of the dead node %s cannot be removed: %s", name, error)
    return ended


def _parents(hierarchies: Hierarchies) -> list[Path]:
    return list(dict.fromkeys(hierarchies.folders.values()))


def _remove_node(parents: Iterable[Path], name: str) -> None:
    for parent in parents:
        for folder in _inner_first(parent / name):
            deadline = time.monotonic() + REMOVE_SECONDS
            while not _removed(folder) and time.monotonic() < deadline:
                _kill_members(folder)
                time.sleep(PAUSE_SECONDS)


def _inner_first(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for inner in folder.iterdir():
            if inner.is_dir():
                yield from _inner_first(inner)
        yield folder


def _kill_members(folder: Path) -> None:
    """SIGKILL what is in a group. Each process is held by a pidfd before its membership is read again, so that a number
    that went to another process meanwhile is not hit."""
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
    except OSError:  # for a missing file EACCES: this would be to create it
        if file.name not in OPTIONAL or file.exists():
            raise
