"""Turns a newly cloned process into the first process of a sandbox. The process gets its own root, limits and
confinement.

A plan describes the sandbox. It is a mapping of plain values (see runtimes/namespace/plan.py). Invariants:

- Every path of the sandbox is resolved with the sandbox's root as `/`, so nothing in an image can lead out of the root.
- The sandbox sees only those files of the host that the plan names, and a few devices. All are mounted read-only.
- Once `enter` has returned, neither this process nor a descendant can undo a step.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.filesystem.paths import folder_of, make_folders
from outrider.sandbox.runtimes.guest.isolation import seccomp, syscalls

if TYPE_CHECKING:
    from typing import Any

    Plan = dict[str, Any]

UNSHARED = syscalls.NEWNS | syscalls.NEWIPC | syscalls.NEWUTS | syscalls.NEWNET | syscalls.NEWCGROUP
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
"""Errors which mean that the machine lacks a resource, not that something is wrong with one file. ENOSPC: the namespace
has its maximum number of mounts."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
USER_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 18})
"""Capabilities of root in a sandbox with several users: chown, dac_override, fowner, fsetid, kill, setgid, setuid,
setpcap, net_bind_service and sys_chroot. They are valid only for the sandbox's own users."""
READ_ONLY_IN_PROC = ("bus", "fs", "irq", "sys", "sysrq-trigger")
"""Entries of /proc that are made read-only in the sandbox. The host's root owns them, and an owner may write without
any capability. If the node runs as the host's root, the sandbox's programs also run as this user, and could otherwise
write to these entries."""
COVERED_IN_PROC = ("acpi", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list")
"""Entries of /proc that tell facts about the host. In the sandbox, an empty file or folder covers each. Container
engines do the same."""
PLAIN_MOUNT = syscalls.MS_NOSUID | syscalls.MS_NODEV
SHOWN_MOUNT = syscalls.ATTR_RDONLY | syscalls.ATTR_NOSUID | syscalls.ATTR_NODEV
DEVICE_MOUNT = syscalls.ATTR_RDONLY | syscalls.ATTR_NOSUID | syscalls.ATTR_NOEXEC
"""Attributes for the mounts of devices. Programs can write to a device even if its mount is read-only. The mount is
read-only so that nobody can change the mode or the times of the host's device file. Otherwise its owner could, and if
the node runs as the host's root, the sandbox's root is that owner."""
PROC_MOUNT = syscalls.ATTR_NOSUID | syscalls.ATTR_NODEV | syscalls.ATTR_NOEXEC
PTS_OPTIONS = "newinstance,ptmxmode=0666,mode=620,max=128"
"""Options for the sandbox's terminals. `max` is needed, because all sandboxes share the host's maximum of some
thousands of terminals."""
IPC_BYTES = 64 << 20
IPC_COUNTS = {"shmmni": "256", "sem": "250 32000 32 128", "msgmni": "16"}
"""Maximum numbers of System V's shared memory segments, semaphores and message queues. These are Linux's old defaults.
With them, each of the three kinds takes less than 3 MiB. The pages of the segments are not included, because IPC_BYTES
limits them."""
WATCHES_SHARE, MIN_WATCHES = 16, 1024
"""Maximum inotify watches of a sandbox: 1/WATCHES_SHARE of a user's maximum, or MIN_WATCHES if this share is
smaller."""
INOTIFY_MAX = 32
"""Maximum number of inotify instances in a sandbox. The kernel also counts them for the node's user, who may have some
128 for all sandboxes together."""


def become_root(plan: Plan) -> None:
    """Become root of the user namespace. In a sandbox with one user, this process writes its user maps itself. For a
    sandbox with several users, the zygote has already written the maps, because this process may not map several
    users."""
    if len(plan["uids"]) == 1:
        write("/proc/self/setgroups", "deny")  # an unprivileged process must do this before it writes gid_map
        write("/proc/self/uid_map", mapping(plan["uids"]))
        write("/proc/self/gid_map", mapping(plan["gids"]))
    else:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)


def mapping(ids: list[list[int]]) -> str:
    """Return the text for /proc/PID/uid_map. It has one line for each range: the first id inside, the first id outside,
    and the number of ids."""
    return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in ids)


def bare_layers(plan: Plan) -> dict[int, int]:
    """Copy the folder of each layer, if mounts of the host are in this folder (see `Plan.inner`). The copies do not
    contain these mounts. Returns the descriptor of each copy, by the layer's number.

    Copies are needed, because an overlay cannot be mounted over a folder that contains a mount. Only the zygote can
    make the copies, because it is outside the sandbox's user namespace. A layer that cannot be copied is left out.
    Raises OSError if the machine lacks a resource."""
    bare = {}
    for number, (lower, target) in enumerate(plan["layers"]):
        if any(inside.startswith(f"{target}/") for _, inside in plan["inner"]):
            try:
                bare[number] = syscalls.clone_bare(lower, SHOWN_MOUNT)
            except OSError as error:
                must_not_be_scarce(error)
    return bare


