"""The runtime `kubernetes` on a fake cluster: the cluster's refusals, delays and losses, and the pods of dead nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from outrider.cli.image import pod_images
from outrider.concurrency.chores import Chores, Failures
from outrider.concurrency.retries import RetryPolicy
from outrider.config import PodsConfig
from outrider.errors import InvalidField, RuntimeFailure, RuntimeUnavailable
from outrider.lab.fakes.kubernetes.api_server import ApiFailure, FakeApiServer, fake_cluster
from outrider.sandbox.runtimes.base import Runtime, RuntimeKind
from outrider.sandbox.runtimes.kubernetes.api import WAITS, ClusterWaits
from outrider.sandbox.runtimes.kubernetes.cluster import PodCluster
from outrider.sandbox.runtimes.kubernetes.exec_stream import ExecStream
from outrider.sandbox.runtimes.kubernetes.pod_request import label_value
from outrider.sandbox.runtimes.kubernetes.pod_state import (
    ContainerStates,
    ContainerStatus,
    ObjectMeta,
    Pod,
    PodCondition,
    PodStatus,
    StateDetail,
)
from outrider.sandbox.runtimes.kubernetes.pull_ahead import pull_ahead
from outrider.sandbox.runtimes.kubernetes.rights import PULL_RULES, RULES
from outrider.sandbox.runtimes.kubernetes.runtime import KubernetesRuntime, launch, verdict_of
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.runtimes.remote import RemoteSandbox, node_label
from outrider.spec import RuntimeSpec
from support.environments import environment_with
from support.waiting import until

from .clusters import IMAGE, needs_machine, python_image
from .world import KindOf, World

pytestmark = pytest.mark.deep  # a test starts servers and many processes

ENVIRONMENT = Path(__file__).parent.parent.parent / ".venv-kubernetes-client"
OFFICIAL_CLIENT = ["kubernetes==37.0.2"]


@pytest.fixture
async def cluster(world: World) -> AsyncIterator[FakeApiServer]:
    """A fake cluster for one test, on the test's event loop."""
    needs_machine()
    async with fake_cluster({IMAGE: python_image()}) as server:
        server.rules.role = RULES
        world.environment.setenv("KUBECONFIG", str(use(server, world.folder)))
        yield server
        for runtime in world.made:
            await runtime.stop()
        await world.host.sweep()
        assert server.pods == {}


def use(server: FakeApiServer, folder: Path) -> Path:
    path = folder / "config"
    path.write_text(server.kubeconfig())
    return path


def pod_sandbox(world: World, *, waits: ClusterWaits = WAITS, **fields: Any) -> RemoteSandbox:
    kind: RuntimeKind = KubernetesRuntime()
    if waits is not WAITS:
        kind = KindOf(partial(launch, part=partial(PodCluster, waits=waits)), RemoteSandbox)
    made = world.create_with(kind, kind="kubernetes", **{"image": IMAGE, **fields})
    assert isinstance(made, RemoteSandbox)
    return made


async def start(world: World, **fields: Any) -> RemoteSandbox:
    made = pod_sandbox(world, **fields)
    await made.start()
    return made


async def echo(sandbox: Runtime) -> str:
    return (await sandbox.exec("echo $GREETING", seconds=10)).stdout.decode().strip()


async def test_a_pod_has_no_rights_and_is_removed_once(world: World, cluster: FakeApiServer) -> None:
    sandbox = await start(world, resources={"memory_mb": 512, "cpus": 0.5, "disk_mb": 100}, lifetime_seconds=600)
    assert await echo(sandbox) == "hello"
    [pod] = cluster.pods.values()
    spec, [container] = pod["spec"], pod["spec"]["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["hostUsers"] is False
    assert spec["activeDeadlineSeconds"] == 600 + 900
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "capabilities": {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]},
    }
    assert container["resources"]["limits"] == {"memory": "512Mi", "cpu": "500m", "ephemeral-storage": "100Mi"}
    labels = pod["metadata"]["labels"]
    assert (labels["outrider.session"], labels["outrider.attempt"]) == ("s0", "1")
    assert not {"volumes", "hostNetwork", "hostPID", "serviceAccountName"} & {key for key in spec if spec[key]}
    await asyncio.gather(sandbox.stop(), sandbox.stop())
    assert cluster.pods == {}
    assert cluster.deletions == [(pod["metadata"]["name"], 0)]  # without a grace period: its programs are dead already


