"""Turns a process that has just been cloned into the first one of a sandbox: its root, its limits, its confinement.

It knows no tool server and no session. A plan (see runtimes/namespace/plan.py), a mapping of plain values, says what it
builds. Invariants: every path of the sandbox is resolved with the sandbox's root as `/`, so that nothing in an image
can lead out of it; nothing of the host is visible except what the plan names, and that is read-only; once `enter` has
returned, nothing that this process does or starts can undo any of it.
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
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
"""Errors that say nothing about a file. ENOSPC: the namespace has as many mounts as it may have."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
USER_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 18})
"""Capabilities of root in a sandbox of several users, valid for those users only: chown, dac_override, fowner, fsetid,
kill, setgid, setuid, setpcap, net_bind_service, sys_chroot."""
READ_ONLY_IN_PROC = ("bus", "fs", "irq", "sys", "sysrq-trigger")
"""Below /proc, read-only in the sandbox: the kernel checks only the owner of these files. Where the node runs as the
host's root, so do the sandbox's programs, which could write to them without any capability."""
COVERED_IN_PROC = ("acpi", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list")
"""Below /proc, covered: they tell of the host. Container engines cover them, too."""
PLAIN_MOUNT = syscalls.MS_NOSUID | syscalls.MS_NODEV
SHOWN_MOUNT = syscalls.ATTR_RDONLY | syscalls.ATTR_NOSUID | syscalls.ATTR_NODEV
DEVICE_MOUNT = syscalls.ATTR_RDONLY | syscalls.ATTR_NOSUID | syscalls.ATTR_NOEXEC
"""Read-only: a device can be written to all the same, but the mode and the times of the host's own node cannot be
changed, which is its owner's right, and so that of a sandbox's root where the node runs as the host's."""
PROC_MOUNT = syscalls.ATTR_NOSUID | syscalls.ATTR_NODEV | syscalls.ATTR_NOEXEC
PTS_OPTIONS = "newinstance,ptmxmode=0666,mode=620,max=128"
"""`max`: the host has some thousands of terminals for all sandboxes together."""
IPC_BYTES = 64 << 20
IPC_COUNTS = {"shmmni": "256", "sem": "250 32000 32 128", "msgmni": "16"}
"""Maximum segments, semaphores and queues: Linux's old defaults, which come to less than 3 MiB each."""
WATCHES_SHARE, MIN_WATCHES = 16, 1024
"""A sandbox may have that part of the inotify watches that a user has in all, and no fewer than so many."""
INOTIFY_MAX = 32
"""The kernel counts these for the user outside, who may have some 128 for all sandboxes together."""


def become_root(plan: Plan) -> None:
    """Become root of the user namespace. A process may map one user by itself, the one that it is outside; more users,
    the zygote has mapped already."""
    if len(plan["uids"]) == 1:
        write("/proc/self/setgroups", "deny")  # the kernel's condition for writing gid_map without privilege
        write("/proc/self/uid_map", mapping(plan["uids"]))
        write("/proc/self/gid_map", mapping(plan["gids"]))
    else:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)


def mapping(ids: list[list[int]]) -> str:
    """The text of /proc/PID/uid_map: lines of the first id inside, the first outside, and their number."""
    return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in ids)


def bare_layers(plan: Plan) -> dict[int, int]:
    """Copies of the layers' folders without what the plan's `inner` says is mounted in them, by number of the layer. An
    overlay cannot be mounted over a folder in which something is, and only this process, which is in no user namespace
    of a sandbox yet, may make such a copy. Where it may not either, there is none. Raises OSError."""
    bare = {}
    for number, (lower, target) in enumerate(plan["layers"]):
        if any(inside.startswith(f"{target}/") for _, inside in plan["inner"]):
            try:
                bare[number] = syscalls.clone_bare(lower, SHOWN_MOUNT)
            except OSError as error:
                must_not_be_scarce(error)
    return bare


def must_not_be_scarce(error: OSError) -> None:
    """Raise the error again where it says nothing about the file, but that something has run out."""
    if error.errno in SCARCE:
        raise error


