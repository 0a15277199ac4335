"""The seccomp filter of a sandbox. It refuses system calls that the sandbox's programs must not make.

DENIED and DENIED_EVERYWHERE list the calls that container engines deny by default, and the calls that they allow only
with certain capabilities. Invariant: a call with the call numbers of another architecture is never allowed. All
functions are pure, except `core_limit`, `confine` and `install`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import struct
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.isolation.syscalls import (
    LIBC,
    NEWCGROUP,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUSER,
    NEWUTS,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    checked,
    prctl,
)

if TYPE_CHECKING:
    Numbers = dict[str, tuple[int | None, int | None]]
    """The numbers of calls on each of MACHINES, None where a machine lacks the call."""

PR_SET_SECCOMP, MODE_FILTER = 22, 2
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, EPROTONOSUPPORT = 1, 38, 93

LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_MACHINE = 0, 4
FIRST, SECOND, THIRD, FOURTH = 16, 24, 32, 40
"""Offsets of a call's first four arguments in `struct seccomp_data`. Each argument has 64 bits. Its lower half is at
its offset. Its upper half begins UPPER bytes after that offset."""
UPPER = 4

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""The first call number of x32, an interface of x86-64 that gives the same calls other numbers."""
UNIX, INTERNET, INTERNET_6, NETLINK = 1, 2, 10, 16
"""The address families of sockets that are allowed. Others may ignore network namespaces, for example vsock, which
connects a virtual machine with its host."""
ASKED = (0, 4, 15, 16)
"""The protocols of netlink that are allowed, for queries to the kernel: ROUTE, SOCK_DIAG, KOBJECT_UEVENT and GENERIC.
USERSOCK is not allowed, because programs could send to each other with it. In a sandbox with the host's network, they
could also send to the host's programs."""
STREAM, SEQUENCED, KIND = 1, 5, 0xF
TCP = 6
FASTOPEN = 0x20000000
"""The flag MSG_FASTOPEN. Sending with this flag opens a connection that Landlock does not check, because Landlock
checks only `connect`."""
PRIORITY_OF_USER, IO_PRIORITY_OF_USER = 2, 3
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
F_SETPIPE_SZ = 1031
F_SETLEASE, F_SETDELEG = 1024, 1040
"""The commands of `fcntl` that set leases. They are refused. The owner of a file can lease it, and any program that
then opens the file waits up to 45 seconds. So if the sandbox sees a file of the host, and the sandbox's programs own
the file, these programs could block the host's programs with a lease."""
RLIMIT_CORE = 4
NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET

LOOKED_AT: Numbers = {
    "ioctl": (16, 29),
    "socket": (41, 198),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "socketpair": (53, 199),
    "clone": (56, 220),
    "fcntl": (72, 25),
    "setpriority": (141, 140),
    "setrlimit": (160, 164),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "prlimit64": (302, 261),
    "sendmmsg": (307, 269),
    "sched_setattr": (314, 274),
}
"""The calls that `checks` allows or refuses by their arguments, with their numbers."""
HOST_WIDE = {
    "x86_64": (29, 30, 31, *range(64, 67), *range(68, 72), 220, *range(240, 246)),
    "aarch64": (*range(180, 197),),
}
"""Numbers of the calls for System V's shared memory, semaphores and messages, and for POSIX's messages. Without
namespaces, all programs of the host share these objects, and an object outlives the program that made it. `shmdt` is
missing, because it only releases memory."""

UNCOUNTED = {"x86_64": (216, 278, 319, 447), "aarch64": (75, 234, 279, 447)}
"""Numbers of the calls `remap_file_pages`, `vmsplice`, `memfd_create` and `memfd_secret`. memory_watch.py cannot count
their memory, because it belongs to a descriptor or a pipe, or is missing in the process's files in /proc."""

CLONE3 = 435
"""Number of the call `clone3`. The filter refuses the call with ENOSYS, because the call's flags are in memory, where a
filter cannot read them. The C library then uses `clone` instead."""

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
DENIED: Numbers = {
    "syslog": (103, 116),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "vhangup": (153, 58),
    "modify_ldt": (154, None),
    "pivot_root": (155, 41),
    "adjtimex": (159, 171),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "create_module": (174, None),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "get_kernel_syms": (177, None),
    "query_module": (178, None),
    "quotactl": (179, 60),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    "clock_settime": (227, 112),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "migrate_pages": (256, 238),
    "unshare": (272, 97),
    "move_pages": (279, 239),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "clock_adjtime": (305, 266),
    "setns": (308, 268),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
}
"""The calls that are always refused, with their numbers on each architecture."""


