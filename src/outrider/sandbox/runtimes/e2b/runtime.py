"""The kind `e2b`: sandboxes of a service that offers the E2B API. Our tool server runs inside each sandbox.

The tool server is started by `envd`, E2B's program in every sandbox. The server's standard input and output connect it
to the node, and also carry the model calls. So the sandbox needs no network, and the node needs no public address.
Invariant: when `stop` returns, the service has confirmed that the sandbox is gone. If the removal fails, the failure is
logged, and the next sweep tries again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

import msgspec

from outrider.concurrency.chores import Chores
from outrider.errors import InvalidField, RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.runtimes.base import Availability, SandboxContext
from outrider.sandbox.runtimes.e2b.api import LIST, E2BSettings
from outrider.sandbox.runtimes.e2b.envd import Envd, ProcessSocket
from outrider.sandbox.runtimes.e2b.programs import output, show_programs
from outrider.sandbox.runtimes.e2b.service import EXTEND_SECONDS, E2BService, Start
from outrider.sandbox.runtimes.probe_cache import ProbeCache
from outrider.sandbox.runtimes.remote import QueueClock, RemoteSandbox, gateway_tunnel, labels_of
from outrider.sandbox.runtimes.tool_server.bundle import remote_command, remote_delivery
from outrider.sandbox.runtimes.tool_server.client import ToolClient
from outrider.sandbox.runtimes.tool_server.launch import RunningServer, configure, environment_of, rooted_setup, undone
from outrider.spec import MEBIBYTE, RuntimeSpec

TEMPLATE = "base"
"""The E2B template of a task that names no image."""
PROBE_SECONDS = 5.0
MEASURE = "import os; print(os.cpu_count(), os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 20)"
SETTLE_SECONDS = 2.0
"""When the tool server or `envd` has ended, the node checks twice, with this many seconds between the checks, whether
the sandbox still exists. Programs in the sandbox are treated as the cause only if it exists both times."""
KERNEL_SHARE = 0.85
"""Programs see at least this fraction of a machine's memory as the machine's size. The kernel takes the rest."""


class E2BRuntime:
    """The kind `e2b`. The field `task.runtime.image` names the E2B template."""

    part = E2BService
    """See `RuntimeKind`."""

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> RemoteSandbox:
        return RemoteSandbox(launch, spec, context)

    @classmethod
    def available(cls) -> Availability:
        """Return whether the service accepts the API key. The first call blocks."""
        return Availability.found(lambda: _probe_of(E2BSettings.read()).get())

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        for name in ("rootfs", "mounts", "users"):
            given = spec.several_users if name == "users" else getattr(spec, name)
            if given:
                raise InvalidField(
                    f"{spec.kind!r} sandboxes are machines of another service, made of its templates",
                    field=f"task.runtime.{name}",
                    hint="leave it out, and name a template in task.runtime.image",
                )


@functools.lru_cache(maxsize=8)  # different settings occur only in tests
def _probe_of(settings: E2BSettings) -> ProbeCache[str]:
    return ProbeCache(lambda: _probe(settings))


def _probe(settings: E2BSettings) -> str:
    """Request the service's list of sandboxes, to check the address and the key. Returns a text about the service. The
    call blocks. Raises RuntimeUnavailable."""
    try:
        status = _list_status(settings)
    except (OSError, HTTPException) as error:
        raise RuntimeUnavailable(
            f"no E2B service at {settings.url}: {error}",
            hint="check E2B_DOMAIN or E2B_API_URL, and that this machine may connect to it",
        ) from error
    if status in (401, 403):
        raise RuntimeUnavailable(f"{settings.url} refuses the key", hint="check E2B_API_KEY")
    if status != 200:
        raise RuntimeUnavailable(f"{settings.url} answers with status {status}", hint="try again later")
    return f"the E2B service at {settings.url}; the key is valid"


def _list_status(settings: E2BSettings) -> int:
    """Request the service's list of sandboxes, and return the HTTP status. The call blocks. Raises OSError and
    HTTPException."""
    url = urlsplit(settings.url)
    kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", f"{url.path}{LIST}?limit=1", headers={"X-API-Key": settings.key})
        return connection.getresponse().status
    finally:
        connection.close()


@asynccontextmanager
async def launch(spec: RuntimeSpec, context: SandboxContext, queued: QueueClock) -> AsyncIterator[RunningServer]:
    """Create a sandbox at the service, and run the tool server in it. See tool_server/launch.py."""
    name = context.directory.name
    service = await context.host.part(E2BService)
    program = await asyncio.to_thread(remote_delivery)
    start = Start()
    async with AsyncExitStack() as undo:
        chores = await undo.enter_async_context(Chores(context.host.failures))
        undo.callback(chores.cancel)
        undo.push_async_callback(undone, name, partial(service.remove, start))
        made = await service.create(start, spec.image or TEMPLATE, labels_of(context), queued, ahead=context.ahead)
        # One name for all sandboxes: `Failures` keeps a limited number of names.
        chores.begin("terms of sandboxes", partial(service.extend, start), every=EXTEND_SECONDS, at_once=False)
        envd = Envd(service.api, made)
        process = ProcessSocket(envd)
        undo.callback(process.close)
        tools = ToolClient(process.end, process.log_tail)
        undo.push_async_callback(undone, name, tools.close)
        await tools.open()
        mark = rooted_setup(spec, context, {}, memory=0).marking()
        chores.create_task(process.run(remote_command(), mark), name="process in a sandbox")
        tools.send_raw(program)
        try:
            image_env = await environment_of(tools)
        except RuntimeFailure as error:
            raise _without_python(process) or error from error
        memory = (spec.resources.memory_mb or 0) * MEBIBYTE
        setup = rooted_setup(spec, context, image_env, memory=memory)
        await configure(tools, msgspec.structs.replace(setup, bridge_port=0, subreaper=True))
        await _check_size(tools, spec)
        await show_programs(tools, envd, service.archives, context.mounts)
        await undo.enter_async_context(
            gateway_tunnel(tools, context.gateway_socket, chores, seconds=spec.lifetime_seconds)
        )

        async def ended_inside() -> bool:
            """Return whether programs in the sandbox ended the tool server or `envd`. This is so if one of the two has
            ended and the sandbox still exists. The service is asked twice: if the service itself has ended the sandbox,
            it may report the end of the tool server before the end of the sandbox. If the service does not respond, the
            cause is outside the sandbox."""
            for pause in (0.0, SETTLE_SECONDS):
                await asyncio.sleep(pause)
                if not await service.exists(start) or not (process.exit is not None or await envd.is_closed()):
                    return False
            return True

        yield RunningServer(tools=tools, ended_inside=ended_inside)


async def _check_size(tools: ToolClient, spec: RuntimeSpec) -> None:
    """Raise RuntimeUnavailable, which names the field, if the task asks for more CPUs or memory than the template
    has."""
    asked = spec.resources
    if asked.cpus is None and asked.memory_mb is None:
        return
    try:
        cpus, memory_mb = map(int, (await output(tools, ["python3", "-I", "-S", "-c", MEASURE])).split())
    except ValueError as error:
        raise RuntimeFailure("the size of the sandbox cannot be measured", inside=True) from error
    for name, wanted, there in (
        ("cpus", asked.cpus or 0, cpus),
        ("memory_mb", (asked.memory_mb or 0) * KERNEL_SHARE, memory_mb),
    ):
        if wanted > there:
            raise RuntimeUnavailable(
                f"the template has {there} of {name}, which is less than the task asks for",
                field=f"task.runtime.resources.{name}",
                hint="name a larger template in task.runtime.image, or ask for less",
            )


def _without_python(process: ProcessSocket) -> RuntimeUnavailable | None:
    """Return the error to raise if the tool server did not start because the sandbox has no usable Python. Returns None
    if the start failed for another reason."""
    if process.exit is None and "python3" not in process.log_tail():
        return None
    return RuntimeUnavailable(
        "no usable Python in the sandbox",
        field="task.runtime.image",
        hint="use a template with python3, 3.8 or newer",
        log_tail=process.log_tail() or None,
    )
