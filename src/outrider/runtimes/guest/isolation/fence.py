"""The last steps of a container that another program has made, before the tool server in it hears of anybody.

Apptainer gives its first process more than a sandbox may have: all capabilities of the user namespace, room for half
of the host's memory, a writable /proc. It knows no session. Invariant: once `enter` has returned, nothing that this
process does or starts can undo any of it.

It is not joined with the tool server's modules, but loaded beside them (see runtimes/apptainer/start.py).
"""

from __future__ import annotations

import resource

from outrider.runtimes.guest.isolation import isolate, seccomp, syscalls

MS_REMOUNT = 32
SESSION = ("/dev", syscalls.MS_NOSUID)
"""Shares its file system with all else that can be written to, but for the next."""
SHARED_MEMORY = ("/dev/shm", syscalls.MS_NOSUID | syscalls.MS_NODEV)


def enter(arguments: list[str]) -> None:
    """`arguments` are the bytes and files that may be written, the bytes of memory (see `Setup.memory`), then limits
    such as `RLIMIT_CORE=0`."""
    size, files, memory, *limits = arguments
    for target, flags in (SESSION, SHARED_MEMORY):
        syscalls.mount("none", target, "tmpfs", MS_REMOUNT | flags, f"size={size},nr_inodes={files}")
    syscalls.unshare(syscalls.NEWCGROUP)
    isolate.make_proc(syscalls.new_mount("proc", isolate.PROC))
    ipc = memory == "0" or isolate.bound_ipc(int(memory))
    isolate.guard_proc()
    syscalls.raise_loopback()
    for limit in limits:
        name, _, value = limit.partition("=")
        resource.setrlimit(getattr(resource, name), (int(value), int(value)))
    syscalls.keep_capabilities(frozenset())
    seccomp.confine(counted=memory != "0", ipc=ipc)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
