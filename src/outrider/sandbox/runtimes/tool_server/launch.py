"""Shared code of the `launch` functions of all runtimes: they connect to a tool server, configure it, and undo
each step.

Each runtime with a tool server has an async context manager `launch(spec, context)`. It makes the sandbox, starts the
tool server inside, and yields a `RunningServer`. Leaving the context undoes all steps. Invariant: when `undone` returns
or raises an error, its `step` has ended, even after a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.sandbox.runtimes.kernel.cgroups import ControlGroup
from outrider.sandbox.runtimes.kernel.process_marks import VARIABLE, mark_of
from outrider.sandbox.runtimes.nvidia import variables
from outrider.sandbox.runtimes.tool_server.client import Done, ToolClient, ToolPart
from outrider.spec import RuntimeSpec

log = logging.getLogger("outrider.runtime")

BRIDGE_PORT = 61080
"""The port at which programs in a sandbox reach the gateway. It is above the dynamic ports of Linux, and above the
ports that programs commonly choose."""
BRIDGE_URL = f"http://127.0.0.1:{BRIDGE_PORT}"
HOME = "/root"
"""The home folder in a sandbox that has its own root file system."""
GATEWAY = "gateway"
"""Name of the gateway's socket in the folder that is mounted in a sandbox."""
START_SECONDS = 30.0
STOP_SECONDS = 5.0


async def never() -> bool:
    return False


async def always() -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A tool server that runs in its sandbox, and is connected and configured. The functions may be called until the
    sandbox is stopped.

    - `group` is the sandbox's control group. It is None if a daemon enforces the limits.
    - `ended_inside` is called when the connection is lost. It returns whether programs inside ended the tool server.
    - `stopped_inside` is called when the server does not respond. It returns whether programs inside stopped the server
      with a signal.
    - `image_is_current` returns whether a sandbox that starts now would get the same image.
    - `layer_limit` is the maximum size in bytes of an archive of the writable layer. It is 0 if the runtime cannot save
      the layer.
    """

    tools: ToolClient
    group: ControlGroup | None = None
    ended_inside: Callable[[], Awaitable[bool]] = never
    stopped_inside: Callable[[], bool] = lambda: False
    image_is_current: Callable[[], Awaitable[bool]] = always
    layer_limit: int = 0

    def starved(self) -> bool:
        """Return whether the kernel has killed a process of this sandbox because the host, and not the sandbox, ran out
        of memory."""
        return self.group is not None and self.group.starved()

    def crowded(self) -> bool:
        """Return whether programs in this sandbox have reached its limit of processes, as a fork bomb does. In this
        case, the tool server may get too little CPU time to respond."""
        return self.group is not None and self.group.was_crowded()


Launch = Callable[[RuntimeSpec, SandboxContext], AbstractAsyncContextManager[RunningServer]]


def died_inside(tools: ToolClient, group: ControlGroup | None, *, killable: bool = False) -> bool:
    """Return whether programs in the sandbox ended the tool server. The server's control group and its log tell the
    cause:

    - Usually the server is the first process of a pid namespace, so programs inside cannot kill it by a signal. They
      can only use up the sandbox's memory, or cause an error that ends the server. The server's log then contains the
      error.
    - A `killable` server is not the first process. Programs can kill such a server by a signal, and the server's log is
      then empty.
    - If the host ran out of memory, the cause is outside the sandbox."""
    if group is not None and group.ran_out():
        return True
    starved = group is not None and group.starved()
    return not starved and (killable or tools.log_tail() != "")


class ToolServerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a tool server, which is sent before any program runs.

    - `files` and `folders` are made before any program runs.
    - `bridge_port` is a port in the sandbox. Connections to it are forwarded to the gateway's socket, `bridge_socket`.
      0 means no forwarding.
    - `python` is the command that starts Python, for a sandbox without a Python of its own.
    - `memory` is the maximum bytes of memory of all programs together. It is 0 if the server need not enforce a
      maximum.
    - `lifetime` is in seconds, and 0 means unlimited. After this time, the server and all programs in the sandbox exit,
      whatever the state of the host.
    - `own_processes` is true if the server sees only processes of its sandbox. Otherwise the server lists no processes.
    - `mark` is in the environment of every process (see kernel/process_marks.py)."""

    env: dict[str, str]
    workdir: str
    files: dict[str, bytes] = {}
    folders: list[str] = []
    bridge_port: int = 0
    bridge_socket: str = ""
    subreaper: bool = False
    own_processes: bool = True
    python: list[str] = []
    memory: int = 0
    lifetime: float = 0
    mark: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))

    def marking(self) -> dict[str, str]:
        """Return the environment variable with the mark, for the tool server itself and for processes that are not
        started by a call."""
        return {VARIABLE: f"{self.mark}:0"}


