"""System calls that the standard library lacks, for namespaces, mounts, capabilities and attributes of processes.

The module needs Linux 5.12 or newer, on x86-64 or arm64. Invariant: every function except `file_type` either succeeds
or raises OSError. An error that `checked` raises names the system call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct

SIGCHLD = 17
NEWNS = 0x00020000
NEWCGROUP = 0x02000000
NEWUTS = 0x04000000
NEWIPC = 0x08000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
MNT_DETACH = 2

AT_FDCWD, AT_NO_AUTOMOUNT, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x800, 0x1000, 0x8000
AT_SYMLINK_NOFOLLOW, AT_STATX_DONT_SYNC = 0x100, 0x4000
STATX_TYPE, STATX_BYTES, STATX_MODE_AT = 1, 256, 28
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8

# These calls are new, and have the same number on every architecture. The two old calls in BY_MACHINE do not.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT = 430, 431, 432
FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC, FSCONFIG_CMD_CREATE = 1, 1, 6
BY_MACHINE = {"x86_64": {"clone": 56, "pivot_root": 155}, "aarch64": {"clone": 220, "pivot_root": 41}}

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CAPABILITY_VERSION_3 = 0x20080522

SIOCSIFFLAGS = 0x8914
IFF_UP_RUNNING = 0x1 | 0x40

LIBC = ctypes.CDLL(None, use_errno=True)
NUMBERS = BY_MACHINE.get(os.uname().machine, {})


def checked(name: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def syscall(name: str, number: int, *args: object) -> int:
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return checked(name, LIBC.syscall(ctypes.c_long(number), *words))


def clone(flags: int) -> int:
    """Fork a child in new namespaces. Only a process with one thread may call this function, because the function skips
    the usual preparations for a fork, such as taking locks."""
    return syscall("clone", NUMBERS["clone"], flags | SIGCHLD, 0, 0, 0, 0)


def unshare(flags: int) -> None:
    checked("unshare", LIBC.unshare(flags))


def prctl(option: int, argument: int = 0) -> None:
    # prctl takes a variable number of arguments. For a plain int, ctypes would pass 32 bits and leave the upper 32 bits
    # undefined. c_ulong sets all 64 bits.
    checked(f"prctl({option})", LIBC.prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(0), 0, 0))


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    checked(f"mount {kind or source} on {target}", LIBC.mount(*words, ctypes.c_ulong(flags), data.encode()))


def detach(target: str) -> None:
    checked(f"umount {target}", LIBC.umount2(target.encode(), MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    syscall("pivot_root", NUMBERS["pivot_root"], new.encode(), old.encode())


def clone_tree(path: str, attributes: int = 0) -> int:
    """Copy the mounts at a path and below it, with additional attributes. Returns a descriptor of the copy, which is
    not attached to a path. The copy keeps its content when the root changes. Automounts are not triggered."""
    return copy_mounts(path, attributes, AT_FDCWD, path, AT_RECURSIVE)


def clone_plain(path: str, attributes: int) -> int:
    """Copy mounts like `clone_tree`. Raises OSError if the path contains a symbolic link."""
    held = open_plain(path)
    try:
        return copy_mounts(path, attributes, held, "", AT_RECURSIVE | AT_EMPTY_PATH)
    finally:
        os.close(held)


def clone_bare(path: str, attributes: int) -> int:
    """Copy the mount at a path like `clone_tree`, but not the mounts below it. The copy shows the files that these
    mounts hide. This needs privileges over the mount namespace of this process, and the mount must be in that
    namespace."""
    # The copy is private, so that mounts which the host later makes below the path do not appear in it.
    return copy_mounts(path, attributes, AT_FDCWD, path, 0, MS_PRIVATE)


def copy_mounts(path: str, attributes: int, folder: int, name: str, flags: int, propagation: int = 0) -> int:
    """Copy the mounts at `name`, relative to the descriptor `folder`. Error messages name `path`."""
    flags |= OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_NO_AUTOMOUNT
    tree = syscall(f"open_tree {path}", SYS_OPEN_TREE, folder, name.encode(), flags)
    try:
        if attributes or propagation:
            wanted = ctypes.create_string_buffer(struct.pack("QQQQ", attributes, 0, propagation, 0), 32)
            flags = AT_EMPTY_PATH | flags & AT_RECURSIVE
            syscall(f"mount_setattr {path}", SYS_MOUNT_SETATTR, tree, b"", flags, wanted, 32)
    except OSError:
        os.close(tree)
        raise
    return tree


def open_plain(path: str) -> int:
    """Return a descriptor of the file at an absolute path. Raises OSError if a part of the path is a symbolic link,
    because somebody may have created the link after the path was checked."""
    held = os.open("/", os.O_PATH | os.O_CLOEXEC)
    for part in filter(None, path.split("/")):
        try:
            inner = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=held)
        finally:
            os.close(held)
        held = inner
        if stat.S_ISLNK(os.fstat(held).st_mode):
            os.close(held)
            raise OSError(errno.ELOOP, f"{part} is a symbolic link", path)
    return held


def file_type(path: str) -> int:
    """Return the type bits in the mode of the file at a path. Returns 0 if the file is missing or cannot be seen. If a
    file system is mounted at the path, the file system is not contacted, because it might never reply. Automounts are
    not triggered."""
    found = ctypes.create_string_buffer(STATX_BYTES)
    flags = AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_STATX_DONT_SYNC
    if LIBC.statx(AT_FDCWD, path.encode(), flags, STATX_TYPE, found):
        return 0
    return int(struct.unpack_from("H", found, STATX_MODE_AT)[0]) & 0o170000


def new_mount(kind: str, attributes: int) -> int:
    """Make a new file system of the given kind. Returns a descriptor of its mount, which is not attached to a path
    yet."""
    context = syscall(f"fsopen {kind}", SYS_FSOPEN, kind.encode(), FSOPEN_CLOEXEC)
    try:
        syscall(f"fsconfig {kind}", SYS_FSCONFIG, context, FSCONFIG_CMD_CREATE, 0, 0, 0)
        return syscall(f"fsmount {kind}", SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(context)


def attach(tree: int, target: str) -> None:
    """Attach the result of `clone_tree` or `new_mount` at a path, and close its descriptor."""
    syscall(f"mount on {target}", SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)
    os.close(tree)


def keep_capabilities(kept: frozenset[int]) -> None:
    """Keep these capabilities, and drop all others for good. The others are also dropped from the bounding set.
    Otherwise a program could get them back, if it has file capabilities or is executed by root."""
    for capability in range(64):
        if capability in kept:
            continue
        if LIBC.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) != 0:
            break  # the kernel knows no higher capability
    low = sum(1 << capability for capability in kept)
    header = struct.pack("II", CAPABILITY_VERSION_3, 0)
    checked("capset", LIBC.capset(header, struct.pack("6I", low, low, 0, 0, 0, 0)))


def set_host_name(name: bytes) -> None:
    checked("sethostname", LIBC.sethostname(name, len(name)))


def raise_loopback() -> None:
    """Start the loopback interface `lo`, which is down in a new network namespace."""
    import _socket
    import fcntl

    probe = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    fcntl.ioctl(probe.fileno(), SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP_RUNNING))
    probe.close()


def rename_process(name: bytes) -> None:
    """Replace the command line that `ps` shows for this process and its forks, because the command line contains paths
    of the host. Fields 48 and 49 of /proc/PID/stat have the place of the command line in memory."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memmove(start, name[: end - start - 1].ljust(end - start, b"\0"), end - start)
