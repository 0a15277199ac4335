"""The filter of system calls: the calls that a sandbox's programs may not make.

DENIED and DENIED_EVERYWHERE have the calls that container engines deny by default, and the calls that container engines
allow only with certain capabilities. Invariant: a call with the numbers of another machine is never allowed. Pure,
except for `core_limit`, `confine` and `install`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import struct

from outrider.sandbox.runtimes.guest.isolation.syscalls import (
    LIBC,
    NEWCGROUP,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUSER,
    NEWUTS,
    PR_SET_NO_NEW_PRIVS,
    checked,
    prctl,
)

PR_SET_SECCOMP, MODE_FILTER = 22, 2
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, EPROTONOSUPPORT = 1, 38, 93

LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_MACHINE = 0, 4
FIRST, SECOND, THIRD, FOURTH = 16, 24, 32, 40
"""Offsets of a call's arguments in `struct seccomp_data`, to the lower half of each argument. The upper half is UPPER
bytes further."""
UPPER = 4

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""The first number of the x32 interface on x86-64: the same calls under numbers that the filter would miss."""
UNIX, INTERNET, INTERNET_6, NETLINK = 1, 2, 10, 16
"""The allowed families of sockets. Other families, such as vsock between a virtual machine and its host, ignore network
namespaces."""
ASKED = (0, 4, 15, 16)
"""The allowed protocols of netlink, for queries to the kernel: ROUTE, SOCK_DIAG, KOBJECT_UEVENT, GENERIC. USERSOCK is
not among them: over USERSOCK, programs could send to each other, and to the host's programs if the sandbox has the
host's network."""
STREAM, SEQUENCED, KIND = 1, 5, 0xF
TCP = 6
FASTOPEN = 0x20000000
"""MSG_FASTOPEN: sending with this flag connects, and Landlock checks only `connect`."""
PRIORITY_OF_USER, IO_PRIORITY_OF_USER = 2, 3
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
F_SETPIPE_SZ = 1031
F_SETLEASE, F_SETDELEG = 1024, 1040
"""The commands for leases, which are refused. Whoever opens a leased file waits 45 seconds for the holder of the lease.
The owner of a file may lease it, and so block a file of the host that is shown in sandboxes."""
RLIMIT_CORE = 4
NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET

LOOKED_AT = {
    "x86_64": {
        "ioctl": 16,
        "socket": 41,
        "sendto": 44,
        "sendmsg": 46,
        "socketpair": 53,
        "clone": 56,
        "fcntl": 72,
        "setpriority": 141,
        "setrlimit": 160,
        "sched_setparam": 142,
        "sched_setscheduler": 144,
        "sched_setaffinity": 203,
        "ioprio_set": 251,
        "prlimit64": 302,
        "sendmmsg": 307,
        "sched_setattr": 314,
    },
    "aarch64": {
        "fcntl": 25,
        "ioctl": 29,
        "ioprio_set": 30,
        "sched_setparam": 118,
        "sched_setscheduler": 119,
        "sched_setaffinity": 122,
        "setpriority": 140,
        "setrlimit": 164,
        "socket": 198,
        "socketpair": 199,
        "sendto": 206,
        "sendmsg": 211,
        "clone": 220,
        "prlimit64": 261,
        "sendmmsg": 269,
        "sched_setattr": 274,
    },
}
"""Numbers of the calls that `checks` allows or refuses by their arguments."""
HOST_WIDE = {
    "x86_64": (29, 30, 31, *range(64, 67), *range(68, 72), 220, *range(240, 246)),
    "aarch64": (*range(180, 197),),
}
"""System V's shared memory, semaphores and messages, and POSIX's messages. Outside of namespaces all programs of the
host share these objects, which outlive their makers. `shmdt` is not in the list, because it only releases memory."""

UNCOUNTED = {"x86_64": (216, 278, 319, 447), "aarch64": (75, 234, 279, 447)}
"""`remap_file_pages`, `vmsplice`, `memfd_create`, `memfd_secret`. The memory from these calls belongs to a descriptor
or pipe, or is missing in the process's /proc, so memory_watch.py cannot count it."""

CLONE3 = 435
"""clone3 is refused with ENOSYS, because its flags are in memory, which a filter cannot read. After ENOSYS the C
library falls back to `clone`."""

