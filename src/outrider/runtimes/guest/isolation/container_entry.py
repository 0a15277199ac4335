"""The last steps in a container that an engine has made, before the tool server in it hears of anybody.

Engines differ in what they leave to a container's programs; with this they have what a namespace sandbox's have. It
knows no session. Invariant: once `enter` has returned, nothing that this process does or starts can undo any of it. It
is not joined with the tool server's modules, but loaded before them.
"""

from __future__ import annotations

import resource

from outrider.runtimes.guest.isolation import seccomp, syscalls


def enter(arguments: list[str]) -> None:
    """`arguments` are the bytes of memory (see `Setup.memory`), then limits such as `RLIMIT_CORE=0`."""
    memory, *limits = arguments
    for limit in limits:
        name, _, value = limit.partition("=")
        resource.setrlimit(getattr(resource, name), (int(value), int(value)))
    seccomp.confine(counted=memory != "0", ipc=memory == "0")
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