def step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Return one instruction of the classic BPF machine. After a test, `then` and `otherwise` are how many instructions
    to skip."""
    return struct.pack("HBBI", code, then, otherwise, value)


REFUSED, PASSED = step(RETURN, ERRNO | EPERM), step(RETURN, ALLOW)
SKIPPED = step(RETURN, ERRNO | 0)
"""An instruction that makes the call do nothing and return success."""
SIZE = len(PASSED)


def refuse(at: int, *values: int, test: int = EQUAL) -> bytes:
    """Return instructions that refuse a call if its argument at the offset `at` matches one of the values."""
    return step(LOAD, at) + b"".join(step(test, value, 0, 1) + REFUSED for value in values)


def require(at: int, *values: int, mask: int = 0xFFFFFFFF) -> bytes:
    """Return instructions that refuse a call unless its argument at the offset `at` is one of the values."""
    tests = [step(EQUAL, value, len(values) - place) for place, value in enumerate(values)]
    return b"".join([step(LOAD, at), step(AND, mask), *tests, REFUSED])


def accept(at: int, value: int) -> bytes:
    """Return instructions that allow a call if the argument at `at` equals `value`, whatever its other arguments
    are."""
    return step(LOAD, at) + step(EQUAL, value, 0, 1) + PASSED


def when(at: int, value: int, steps: bytes) -> bytes:
    """Return instructions that run `steps` only if the call's argument at the offset `at` equals `value`."""
    return step(LOAD, at) + step(EQUAL, value, 0, len(steps) // SIZE) + steps


def checks(tcp_only: bool, server: int, counted: bool) -> dict[str, bytes]:
    """Return the instructions for each call in LOOKED_AT. A call that its instructions do not refuse is allowed."""
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
    # Without a new limit, prlimit64 only reads, and is allowed. A call that sets the limit of core dumps does nothing
    # and reports success. Otherwise a program could set 0, which is worse than one byte (see `core_limit`).
    found["prlimit64"] = lower + upper + when(SECOND, RLIMIT_CORE, SKIPPED) + first
    found["setrlimit"] = when(FIRST, RLIMIT_CORE, SKIPPED)
    return found


def numbers_on(machine: str, calls: Numbers) -> dict[str, int]:
    column = list(MACHINES).index(machine)
    return {name: number for name, row in calls.items() if (number := row[column]) is not None}


def denied(machine: str) -> dict[str, int]:
    """Return the numbers of all calls that are refused whatever their arguments are."""
    return {**DENIED_EVERYWHERE, **numbers_on(machine, DENIED)}


@functools.lru_cache(maxsize=4)
def program(machine: str, tcp_only: bool = False, server: int = 1, *, counted: bool = False, ipc: bool = True) -> bytes:
    """Return the filter as a BPF program. `machine` is the architecture, as `uname -m` names it. Raises KeyError if
    MACHINES does not have it.

    Programs cannot change the scheduling and limits of process 1 and of the process with the id `server`.

    - `tcp_only` is for a sandbox without namespaces, whose programs run beside the host's programs. A program can then
      change only its own scheduling and limits, and cannot make the calls in HOST_WIDE. It can open only pairs of Unix
      sockets, TCP sockets, and sockets for queries to the kernel.
    - `counted` means that memory_watch.py counts and limits memory. The calls in UNCOUNTED, and changes of a pipe's
      size, are then refused.
    - Without `ipc`, the calls in HOST_WIDE are refused.
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
    for number in sorted(denied(machine).values()):
        steps += [step(EQUAL, number, 0, 1), REFUSED]
    looked_at = numbers_on(machine, LOOKED_AT)
    for name, check in checks(tcp_only, server, counted).items():
        steps += [step(EQUAL, looked_at[name], 0, len(check) // SIZE + 1), check, PASSED]
    return b"".join([*steps, PASSED])


def core_limit() -> int:
    """Return the limit of core dumps (RLIMIT_CORE) for untrusted programs. It is one byte, too small for any core dump.

    If /proc/sys/kernel/core_pattern names a program, the kernel starts this program for each crash in the sandbox. The
    program runs outside the sandbox, as the host's root. A limit of one byte prevents the start, but a limit of 0 does
    not. The result is 0 only if the hard limit of this process is 0."""
    return min(1, resource.getrlimit(resource.RLIMIT_CORE)[1] % (1 << 64))  # -1 means no limit


def confine(tcp_only: bool = False, *, counted: bool = False, ipc: bool = True) -> None:
    """Install the filter on this process, which is the tool server, and on all its descendants. Also protect this
    process from its descendants. Neither can be undone. Raises OSError, and KeyError for an unknown architecture."""
    install(program(os.uname().machine, tcp_only, os.getpid(), counted=counted, ipc=ipc))
    # Hide this process's files in /proc from programs of the same user. Otherwise these programs could read and change
    # this process's memory and descriptors.
    prctl(PR_SET_DUMPABLE, 0)


def install(code: bytes) -> None:
    """Install a filter on this process and all its descendants. This cannot be undone. Raises OSError."""
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    checked("seccomp", LIBC.prctl(PR_SET_SECCOMP, ctypes.c_ulong(MODE_FILTER), header, 0, 0))