DENIED_EVERYWHERE = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
}
DENIED = {
    "x86_64": {
        "syslog": 103,
        "uselib": 134,
        "ustat": 136,
        "sysfs": 139,
        "vhangup": 153,
        "modify_ldt": 154,
        "pivot_root": 155,
        "adjtimex": 159,
        "acct": 163,
        "settimeofday": 164,
        "mount": 165,
        "umount2": 166,
        "swapon": 167,
        "swapoff": 168,
        "reboot": 169,
        "sethostname": 170,
        "setdomainname": 171,
        "iopl": 172,
        "ioperm": 173,
        "create_module": 174,
        "init_module": 175,
        "delete_module": 176,
        "get_kernel_syms": 177,
        "query_module": 178,
        "quotactl": 179,
        "nfsservctl": 180,
        "lookup_dcookie": 212,
        "clock_settime": 227,
        "mbind": 237,
        "set_mempolicy": 238,
        "get_mempolicy": 239,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "migrate_pages": 256,
        "unshare": 272,
        "move_pages": 279,
        "perf_event_open": 298,
        "fanotify_init": 300,
        "name_to_handle_at": 303,
        "open_by_handle_at": 304,
        "clock_adjtime": 305,
        "setns": 308,
        "kcmp": 312,
        "finit_module": 313,
        "kexec_file_load": 320,
        "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39,
        "mount": 40,
        "pivot_root": 41,
        "nfsservctl": 42,
        "vhangup": 58,
        "quotactl": 60,
        "lookup_dcookie": 18,
        "acct": 89,
        "unshare": 97,
        "kexec_load": 104,
        "init_module": 105,
        "delete_module": 106,
        "clock_settime": 112,
        "syslog": 116,
        "reboot": 142,
        "sethostname": 161,
        "setdomainname": 162,
        "settimeofday": 170,
        "adjtimex": 171,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "swapon": 224,
        "swapoff": 225,
        "mbind": 235,
        "get_mempolicy": 236,
        "set_mempolicy": 237,
        "migrate_pages": 238,
        "move_pages": 239,
        "perf_event_open": 241,
        "fanotify_init": 262,
        "name_to_handle_at": 264,
        "open_by_handle_at": 265,
        "clock_adjtime": 266,
        "setns": 268,
        "kcmp": 272,
        "finit_module": 273,
        "bpf": 280,
        "userfaultfd": 282,
        "kexec_file_load": 294,
    },
}


