"""The parts of every runtime's `launch`: what a tool server is told, its connection, and how steps are undone.

A runtime with a tool server has one async context manager `launch(spec, context)`. It makes the sandbox, starts the
tool server in it, and yields a `RunningServer`; leaving it undoes all of that. This module does not know how a sandbox
is isolated. Invariant: a step that is undone by `undone` has ended when that returns or raises, whoever is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.errors import RuntimeFailure
from outrider.runtimes.base import SandboxContext
from outrider.runtimes.kernel.cgroups import Group
from outrider.runtimes.kernel.process_marks import VARIABLE, mark_of
from outrider.runtimes.nvidia import variables
from outrider.runtimes.tool_server.client import Done, ToolClient
from outrider.spec import RuntimeSpec

log = logging.getLogger("outrider.runtime")

BRIDGE_PORT = 61080
"""Where the gateway listens inside: above Linux's dynamic ports and what programs commonly choose."""
BRIDGE_URL = f"http://127.0.0.1:{BRIDGE_PORT}"
HOME = "/root"
"""The home folder in a sandbox that has a root of its own."""
START_SECONDS = 30.0
STOP_SECONDS = 5.0


async def never() -> bool:
    return False


async def always() -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A tool server that runs in its sandbox, set up and connected.

    `group` is the sandbox's control group, None where a daemon keeps the limits. The functions are called while the
    sandbox is not stopped: `ended_inside` tells whether programs inside ended the tool server, whose connection is
    gone; `stopped_inside`, whether they sent it a signal to stop, as it does not answer; `image_is_current`, whether a
    sandbox that is started now would have the same image. `layer_limit` is the maximum size in bytes of an archive of
    the writable layer, 0 where the runtime cannot save it. `next_host` is the path inside at which the server finds its
    next host, if the sandbox can outlive this one, and `handle` is what that must know of it.
    """

    tools: ToolClient
    group: Group | None = None
    ended_inside: Callable[[], Awaitable[bool]] = never
    stopped_inside: Callable[[], bool] = lambda: False
    image_is_current: Callable[[], Awaitable[bool]] = always
    layer_limit: int = 0
    next_host: str = ""
    handle: Mapping[str, str] = field(default_factory=dict)

    def starved(self) -> bool:
        """Whether the kernel has killed a process of this sandbox for want of the host's memory, not of its own."""
        return self.group is not None and self.group.starved()


Launch = Callable[[RuntimeSpec, SandboxContext], AbstractAsyncContextManager[RunningServer]]


def died_inside(tools: ToolClient, group: Group | None, *, killable: bool = False) -> bool:
    """Whether a tool server, which is dead, was ended by the programs beside it: as far as its group and its log tell.

    As the first process of a pid namespace it takes no signal from there. So it has written to its log what it died
    of, or the sandbox's memory ran out. A `killable` one is in no such namespace."""
    if group is not None and group.ran_out():
        return True
    starved = group is not None and group.starved()
    return not starved and (killable or tools.log_tail() != "")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool server is told first.

    `files` are written and `folders` made before anything else runs. `bridge_port` is where it forwards connections to
    the gateway's socket, 0 for nowhere. `python` is the command that starts one in a sandbox that has none. `memory` is
    the maximum bytes of memory of all its programs together, 0 where the server need not count. After `lifetime`
    seconds (0: never) the server ends by itself with all that runs there, whatever has become of its host. `mark` is in
    the environment of every process (see kernel/process_marks.py)."""

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
        """The environment variable that says whose a process is, before any call."""
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
) -> Setup:
    """The set-up of a sandbox that has a root of its own. The spec's variables win over those of its image, and what
    tells of the sandbox's GPUs over both. `libraries` is a folder of it whose libraries win over the image's."""
    env = {**image_env, **spec.env, **variables(context.gpus)}
    if libraries:
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, (libraries, env.get("LD_LIBRARY_PATH"))))
    return Setup(
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
    """The variables that every sandbox has, with `env` on top: nothing of the service's own environment."""
    clean = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": home,
        "LANG": "C.UTF-8",
        "USER": "root",
    }
    return {**clean, **env}


async def configure(tools: ToolClient, setup: Setup) -> None:
    """Send a server that has just been started its set-up. Raises RuntimeFailure."""
    try:
        async with asyncio.timeout(START_SECONDS):
            args = msgspec.to_builtins(setup, builtin_types=(bytes,))
            await tools.call("configure", {**args, "lifetime": round(setup.lifetime * 1000)}, Done)
    except TimeoutError as error:
        raise RuntimeFailure(f"the sandbox did not start within {START_SECONDS:.0f} s") from error
    except OSError as error:
        raise RuntimeFailure(f"the sandbox cannot be set up: {error}") from error


@contextlib.contextmanager
def connection(kind: int = socket.SOCK_STREAM) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a new connection, while a process is started that gets the second as its standard input and output.

    The second end is closed on leaving. The first is the caller's, and closed only when the block raises."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with theirs:
        try:
            yield ours, theirs
        except BaseException:  # also a cancellation
            ours.close()
            raise


async def undone(sandbox: str, step: Callable[[], Awaitable[object]]) -> None:
    """Run the `step` that undoes a part of a launch to its end, also when cancelled meanwhile.

    A failure is logged: `Runtime.stop` raises nothing, and the sandbox's other parts are undone too."""
    try:
        await shielded(step)
    except Exception as error:  # of whatever kind
        bug = not isinstance(error, (RuntimeFailure, OSError))
        log.error("%s is not stopped in full: %s", sandbox, error, exc_info=bug)
