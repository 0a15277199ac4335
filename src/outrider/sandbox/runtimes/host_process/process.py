"""The runtime `process`: runs trusted code on the host itself, without isolation. Its sandboxes have the same tool
server as all others.

Invariant: after `stop`, no process of the sandbox is left. This includes processes that have left their session and
whose parents have exited.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from outrider.errors import InvalidField, RuntimeFailure
from outrider.sandbox.runtimes.base import Availability, SandboxContext
from outrider.sandbox.runtimes.kernel.cgroups import Cgroups, ControlGroup
from outrider.sandbox.runtimes.kernel.child import Child
from outrider.sandbox.runtimes.kernel.process_marks import kill_marked, mark_of
from outrider.sandbox.runtimes.limits import counted_memory, rlimits
from outrider.sandbox.runtimes.tool_server.bundle import compiled, delivery, server_command
from outrider.sandbox.runtimes.tool_server.client import Stopped, ToolClient
from outrider.sandbox.runtimes.tool_server.launch import (
    STOP_SECONDS,
    Launch,
    RunningServer,
    ToolServerSetup,
    clean_environment,
    configure,
    connection,
    died_inside,
    undone,
)
from outrider.sandbox.runtimes.tool_server.sandbox import SandboxPaths, ToolServerSandbox
from outrider.spec import RuntimeSpec

WORK = "work"
SCRATCH = "tmp"
"""Names of two folders in the sandbox's own directory: the working folder, and the folder for temporary files."""

Program = Callable[[SandboxContext, bytes, Mapping[str, int], int], tuple[list[str], bytes]]
"""A function that returns the tool server's command, and the code that is sent to the server first. Its arguments are
the sandbox's context, the server's bytecode, the rlimits of each program, and `ToolServerSetup.memory`."""


class ProcessRuntime:
    """The kind `process`. The spec's workdir is the folder `work` in the sandbox's own directory. Methods accept paths
    in the workdir and translate them to the host's paths. Commands see the host's paths. A spec with `rootfs`, `image`,
    `mounts` or `users` is refused."""

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> ToolServerSandbox:
        return sandbox_on_host(launch, spec, context)

    @classmethod
    def available(cls) -> Availability:
        if sys.platform != "linux":
            return Availability(ok=False, detail="needs Linux", hint="run Outrider on Linux, or in a Linux VM")
        return Availability(ok=True, detail="runs programs on this host, without isolation: trusted code only")

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        for name in ("rootfs", "image", "mounts", "users"):
            given = spec.several_users if name == "users" else getattr(spec, name)
            if given:
                raise InvalidField(
                    f"{spec.kind!r} sandboxes have the host's own files and user",
                    field=f"task.runtime.{name}",
                    hint="leave it out, or use runtime kind 'namespace'",
                )


def sandbox_on_host(launch: Launch, spec: RuntimeSpec, context: SandboxContext) -> ToolServerSandbox:
    """Return a sandbox that uses the host's files. Its programs call the gateway at the gateway's own URL."""
    return ToolServerSandbox(
        launch,
        spec,
        context,
        paths=SandboxPaths(spec.workdir, str(context.directory / WORK)),
        endpoint=gateway_url(context),
        scratch=str(context.directory / SCRATCH),
    )


def gateway_url(context: SandboxContext) -> str:
    return context.gateway_url.rstrip("/")


def plain_program(
    context: SandboxContext, bytecode: bytes, limits: Mapping[str, int], memory: int
) -> tuple[list[str], bytes]:
    """Return the tool server's command and code. The code does not confine the server."""
    return server_command(sys.executable), bytecode


@asynccontextmanager
async def launch(
    spec: RuntimeSpec,
    context: SandboxContext,
    *,
    program: Program = plain_program,
    env: Mapping[str, str] = {},
) -> AsyncIterator[RunningServer]:
    """Start the tool server as a child of this process. `env` has further variables, which the spec's variables
    override. tool_server/launch.py explains the other parameters and the result."""
    name = context.directory.name
    work, scratch = str(context.directory / WORK), str(context.directory / SCRATCH)
    groups = await context.host.part(Cgroups)
    controllers = groups.hierarchies.folders
    memory = counted_memory(spec.resources, controllers)
    setup = ToolServerSetup(
        env=clean_environment({"TMPDIR": scratch, **env, **spec.env}, work),
        workdir=work,
        folders=[work, scratch],
        subreaper=True,
        own_processes=False,
        memory=memory,
        lifetime=spec.lifetime_seconds,
        mark=mark_of(context.directory),
    )
    async with AsyncExitStack() as undo:
        group = groups.make(name, spec.resources)
        undo.push_async_callback(undone, name, group.remove)
        bytecode = await asyncio.to_thread(compiled, (sys.executable,))
        command, code = program(context, bytecode, rlimits(spec.resources, controllers), memory)
        yield await undo.enter_async_context(server_process(name, command, code, setup, group=group))


@asynccontextmanager
async def server_process(
    name: str, command: Sequence[str], code: bytes, setup: ToolServerSetup, *, group: ControlGroup | None = None
) -> AsyncIterator[RunningServer]:
    """Start the tool server of the sandbox `name` as a child of this process. It runs `command` in `group`, and reads
    `code` from its standard input. When the context ends, every descendant of the server has exited. Raises
    RuntimeFailure and OSError."""
    with connection() as (ours, theirs):
        child = Child.spawn(command, setup.marking(), theirs)
    tools = ToolClient(ours, child.log_tail)

    async def ended_inside() -> bool:
        return died_inside(tools, group, killable=True)

    async with AsyncExitStack() as undo:
        undo.push_async_callback(undone, name, partial(_end, child, tools, setup.mark))
        if group is not None:
            group.add(child.pid)
        await tools.open()
        tools.send_raw(delivery(code))
        await configure(tools, setup)
        yield RunningServer(tools=tools, group=group, ended_inside=ended_inside, stopped_inside=child.stopped_by_signal)


async def _end(child: Child, tools: ToolClient, mark: str) -> None:
    """Kill all processes of the sandbox, and wait until they have exited.

    The server kills its own descendants, because nothing else can find processes that cleared their environment. If the
    server does not confirm that all its descendants are dead, or does not exit in time, the remaining processes are
    found by their mark and killed."""
    tools.fail_all("the sandbox was stopped")
    ended = False
    with contextlib.suppress(TimeoutError, RuntimeFailure, OSError):
        async with asyncio.timeout(STOP_SECONDS):
            ended = (await tools.call("stop", {}, Stopped)).left == 0
    await tools.close()
    in_time = await child.end(STOP_SECONDS)
    if not (ended and in_time):
        await asyncio.to_thread(kill_marked, f"{mark}:")