def must_not_be_scarce(error: OSError) -> None:
    """Raise the error again if it means that the machine lacks a resource (see SCARCE)."""
    if error.errno in SCARCE:
        raise error


def enter(plan: Plan, bare: dict[int, int]) -> list[int]:
    """Confine this process as the plan describes. `bare` is the result of `bare_layers`. Returns the descriptors of the
    layers' upper folders, in the plan's order. A layer can be saved only through its descriptor, because no path leads
    to the upper folders any more."""
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
    return uppers


def change_root(plan: Plan, bare: dict[int, int]) -> list[int]:
    """Change the root of this process to the one that the plan describes.

    The host's files and mounts are opened first. Then the root is changed, after which no path leads to the host. Paths
    of the sandbox are resolved only after this change, because an image may have links anywhere. Only the layers are
    mounted earlier (see `mount_layer` for their paths).
    """
    base = plan["base"]
    # mounts that are made here must not appear on the host
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    folders = [(syscalls.clone_tree(source, SHOWN_MOUNT), target) for source, target in plan["folders"]]
    shown = [(syscalls.clone_tree(source, SHOWN_MOUNT), target) for source, target in plan["shown"]]
    shown += [(syscalls.clone_plain(source, SHOWN_MOUNT), target) for source, target in plan["named"]]
    own = [(f"/dev/{name}", f"/dev/{name}") for name in DEVICES]
    devices = [(syscalls.clone_tree(source, DEVICE_MOUNT), target) for source, target in (*own, *plan["devices"])]
    saved = os.open(plan["saved"], os.O_RDONLY) if plan["saved"] else -1
    # The list of owners is not needed with a saved layer, whose files already have their owners.
    owners = read_whole(plan["owners"]) if plan["owners"] and saved < 0 else b""
    syscalls.mount("none", base, "tmpfs", PLAIN_MOUNT, f"mode=755,size={plan['bytes']},nr_inodes={plan['files']}")
    os.mkdir(f"{base}/root")
    os.mkdir(f"{base}/shm")
    os.chmod(f"{base}/shm", 0o1777)
    devices.append((syscalls.clone_tree(f"{base}/shm"), "/dev/shm"))
    for number in range(len(plan["layers"])):
        os.mkdir(f"{base}/upper{number}")
        os.mkdir(f"{base}/work{number}")
    if saved >= 0:
        from outrider.sandbox.runtimes.guest.filesystem.layers import restore_layers  # slow to load, and rarely used

        restore_layers(saved, [f"{base}/upper{number}" for number in range(len(plan["layers"]))])
    uppers, whole = [], [f"{target}/" for _, target in plan["folders"]]
    for number, (lower, target) in enumerate(plan["layers"]):
        os.chdir(base)
        uppers.append(os.open(f"upper{number}", os.O_RDONLY | os.O_DIRECTORY))
        try:
            mount_layer(number, lower, target, bare.get(number))
        except OSError as error:
            must_not_be_scarce(error)
            # Show the folder read-only, without a writable layer. In two cases, the error is raised instead: for the
            # root, which needs its layer, and for a restored layer with files, because an agent's files must not be
            # lost silently.
            if number == 0 or os.listdir(f"upper{number}"):
                raise
            folders.insert(0, (syscalls.clone_tree(lower, SHOWN_MOUNT), target))
            whole.append(f"{target}/")
    inner = []
    for source, target in plan["inner"]:
        # The folders in `whole` already contain copies of the mounts inside them.
        there = target.startswith(tuple(whole))
        tree = None if there or not source else clone_inner(source)
        covered = not source or (not there and tree is None)
        inner.append((covered, tree, syscalls.clone_tree("/dev/null", DEVICE_MOUNT), target))
    # A new /proc is mounted before the root changes. The kernel allows this only to a process that still sees a /proc.
    proc = syscalls.new_mount("proc", PROC_MOUNT)
    os.chdir(f"{base}/root")
    syscalls.pivot_root(".", ".")  # mounts the old root over the new one, at the same path
    syscalls.detach(".")
    os.chdir("/")
    give_owners(owners, plan)
    for tree, target in folders:
        attach_at(tree, target)
    for one in inner:
        attach_inner(*one)
    for tree, target in shown:
        attach_at(tree, target)
    make_dev(devices)
    make_proc(proc)  # attached last, because links in /proc lead to this process's descriptors, and so to the host
    # If something in the plan has the target `/`, the mount at this target covers the confined root. `/..` then leads
    # into this mount.
    if not os.path.samestat(os.stat("/.."), os.stat("/")):
        raise OSError(errno.EINVAL, "something is mounted over the sandbox's root")
    return uppers


