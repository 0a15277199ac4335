"""What a sandbox may use, by its `resources`: the numbers that control groups, rlimits and the tool server are given.

It sets no limit itself. Invariant: each resource is bounded for every sandbox, also where no control group can be made,
but for processors, and for the number of processes of a sandbox that shares the host's users.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Container

from outrider.runtimes.guest.isolation.seccomp import core_limit
from outrider.runtimes.kernel.cgroups import CONTROLLERS, Hierarchies
from outrider.spec import MEBIBYTE, Resources

BYTES_PER_FILE = 4096
"""The bound on written bytes bounds the number of files too, because each takes kernel memory."""
FILES_SHARE_OF_MEMORY = 0.75
MIN_OPEN_FILES = 1024
"""What programs take for granted."""
MAX_OPEN_FILES = 1 << 16
SHARES = {"RLIMIT_SIGPENDING": (16, 64), "RLIMIT_MSGQUEUE": (8, 0)}
"""What a sandbox may use of what the kernel gives a user in all: that part, and no less than so much. An eighth of
Linux's default of 800 KiB for messages is one queue of the usual size."""
COUNTED_BY_NAMESPACE = (5, 14)
"""Since that Linux these limits are kept for each user namespace by itself, besides for the user. Before it a lower
limit would only be reached earlier, by everybody."""


def counted_memory(resources: Resources, controllers: Container[str]) -> int:
    """Maximum bytes of memory of all programs of the sandbox, kept by its tool server (guest/memory_watch.py).

    It is 0 where a control group keeps it."""
    return 0 if "memory" in controllers else resources.most_memory_mb * MEBIBYTE


def rlimits(resources: Resources, controllers: Container[str], *, own_users: bool = False) -> dict[str, int]:
    """Limits of each process, for what no control group limits for all of them together, by their names in `resource`.

    `own_users`: the sandbox has a user namespace. Without one the kernel counts all processes of the user on the host,
    so that the number of processes cannot be limited."""
    limits = {"RLIMIT_CORE": core_limit(), "RLIMIT_NOFILE": open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))}
    if "pids" not in controllers and own_users:
        limits["RLIMIT_NPROC"] = resources.pids
    if own_users and kernel_version() >= COUNTED_BY_NAMESPACE:
        limits |= shared_limits()
    if counted := counted_memory(resources, controllers):
        # Not the address space: Node cannot compile WebAssembly in less than some tens of GiB of it.
        limits["RLIMIT_DATA"] = counted
    return limits


def shared_limits() -> dict[str, int]:
    """Limits for what all processes of a user have together: timers of `timer_create` and queued signals, and bytes of
    POSIX's message queues. Each sandbox has a share, so that no agent uses up what its neighbours need."""
    return {
        name: min(max(own // share, least), own)
        for name, (share, least) in SHARES.items()
        if (own := resource.getrlimit(getattr(resource, name))[0]) != resource.RLIM_INFINITY
    }


def kernel_version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def open_files(soft: int, hard: int) -> int:
    """Descriptors that a program may have open, by this process's own soft and hard limits.

    The kernel refuses to send a descriptor over a socket when the user has more of them under way than the sending
    process may have open. Half of the node's own limit leaves the node as many, whatever its sandboxes send."""
    soft, hard = (MAX_OPEN_FILES * 2 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    return max(min(MAX_OPEN_FILES, soft // 2), min(MIN_OPEN_FILES, hard))


def writable_bounds(resources: Resources) -> tuple[int, int]:
    """Maximum (bytes, number of files) that may be written.

    Files live in memory. Where a task bounds its memory they may take a part of that only, so that a full disk is an
    error and not the death of all programs."""
    size = resources.disk_mb * MEBIBYTE
    if resources.memory_mb is not None:
        size = min(size, round(resources.memory_mb * MEBIBYTE * FILES_SHARE_OF_MEMORY))
    return size, max(4096, size // BYTES_PER_FILE)


def limits_in_words(hierarchies: Hierarchies) -> str:
    """Which limits are in force on this machine, for people."""
    missing = [name for name in CONTROLLERS if name not in hierarchies.folders]
    instead = {
        "cpu": "cpus not limited",
        "memory": "memory counted by the tool server, and per process by rlimits",
        "pids": "processes by rlimits" if os.geteuid() else "processes not limited",
    }
    return "; ".join([str(hierarchies), *(instead[name] for name in missing)])
