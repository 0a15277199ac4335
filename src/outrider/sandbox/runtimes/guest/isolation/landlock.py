"""Confines a tool server with Landlock. This is for a host that does not allow user namespaces.

The process and its descendants may use only some folders. They may connect to only one TCP port, and send signals only
to each other, if the kernel's version of Landlock can enforce these two rules. Invariant: once `enter` has returned,
neither this process nor a descendant can undo a step. Numbers and structures are from linux/landlock.h.

The module is not part of the tool server's program. It is loaded before that program (see `confined` in
sandbox/runtimes/tool_server/bundle.py).
"""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import struct

from outrider.sandbox.runtimes.guest.isolation import seccomp, syscalls

SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446
CREATE_VERSION = 1
PATH_BENEATH, NET_PORT = 1, 2

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE, IOCTL_DEVICE = 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE
RIGHTS_SINCE = ((1, (1 << 13) - 1), (2, 1 << 13), (3, TRUNCATE), (5, IOCTL_DEVICE))
"""Rights on files: for each version of Landlock, the bits of the rights that it introduced. The kernel refuses a
ruleset with a right that it does not support."""
NETWORK_SINCE, SCOPES_SINCE = 4, 6
CONNECT_TCP = 2
SCOPES = 1 | 2
"""Flags that forbid signals to processes outside this confinement, and connections to the abstract Unix sockets of such
processes."""


def version() -> int:
    """Return the version of the kernel's Landlock, or 0 if the kernel does not have it."""
    number = syscalls.LIBC.syscall(SYS_CREATE_RULESET, None, ctypes.c_size_t(0), CREATE_VERSION)
    return int(max(0, number))


def enter(arguments: list[str]) -> None:
    """Confine this process. The first argument is the only TCP port to which programs may connect. The other arguments
    are words such as `read=/usr`, `write=/tmp/x`, `memory=0` (see `ToolServerSetup.memory`) and `RLIMIT_CORE=1`. A
    missing path is skipped."""
    port, *words = arguments
    given = [(name, value) for name, _, value in (word.partition("=") for word in words)]
    have = version()
    rights = sum(bits for since, bits in RIGHTS_SINCE if since <= have)
    ruleset = create(have, rights)
    for name, path in given:
        if name in ("read", "write"):
            allow_path(ruleset, path, rights & (READ if name == "read" else rights))
    if have >= NETWORK_SINCE:
        add(ruleset, NET_PORT, struct.pack("QQ", CONNECT_TCP, int(port)))
    for name, value in given:
        if name.startswith("RLIMIT_"):
            resource.setrlimit(getattr(resource, name), (int(value), int(value)))
    syscalls.keep_capabilities(frozenset())
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.syscall("landlock_restrict_self", SYS_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    seccomp.confine(tcp_only=True, counted=("memory", "0") not in given)


def create(have: int, rights: int) -> int:
    """Create a ruleset for version `have` of Landlock. The structure contains only the fields of this version, because
    a kernel refuses the fields of later versions."""
    network = CONNECT_TCP if have >= NETWORK_SINCE else 0
    scopes = SCOPES if have >= SCOPES_SINCE else 0
    fields = (rights, network, scopes)[: 3 if have >= SCOPES_SINCE else 2 if have >= NETWORK_SINCE else 1]
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    return syscalls.syscall("landlock_create_ruleset", SYS_CREATE_RULESET, attributes, len(attributes), 0)


def allow_path(ruleset: int, path: str, rights: int) -> None:
    """Allow the rights at a path and below it. For a file, rights that concern only folders are left out, because the
    kernel refuses them. A missing path is skipped."""
    try:
        held = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(held).st_mode):
        rights &= ON_FILES
    add(ruleset, PATH_BENEATH, struct.pack("=Qi", rights, held))
    os.close(held)


def add(ruleset: int, kind: int, rule: bytes) -> None:
    syscalls.syscall("landlock_add_rule", SYS_ADD_RULE, ruleset, kind, rule, 0)
