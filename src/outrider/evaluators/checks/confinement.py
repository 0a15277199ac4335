"""Restricts a process that checks answers: it can only calculate and read Python's files.

`reasoning_sets.py` keeps answers from running as code in this process. If an answer runs anyway, it cannot write a
file, open a socket, start a program or send a signal. Invariant: after `confine_zygote` or `confine_check` has
returned, the process cannot undo the restrictions.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

from outrider.sandbox.runtimes.guest.isolation import landlock, seccomp, syscalls
from outrider.sandbox.runtimes.guest.isolation.seccomp import (
    ANY_BIT,
    EQUAL,
    LOAD,
    PASSED,
    REFUSED,
    SECOND,
    THIRD,
    refuse,
    step,
)

SYSTEM_FOLDERS = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
OPENS = {"x86_64": {2: SECOND, 257: THIRD}, "aarch64": {56: THIRD}}
"""The system calls `open` and `openat`, by machine architecture. Maps the number of each call to the position of the
argument that holds the flags."""
CALCULATION = {
    "x86_64": (
        *(0, 1, 3, 4, 5, 6, 8),  # read, write, close, stat, fstat, lstat, lseek
        *(9, 10, 11, 12, 25, 28),  # mmap, mprotect, munmap, brk, mremap, madvise
        *(14, 15, 17, 21, 24),  # rt_sigprocmask, rt_sigreturn, pread64, access, sched_yield
        *(39, 60, 63, 89, 98, 99, 186),  # getpid, exit, uname, readlink, getrusage, sysinfo, gettid
        *(202, 204, 217, 219, 228, 229, 231),  # futex, sched_getaffinity, getdents64, restart, clock_*, exit_group
        *(262, 267, 269, 273, 318, 332, 334),  # newfstatat, readlinkat, faccessat, robust list, getrandom, statx, rseq
    ),
    "aarch64": (
        *(63, 64, 57, 80, 62, 222, 226, 215, 214, 216, 233, 135, 139, 67, 124),
        *(172, 93, 160, 165, 179, 178, 98, 123, 61, 128, 113, 114, 94, 79, 78, 48, 99, 278, 291, 293),
    ),
}
"""The system calls that Python needs to calculate and to import: their numbers, by machine architecture. aarch64
lacks some of the calls of x86_64. Files may also be opened for reading (see OPENS). All other calls fail."""
SETITIMER = {"x86_64": 38, "aarch64": 103}
"""The number of the system call `setitimer`, by machine architecture. CALCULATION does not contain this call, because a
check could use it to extend its own limit of processor time."""


def confine_zygote() -> None:
    """Restrict this process and its forks to reading Python's files. On a kernel without Landlock, these processes can
    also read other files. A check can send the content of such files only to its caller."""
    if landlock.version() > 0:
        # Permit only those folders of sys.path from which a module was loaded. sys.path may also include the service's
        # working directory, which checks must not read.
        loaded = {str(getattr(module, "__file__", None) or "") for module in tuple(sys.modules.values())}
        folders = [path for path in sys.path if any(name.startswith(f"{path}/") for name in loaded)]
        landlock.enter(["0", *(f"read={path}" for path in (*SYSTEM_FOLDERS, *folders))])
    else:
        syscalls.keep_capabilities(frozenset())
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def confine_check(seconds: float, memory: int) -> None:
    """Restrict this process, which runs one check, to calculating. `seconds` limits its processor time, and `memory`
    its address space in bytes. When the time is up, the kernel kills the process with SIGPROF."""
    whole = int(seconds) + 2  # RLIMIT_CPU counts whole seconds, and kills a process that ignores SIGPROF
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, whole),
        (resource.RLIMIT_CORE, seccomp.core_limit()),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    seccomp.install(calculation(os.uname().machine))


def calculation(machine: str, *more: int) -> bytes:
    """Return the seccomp filter of a check. It permits the system calls in CALCULATION and in `more`, and opening files
    for reading. Raises KeyError for a machine that is not in CALCULATION."""
    steps = [
        step(LOAD, seccomp.AT_MACHINE),
        step(EQUAL, seccomp.MACHINES[machine], 1, 0),
        step(seccomp.RETURN, seccomp.KILL),
        step(LOAD, seccomp.AT_NUMBER),
    ]
    for number, flags in OPENS[machine].items():
        check = refuse(flags, WRITING, test=ANY_BIT)
        steps += [step(EQUAL, number, 0, len(check) // seccomp.SIZE + 1), check, PASSED]
    for number in (*CALCULATION[machine], *more):
        steps += [step(EQUAL, number, 0, 1), PASSED]
    return b"".join([*steps, REFUSED])
