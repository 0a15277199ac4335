"""The kind `kubernetes`. A sandbox is a pod, in which the API server runs the tool server as a command.

One WebSocket to this command carries calls, files and the agent's model calls. So a pod needs no network, and the node
needs no address that pods can reach. Invariant: when `stop` returns, the API server no longer has the pod. If the
removal failed, the pod's programs end within IDLE_SECONDS, because their tool server has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from aiohttp import ClientWebSocketResponse

from outrider.errors import InvalidField, RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.pythons.portable import portable_command
from outrider.sandbox.runtimes.base import Availability, SandboxContext
from outrider.sandbox.runtimes.containers.create_request import NEUTRAL
from outrider.sandbox.runtimes.kubernetes.api import KubeApiError
from outrider.sandbox.runtimes.kubernetes.cluster import PAUSES, PodCluster
from outrider.sandbox.runtimes.kubernetes.credentials import find_access
from outrider.sandbox.runtimes.kubernetes.exec_stream import ExecStream
from outrider.sandbox.runtimes.kubernetes.pod_request import OWN_HOME, label_value, pod_body, pod_name, python_of
from outrider.sandbox.runtimes.kubernetes.pod_state import CONTAINER, NEEDS_PYTHON, Pod
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.runtimes.remote import QueueClock, RemoteSandbox, gateway_tunnel, labels_of
from outrider.sandbox.runtimes.tool_server.bundle import FLAGS, PIPES_BOOT, remote_delivery
from outrider.sandbox.runtimes.tool_server.client import Stopped, ToolClient
from outrider.sandbox.runtimes.tool_server.launch import (
    STOP_SECONDS,
    RunningServer,
    ToolServerSetup,
    configure,
    connection,
    environment_of,
    rooted_setup,
    undone,
)
from outrider.spec import RuntimeSpec

SETTLE_SECONDS = 2.0
"""If a tool server has ended and the pod's state shows no cause outside the pod, the node waits this many seconds, and
then requests the pod's state again. The cause of the end may appear in the state with a delay. The pod's programs are
treated as the cause only if the second state shows no outside cause either."""
OF_CLUSTER = ("KUBERNETES_", "OUTRIDER_")
"""Environment variables in a pod that have one of these prefixes do not come from its image."""


class KubernetesRuntime:
    """The kind `kubernetes`. The methods of a sandbox take paths in the pod. `stop` discards all files that programs
    have written."""

    part = PodCluster

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> RemoteSandbox:
        return RemoteSandbox(launch, spec, context)

    @classmethod
    def available(cls) -> Availability:
        """Return whether this machine is configured to use a cluster. The API server gets no request."""
        return Availability.found(lambda: f"pods of the cluster at {find_access().url}")

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        for name in ("rootfs", "mounts"):
            if getattr(spec, name):
                raise InvalidField(
                    f"{spec.kind!r} sandboxes have no files of this machine",
                    field=f"task.runtime.{name}",
                    hint="put the files into the image, or name them in an upload step of task.runtime.prepare",
                )
        if spec.image is None or spec.image.startswith("/"):
            raise InvalidField(
                f"{spec.kind!r} sandboxes need an image",
                field="task.runtime.image",
                hint="name an image as the cluster's machines pull it, such as registry.example/name:tag",
            )


@asynccontextmanager
async def launch(
    spec: RuntimeSpec,
    context: SandboxContext,
    clock: QueueClock,
    *,
    part: Callable[[Host], AbstractAsyncContextManager[PodCluster]] = PodCluster,
) -> AsyncIterator[RunningServer]:
    """Make a pod and run the tool server in it. See tool_server/launch.py. `part` is the node's part that makes the
    pods."""
    cluster = await context.host.part(part)
    pods, sandbox = cluster.pods, context.directory.name
    if pods.user is not None and spec.several_users:
        raise InvalidField(
            "the operator's setting sandboxes.kubernetes.user gives pods one user", field="task.runtime.users"
        )
    if context.mounts and pods.tools_image is None:
        raise RuntimeUnavailable(
            "the harness's program cannot be shown in a pod",
            hint="set sandboxes.kubernetes.tools_image to Outrider's image, built with this program; "
            "see docs/runtimes/kubernetes.md",
        )
    python = [] if pods.tools_image is None else portable_command()
    make_setup = partial(rooted_setup, spec, context, memory=0, python=python)
    name = pod_name(cluster.node, sandbox)
    labels = {key: label_value(value) for key, value in labels_of(context).items()}
    body = pod_body(name, labels, pods, spec, shown=context.mounts, env=make_setup({}).marking())
    emptied = False
    async with AsyncExitStack() as undo:
        # Registered before `create`, because a `create` that fails may have created the pod.
        undo.push_async_callback(undone, sandbox, lambda: cluster.remove(name, emptied=lambda: emptied))
        limit = await cluster.create(name, body, clock, ahead=context.ahead)
        await cluster.running(name, clock, limit, ahead=context.ahead)
        with connection() as (ours, theirs):
            with clock.waiting():
                entered = await enter(cluster, name)
            stream = ExecStream(entered, theirs.dup(), cluster.chores, waits=cluster.waits)
        tools = ToolClient(ours, stream.log_tail)
        undo.push_async_callback(undone, sandbox, tools.close)
        await undo.enter_async_context(stream)
        await tools.open()

        async def empty() -> None:
            nonlocal emptied
            emptied = await end_programs(tools)

        undo.push_async_callback(undone, sandbox, empty)
        tools.send_raw(await asyncio.to_thread(remote_delivery))
        try:
            setup = in_pod(make_setup(of_image(await environment_of(tools))), own_user=pods.user is not None)
            await configure(tools, setup)
        except RuntimeFailure as error:
            if tools.loss != "gone" or pods.tools_image is not None:
                raise
            raise error.replace(hint=NEEDS_PYTHON) from error
        tunnel = gateway_tunnel(tools, context.gateway_socket, cluster.chores, seconds=spec.lifetime_seconds)
        await undo.enter_async_context(tunnel)

        yield RunningServer(tools=tools, ended_inside=partial(ended_inside, cluster, name, stream))


async def ended_inside(cluster: PodCluster, name: str, stream: ExecStream) -> bool:
    """Return whether programs in the pod ended the tool server. There are two such cases:

    - The programs exceeded a limit of the pod.
    - The API server reports the exit of the tool server, and nothing else has ended the pod.

    In any other case, for example after a broken connection, the cause was outside the pod."""
    try:
        verdict = verdict_of(await cluster.state(name), exited=stream.exited)
        if verdict:  # a machine that ends a pod may report the server's exit first, and the reason later
            await asyncio.sleep(SETTLE_SECONDS)
            verdict = verdict_of(await cluster.state(name), exited=stream.exited)
    except RuntimeFailure:
        return False
    return verdict


def verdict_of(pod: Pod | None, *, exited: bool) -> bool:
    """Return whether programs in the pod ended the tool server, as far as the pod's state shows it. `exited` is True if
    the API server has reported the tool server's exit."""
    if pod is None or pod.metadata.deletion_timestamp is not None:
        return False
    if pod.out_of_memory or pod.evicted_for_own_use:
        return True
    return exited and not pod.status.reason and not pod.disrupted