def step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Return one instruction of the classic BPF machine. The jumps count the instructions to skip."""
    return struct.pack("HBBI", code, then, otherwise, value)


REFUSED, PASSED = step(RETURN, ERRNO | EPERM), step(RETURN, ALLOW)
SKIPPED = step(RETURN, ERRNO | 0)
"""The call does nothing and returns success."""
SIZE = len(PASSED)


def refuse(at: int, *values: int, test: int = EQUAL) -> bytes:
    """Steps that refuse a call if the argument at `at` matches a value."""
    return step(LOAD, at) + b"".join(step(test, value, 0, 1) + REFUSED for value in values)


def require(at: int, *values: int, mask: int = 0xFFFFFFFF) -> bytes:
    """Steps that refuse a call unless the argument at `at` is among the values."""
    tests = [step(EQUAL, value, len(values) - place) for place, value in enumerate(values)]
    return b"".join([step(LOAD, at), step(AND, mask), *tests, REFUSED])


def accept(at: int, value: int) -> bytes:
    """Steps that allow a call if the argument at `at` is the value, whatever the other arguments are."""
    return step(LOAD, at) + step(EQUAL, value, 0, 1) + PASSED


def when(at: int, value: int, steps: bytes) -> bytes:
    """The given steps, applied only to a call whose argument at `at` is the value."""
    return step(LOAD, at) + step(EQUAL, value, 0, len(steps) // SIZE) + steps


def checks(tcp_only: bool, server: int, counted: bool) -> dict[str, bytes]:
    """Return the steps for each call of LOOKED_AT. Calls not refused by their steps are allowed."""
    asks = b"".join(accept(THIRD, protocol) for protocol in ASKED) + step(RETURN, ERRNO | EPROTONOSUPPORT)
    found = {
        "clone": refuse(FIRST, NAMESPACES, test=ANY_BIT),
        "ioctl": refuse(SECOND, TIOCSTI, TIOCLINUX),
        "fcntl": refuse(SECOND, F_SETLEASE, F_SETDELEG, *((F_SETPIPE_SZ,) if counted else ())),
        "socket": require(FIRST, UNIX, INTERNET, INTERNET_6, NETLINK) + when(FIRST, NETLINK, asks),
        "socketpair": require(FIRST, UNIX),
    }
    if tcp_only:
        kind = require(SECOND, STREAM, mask=KIND) + require(THIRD, 0, TCP)
        found["socket"] = require(FIRST, INTERNET, INTERNET_6, NETLINK) + when(FIRST, NETLINK, asks) + kind
        found["socketpair"] += require(SECOND, STREAM, SEQUENCED, mask=KIND)
        found["sendto"] = found["sendmmsg"] = refuse(FOURTH, FASTOPEN, test=ANY_BIT)
        found["sendmsg"] = refuse(THIRD, FASTOPEN, test=ANY_BIT)
    first, second = (require(at, 0) if tcp_only else refuse(at, 1, server) for at in (FIRST, SECOND))
    for name in ("sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr"):
        found[name] = first
    found["setpriority"] = refuse(FIRST, PRIORITY_OF_USER) + second
    found["ioprio_set"] = refuse(FIRST, IO_PRIORITY_OF_USER) + second
    lower, upper = step(LOAD, THIRD) + step(EQUAL, 0, 0, 3), accept(THIRD + UPPER, 0)
    # Without a new limit, prlimit64 only reads. A new limit of core dumps is ignored, because a limit of 0 would be
    # worse than `core_limit`.
    found["prlimit64"] = lower + upper + when(SECOND, RLIMIT_CORE, SKIPPED) + first
    found["setrlimit"] = when(FIRST, RLIMIT_CORE, SKIPPED)
    return found


@functools.lru_cache(maxsize=4)
def program(machine: str, tcp_only: bool = False, server: int = 1, *, counted: bool = False, ipc: bool = True) -> bytes:
    """Return the filter, a BPF program, for a machine by its name of `uname -m`.

    Programs cannot slow down or limit process 1 and `server`. `tcp_only` is for programs that run among the host's own.
    They can slow down and limit only themselves, and cannot make the calls of HOST_WIDE. They can open only pairs of
    Unix sockets, TCP sockets, and sockets for queries to the kernel. `counted` means that the memory of processes is
    counted and bounded: the calls of UNCOUNTED and a change of a pipe's size are then refused. Without `ipc`, the calls
    of HOST_WIDE are refused. Raises KeyError for a machine without a list.
    """
    steps = [
        step(LOAD, AT_MACHINE),
        step(EQUAL, MACHINES[machine], 1, 0),
        step(RETURN, KILL),
        step(LOAD, AT_NUMBER),
    ]
    if machine == "x86_64":
        steps += [step(AT_LEAST, X32, 0, 1), step(RETURN, ERRNO | ENOSYS)]
    missing = (CLONE3, *(UNCOUNTED[machine] if counted else ()), *(() if ipc and not tcp_only else HOST_WIDE[machine]))
    for number in missing:
        steps += [step(EQUAL, number, 0, 1), step(RETURN, ERRNO | ENOSYS)]
    for number in sorted([*DENIED_EVERYWHERE.values(), *DENIED[machine].values()]):
        steps += [step(EQUAL, number, 0, 1), REFUSED]
    for name, check in checks(tcp_only, server, counted).items():
        steps += [step(EQUAL, LOOKED_AT[machine][name], 0, len(check) // SIZE + 1), check, PASSED]
    return b"".join([*steps, PASSED])


def core_limit() -> int:
    """Return the RLIMIT_CORE of untrusted programs: one byte, too few for any core dump. With a limit of 0 the kernel
    would still start the host's program for core dumps, if /proc/sys/kernel/core_pattern names one. The host's program
    would run outside of the sandbox and as root, once for each crash in the sandbox. The limit is 0 only if this
    process's own hard limit is 0."""
    return min(1, resource.getrlimit(resource.RLIMIT_CORE)[1] % (1 << 64))  # -1 means that there is no limit


def confine(tcp_only: bool = False, *, counted: bool = False, ipc: bool = True) -> None:
    """Install the filter on this process, the tool server, and on all its descendants, for good. Raises OSError, and
    KeyError as `program` does."""
    install(program(os.uname().machine, tcp_only, os.getpid(), counted=counted, ipc=ipc))


def install(code: bytes) -> None:
    """Install a filter on this process and on all its descendants, for good. Raises OSError."""
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    checked("seccomp", LIBC.prctl(PR_SET_SECCOMP, ctypes.c_ulong(MODE_FILTER), header, 0, 0))