async def test_a_user_other_than_root(world: World, cluster: FakeApiServer) -> None:
    world.host.pods = PodsConfig(user=12345)
    sandbox = await start(world)
    done = await sandbox.exec("id -u; pwd; echo $HOME; echo x > f && touch $HOME/g && ls", seconds=10)
    assert done.stdout.decode().split() == ["12345", "/work", "/home/outrider", "f"], done
    [pod] = cluster.pods.values()
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    with pytest.raises(RuntimeUnavailable, match="one user"):
        await start(world, users=10)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"image": None}, "image"), ({"image": "/a.sif"}, "image"), ({"image": None, "rootfs": "/r"}, "rootfs")],
)
def test_what_a_pod_cannot_have_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        KubernetesRuntime.check_spec(RuntimeSpec(kind="kubernetes", **fields))
    assert refused.value.field == f"task.runtime.{field}"
    assert refused.value.hint


async def test_programs_of_the_node_need_the_tools_image(world: World, cluster: FakeApiServer) -> None:
    sandbox = pod_sandbox(world, mounts=(Path("/opt"),))
    with pytest.raises(RuntimeUnavailable, match="program") as refused:
        await sandbox.start()
    assert "tools_image" in (refused.value.hint or "")
    assert cluster.created == []


async def test_an_image_that_is_not_there(world: World, cluster: FakeApiServer) -> None:
    with pytest.raises(RuntimeUnavailable, match=r"ImagePullBackOff: Back-off pulling image .*no/such"):
        await start(world, image="no/such:1")
    assert cluster.pods == {}


async def test_quota_is_waited_for_off_the_clock(world: World, cluster: FakeApiServer) -> None:
    cluster.rules.quota = 1
    first = await start(world)
    second = pod_sandbox(world)
    starting = asyncio.create_task(second.start())
    await until(lambda: second.queued_seconds() > 0.5)
    await first.stop()
    await starting
    assert await echo(second) == "hello"
    assert second.queued_seconds() > 0.5


async def test_a_place_is_waited_for_and_given_up(world: World, cluster: FakeApiServer) -> None:
    cluster.rules.room = 0
    world.host.pods = PodsConfig(queue_seconds=0.5)
    sandbox = pod_sandbox(world)
    with pytest.raises(RuntimeFailure, match=r"Unschedulable: 0/1 nodes are available: 1 Insufficient cpu") as failed:
        await sandbox.start()
    assert failed.value.retryable
    assert sandbox.queued_seconds() > 0.4
    assert cluster.pods == {}


async def test_quota_and_a_place_are_waited_for_within_one_limit(world: World, cluster: FakeApiServer) -> None:
    waits = ClusterWaits(look=0.1, full=RetryPolicy(first=0.1, longest=0.1))
    cluster.rules.quota = cluster.rules.room = 0
    world.host.pods = PodsConfig(queue_seconds=2)
    sandbox = pod_sandbox(world, waits=waits)
    starting = asyncio.create_task(sandbox.start())
    await until(lambda: sandbox.queued_seconds() > 1)
    cluster.rules.quota = None
    with pytest.raises(RuntimeFailure, match=r"does not run after 2 s: Unschedulable"):
        await starting
    assert 1.9 < sandbox.queued_seconds() < 2.8
    assert cluster.pods == {}


async def test_a_full_quota_is_given_up_with_the_servers_words(world: World, cluster: FakeApiServer) -> None:
    cluster.rules.quota = 0
    world.host.pods = PodsConfig(queue_seconds=0.2)
    with pytest.raises(RuntimeFailure, match="exceeded quota: fake, requested: pods=1") as failed:
        await start(world)
    assert failed.value.retryable