async def enter(cluster: PodCluster, name: str) -> ClientWebSocketResponse:
    """Start the tool server in a running pod. Returns the WebSocket for its input and outputs."""
    command = [*python_of(cluster.pods), *FLAGS, "-c", PIPES_BOOT]
    failures, last = 0, KubeApiError(0, "no answer in time")
    try:
        async with asyncio.timeout(cluster.waits.enter):
            while True:
                try:
                    return await cluster.api.exec(cluster.namespace, name, CONTAINER, command)
                except KubeApiError as error:
                    if not (error.passing or error.status == 404):
                        raise cluster.failure("start a command in a pod", error) from error
                    last = error
                await asyncio.sleep(PAUSES.wait(failures))
                failures += 1
    except TimeoutError as error:
        raise cluster.failure("start a command in a pod", last) from error


async def end_programs(tools: ToolClient) -> bool:
    """Let the tool server kill all programs. Returns whether the server has confirmed that none is left."""
    tools.fail_all("the sandbox was stopped")
    with contextlib.suppress(TimeoutError, RuntimeFailure, OSError):
        async with asyncio.timeout(STOP_SECONDS):
            return (await tools.call("stop", {}, Stopped)).left == 0
    return False


def of_image(env: dict[str, str]) -> dict[str, str]:
    """Return only the variables that the image has set."""
    added = (*NEUTRAL, "HOSTNAME", "HOME", "PWD")
    return {name: value for name, value in env.items() if name not in added and not name.startswith(OF_CLUSTER)}


def in_pod(setup: ToolServerSetup, *, own_user: bool) -> ToolServerSetup:
    """Return `setup`, changed for a server in a pod: the server is not the first process of its pid namespace, and
    reaches the gateway through a tunnel. If `own_user` is True, the pod's user is not root, and has another home
    folder."""
    changes: dict[str, Any] = {"subreaper": True, "bridge_port": 0}
    if own_user:
        env = {**setup.env, "HOME": OWN_HOME, "USER": "outrider"}
        changes |= {"env": env, "folders": ["/tmp", "/var/tmp", setup.workdir]}
    return msgspec.structs.replace(setup, **changes)