def rooted_setup(
    spec: RuntimeSpec,
    context: SandboxContext,
    image_env: Mapping[str, str],
    *,
    memory: int,
    python: Sequence[str] = (),
    bridge_socket: str = "",
    libraries: str = "",
) -> ToolServerSetup:
    """Return the set-up of a sandbox with its own root. The spec's variables override the image's variables, and the
    GPU variables override both. `libraries` is a folder in the sandbox. The libraries in this folder take precedence
    over the image's."""
    env = {**image_env, **spec.env, **variables(context.gpus)}
    if libraries:
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, (libraries, env.get("LD_LIBRARY_PATH"))))
    return ToolServerSetup(
        env=clean_environment(env, HOME),
        workdir=spec.workdir,
        folders=[HOME, "/tmp", "/var/tmp", spec.workdir],
        bridge_port=BRIDGE_PORT,
        bridge_socket=bridge_socket,
        python=list(python),
        memory=memory,
        lifetime=spec.lifetime_seconds,
        mark=mark_of(context.directory),
    )


def clean_environment(env: Mapping[str, str], home: str) -> dict[str, str]:
    """Return the variables that every sandbox has, together with the variables in `env`, which override the others. No
    variable comes from the service's own environment."""
    clean = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": home,
        "LANG": "C.UTF-8",
        "USER": "root",
    }
    return {**clean, **env}


async def environment_of(tools: ToolClient) -> dict[str, str]:
    """Return the environment variables of the tool server, except its mark. Raises RuntimeFailure, for example if the
    server does not reply within START_SECONDS."""
    try:
        async with asyncio.timeout(START_SECONDS):
            reply = await tools.call("environ", {}, ToolPart)
    except TimeoutError as error:
        raise RuntimeFailure(f"the sandbox's tool server did not start within {START_SECONDS:.0f} s") from error
    pairs = (entry.partition("=") for entry in reply.data.decode("utf-8", "replace").split("\0") if entry)
    return {name: value for name, _, value in pairs if name != VARIABLE}


async def configure(tools: ToolClient, setup: ToolServerSetup) -> None:
    """Send the set-up to a tool server that has just started. Raises RuntimeFailure."""
    try:
        async with asyncio.timeout(START_SECONDS):
            args = msgspec.to_builtins(setup, builtin_types=(bytes,))
            await tools.call("configure", {**args, "lifetime": round(setup.lifetime * 1000)}, Done)
    except TimeoutError as error:
        raise RuntimeFailure(f"the sandbox did not start within {START_SECONDS:.0f} s") from error
    except OSError as error:
        raise RuntimeFailure(f"the sandbox cannot be set up: {error}") from error


def share_gateway(gateway: Path, folder: Path) -> None:
    """Make `folder`, and hard-link the gateway's socket into it. The caller mounts the folder in a sandbox. Every user
    may connect to the socket, because root in the sandbox may be a different user of the host than the node's user.
    Raises OSError."""
    folder.mkdir(mode=0o711)
    with contextlib.suppress(PermissionError):
        gateway.chmod(0o666)
    (folder / GATEWAY).hardlink_to(gateway)


@contextlib.contextmanager
def connection(kind: int = socket.SOCK_STREAM) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Make a new connection, and yield both ends. The second end is for a new process, as its standard input and
    output.

    The second end is closed when the block ends. The first end belongs to the caller, and is closed here only if the
    block raises an error."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with theirs:
        try:
            yield ours, theirs
        except BaseException:  # BaseException includes CancelledError
            ours.close()
            raise


async def undone(sandbox: str, step: Callable[[], Awaitable[object]]) -> None:
    """Run `step` to its end, even if the caller is cancelled meanwhile. `step` undoes a part of a launch.

    A failure is logged and not raised, because `Runtime.stop` never raises an error, and the remaining steps must also
    be undone."""
    try:
        await shielded(step)
    except Exception as error:  # after any error, the remaining steps must still be undone
        bug = not isinstance(error, (RuntimeFailure, OSError))
        log.error("%s is not stopped in full: %s", sandbox, error, exc_info=bug)
