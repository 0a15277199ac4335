"""A process that has just been cloned becomes the first one of a sandbox: its root, its limits, its confinement.

It knows no tool server and no session. A plan (see runtimes/namespace/plan.py), a mapping of plain values, says what it
builds. Invariants: whatever is named by a path of the sandbox is resolved with the sandbox's root as `/`, so that
nothing in an image can lead out of it; nothing of the host is shown but what the plan names, and that read-only; and
once `enter` has returned, nothing that this process does or starts can undo any of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from typing import TYPE_CHECKING

from outrider.runtimes.guest.filesystem.paths import folder_of, make_folders
from outrider.runtimes.guest.isolation import seccomp, syscalls

if TYPE_CHECKING:
    from typing import Any

    Plan = dict[str, Any]

UNSHARED = syscalls.NEWNS | syscalls.NEWIPC | syscalls.NEWUTS | syscalls.NEWNET | syscalls.NEWCGROUP
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
USER_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 18})
"""For a sandbox of several users, over these alone: to change owners, to be another, to pass modes over (chown,
dac_override, fowner, fsetid, kill, setgid, setuid, setpcap), to listen on low ports, to change the root."""
GUARDED = ("bus", "fs", "irq", "sys", "sysrq-trigger")
"""Below /proc: what the host's root could change with no capability at all. Shown read-only."""
HIDDEN = ("acpi", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list")
PLAIN = syscalls.MS_NOSUID | syscalls.MS_NODEV
SHOWN = syscalls.ATTR_RDONLY | syscalls.ATTR_NOSUID | syscalls.ATTR_NODEV
PROC = syscalls.ATTR_NOSUID | syscalls.ATTR_NODEV | syscalls.ATTR_NOEXEC
PTS = "newinstance,ptmxmode=0666,mode=620,max=128"
"""Of terminals the host has some thousands for all sandboxes."""
IPC_BYTES = 64 << 20
IPC_COUNTS = {"shmmni": "256", "sem": "250 32000 32 128", "msgmni": "16"}
"""Linux's own of long ago, each less than 3 MiB in all."""
INOTIFY_MAX = 32
"""Of what the user outside may have for all sandboxes, usually 128."""


def identify(plan: Plan) -> None:
    """Be root of the user namespace, which is one user outside. More users, only others can give us."""
    if len(plan["uids"]) == 1:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", mapping(plan["uids"]))
        write("/proc/self/gid_map", mapping(plan["gids"]))
    else:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)


def mapping(ids: list[list[int]]) -> str:
    """As /proc/PID/uid_map takes it: lines of the first id inside, the first outside, and how many."""
    return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in ids)