async def test_a_cancelled_start_leaves_no_pod(world: World, cluster: FakeApiServer) -> None:
    cluster.rules.room = 0
    sandbox = pod_sandbox(world)
    starting = asyncio.create_task(sandbox.start())
    await until(lambda: len(cluster.pods) == 1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await sandbox.stop()
    assert cluster.pods == {}


GRANTED = [f"{verb} {resource}" for rule in RULES for resource in rule["resources"] for verb in rule["verbs"]]


@pytest.mark.parametrize("denied", GRANTED)
async def test_each_right_is_needed_and_named(
    world: World, cluster: FakeApiServer, denied: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.rules.denied = frozenset([denied])
    sandbox = pod_sandbox(world)
    if denied == "delete pods":  # the failure is logged, and the pod is left for a sweep
        await sandbox.start()
        await sandbox.stop()
        assert len(cluster.pods) == 1
        assert "cannot delete" in caplog.text
    elif denied == "watch pods":  # the states of pods are requested every few seconds instead
        await sandbox.start()
        [failing] = world.host.failures.failing()
        assert failing.name == "watch pods"
        assert "cannot watch" in failing.error
    elif denied == "get pods":
        await sandbox.start()
        part = await world.host.part(PodCluster)
        with pytest.raises(RuntimeUnavailable, match="cannot get") as refused:
            await part.state(next(iter(cluster.created)))
        assert "rights" in (refused.value.hint or "")
    else:
        with pytest.raises(RuntimeUnavailable) as refused:
            await sandbox.start()
        assert "rights" in (refused.value.hint or "")
    cluster.rules.denied = frozenset()


async def test_what_the_role_does_not_grant_is_forbidden(cluster: FakeApiServer) -> None:
    """The fake cluster enforces the rights of the chart, so the other tests of this file show that these rights
    suffice."""
    pods = "/api/v1/namespaces/rl/pods"
    forbidden = [
        ("GET", "/api/v1/namespaces/rl/secrets"),
        ("GET", "/api/v1/namespaces/kube-system/pods"),
        ("GET", "/api/v1/pods"),
        ("GET", "/api/v1/nodes"),
        ("POST", "/api/v1/namespaces/default/pods"),
        ("DELETE", pods),
        ("PUT", f"{pods}/a"),
        ("PATCH", f"{pods}/a"),
        ("GET", f"{pods}/a/log"),
        ("POST", f"{pods}/a/eviction"),
        ("POST", f"{pods}/a/ephemeralcontainers"),
        ("GET", f"{pods}/a/portforward"),
        ("POST", "/apis/apps/v1/namespaces/rl/daemonsets"),
        ("POST", "/apis/rbac.authorization.k8s.io/v1/namespaces/rl/rolebindings"),
    ]
    async with ClientSession(cluster.url) as client:
        for method, path in forbidden:
            async with client.request(method, path, json={}) as answer:
                assert (method, path, answer.status) == (method, path, 403)
        async with client.get(pods) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ('pods "x" is forbidden: failed quota: q: must specify limits.cpu for: sandbox', "task.runtime.resources"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot', "sandboxes.kubernetes.user"),
        ('pods "x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 4Gi', "limit range"),
        ('pods is forbidden: User "x" cannot create resource "pods"', "rights"),
    ],
)
async def test_the_reason_of_a_forbidden_pod_is_told_apart(
    world: World, cluster: FakeApiServer, message: str, hint: str
) -> None:
    def refuse(request: web.Request) -> None:
        if request.method == "POST":
            raise ApiFailure(403, "Forbidden", message)

    cluster.rules.faults = [refuse]
    with pytest.raises(RuntimeUnavailable, match=re.escape(message)) as refused:
        await start(world)
    assert hint in (refused.value.hint or "")


async def test_a_wrong_token(world: World, cluster: FakeApiServer) -> None:
    cluster.rules.token = "another"
    with pytest.raises(RuntimeUnavailable, match="Unauthorized"):
        await start(world)
    cluster.rules.token = None


def once(status: int, method: str, path: str, times: int = 1, **headers: str) -> Callable[[web.Request], None]:
    """Return a fault: the first `times` requests that match fail."""
    left = [times]

    def fault(request: web.Request) -> None:
        if left[0] and request.method == method and re.search(path, request.path_qs):
            left[0] -= 1
            raise ApiFailure(status, "Busy", "a fault of the test", **headers)

    return fault


@pytest.mark.parametrize("status", [429, 500, 503, 504])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/pods$"), ("GET", "watch=1"), ("GET", "/exec"), ("DELETE", "/pods/")]
)
async def test_a_busy_server_is_asked_again(
    world: World, cluster: FakeApiServer, status: int, method: str, path: str
) -> None:
    await world.host.part(PodCluster)  # before the faults, because a first sweep that fails is not repeated
    cluster.rules.faults = [once(status, method, path, times=2, Retry_After="0")]
    sandbox = await start(world)
    assert await echo(sandbox) == "hello"
    await sandbox.stop()
    assert cluster.pods == {}
    assert len(cluster.created) == 1


