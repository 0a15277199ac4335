"""The last steps of a container that another program has made, before the tool server in it hears of anybody.

Apptainer gives its first process more than a sandbox may have: all capabilities of the user namespace, room for half
of the host's memory, a writable /proc. It knows no session. Invariant: once `enter` has returned, nothing that this
process does or starts can undo any of it.

It is not joined with the tool server's modules, but loaded beside them (see runtimes/apptainer_start.py).
"""

from __future__ import annotations

import resource

from outrider.runtimes.inside import cage, kernel, seccomp

MS_REMOUNT = 32
SESSION = ("/dev", kernel.MS_NOSUID)
"""Shares its file system with all else that can be written to, but for the next."""
SHARED_MEMORY = ("/dev/shm", kernel.MS_NOSUID | kernel.MS_NODEV)


def enter(arguments: list[str]) -> None:
    """`arguments` are the bytes and files that may be written, the bytes of memory (see `Setup.memory`), then limits
    such as `RLIMIT_CORE=0`."""
    size, files, memory, *limits = arguments
    for target, flags in (SESSION, SHARED_MEMORY):
        kernel.mount("none", target, "tmpfs", MS_REMOUNT | flags, f"size={size},nr_inodes={files}")
    kernel.unshare(kernel.NEWCGROUP)
    cage.make_proc(kernel.new_mount("proc", cage.PROC))
    ipc = memory == "0" or cage.bound_ipc(int(memory))
    cage.guard_proc()
    kernel.raise_loopback()
    for limit in limits:
        name, _, value = limit.partition("=")
        resource.setrlimit(getattr(resource, name), (int(value), int(value)))
    kernel.keep_capabilities(frozenset())
    seccomp.confine(counted=memory != "0", ipc=ipc)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
