"""The system calls that the standard library lacks: namespaces, mounts, capabilities and process attributes.

It knows no sandbox. Invariant: every call either does what it says or raises OSError with the call's name. Linux 5.12
or newer, on x86-64 and arm64: the calls by number have the same number on both, unless said.
"""

from __future__ import annotations

import ctypes
import os
import struct

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

AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8

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
    """As `fork`, with the child in new namespaces. Only for a process of one thread: nothing of Python's or the C
    library's own preparation for a fork takes place."""
    return syscall("clone", NUMBERS["clone"], flags | 17, 0, 0, 0, 0)


def unshare(flags: int) -> None:
    checked("unshare", LIBC.unshare(flags))


def prctl(option: int, argument: int = 0) -> None:
    checked(f"prctl({option})", LIBC.prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(0), 0, 0))


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    checked(f"mount {kind or source} on {target}", LIBC.mount(*words, ctypes.c_ulong(flags), data.encode()))


def detach(target: str) -> None:
    checked(f"umount {target}", LIBC.umount2(target.encode(), MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    syscall("pivot_root", NUMBERS["pivot_root"], new.encode(), old.encode())


def clone_tree(path: str, attributes: int = 0) -> int:
    """A copy of the mounts at a path, attached nowhere, with further attributes; a descriptor of it."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE
    tree = syscall(f"open_tree {path}", SYS_OPEN_TREE, AT_FDCWD, path.encode(), flags)
    if attributes:
        wanted = ctypes.create_string_buffer(struct.pack("QQQQ", attributes, 0, 0, 0), 32)
        flags = AT_EMPTY_PATH | AT_RECURSIVE
        syscall(f"mount_setattr {path}", SYS_MOUNT_SETATTR, tree, b"", flags, wanted, 32)
    return tree


def new_mount(kind: str, attributes: int) -> int:
    """A new file system of that kind, attached nowhere; a descriptor of it."""
    context = syscall(f"fsopen {kind}", SYS_FSOPEN, kind.encode(), FSOPEN_CLOEXEC)
    try:
        syscall(f"fsconfig {kind}", SYS_FSCONFIG, context, FSCONFIG_CMD_CREATE, 0, 0, 0)
        return syscall(f"fsmount {kind}", SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(context)


def attach(tree: int, target: str) -> None:
    """Mount what `clone_tree` or `new_mount` gave."""
    syscall(f"mount on {target}", SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)
    os.close(tree)


def keep_capabilities(kept: frozenset[int]) -> None:
    """These, and no others, for good: also a program with file capabilities gets no more."""
    for capability in range(64):
        if capability in kept:
            continue
        if LIBC.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) != 0:
            break
    low = sum(1 << capability for capability in kept)
    header = struct.pack("II", CAPABILITY_VERSION_3, 0)
    checked("capset", LIBC.capset(header, struct.pack("6I", low, low, 0, 0, 0, 0)))


def set_host_name(name: bytes) -> None:
    checked("sethostname", LIBC.sethostname(name, len(name)))


def raise_loopback() -> None:
    import _socket
    import fcntl

    probe = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    fcntl.ioctl(probe.fileno(), SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP_RUNNING))
    probe.close()


def rename_process(name: bytes) -> None:
    """What `ps` shows of this process and its forks, in place of the command line, which tells of the host's paths."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memmove(start, name[: end - start - 1].ljust(end - start, b"\0"), end - start)