async def test_a_lost_reply_makes_no_second_pod(world: World, cluster: FakeApiServer) -> None:
    """The server makes the pod, and the connection breaks before the reply."""
    lost = [True]

    async def lose(request: web.Request) -> web.Response | None:
        if request.method != "POST" or not lost:
            return None
        lost.clear()
        await cluster._create(request)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    cluster.rules.faults = [lose]
    sandbox = await start(world)
    assert await echo(sandbox) == "hello"
    assert len(cluster.created) == len(cluster.pods) == 1


async def test_a_server_that_hangs_and_drips(world: World, cluster: FakeApiServer) -> None:
    """A request without a reply, and a reply that comes byte by byte for ever, are given up in time."""
    how = ["hang", "drip"]

    async def fault(request: web.Request) -> web.StreamResponse | None:
        if request.method != "POST" or not how:
            return None
        if how.pop() == "hang":
            await asyncio.sleep(30)
        answer = web.StreamResponse()
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await answer.write(b" ")
                await asyncio.sleep(0.05)
        return answer

    cluster.rules.faults = [fault]
    sandbox = await start(world, waits=ClusterWaits(call=0.5))
    assert await echo(sandbox) == "hello"
    assert how == []


async def test_a_slow_creation_is_off_the_clock(world: World, cluster: FakeApiServer) -> None:
    async def slow(request: web.Request) -> None:
        if request.method == "POST":
            await asyncio.sleep(1)

    cluster.rules.faults = [slow]
    sandbox = await start(world)
    assert sandbox.queued_seconds() > 0.9


@pytest.mark.parametrize("for_ever", [False, True])
async def test_a_command_that_does_not_begin_is_begun_again_and_given_up(
    world: World, cluster: FakeApiServer, for_ever: bool
) -> None:
    waits = ClusterWaits(open=0.3, enter=1.0 if for_ever else 30.0)
    begun: list[str] = []

    async def hang(request: web.Request) -> None:
        if request.path.endswith("/exec"):
            begun.append(request.path)
            if for_ever or len(begun) == 1:
                await asyncio.sleep(5)

    cluster.rules.faults = [hang]
    if for_ever:
        with pytest.raises(RuntimeFailure, match="does not start a command in a pod: no answer in time") as failed:
            await start(world, waits=waits)
        assert failed.value.retryable
        assert cluster.pods == {}
    else:
        assert await echo(await start(world, waits=waits)) == "hello"
        assert len(begun) == 2


INTERNAL = {"status": "Failure", "reason": "InternalError", "message": "error dialing backend", "code": 500}


