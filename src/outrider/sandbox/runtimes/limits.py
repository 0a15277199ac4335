"""Limits of a sandbox, computed from its `resources`: the numbers for control groups, rlimits and the tool server.

This module applies no limit itself. Invariant: each resource of every sandbox is bounded, even if no control group can
be made. There are two exceptions: CPU time, and the number of processes of a sandbox without its own user namespace.
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
"""A sandbox may have one file for each BYTES_PER_FILE bytes of its disk limit. The number of files is bounded, because
each file takes kernel memory."""
FILES_SHARE_OF_MEMORY = 0.75
MIN_OPEN_FILES = 1024
"""Minimum number of open files of a sandbox, if the node's hard limit allows this number. Many programs need this
number."""
MAX_OPEN_FILES = 1 << 16
SHARES = {"RLIMIT_SIGPENDING": (16, 64), "RLIMIT_MSGQUEUE": (8, 0)}
"""Resources that the kernel bounds per user. Each value is a divisor and a minimum: a sandbox gets the user's limit
divided by the divisor, but at least the minimum. Linux's default for message queues is 800 KiB; an eighth of this holds
one queue of the usual size."""
COUNTED_BY_NAMESPACE = (5, 14)
"""The first Linux version that counts the resources of `SHARES` per user namespace as well as per user. Older
kernels have one count for all sandboxes, so a lower limit would not separate the sandboxes. They would only reach it
earlier."""


def counted_memory(resources: Resources, controllers: Container[str]) -> int:
    """Return the maximum bytes of memory for all programs of the sandbox together. The tool server enforces this limit
    (see guest/memory_watch.py). Returns 0 if a control group enforces it."""
    return 0 if "memory" in controllers else resources.most_memory_mb * MEBIBYTE


def rlimits(resources: Resources, controllers: Container[str], *, own_users: bool = False) -> dict[str, int]:
    """Return the limits of each single process. Keys are the names of limits in the module `resource`, such as
    `RLIMIT_DATA`. A limit that a control group enforces for the whole sandbox is left out.

    `own_users` is true if the sandbox has a user namespace. Without a user namespace the kernel counts all processes of
    the user on the host, so the number of processes cannot be limited."""
    limits = {"RLIMIT_CORE": core_limit(), "RLIMIT_NOFILE": open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))}
    if "pids" not in controllers and own_users:
        limits["RLIMIT_NPROC"] = resources.pids
    if own_users and kernel_version() >= COUNTED_BY_NAMESPACE:
        limits |= shared_limits()
    if counted := counted_memory(resources, controllers):
        # RLIMIT_DATA and not RLIMIT_AS: Node needs tens of GiB of address space to compile WebAssembly.
        limits["RLIMIT_DATA"] = counted
    return limits


def shared_limits() -> dict[str, int]:
    """Return the limits of resources that all processes of a user share: timers of `timer_create` and queued signals,
    and bytes of POSIX message queues. Each sandbox gets its own share, so an agent cannot exhaust the resources of
    other sandboxes."""
    return {
        name: min(max(own // share, least), own)
        for name, (share, least) in SHARES.items()
        if (own := resource.getrlimit(getattr(resource, name))[0]) != resource.RLIM_INFINITY
    }


def kernel_version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def open_files(soft: int, hard: int) -> int:
    """Return the number of descriptors that a program may have open. `soft` and `hard` are the limits of this process.

    Descriptors that were sent over a socket and not yet received count against the user. The kernel refuses to send
    another if there are more of them than the sending process may have open. A program gets half of the node's own
    limit, so the sandboxes' unreceived descriptors never stop the node from sending."""
    soft, hard = (MAX_OPEN_FILES * 2 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    return max(min(MAX_OPEN_FILES, soft // 2), min(MIN_OPEN_FILES, hard))


def writable_bounds(resources: Resources) -> tuple[int, int]:
    """Return the maximum (bytes, number of files) that may be written.

    The sandboxes that use these bounds keep their files in memory. If a task limits its memory, files may take only a
    part of that memory. Then a full disk is an error and does not kill all programs."""
    size = resources.disk_mb * MEBIBYTE
    if resources.memory_mb is not None:
        size = min(size, round(resources.memory_mb * MEBIBYTE * FILES_SHARE_OF_MEMORY))
    return size, max(4096, size // BYTES_PER_FILE)


def limits_in_words(hierarchies: Hierarchies) -> str:
    """Return a description, for people, of how this machine limits sandboxes."""
    missing = [name for name in CONTROLLERS if name not in hierarchies.folders]
    instead = {
        "cpu": "cpus not limited",
        "memory": "memory counted by the tool server, and per process by rlimits",
        "pids": "processes by rlimits" if os.geteuid() else "processes not limited",
    }
    return "; ".join([str(hierarchies), *(instead[name] for name in missing)])
