"""The last steps that confine the tool server of a container, before it takes a call.

The rights of a container's programs depend on the container engine. These steps reduce the rights to those of programs
in a namespace sandbox. Apptainer gives the most: the first process of its containers has all capabilities of the user
namespace, a writable /proc, and file systems as large as half of the host's memory. Invariant: once `enter` has
returned, neither this process nor a descendant can undo a step.

The module is not part of the tool server's program. It is loaded before that program (see `confined` in
sandbox/runtimes/tool_server/bundle.py).
"""

from __future__ import annotations

import resource

from outrider.sandbox.runtimes.guest.isolation import seccomp, syscalls

MS_REMOUNT = 32
WRITABLE = (("/dev", syscalls.MS_NOSUID), ("/dev/shm", syscalls.MS_NOSUID | syscalls.MS_NODEV))
"""Apptainer's file systems in memory, and the flags of their mounts. The file system at /dev also holds all other
writable folders."""


def enter(arguments: list[str]) -> None:
    """Confine this process. `arguments` are words such as `memory=BYTES` (see `ToolServerSetup.memory`), and limits
    such as `RLIMIT_DATA=1024`. For Apptainer, `bytes=N` and `files=N` are also given: the maximum size and number of
    written files."""
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
    """Limit Apptainer's file systems in memory, replace /proc, and start the loopback interface. Returns whether
    programs may use System V's shared memory. They may use it if its size could be limited, or if the sandbox's memory
    is not counted."""
    from outrider.sandbox.runtimes.guest.isolation import isolate  # only Apptainer's bundle contains this module

    for target, flags in WRITABLE:
        size = f"size={options['bytes']},nr_inodes={options['files']}"
        syscalls.mount("none", target, "tmpfs", MS_REMOUNT | flags, size)
    syscalls.unshare(syscalls.NEWCGROUP)
    isolate.make_proc(syscalls.new_mount("proc", isolate.PROC_MOUNT))
    ipc = memory == 0 or isolate.limit_ipc(memory)
    isolate.protect_proc()
    syscalls.raise_loopback()
    return ipc