@pytest.mark.parametrize("how", ["dropped", "failed", "dropped a minute ago"])
async def test_a_connection_that_breaks_in_a_command_is_the_clusters_fault(
    world: World, cluster: FakeApiServer, how: str
) -> None:
    sandbox = await start(world)
    running = asyncio.create_task(sandbox.exec("sleep 60", seconds=60))
    await sandbox.exec("true", seconds=10)
    await cluster.machine.cut(INTERNAL if how == "failed" else None)
    with pytest.raises(RuntimeFailure, match="gone") as failed:
        await running
    assert failed.value.retryable
    if how == "dropped a minute ago":  # the pod's first program has ended by itself by then
        [pod] = cluster.pods.values()
        ended = {"exitCode": 0, "reason": "Completed", "finishedAt": "2026-01-01T00:00:00Z"}
        status = {"name": "sandbox", "state": {"terminated": ended}}
        cluster._report(pod, {"phase": "Succeeded", "containerStatuses": [status]})
    assert not await sandbox.broken_inside()


async def test_a_silent_connection_is_broken_and_a_quiet_one_is_not(world: World, cluster: FakeApiServer) -> None:
    sandbox = await start(world, waits=ClusterWaits(ping=0.1, silence=1.0))
    done = await sandbox.exec("sleep 2; echo here", seconds=30)
    assert done.stdout == b"here\n"
    [request] = cluster.machine.sockets.values()
    assert request.transport is not None
    request.transport.pause_reading()  # like a server that has stopped, or a network that drops all packets
    with pytest.raises(RuntimeFailure, match="gone") as failed:
        await sandbox.exec("sleep 60", seconds=60)
    assert "silent for 1 s" in (failed.value.log_tail or "")
    assert not await sandbox.broken_inside()
    request.transport.resume_reading()