def enter(plan: Plan) -> list[int]:
    """The whole of it; descriptors of the layers' upper folders, in the plan's order, which no path leads to."""
    for group in plan["cgroups"]:
        write(group, "0")
    syscalls.unshare(UNSHARED)
    identify(plan)
    uppers = change_root(plan)
    ipc = not plan["memory"] or bound_ipc(plan["memory"])
    guard_proc()
    syscalls.set_host_name(b"sandbox")
    syscalls.raise_loopback()
    for name, value in plan["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    syscalls.keep_capabilities(USER_CAPABILITIES if len(plan["uids"]) > 1 else frozenset())
    seccomp.confine(counted=bool(plan["memory"]), ipc=ipc)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    return uppers


def change_root(plan: Plan) -> list[int]:
    """All that is wanted of the host is taken hold of first. Then the root is changed and the host's is gone, and only
    then a path of the sandbox is resolved, which an image or another sandbox may have filled with links."""
    base = plan["base"]
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    shown = [(syscalls.clone_tree(source, SHOWN), target) for source, target in plan["shown"]]
    devices = [(syscalls.clone_tree(f"/dev/{name}"), f"/dev/{name}") for name in DEVICES]
    saved = os.open(plan["saved"], os.O_RDONLY) if plan["saved"] else -1
    syscalls.mount("none", base, "tmpfs", PLAIN, f"mode=755,size={plan['bytes']},nr_inodes={plan['files']}")
    os.mkdir(f"{base}/root")
    os.mkdir(f"{base}/shm")
    os.chmod(f"{base}/shm", 0o1777)
    devices.append((syscalls.clone_tree(f"{base}/shm"), "/dev/shm"))
    for number in range(len(plan["layers"])):
        os.mkdir(f"{base}/upper{number}")
        os.mkdir(f"{base}/work{number}")
    if saved >= 0:
        from outrider.runtimes.guest.filesystem.layers import restore_layers  # which is slow to load, and rarely used

        restore_layers(saved, [f"{base}/upper{number}" for number in range(len(plan["layers"]))])
    uppers = [put_up(base, number, lower, target) for number, (lower, target) in enumerate(plan["layers"])]
    proc = syscalls.new_mount("proc", PROC)  # here, because the kernel allows it only where one is to be seen
    os.chdir(f"{base}/root")
    syscalls.pivot_root(".", ".")  # which puts the old root over the new one
    syscalls.detach(".")
    os.chdir("/")
    for tree, target in shown:
        show(tree, target)
    make_dev(devices)
    make_proc(proc)  # the last of it: the links of /proc lead to what is held here
    if not os.path.samestat(os.stat("/.."), os.stat("/")):
        raise OSError(errno.EINVAL, "something is mounted over the sandbox's root")
    return uppers


def put_up(base: str, number: int, lower: str, target: str) -> int:
    """A throw-away writable folder over one of the host's. All targets but the first, `/`, are plain folders of the
    first's lower one. Paths are relative, or of /proc: a mount's options can be read inside."""
    os.chdir(base)
    held = os.open(lower, os.O_PATH | os.O_DIRECTORY)
    os.chmod(f"upper{number}", os.stat(held).st_mode & 0o7777)
    where = f"lowerdir=/proc/self/fd/{held},upperdir=upper{number},workdir=work{number},userxattr"
    syscalls.mount("overlay", f"root{target}", "overlay", PLAIN, where)
    os.close(held)
    return os.open(f"upper{number}", os.O_RDONLY | os.O_DIRECTORY)


def make_proc(proc: int) -> None:
    make_own("/proc")
    syscalls.attach(proc, "/proc")
    write("/proc/sys/user/max_inotify_instances", str(INOTIFY_MAX))


def bound_ipc(memory: int) -> bool:
    """Give System V's shared memory, semaphores and messages, which belong to no process, a small part of `memory`:
    databases want a few pages of them. False where this kernel lets only the host's root do that (before Linux 6.0)."""
    pages = min(IPC_BYTES, memory // 4) // os.sysconf("SC_PAGE_SIZE")
    try:
        for name, value in {"shmall": str(pages), **IPC_COUNTS}.items():
            write(f"/proc/sys/kernel/{name}", value)
    except OSError:
        return False
    return True


def guard_proc() -> None:
    """After this the kernel's switches stay as they are."""
    for name in GUARDED:
        if os.path.exists(f"/proc/{name}"):
            syscalls.attach(syscalls.clone_tree(f"/proc/{name}", syscalls.ATTR_RDONLY), f"/proc/{name}")
    for name in HIDDEN:
        if os.path.isdir(f"/proc/{name}"):
            syscalls.mount("none", f"/proc/{name}", "tmpfs", PLAIN | syscalls.MS_RDONLY, "size=0")
        elif os.path.exists(f"/proc/{name}"):
            syscalls.attach(syscalls.clone_tree("/dev/null"), f"/proc/{name}")


def make_dev(devices: list[tuple[int, str]]) -> None:
    make_own("/dev")
    syscalls.mount("none", "/dev", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "mode=755,size=64k,nr_inodes=64")
    for tree, target in devices:
        show(tree, target)
    os.mkdir("/dev/pts")
    syscalls.mount("none", "/dev/pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, PTS)
    for name, aim in LINKS.items():
        os.symlink(aim, f"/dev/{name}")


def make_own(folder: str) -> None:
    """A folder right below the root, which nothing but a folder may stand for."""
    make_folders(folder)
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise OSError(errno.ENOTDIR, f"{folder} of the sandbox's root is not a folder")


def show(tree: int, target: str) -> None:
    """Attach mounts at a path that is made if it is missing."""
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        make_folders(target)
    else:
        make_folders(folder_of(target))
        with contextlib.suppress(FileExistsError):  # a pipe, perhaps, which must not be opened
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC))
    syscalls.attach(tree, target)


def write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
