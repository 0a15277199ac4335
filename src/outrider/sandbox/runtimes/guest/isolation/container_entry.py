"""The last steps of confinement in a container, before the tool server takes any call.

Container engines differ in the rights that they give to a container's programs. After these steps the programs have the
same rights as in a namespace sandbox. Apptainer gives the most: the first process of its containers has all
capabilities of the user namespace, a writable /proc, and file systems as large as half of the host's memory. Invariant:
once `enter` has returned, neither this process nor any descendant can undo a step. The module is not joined with the
tool server's modules, but loaded before them (see `confined` in sandbox/runtimes/tool_server/bundle.py).
"""

from __future__ import annotations

import resource

from outrider.sandbox.runtimes.guest.isolation import seccomp, syscalls

MS_REMOUNT = 32
WRITABLE = (("/dev", syscalls.MS_NOSUID), ("/dev/shm", syscalls.MS_NOSUID | syscalls.MS_NODEV))
"""Apptainer's file systems in memory, with the flags of their mounts. All other writable folders are in the same file
system as /dev."""


def enter(arguments: list[str]) -> None:
    """Confine this process. `arguments` are words: `memory=BYTES` (see `ToolServerSetup.memory`), limits such as
    `RLIMIT_DATA=1024`, and with Apptainer `bytes=N` and `files=N`, the maximum size and number of written files."""
    options = dict(argument.split("=", 1) for argument in arguments)
    memory = int(options["memory"])
    by_apptainer = "files" in options
    ipc = limit_apptainer(options, memory) if by_apptainer else not memory
    for name, value in options.items():
        if name.startswith("RLIMIT_"):
            resource.setrlimit(getattr(resource, name), (int(value), int(value)))
    resource.setrlimit(resource.RLIMIT_CORE, (seccomp.core_limit(), seccomp.core_limit()))
    if by_apptainer:
        syscalls.keep_capabilities(frozenset())
    seccomp.confine(counted=memory != 0, ipc=ipc)


def limit_apptainer(options: dict[str, str], memory: int) -> bool:
    """Bound the file systems, replace /proc, and bring the loopback up. Returns True if programs may use System V's
    shared memory: its size is bounded, or memory is not counted."""
    from outrider.sandbox.runtimes.guest.isolation import isolate  # the bundles for other engines lack this module

    for target, flags in WRITABLE:
        size = f"size={options['bytes']},nr_inodes={options['files']}"
        syscalls.mount("none", target, "tmpfs", MS_REMOUNT | flags, size)
    syscalls.unshare(syscalls.NEWCGROUP)
    isolate.make_proc(syscalls.new_mount("proc", isolate.PROC_MOUNT))
    ipc = memory == 0 or isolate.limit_ipc(memory)
    isolate.protect_proc()
    syscalls.raise_loopback()
    return ipc
