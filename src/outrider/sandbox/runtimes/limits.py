"""Computes the limits of a sandbox from its `resources`, for control groups, rlimits and the tool server.

This module applies no limit itself. Invariant: each resource of every sandbox is bounded, even without control groups.
There are two exceptions: CPU time, and the number of processes of a sandbox without its own user namespace.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Container

from outrider.sandbox.runtimes.guest.isolation.seccomp import core_limit
from outrider.sandbox.runtimes.kernel.cgroups import CONTROLLERS, Hierarchies
from outrider.spec import MEBIBYTE, Resources

BYTES_PER_FILE = 4096
"""A sandbox may have one file for each BYTES_PER_FILE bytes of its disk limit. The number of files needs a limit,
because each file takes kernel memory."""
FILES_SHARE_OF_MEMORY = 0.75
MIN_OPEN_FILES = 1024
"""A sandbox may have at least this many open files, because many programs need them. If the node's hard limit is lower,
that limit applies."""
MAX_OPEN_FILES = 1 << 16
SHARES = {"RLIMIT_SIGPENDING": (16, 64), "RLIMIT_MSGQUEUE": (8, 0)}
"""Resources that the kernel limits per user. Each value is a divisor and a minimum. A sandbox gets the user's limit
divided by the divisor, but at least the minimum. For message queues, Linux's default limit is 800 KiB, and an eighth of
it holds one queue of the usual size."""
COUNTED_BY_NAMESPACE = (5, 14)
"""The first Linux version that also counts the resources in `SHARES` per user namespace. Older kernels count only per
user, that is, for all sandboxes together. With an older kernel, a lower limit would not give each sandbox its own
share: all sandboxes together would only reach the limit sooner."""


def counted_memory(resources: Resources, controllers: Container[str]) -> int:
    """Return the limit that the tool server enforces for the memory of all programs of a sandbox together, in bytes
    (see guest/memory_watch.py). Returns 0 if a control group enforces this limit instead."""
    return 0 if "memory" in controllers else resources.most_memory_mb * MEBIBYTE


def rlimits(resources: Resources, controllers: Container[str], *, own_users: bool = False) -> dict[str, int]:
    """Return the limits of each single process, by their names in the module `resource`, such as `RLIMIT_DATA`. A limit
    that a control group enforces for the whole sandbox is left out.

    `own_users` is true if the sandbox has a user namespace. Without one, the number of processes cannot be limited,
    because the kernel would count all processes of the user on the host."""
    limits = {"RLIMIT_CORE": core_limit(), "RLIMIT_NOFILE": open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))}
    if "pids" not in controllers and own_users:
        limits["RLIMIT_NPROC"] = resources.pids
    if own_users and kernel_version() >= COUNTED_BY_NAMESPACE:
        limits |= shared_limits()
    if counted := counted_memory(resources, controllers):
        # RLIMIT_AS is not used, because Node needs tens of GiB of address space to compile WebAssembly.
        limits["RLIMIT_DATA"] = counted
    return limits


def shared_limits() -> dict[str, int]:
    """Return the limits of resources that all processes of a user share. These are timers of `timer_create`, queued
    signals, and bytes of POSIX message queues. Each sandbox gets its own share, so an agent cannot use up the resources
    of other sandboxes."""
    return {
        name: min(max(own // share, least), own)
        for name, (share, least) in SHARES.items()
        if (own := resource.getrlimit(getattr(resource, name))[0]) != resource.RLIM_INFINITY
    }


def kernel_version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def open_files(soft: int, hard: int) -> int:
    """Return how many descriptors a program may have open. `soft` and `hard` are the limits of this process.

    For each user, the kernel counts the descriptors that were sent over a socket but not yet received. A process cannot
    send another descriptor while this count exceeds the process's own limit of open descriptors. So a sandbox's program
    gets at most half of the node's limit. The sandbox then stops sending before the count reaches the node's limit, and
    never keeps the node from sending. If half of the node's limit is less than MIN_OPEN_FILES, the program gets
    MIN_OPEN_FILES, or the node's hard limit if that is lower."""
    soft, hard = (MAX_OPEN_FILES * 2 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    return max(min(MAX_OPEN_FILES, soft // 2), min(MIN_OPEN_FILES, hard))


def writable_bounds(resources: Resources) -> tuple[int, int]:
    """Return two maximums for the files that a sandbox may write: the bytes, and the number of files.

    Sandboxes with these maximums keep their files in memory. So if a task limits its memory, files may take only a part
    of the memory. A program that writes too much then gets an error, and does not exhaust the memory of the sandbox's
    other programs."""
    size = resources.disk_mb * MEBIBYTE
    if resources.memory_mb is not None:
        size = min(size, round(resources.memory_mb * MEBIBYTE * FILES_SHARE_OF_MEMORY))
    return size, max(4096, size // BYTES_PER_FILE)


def limits_in_words(hierarchies: Hierarchies) -> str:
    """Return a text for people that describes how this machine limits sandboxes."""
    missing = [name for name in CONTROLLERS if name not in hierarchies.folders]
    instead = {
        "cpu": "cpus not limited",
        "memory": "memory counted by the tool server, and per process by rlimits",
        "pids": "processes by rlimits" if os.geteuid() else "processes not limited",
    }
    return "; ".join([str(hierarchies), *(instead[name] for name in missing)])
