"""The system calls that a sandbox's programs do not get: what reaches into the kernel beyond what work needs.

The list follows what container engines deny by default, plus what they leave to capabilities. It knows nothing of who
is confined. Invariant: a call of another machine's numbering is never let through. Pure but for `confine`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct

from outrider.runtimes.inside.kernel import NEWCGROUP, NEWIPC, NEWNET, NEWNS, NEWPID, NEWUSER, NEWUTS, checked, prctl

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38

LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_MACHINE, AT_FIRST, AT_SECOND = 0, 4, 16, 24

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""From here on the numbers of x86-64 mean the x32 calls."""
CLONE = {"x86_64": 56, "aarch64": 220}
IOCTL = {"x86_64": 16, "aarch64": 29}
SOCKET = {"x86_64": 41, "aarch64": 198}
UNIX, INTERNET, INTERNET_6, NETLINK = 1, 2, 10, 16
"""The families of sockets that there are: others, such as those between a virtual machine and its host, know of no
network namespace."""
STREAM, KIND = 1, 0xF
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET

CLONE3 = 435
"""Its flags are in memory, where a filter cannot look: without it the C library uses `clone`."""

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
    """One instruction of the classic BPF machine; the jumps count the instructions to skip."""
    return struct.pack("HBBI", code, then, otherwise, value)


@functools.lru_cache(maxsize=2)
def program(machine: str, tcp_only: bool = False) -> bytes:
    """The filter for a machine by the name that `uname -m` gives it. With `tcp_only` there are sockets for that and to
    ask the kernel, and no others. Raises KeyError for a machine without a list."""
    steps = [
        step(LOAD, AT_MACHINE),
        step(EQUAL, MACHINES[machine], 1, 0),
        step(RETURN, KILL),
        step(LOAD, AT_NUMBER),
    ]
    if machine == "x86_64":
        steps += [step(AT_LEAST, X32, 0, 1), step(RETURN, ERRNO | ENOSYS)]
    steps += [step(EQUAL, CLONE3, 0, 1), step(RETURN, ERRNO | ENOSYS)]
    for number in sorted([*DENIED_EVERYWHERE.values(), *DENIED[machine].values()]):
        steps += [step(EQUAL, number, 0, 1), step(RETURN, ERRNO | EPERM)]
    sockets = [step(LOAD, AT_FIRST), step(EQUAL, NETLINK, 8, 0), step(EQUAL, INTERNET, 3, 0)]
    sockets += [step(EQUAL, INTERNET_6, 2, 0), step(EQUAL, UNIX, 4, 0)]
    sockets += [step(RETURN, ERRNO | EPERM), step(LOAD, AT_SECOND), step(AND, KIND)]
    sockets += [step(EQUAL, STREAM, 1, 0), step(RETURN, ERRNO | EPERM if tcp_only else ALLOW), step(RETURN, ALLOW)]
    steps += [step(EQUAL, SOCKET[machine], 0, len(sockets)), *sockets]
    steps += [step(EQUAL, CLONE[machine], 0, 4), step(LOAD, AT_FIRST), step(ANY_BIT, NAMESPACES, 0, 1)]
    steps += [step(RETURN, ERRNO | EPERM), step(RETURN, ALLOW)]
    steps += [step(EQUAL, IOCTL[machine], 0, 4), step(LOAD, AT_SECOND), step(EQUAL, TIOCSTI, 1, 0)]
    steps += [step(EQUAL, TIOCLINUX, 0, 1), step(RETURN, ERRNO | EPERM)]
    return b"".join([*steps, step(RETURN, ALLOW)])


def confine(tcp_only: bool = False) -> None:
    """Put the filter on this process and all that it starts, for good. Raises OSError, and KeyError as `program`."""
    code = program(os.uname().machine, tcp_only)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    checked("seccomp", libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(MODE_FILTER), header, 0, 0))
