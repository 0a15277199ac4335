"""A tool server of ours as a running thing: its process, its connection, and its verified death.

It does not know which isolation its command line sets up. Invariant: after `stop`, or after a `start` that raised,
every process that was ever below the server is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Mapping, Sequence

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.errors import RuntimeFailure
from outrider.runtimes.kernel.cgroups import Group
from outrider.runtimes.kernel.child import Child
from outrider.runtimes.kernel.process_marks import VARIABLE, kill_marked
from outrider.runtimes.tool_server.bundle import delivery
from outrider.runtimes.tool_server.client import Done, Stopped, ToolClient

BRIDGE_PORT = 61080
"""Where the gateway listens inside: above Linux's dynamic ports and what programs commonly choose."""
START_SECONDS = 30.0
STOP_SECONDS = 5.0


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool server is told first. `files` are written, `folders` made, before anything else runs. `python` is how
    to start one where the sandbox has none. `memory` is how many bytes its programs may have together, 0 where that is
    seen to otherwise. After `lifetime` seconds (0: never) the server ends by itself with all that runs there, whatever
    has become of its host. `mark` is in the environment of everything (see marks.py)."""

    env: dict[str, str]
    workdir: str
    files: dict[str, bytes] = {}
    folders: list[str] = []
    bridge_port: int = 0
    bridge_socket: str = ""
    subreaper: bool = False
    python: list[str] = []
    memory: int = 0
    lifetime: float = 0
    mark: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))

    def marking(self) -> dict[str, str]:
        """The environment that says whose a process is, before any call."""
        return {VARIABLE: f"{self.mark}:0"}


class HostedServer:
    """A tool server that is a program of ours, started by `start`; `tools` is its connection."""

    def __init__(self, child: Child, tools: ToolClient, mark: str) -> None:
        self.tools = tools
        self._child = child
        self._mark = mark

    @classmethod
    async def start(
        cls, command: Sequence[str], bytecode: bytes, setup: Setup, *, group: Group | None = None
    ) -> HostedServer:
        """Spawn `command`, in `group`, and wait until the server has done its `setup`. Raises RuntimeFailure, leaving
        nothing but the group."""
        try:
            server = cls._spawn(command, setup)
            try:
                if group is not None:
                    group.add(server._child.pid)
                await server.tools.open()
                server.tools.send_raw(delivery(bytecode))
                await configure(server.tools, setup)
            except BaseException:  # also a cancel: what was begun is undone
                await shielded(server.stop)
                raise
            return server
        except OSError as error:
            raise RuntimeFailure(f"the sandbox cannot be started: {error}") from error

    @classmethod
    def _spawn(cls, command: Sequence[str], setup: Setup) -> HostedServer:
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                child = Child.spawn(command, setup.marking(), theirs)
            undo.pop_all()
        return cls(child, ToolClient(ours, child.log_tail), setup.mark)

    def stopped_by_signal(self) -> bool:
        return self._child.stopped_by_signal()

    async def stop(self) -> None:
        """Kill all processes and wait for their end: the server itself kills what is below it; what it could not kill,
        and all if it died, we do. Call once; not cancel-safe by itself."""
        self.tools.fail_all("the sandbox was stopped")
        ended = False
        with contextlib.suppress(TimeoutError, RuntimeFailure, OSError):
            async with asyncio.timeout(STOP_SECONDS):
                ended = (await self.tools.call("stop", {}, Stopped)).left == 0
        await self.tools.close()
        in_time = await self._child.end(STOP_SECONDS)
        if not (ended and in_time):
            await asyncio.to_thread(kill_marked, f"{self._mark}:")


async def configure(tools: ToolClient, setup: Setup) -> None:
    """Tell a server that has just been started what it is to be. Raises RuntimeFailure."""
    try:
        async with asyncio.timeout(START_SECONDS):
            args = msgspec.to_builtins(setup, builtin_types=(bytes,))
            await tools.call("configure", {**args, "lifetime": round(setup.lifetime * 1000)}, Done)
    except TimeoutError as error:
        raise RuntimeFailure(f"the sandbox did not start within {START_SECONDS:.0f} s") from error
    except OSError as error:
        raise RuntimeFailure(f"the sandbox cannot be set up: {error}") from error


def clean_environment(env: Mapping[str, str], workdir: str) -> dict[str, str]:
    """The clean environment of a sandbox, the spec's own on top."""
    clean = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": workdir,
        "LANG": "C.UTF-8",
        "USER": "root",
    }
    return {**clean, **env}