def enter(plan: Plan, bare: dict[int, int]) -> list[int]:
    """Do all of it. `bare` is what `bare_layers` has returned. Returns descriptors of the layers' upper folders, in the
    plan's order: no path leads to them any more, and saving a layer needs them."""
    for group in plan["cgroups"]:
        write(group, "0")
    syscalls.unshare(UNSHARED)
    become_root(plan)
    uppers = change_root(plan, bare)
    ipc = not plan["memory"] or limit_ipc(plan["memory"])
    protect_proc()
    syscalls.set_host_name(b"sandbox")
    syscalls.raise_loopback()
    for name, value in plan["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    syscalls.keep_capabilities(USER_CAPABILITIES if len(plan["uids"]) > 1 else frozenset())
    seccomp.confine(counted=bool(plan["memory"]), ipc=ipc)
    # Else programs of the same user could read and change this process's memory and descriptors through /proc.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    return uppers


def change_root(plan: Plan, bare: dict[int, int]) -> list[int]:
    """Make the plan's root the root of this process.

    Everything that is needed of the host is opened first. Then the root is changed, and the host's is gone. Only then
    is any path of the sandbox resolved: an image may have links anywhere.
    """
    base = plan["base"]
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)  # no mount here shall reach the host
    folders = [(syscalls.clone_tree(source, SHOWN_MOUNT), target) for source, target in plan["folders"]]
    shown = [(syscalls.clone_tree(source, SHOWN_MOUNT), target) for source, target in plan["shown"]]
    shown += [(syscalls.clone_plain(source, SHOWN_MOUNT), target) for source, target in plan["named"]]
    own = [(f"/dev/{name}", f"/dev/{name}") for name in DEVICES]
    devices = [(syscalls.clone_tree(source, DEVICE_MOUNT), target) for source, target in (*own, *plan["devices"])]
    saved = os.open(plan["saved"], os.O_RDONLY) if plan["saved"] else -1
    syscalls.mount("none", base, "tmpfs", PLAIN_MOUNT, f"mode=755,size={plan['bytes']},nr_inodes={plan['files']}")
    os.mkdir(f"{base}/root")
    os.mkdir(f"{base}/shm")
    os.chmod(f"{base}/shm", 0o1777)
    devices.append((syscalls.clone_tree(f"{base}/shm"), "/dev/shm"))
    for number in range(len(plan["layers"])):
        os.mkdir(f"{base}/upper{number}")
        os.mkdir(f"{base}/work{number}")
    if saved >= 0:
        from outrider.runtimes.guest.filesystem.layers import restore_layers  # slow to load, and rarely used

        restore_layers(saved, [f"{base}/upper{number}" for number in range(len(plan["layers"]))])
    uppers, whole = [], [f"{target}/" for _, target in plan["folders"]]
    for number, (lower, target) in enumerate(plan["layers"]):
        os.chdir(base)
        uppers.append(os.open(f"upper{number}", os.O_RDONLY | os.O_DIRECTORY))
        try:
            mount_layer(number, lower, target, bare.get(number))
        except OSError as error:
            must_not_be_scarce(error)
            # Without the root itself there is no sandbox; and what an agent has written below is not left out silently.
            if number == 0 or os.listdir(f"upper{number}"):
                raise
            folders.insert(0, (syscalls.clone_tree(lower, SHOWN_MOUNT), target))
            whole.append(f"{target}/")
    inner = []
    for source, target in plan["inner"]:
        there = target.startswith(tuple(whole))  # a folder that is shown has come with all that is mounted in it
        tree = None if there or not source else clone_inner(source)
        covered = not source or (not there and tree is None)
        inner.append((covered, tree, syscalls.clone_tree("/dev/null", DEVICE_MOUNT), target))
    proc = syscalls.new_mount("proc", PROC_MOUNT)  # now: the kernel allows it only where a /proc is visible
    os.chdir(f"{base}/root")
    syscalls.pivot_root(".", ".")  # stacks the old root over the new one, at the same place
    syscalls.detach(".")
    os.chdir("/")
    for tree, target in folders:
        attach_at(tree, target)
    for one in inner:
        attach_inner(*one)
    for tree, target in shown:
        attach_at(tree, target)
    make_dev(devices)
    make_proc(proc)  # last: through the links of /proc, paths lead to the descriptors held here
    # A plan could name `/` itself as a target: paths would then see another root than the one confined here.
    if not os.path.samestat(os.stat("/.."), os.stat("/")):
        raise OSError(errno.EINVAL, "something is mounted over the sandbox's root")
    return uppers


def mount_layer(number: int, lower: str, target: str, bare: int | None) -> None:
    """Mount a throw-away writable layer over a folder of the host, or over the `bare` copy of it. Raises OSError where
    that cannot be: something is mounted in the folder, or it is itself an overlay over an overlay.

    The first target is `/`; all others are plain folders of the first's lower one. The paths are relative, or of /proc:
    programs inside can read a mount's options, and the host's paths are none of theirs.
    """
    if bare is not None:
        os.mkdir(f"lower{number}")
        syscalls.attach(bare, f"lower{number}")  # an overlay takes no folder that is attached nowhere
        lower = f"lower{number}"
    # The first may be a folder that the task names.
    held = syscalls.open_plain(lower) if target == "/" and bare is None else os.open(lower, os.O_PATH | os.O_DIRECTORY)
    os.chmod(f"upper{number}", os.stat(held).st_mode & 0o7777)  # the merged folder has the upper one's mode
    where = f"lowerdir=/proc/self/fd/{held},upperdir=upper{number},workdir=work{number},userxattr"
    try:
        syscalls.mount("overlay", f"root{target}", "overlay", PLAIN_MOUNT, where)
    finally:
        os.close(held)


