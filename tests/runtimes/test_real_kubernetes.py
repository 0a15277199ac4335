"""The runtime `kubernetes` with a real API server: its checks of pods, its rights, its quotas, its watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from outrider.config import PodsConfig
from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.kubernetes.rights import RULES
from outrider.sandbox.runtimes.kubernetes.runtime import KubernetesRuntime
from outrider.sandbox.runtimes.remote import RemoteSandbox

from .clusters import IMAGE
from .real_cluster import NAMESPACE, RealCluster, real_cluster
from .world import World

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.fixture
async def cluster(world: World, tmp_path: Path) -> AsyncIterator[RealCluster]:
    async with real_cluster(tmp_path, [dict(rule) for rule in RULES]) as server:
        (world.folder / "config").write_text(server.kubeconfig())
        world.environment.setenv("KUBECONFIG", str(world.folder / "config"))
        yield server
        for runtime in world.made:
            await runtime.stop()
        assert await server.pods() == []


async def start(world: World, **fields: Any) -> RemoteSandbox:
    made = world.create_with(KubernetesRuntime(), kind="kubernetes", **{"image": IMAGE, **fields})
    assert isinstance(made, RemoteSandbox)
    await made.start()
    return made


async def echo(sandbox: Runtime) -> str:
    return (await sandbox.exec("echo $GREETING", seconds=10)).stdout.decode().strip()


async def test_a_session_of_a_sandbox(world: World, cluster: RealCluster) -> None:
    """Create, watch, exec, files, large output and stop work with the least rights."""
    sandbox = await start(world, resources={"memory_mb": 512, "cpus": 0.5}, env={"A": "b"})
    assert await echo(sandbox) == "hello"
    [pod] = await cluster.pods()
    assert pod["metadata"]["labels"]["outrider.session"] == "s0"
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == "512Mi"
    await sandbox.write("f", b"x" * 3_000_000)
    assert len(await sandbox.read("f")) == 3_000_000
    done = await sandbox.exec("yes | head -c 20000000; exit 3", seconds=60)
    assert (done.exit_code, done.stdout[:3]) == (3, b"y\ny")
    shell = await sandbox.open_shell()
    await shell.run("cd /tmp", seconds=10)
    assert (await shell.run("pwd", seconds=10)).output == "/tmp\n"
    done = await sandbox.exec("sleep 60", seconds=0.5)
    assert done.timed_out
    await sandbox.stop()
    assert await cluster.pods() == []


async def test_many_at_once(world: World, cluster: RealCluster) -> None:
    world.host.starts_per_second = 100.0
    sandboxes = await asyncio.gather(*(start(world) for _ in range(8)))
    assert await asyncio.gather(*map(echo, sandboxes)) == ["hello"] * 8
    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    assert await cluster.pods() == []


async def test_its_own_form_of_a_user(world: World, cluster: RealCluster) -> None:
    world.host.pods = PodsConfig(
        user=12345, node_selector={"a": "b"}, tolerations=({"key": "rl", "operator": "Exists"},), pull_secrets=("s",)
    )
    sandbox = await start(world)
    assert (await sandbox.exec("id -u", seconds=10)).stdout == b"12345\n"
    [pod] = await cluster.pods()
    assert pod["spec"]["nodeSelector"] == {"a": "b"}


async def test_a_quota(world: World, cluster: RealCluster) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
    await cluster.call("POST", path, {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}})
    # In a real cluster, a controller copies the limits into the status.
    status = {"status": {"hard": {"pods": "1"}, "used": {"pods": "0"}}}
    await cluster.call("PATCH", f"{path}/few/status", status, kind="application/merge-patch+json")
    world.host.pods = PodsConfig(queue_seconds=3)
    await start(world)
    with pytest.raises(RuntimeFailure, match=r"exceeded quota: few, requested: pods=1, used: pods=1") as failed:
        await start(world)
    assert failed.value.retryable


async def test_a_pod_that_the_server_refuses(world: World, cluster: RealCluster) -> None:
    world.host.pods = PodsConfig(priority_class="no-such-class")
    with pytest.raises(RuntimeUnavailable, match="no-such-class"):
        await start(world)
    assert await cluster.pods() == []


@pytest.mark.parametrize("without", ["pods/exec", "pods"])
async def test_without_the_rights(world: World, tmp_path: Path, without: str) -> None:
    rules = [dict(rule) for rule in RULES if without not in rule["resources"]]
    async with real_cluster(tmp_path, rules) as server:
        (world.folder / "config").write_text(server.kubeconfig())
        world.environment.setenv("KUBECONFIG", str(world.folder / "config"))
        with pytest.raises(RuntimeUnavailable) as refused:
            await start(world)
        assert "403" in str(refused.value) or "forbidden" in str(refused.value)
        assert "rights" in (refused.value.hint or "")
        assert await server.pods() == []
        for runtime in world.made:
            await runtime.stop()
