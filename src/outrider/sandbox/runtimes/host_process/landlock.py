"""The runtime `process-landlock`, for machines without user namespaces. Programs run on the host itself, and Landlock
confines them.

The isolation is weaker than that of namespaces: programs see the host's system folders and its processes, but cannot
look into the host's processes. Without control groups, each process has its own limits. For the sandbox as a whole, the
tool server limits only the memory. Invariant: programs change files only in the sandbox's own directory, except that
they can write to the terminals of the service's user. `stop` kills the same processes as in the process runtime.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from outrider.sandbox.runtimes.base import Availability, SandboxContext
from outrider.sandbox.runtimes.guest.isolation import landlock, seccomp
from outrider.sandbox.runtimes.host_process.process import ProcessRuntime, gateway_url, launch, sandbox_on_host
from outrider.sandbox.runtimes.kernel.cgroups import find
from outrider.sandbox.runtimes.shown_folders import SHOWN
from outrider.sandbox.runtimes.tool_server.bundle import confined, server_command
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox
from outrider.spec import RuntimeSpec

CONFINEMENT = ("isolation.syscalls", "isolation.seccomp", "isolation.landlock")
NEEDED = 3
"""The oldest usable version of Landlock (Linux 6.2). With older versions, programs could truncate a file that they may
not write."""
WRITE = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx", "/dev/pts")
"""Writable paths. /dev/pts is needed to open new terminals. It also gives access to other terminals of the service's
user."""
ENVIRONMENT = {"GIT_CONFIG_NOSYSTEM": "1"}
"""Variables that make git skip the configuration file of the host. Otherwise git exits with an error if the file exists
but cannot be read."""


class LandlockRuntime:
    """The kind `process-landlock`. It is like `ProcessRuntime`, with these restrictions:

    - Programs can write only below the sandbox's own directory.
    - They can read only the system's folders and the harness's programs.
    - They can open TCP connections only to the gateway, if the kernel has version 4 of Landlock
      (`landlock.NETWORK_SINCE`)."""

    check_spec = ProcessRuntime.check_spec

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> ToolServerSandbox:
        return sandbox_on_host(partial(launch, program=confined_program, env=ENVIRONMENT), spec, context)

    @classmethod
    def available(cls) -> Availability:
        if platform.machine() not in seccomp.MACHINES or sys.platform != "linux":
            return Availability(ok=False, detail="needs Linux on x86-64 or arm64")
        if (have := landlock.version()) < NEEDED:
            detail = f"Landlock {NEEDED} or newer is needed, this kernel has {have or 'none'}"
            return Availability(ok=False, detail=detail, hint="Linux 6.2 or newer, with landlock in its list of LSMs")
        network = "TCP" if have >= landlock.NETWORK_SINCE else "no network"
        return Availability(
            ok=True,
            detail=f"Landlock {have}: files and {network} restricted, weaker than namespaces; limits by {find()}",
        )


def confined_program(
    context: SandboxContext, bytecode: bytes, limits: Mapping[str, int], memory: int
) -> tuple[list[str], bytes]:
    """Return the tool server's command and code. The code of guest/isolation/landlock.py runs first and parses the
    arguments after the command."""
    shown = [*SHOWN["process-landlock"], str(Path(sys.base_prefix).resolve()), *map(str, context.mounts)]
    words = [
        str(urlsplit(gateway_url(context)).port or 0),
        *(f"read={path}" for path in shown),
        *(f"write={path}" for path in (*WRITE, context.directory)),
        f"memory={memory}",
        *(f"{name}={value}" for name, value in limits.items()),
    ]
    return [*server_command(sys.executable), *words], confined(CONFINEMENT, bytecode)
