"""The common parts of every runtime's `launch`: the set-up of a tool server, the connection, and the undoing of steps.

A runtime with a tool server has one async context manager `launch(spec, context)`. It makes the sandbox, starts the
tool server inside, and yields a `RunningServer`. Leaving the context undoes all steps. Invariant: when `undone` returns
or raises, its step has ended, even after a cancellation.
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
"""Port of the gateway inside a sandbox: above Linux's dynamic ports and the ports that programs commonly choose."""
BRIDGE_URL = f"http://127.0.0.1:{BRIDGE_PORT}"
HOME = "/root"
"""The home folder in a sandbox that has its own root file system."""
GATEWAY = "gateway"
"""Name of the gateway's socket in a folder that is mounted in a sandbox."""
START_SECONDS = 30.0
STOP_SECONDS = 5.0


async def never() -> bool:
    return False


async def always() -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A configured and connected tool server that runs in its sandbox.

    `group` is the sandbox's control group, None where a daemon enforces the limits. The functions may be called until
    the sandbox is stopped. `ended_inside`, called when the connection is gone, returns whether programs inside ended
    the tool server. `stopped_inside`, called when the server does not respond, returns whether programs inside sent the
    server a stop signal. `image_is_current` returns whether a sandbox started now would have the same image.
    `layer_limit` is the maximum size in bytes of an archive of the writable layer, 0 where the runtime cannot save the
    layer.
    """

    tools: ToolClient
    group: ControlGroup | None = None
    ended_inside: Callable[[], Awaitable[bool]] = never
    stopped_inside: Callable[[], bool] = lambda: False
    image_is_current: Callable[[], Awaitable[bool]] = always
    layer_limit: int = 0

    def starved(self) -> bool:
        """Return whether the kernel has killed a process of this sandbox because the host, not the sandbox, ran out of
        memory."""
        return self.group is not None and self.group.starved()

    def crowded(self) -> bool:
        """Return whether programs in this sandbox have reached its limit of processes, as a fork bomb does. So many
        processes leave the tool server too little processor time to respond."""
        return self.group is not None and self.group.was_crowded()


Launch = Callable[[RuntimeSpec, SandboxContext], AbstractAsyncContextManager[RunningServer]]


def died_inside(tools: ToolClient, group: ControlGroup | None, *, killable: bool = False) -> bool:
    """Return whether programs in the sandbox ended the tool server, judged by the server's group and log.

    The first process of a pid namespace receives no signals from inside. So if programs inside ended the server, either
    the log has the reason, or the sandbox's memory ran out. A `killable` server is not the first process of a
    namespace: programs can kill the server by a signal, and the log is then empty. If the host's memory ran out, the
    cause is outside."""
    if group is not None and group.ran_out():
        return True
    starved = group is not None and group.starved()
    return not starved and (killable or tools.log_tail() != "")


class ToolServerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration sent to a tool server first.

    `files` are written and `folders` made before any program runs. Connections to `bridge_port` are forwarded to the
    gateway's socket; 0 disables forwarding. `python` is the command that starts Python in a sandbox that has none
    itself. `memory` is the maximum bytes of memory of all programs together, 0 if the server need not count. After
    `lifetime` seconds (0: never) the server and all programs in the sandbox exit, whatever the state of the host.
    With `own_processes`, all processes that the server can see are the sandbox's, and the server lists them. `mark` is
    in the environment of every process (see kernel/process_marks.py)."""

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
        """Return the environment variable that marks the tool server, and other processes that belong to no call."""
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
    """Return the set-up of a sandbox with its own root. The spec's variables take precedence over the image's, and the
    GPU variables over both. Libraries in the sandbox's folder `libraries` take precedence over the image's."""
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
    """Return the variables of every sandbox, overridden by `env`. None comes from the service's own environment."""
    clean = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": home,
        "LANG": "C.UTF-8",
        "USER": "root",
    }
    return {**clean, **env}


async def environment_of(tools: ToolClient) -> dict[str, str]:
    """Return the environment variables with which the tool server was started, without its mark. Raises RuntimeFailure,
    also for a server that does not reply within START_SECONDS."""
    try:
        async with asyncio.timeout(START_SECONDS):
            told = await tools.call("environ", {}, ToolPart)
    except TimeoutError as error:
        raise RuntimeFailure(f"the sandbox's tool server did not start within {START_SECONDS:.0f} s") from error
    pairs = (entry.partition("=") for entry in told.data.decode("utf-8", "replace").split("\0") if entry)
    return {name: value for name, _, value in pairs if name != VARIABLE}


async def configure(tools: ToolClient, setup: ToolServerSetup) -> None:
    """Send the set-up to a server that has just been started. Raises RuntimeFailure."""
    try:
        async with asyncio.timeout(START_SECONDS):
            args = msgspec.to_builtins(setup, builtin_types=(bytes,))
            await tools.call("configure", {**args, "lifetime": round(setup.lifetime * 1000)}, Done)
    except TimeoutError as error:
        raise RuntimeFailure(f"the sandbox did not start within {START_SECONDS:.0f} s") from error
    except OSError as error:
        raise RuntimeFailure(f"the sandbox cannot be set up: {error}") from error


def share_gateway(gateway: Path, folder: Path) -> None:
    """Make `folder`, to be mounted in a sandbox, and give the gateway's socket a second name in it. The sandbox's root
    may be another user than the node, and must be able to connect. Raises OSError."""
    folder.mkdir(mode=0o711)
    with contextlib.suppress(PermissionError):
        gateway.chmod(0o666)
    (folder / GATEWAY).hardlink_to(gateway)


@contextlib.contextmanager
def connection(kind: int = socket.SOCK_STREAM) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a new connection. The second end is for a new process, as its standard input and output.

    The second end is closed at the end of the block. The first end belongs to the caller, and is closed only if the
    block raises."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with theirs:
        try:
            yield ours, theirs
        except BaseException:  # BaseException includes CancelledError
            ours.close()
            raise


async def undone(sandbox: str, step: Callable[[], Awaitable[object]]) -> None:
    """Run `step`, which undoes a part of a launch, to its end, even if the caller is cancelled meanwhile.

    A failure is logged and not raised: `Runtime.stop` raises nothing, and the sandbox's other parts must be undone
    too."""
    try:
        await shielded(step)
    except Exception as error:  # whatever the error is, the other parts must be undone
        bug = not isinstance(error, (RuntimeFailure, OSError))
        log.error("%s is not stopped in full: %s", sandbox, error, exc_info=bug)