async def test_a_server_that_only_talks_holds_up_no_end() -> None:
    """The server, or a proxy before it, does not react to the end of the WebSocket, and goes on to send."""

    async def talk(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await connection.send_bytes(b"\1x")
                await asyncio.sleep(0.1)
        return connection

    app = web.Application()
    app.router.add_get("/", talk)
    ours, theirs = socket.socketpair()
    with ours:
        async with (
            TestServer(app) as server,
            ClientSession() as session,
            Chores(Failures()) as chores,
            asyncio.timeout(30),
            ExecStream(await session.ws_connect(server.make_url("/")), theirs, chores),
        ):
            pass


def pod_with(reason: str = "", message: str = "", *, ended: str = "", condition: str = "", gone: bool = False) -> Pod:
    state = ContainerStates(terminated=StateDetail(reason=ended)) if ended else ContainerStates(running=StateDetail())
    return Pod(
        metadata=ObjectMeta(deletion_timestamp="2026-01-01T00:00:00Z" if gone else None),
        status=PodStatus(
            reason=reason,
            message=message,
            conditions=[PodCondition(type=condition, status="True")],
            container_statuses=[ContainerStatus(name="sandbox", state=state)],
        ),
    )


@pytest.mark.parametrize(
    ("pod", "exited", "inside"),
    [
        (pod_with(), True, True),
        (pod_with(), False, False),
        (pod_with(ended="OOMKilled"), False, True),
        (pod_with("Evicted", "Pod ephemeral local storage usage exceeds the total limit"), True, True),
        (pod_with("Evicted", "The node was low on resource: memory."), True, False),
        (pod_with("NodeShutdown", ended="Error"), True, False),
        (pod_with(condition="DisruptionTarget"), True, False),
        (pod_with(ended="Completed"), False, False),
        (pod_with(ended="Error"), True, True),
        (pod_with(ended="ContainerStatusUnknown"), False, False),
        (pod_with(gone=True, ended="OOMKilled"), True, False),
        (None, True, False),
    ],
)
def test_only_what_programs_of_the_pod_did_is_blamed_on_them(pod: Pod | None, exited: bool, inside: bool) -> None:
    assert verdict_of(pod, exited=exited) is inside


async def test_an_eviction_that_is_reported_late_is_the_clusters_fault(world: World, cluster: FakeApiServer) -> None:
    """The exit of the tool server is seen before its reason."""
    sandbox = await start(world)
    [pod] = cluster.pods.values()
    with pytest.raises(RuntimeFailure, match="gone"):
        await sandbox.exec("kill -9 $PPID", seconds=20)
    asked = asyncio.create_task(sandbox.broken_inside())
    await asyncio.sleep(0.5)
    assert not asked.done()
    pod["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    assert not await asked


async def test_a_pod_that_cannot_be_removed_keeps_no_other(world: World, cluster: FakeApiServer) -> None:
    part = await world.host.part(PodCluster)
    labels = {"app.kubernetes.io/name": "outrider-sandbox", "outrider.node": part.node}
    for name in ("a", "b"):
        metadata = {"labels": labels, "namespace": "rl", "name": name, "uid": name}
        cluster.pods["rl", name] = {"metadata": metadata, "spec": {"nodeName": "lost"}, "status": {}}

    def refuse(request: web.Request) -> None:
        if request.method == "DELETE" and request.path.endswith("/a"):
            raise ApiFailure(422, "Invalid", "a finalizer")

    cluster.rules.faults = [refuse]
    with pytest.raises(RuntimeFailure, match="a finalizer"):
        await part.sweep()
    assert list(cluster.pods) == [("rl", "a")]
    cluster.rules.faults = []


async def test_a_pod_that_cannot_be_removed_keeps_no_other_from_starting(
    world: World, cluster: FakeApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    labels = {"app.kubernetes.io/name": "outrider-sandbox", "outrider.node": node_label(world.host)}
    metadata = {"labels": labels, "namespace": "rl", "name": "a", "uid": "a"}
    cluster.pods["rl", "a"] = {"metadata": metadata, "spec": {"nodeName": "lost"}, "status": {}}

    def refuse(request: web.Request) -> None:
        if request.method == "DELETE" and request.path.endswith("/a"):
            raise ApiFailure(422, "Invalid", "a finalizer")

    cluster.rules.faults = [refuse]
    sandbox = await start(world)
    assert "a finalizer" in caplog.text
    assert await echo(sandbox) == "hello"
    cluster.rules.faults = []


async def test_a_watch_that_lost_the_past_lists_again(world: World, cluster: FakeApiServer) -> None:
    first = await start(world)
    cluster.forget_changes()  # the watch ends with 410
    second = await start(world)
    assert (await echo(first), await echo(second)) == ("hello", "hello")


async def test_starts_are_paced(world: World, cluster: FakeApiServer) -> None:
    world.host.starts_per_second = 4.0
    sandboxes = [pod_sandbox(world) for _ in range(5)]
    began = time.monotonic()
    await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
    assert time.monotonic() - began > 0.95  # four pauses
    assert max(sandbox.queued_seconds() for sandbox in sandboxes) > 0.7


async def test_a_removed_pod_is_the_clusters_fault(world: World, cluster: FakeApiServer) -> None:
    sandbox = await start(world)
    [pod] = cluster.pods.values()
    running = asyncio.create_task(sandbox.exec("sleep 60", seconds=60))
    await until(lambda: cluster.machine.execs == 1)
    cluster._forget(pod)
    await cluster.machine.kill(pod["metadata"]["uid"])
    with pytest.raises(RuntimeFailure, match="gone"):
        await running
    assert not await sandbox.broken_inside()


async def test_a_killed_tool_server_is_the_agents_fault(world: World, cluster: FakeApiServer) -> None:
    sandbox = await start(world)
    with contextlib.suppress(RuntimeFailure):
        await sandbox.exec("kill -9 $PPID", seconds=20)
    await until(lambda: sandbox.server.tools.loss == "gone")
    assert await sandbox.broken_inside()


async def test_the_model_endpoint_needs_no_network(world: World, cluster: FakeApiServer) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(body=await request.read() + request.path.encode())

    async with world.gateway(reply):
        sandbox = await start(world)
        fetch = (
            "import urllib.request as r; "
            f"print(len(r.urlopen(r.Request('{sandbox.endpoint}/v1/x', b'y' * 300000)).read()))"
        )
        done = await sandbox.exec(["python3", "-c", fetch], seconds=30)
    assert done.stdout == b"300005\n", done


async def test_large_output_is_cut_and_arrives(world: World, cluster: FakeApiServer) -> None:
    sandbox = await start(world)
    done = await sandbox.exec("head -c 30000000 /dev/zero; echo end", seconds=60)
    assert done.exit_code == 0
    assert done.stdout.endswith(b"end\n")
    assert b"bytes cut" in done.stdout


@pytest.mark.parametrize("other", ["dead", "alive", "elsewhere"])
async def test_orphans_are_found_by_label(world: World, cluster: FakeApiServer, other: str) -> None:
    """The pods of a dead node are removed. The pods of living nodes and of other machines stay."""
    await start(world)
    [mine] = cluster.pods.values()
    label = mine["metadata"]["labels"]["outrider.node"]
    machine, _, name = label.partition("-")
    parts = name.split("-")
    wrong = {
        "dead": f"{machine}-{'-'.join([*parts[:2], '1', '1', parts[-1]])}",
        "alive": f"{label[:-4]}abcd",
        "elsewhere": f"ffffffff-{name[:-4]}abcd",
    }[other]
    pod = json.loads(json.dumps(mine))
    pod["metadata"] |= {"name": "orphan", "uid": "u2", "labels": {**mine["metadata"]["labels"], "outrider.node": wrong}}
    cluster.pods["rl", "orphan"] = pod
    swept = await world.host.sweep()
    assert world.host.failures.failing() == ()
    assert (("rl", "orphan") in cluster.pods) is (other != "dead")
    assert swept.get("PodCluster", 0) == (1 if other == "dead" else 0)
    cluster.pods.pop(("rl", "orphan"), None)


@pytest.mark.parametrize("end", ["abcdefgh", "abcdefg_", "_______-"])
def test_the_label_of_a_node_is_a_label_of_kubernetes(tmp_path: Path, end: str) -> None:
    """`mkdtemp` chooses the end of a node's name. If the pods had the label in another form, a search would find no
    pods."""
    label = node_label(Host(tmp_path / f"outrider-{end}"))
    assert label_value(label) == label
    assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", label)


NODE = """
import asyncio, sys
from pathlib import Path
from outrider.sandbox import open_sandbox
from outrider.spec import RuntimeSpec

async def main():
    async with open_sandbox(RuntimeSpec(kind="kubernetes", image=sys.argv[1])) as sandbox:
        await sandbox.exec("nohup setsid sleep 5000 >/dev/null 2>&1 &", seconds=10)
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_node_leaves_nothing(world: World, cluster: FakeApiServer) -> None:
    """`kill -9` of a node: its pod's programs end with the connection, and another node's sweep removes the pod."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", NODE, IMAGE), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert node.stdout is not None
    async with asyncio.timeout(60):
        assert await node.stdout.readline() == b"ready\n"
    assert len(cluster.pods) == 1
    [container] = cluster.machine._running.values()
    node.send_signal(signal.SIGKILL)
    await node.wait()

    def inside() -> list[str]:
        here = os.readlink(f"/proc/{container.pid}/ns/pid")
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/pid") == here:
                    found.append(pid)
        return found

    await until(lambda: inside() == [str(container.pid)])  # only the first program is left, for a minute
    async with Host(world.folder / "next") as host:
        await host.part(PodCluster)  # this sweeps
        assert cluster.pods == {}


async def test_images_are_pulled_ahead_on_all_machines(world: World, cluster: FakeApiServer) -> None:
    pods = PodsConfig(tools_image=IMAGE, node_selector={"a": "b"}, pull_secrets=("login",))
    with pytest.raises(RuntimeUnavailable, match="cannot create"):  # the chart grants no rights on daemon sets
        await pull_ahead([IMAGE], pods, seconds=1)
    cluster.rules.role = (*RULES, *PULL_RULES)
    seen: list[tuple[int, int]] = []
    pulled = await pull_ahead([IMAGE], pods, seconds=10, progress=lambda *counts: seen.append(counts))
    assert (pulled.images, pulled.machines, seen[-1]) == ((IMAGE,), 1, (1, 1))
    with pytest.raises(RuntimeFailure, match="only 0 of 1 machines"):
        await pull_ahead([IMAGE, "no/such:1"], pods, seconds=0.2)
    with pytest.raises(RuntimeUnavailable, match="own image"):
        await pull_ahead([IMAGE], PodsConfig(), seconds=1)
    assert cluster.daemon_sets == {}


@pytest.mark.parametrize("how", ["lost", "cancelled"])
async def test_images_whose_daemon_set_was_made_without_a_reply(world: World, cluster: FakeApiServer, how: str) -> None:
    cluster.rules.role = (*RULES, *PULL_RULES)

    async def make(request: web.Request) -> web.StreamResponse | None:
        if request.method != "POST":
            return None
        made = await cluster._create_daemon_set(request)
        if how == "lost":
            assert request.transport is not None
            request.transport.abort()
        else:
            pulling.cancel()
            await asyncio.sleep(0.2)
        return made

    cluster.rules.faults = [make]
    pulling = asyncio.create_task(pull_ahead([IMAGE], PodsConfig(tools_image=IMAGE), seconds=10))
    with pytest.raises(RuntimeFailure if how == "lost" else asyncio.CancelledError):
        await pulling
    assert cluster.daemon_sets == {}


def test_images_of_tasks() -> None:
    pod = {"kind": "kubernetes", "image": "a:1"}
    task = {
        "runtime": pod,
        "evaluator": {"kind": "command", "runtime": {**pod, "image": "b:1"}},
        "then": [{"evaluator": {"runtime": {**pod, "image": "c:1"}}}, {"evaluator": {"runtime": {"image": "d:1"}}}],
    }
    assert list(pod_images(task)) == ["a:1", "b:1", "c:1"]
    assert list(pod_images({"runtime": {"kind": "docker", "image": "a"}})) == []


CLIENT = """
import faulthandler, sys
faulthandler.dump_traceback_later(40, exit=True)
from kubernetes import client, config, watch
from kubernetes.stream import stream

config.load_kube_config(sys.argv[1])
api = client.CoreV1Api()
[pod] = api.list_namespaced_pod("rl", label_selector="app.kubernetes.io/name=outrider-sandbox").items
name = pod.metadata.name
assert pod.status.phase == "Running", pod.status
assert pod.status.container_statuses[0].state.running is not None
assert api.read_namespaced_pod(name, "rl").spec.automount_service_account_token is False
opened = stream(
    api.connect_get_namespaced_pod_exec, name, "rl", command=["sh", "-c", "cat; echo err >&2; exit 3"],
    container="sandbox", stdin=True, stdout=True, stderr=True, tty=False, _preload_content=False,
)
opened.write_stdin("from the client\\n")
opened.update(timeout=5)
assert opened.read_stdout() == "from the client\\n"
opened.close()
done = stream(
    api.connect_get_namespaced_pod_exec, name, "rl", command=["sh", "-c", "echo err >&2; exit 3"],
    container="sandbox", stdin=False, stdout=True, stderr=True, tty=False, _preload_content=False,
)
done.run_forever(timeout=20)
assert done.read_stderr() == "err\\n"
assert done.returncode == 3, done.returncode
try:
    api.read_namespaced_pod("no", "rl")
except client.ApiException as error:
    assert error.status == 404, error
events = watch.Watch().stream(api.list_namespaced_pod, "rl", resource_version="0", timeout_seconds=5)
assert next(iter(events))["object"].metadata.name == name
api.delete_namespaced_pod(name, "rl", grace_period_seconds=0)
print("ok")
"""


@pytest.mark.real
async def test_the_test_cluster_is_true_to_the_official_client(world: World, cluster: FakeApiServer) -> None:
    python = await asyncio.to_thread(environment_with, ENVIRONMENT, OFFICIAL_CLIENT)
    await start(world)
    client = await asyncio.create_subprocess_exec(
        *(python, "-c", CLIENT, str(world.folder / "config")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await client.communicate()
    assert output == b"ok\n", output.decode()