def clone_inner(source: str) -> int | None:
    """A copy of what is mounted at a path of the host; None where this user cannot have one, or it is gone by now."""
    try:
        return syscalls.clone_tree(source, SHOWN_MOUNT)
    except OSError as error:
        must_not_be_scarce(error)
        return None


def attach_inner(hidden: bool, tree: int | None, cover: int, target: str) -> None:
    """Attach what is mounted below a folder of the host at its place in the sandbox; or, if `hidden`, cover the place.
    Without `tree` it is there already. Folders and regular files are shown, and not sockets, behind which is the host.
    """
    kind = syscalls.file_type(target)
    if kind and kind != stat.S_IFDIR and tree is not None:
        kind = stat.S_IFMT(os.fstat(tree).st_mode)
    if kind in (0, stat.S_IFLNK):
        pass  # an agent whose layer was restored has removed the place
    elif hidden or kind not in (stat.S_IFDIR, stat.S_IFREG):
        if kind == stat.S_IFDIR:
            syscalls.mount("none", target, "tmpfs", PLAIN_MOUNT | syscalls.MS_RDONLY, "size=0")
        else:
            syscalls.attach(os.dup(cover), target)
    elif tree is not None:
        syscalls.attach(os.dup(tree), target)
    for fd in (tree, cover):
        if fd is not None:
            os.close(fd)


def make_proc(proc: int) -> None:
    """Attach a /proc, and set the limits that programs could not set themselves once it is read-only."""
    make_root_folder("/proc")
    syscalls.attach(proc, "/proc")
    write("/proc/sys/user/max_inotify_instances", str(INOTIFY_MAX))
    with open("/proc/sys/fs/inotify/max_user_watches") as file:  # of the whole user
        write("/proc/sys/user/max_inotify_watches", str(max(int(file.read()) // WATCHES_SHARE, MIN_WATCHES)))


def limit_ipc(memory: int) -> bool:
    """Limit System V's shared memory, semaphores and messages to a small part of `memory`. They belong to no process,
    so that counting processes does not see them, but databases need a few pages. Returns False where the kernel lets
    only the host's root set the limits (before Linux 6.0)."""
    pages = min(IPC_BYTES, memory // 4) // os.sysconf("SC_PAGE_SIZE")
    try:
        for name, value in {"shmall": str(pages), **IPC_COUNTS}.items():
            write(f"/proc/sys/kernel/{name}", value)
    except OSError:
        return False
    return True


def protect_proc() -> None:
    """Make the kernel's switches in /proc read-only, and cover what tells of the host."""
    for name in READ_ONLY_IN_PROC:
        if os.path.exists(f"/proc/{name}"):
            syscalls.attach(syscalls.clone_tree(f"/proc/{name}", syscalls.ATTR_RDONLY), f"/proc/{name}")
    for name in COVERED_IN_PROC:
        if os.path.isdir(f"/proc/{name}"):
            syscalls.mount("none", f"/proc/{name}", "tmpfs", PLAIN_MOUNT | syscalls.MS_RDONLY, "size=0")
        elif os.path.exists(f"/proc/{name}"):
            syscalls.attach(syscalls.clone_tree("/dev/null", DEVICE_MOUNT), f"/proc/{name}")


def make_dev(devices: list[tuple[int, str]]) -> None:
    make_root_folder("/dev")
    syscalls.mount("none", "/dev", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "mode=755,size=64k,nr_inodes=256")
    for tree, target in devices:
        attach_at(tree, target)
    os.mkdir("/dev/pts")
    syscalls.mount("none", "/dev/pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, PTS_OPTIONS)
    for name, aim in DEVICE_LINKS.items():
        os.symlink(aim, f"/dev/{name}")


def make_root_folder(folder: str) -> None:
    """Make a folder right below the root. Raises OSError if the image has a link or file of that name."""
    make_folders(folder)
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise OSError(errno.ENOTDIR, f"{folder} of the sandbox's root is not a folder")


def attach_at(tree: int, target: str) -> None:
    """Attach mounts at a path, which is made if it is missing."""
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        make_folders(target)
    else:
        make_folders(folder_of(target))
        with contextlib.suppress(FileExistsError):  # what is there may be a pipe: opening it would block
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC))
    syscalls.attach(tree, target)


def write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