def mount_layer(number: int, lower: str, target: str, bare: int | None) -> None:
    """Mount a writable layer over a folder of the host, or over its `bare` copy. The layer is thrown away with the
    sandbox. Raises OSError if the folder contains a mount, or is itself an overlay over an overlay.

    The target of the first layer is `/`. Every other target is a plain folder in the first layer's lower folder.
    Programs inside can read the options of the mount. So the paths in the options are relative or below /proc, and do
    not show paths of the host.
    """
    if bare is not None:
        os.mkdir(f"lower{number}")
        syscalls.attach(bare, f"lower{number}")  # an overlay only accepts a folder that is attached to a path
        lower = f"lower{number}"
    # The first layer's folder is opened with `open_plain`, which refuses links: the task may choose this path, and a
    # part of it may have become a link.
    held = syscalls.open_plain(lower) if target == "/" and bare is None else os.open(lower, os.O_PATH | os.O_DIRECTORY)
    # the merged folder gets the upper folder's mode
    os.chmod(f"upper{number}", os.stat(held).st_mode & 0o7777)
    where = f"lowerdir=/proc/self/fd/{held},upperdir=upper{number},workdir=work{number},userxattr"
    try:
        syscalls.mount("overlay", f"root{target}", "overlay", PLAIN_MOUNT, where)
    finally:
        os.close(held)


def give_owners(listed: bytes, plan: Plan) -> None:
    """Give an image's files to their owners. `listed` has the format of sandbox/rootfs/owners.py: `UID GID PATH` and a
    NUL for each file. A file is skipped if the sandbox has no user with the owner's id.

    `chown` copies each file to the writable layer. The paths are safe to use: no program of the sandbox runs yet, and
    no path leads through a link."""
    users, groups = (max(inside + count for inside, _, count in plan[kind]) for kind in ("uids", "gids"))
    for entry in listed.split(b"\0")[:-1]:
        uid, gid, path = entry.split(b" ", 2)
        if int(uid) < users and int(gid) < groups:
            os.chown(b"/" + path, int(uid), int(gid), follow_symlinks=False)


def clone_inner(source: str) -> int | None:
    """Copy a mount of the host. Returns None if the mount no longer exists, or if this user may not copy it."""
    try:
        return syscalls.clone_tree(source, SHOWN_MOUNT)
    except OSError as error:
        must_not_be_scarce(error)
        return None


def attach_inner(hidden: bool, tree: int | None, cover: int, target: str) -> None:
    """Attach an inner mount (see `Plan.inner`) at its path in the sandbox. `tree` is a copy of the mount, or None if
    the mount is already attached or is hidden.

    If `hidden` is true, the path is covered instead: a file by `cover`, and a folder by an empty file system. A special
    file, such as a socket, is always covered, because it would lead to the host."""
    kind = syscalls.file_type(target)
    if kind and kind != stat.S_IFDIR and tree is not None:
        kind = stat.S_IFMT(os.fstat(tree).st_mode)
    if kind in (0, stat.S_IFLNK):
        pass  # an agent removed this path or replaced it by a link, before the layer was saved
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
    """Attach a /proc, and limit inotify. Programs cannot change the limits once /proc/sys is read-only."""
    make_root_folder("/proc")
    syscalls.attach(proc, "/proc")
    write("/proc/sys/user/max_inotify_instances", str(INOTIFY_MAX))
    with open("/proc/sys/fs/inotify/max_user_watches") as file:
        write("/proc/sys/user/max_inotify_watches", str(max(int(file.read()) // WATCHES_SHARE, MIN_WATCHES)))


def limit_ipc(memory: int) -> bool:
    """Limit System V's shared memory to a quarter of `memory`, but at most 64 MiB. Also limit semaphores and messages.

    memory_watch.py does not count these objects, because they belong to no process. They are still allowed, because
    databases need a few pages. Returns False on Linux before 6.0, where only the host's root can set the limits."""
    pages = min(IPC_BYTES, memory // 4) // os.sysconf("SC_PAGE_SIZE")
    try:
        for name, value in {"shmall": str(pages), **IPC_COUNTS}.items():
            write(f"/proc/sys/kernel/{name}", value)
    except OSError:
        return False
    return True


def protect_proc() -> None:
    """Make the kernel's settings in /proc read-only, and cover the files that tell facts about the host."""
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
    """Make a folder directly below the root. Raises OSError if the image has a file or link with this name."""
    make_folders(folder)
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise OSError(errno.ENOTDIR, f"{folder} of the sandbox's root is not a folder")


def attach_at(tree: int, target: str) -> None:
    """Attach a copied mount at a path. A missing path is made."""
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        make_folders(target)
    else:
        make_folders(folder_of(target))
        # an existing file is not opened: it may be a pipe, which would block
        with contextlib.suppress(FileExistsError):
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC))
    syscalls.attach(tree, target)


def read_whole(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
