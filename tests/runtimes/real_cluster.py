"""A real API server of Kubernetes with etcd, and a stand-in for its machines, scheduler and kubelet.

`.ci/kubernetes PREFIX` builds the API server from Debian's sources and prints the paths of both programs. The
stand-in binds pods to its node, runs them on a `FakeMachine`, reports their states, and serves commands as a kubelet
does: the API server passes them on, as in a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from outrider.lab.fakes.kubernetes.machine import FakeMachine
from support.ports import free_port

from .clusters import IMAGE, needs_machine, python_image

API_SERVER, ETCD = "SANDBOX_KUBE_APISERVER", "SANDBOX_ETCD"
ADMIN, NODE_USER = "admin-token-of-tests", "node-token-of-tests"
NAMESPACE = "rl"
NODE = "stand-in"

Json = dict[str, Any]


def programs() -> tuple[str, str]:
    needs_machine()
    if API_SERVER not in os.environ or ETCD not in os.environ:
        pytest.skip(f"{API_SERVER} is not set: .ci/kubernetes PREFIX builds an API server and prints the variable")
    return os.environ[API_SERVER], os.environ[ETCD]


def make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a key and a certificate for 127.0.0.1. Returns their paths."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(addresses, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.key", folder / f"{name}.crt"
    form = serialization.PrivateFormat.TraditionalOpenSSL
    paths[0].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    paths[1].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return paths


@dataclass
class RealCluster:
    """A running cluster. `call` sends a request as the cluster's admin."""

    url: str
    certificate: Path
    session: aiohttp.ClientSession
    machine: FakeMachine
    room: int = 1000

    async def call(self, method: str, path: str, body: Any = None, *, kind: str = "application/json") -> Json:
        async with self.session.request(
            method, self.url + path, json=body, headers={"Content-Type": kind} if body is not None else None
        ) as answer:
            found: Json = await answer.json()
            # For a moment after it has become ready, the server refuses some objects.
            if "not yet ready" in found.get("message", ""):
                await asyncio.sleep(0.2)
                return await self.call(method, path, body, kind=kind)
            if answer.status >= 300 and answer.status != 409:
                raise AssertionError(f"{method} {path}: {found}")
            return found

    def kubeconfig(self, token: str = NODE_USER) -> str:
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        context = {"cluster": "real", "user": "real", "namespace": NAMESPACE}
        return json.dumps(
            {
                "current-context": "real",
                "clusters": [{"name": "real", "cluster": cluster}],
                "users": [{"name": "real", "user": {"token": token}}],
                "contexts": [{"name": "real", "context": context}],
            }
        )

    async def pods(self) -> list[Json]:
        found = await self.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")
        items: list[Json] = found["items"]
        return items


@asynccontextmanager
async def real_cluster(folder: Path, rules: list[Json]) -> AsyncIterator[RealCluster]:
    """Run the cluster. `rules` are the rules of the user whose token is in `kubeconfig`."""
    api_server, etcd = programs()
    api_port, etcd_port, peer_port = free_port(), free_port(), free_port()
    key, certificate = make_pair(folder, "server")
    accounts, _ = make_pair(folder, "accounts")
    (folder / "tokens.csv").write_text(f'{ADMIN},admin,1,"system:masters"\n{NODE_USER},rollouts,2\n')
    async with AsyncExitStack() as held:
        for name, command in {
            "etcd": [
                *(etcd, f"--data-dir={folder}/etcd", f"--listen-client-urls=http://127.0.0.1:{etcd_port}"),
                *(f"--advertise-client-urls=http://127.0.0.1:{etcd_port}", "--unsafe-no-fsync"),
                f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            ],
            "api": [
                *(api_server, f"--etcd-servers=http://127.0.0.1:{etcd_port}", f"--secure-port={api_port}"),
                *("--bind-address=127.0.0.1", f"--tls-cert-file={certificate}", f"--tls-private-key-file={key}"),
                *(f"--service-account-key-file={accounts}", f"--service-account-signing-key-file={accounts}"),
                *("--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.0.0.0/24"),
                *("--authorization-mode=RBAC", f"--token-auth-file={folder}/tokens.csv", f"--cert-dir={folder}"),
                "--kubelet-preferred-address-types=InternalIP",
            ],
        }.items():
            with (folder / f"{name}.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
            held.push_async_callback(process.wait)
            held.callback(process.kill)
        tls = ssl.create_default_context(cafile=str(certificate))
        session = await held.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls), headers={"Authorization": f"Bearer {ADMIN}"})
        )
        machine = await held.enter_async_context(FakeMachine({IMAGE: python_image()}))
        cluster = RealCluster(f"https://127.0.0.1:{api_port}", certificate, session, machine)
        await ready(cluster)
        await set_up(cluster, rules)
        kubelet_port = await held.enter_async_context(kubelet(cluster, folder))
        await register_node(cluster, kubelet_port)
        task = asyncio.create_task(run_pods(cluster), name="stand-in")
        held.push_async_callback(ended, task)
        yield cluster


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def ready(cluster: RealCluster) -> None:
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with cluster.session.get(f"{cluster.url}/readyz") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)


async def set_up(cluster: RealCluster, rules: list[Json]) -> None:
    """Create a namespace, its default service account, and the rights of the node's user."""
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
    await cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    await cluster.call("POST", accounts, {"metadata": {"name": "default"}})
    await cluster.call("POST", f"{rbac}/roles", {"metadata": {"name": "rollouts"}, "rules": rules})
    binding = {
        "metadata": {"name": "rollouts"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "rollouts"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "rollouts"}],
    }
    await cluster.call("POST", f"{rbac}/rolebindings", binding)


async def register_node(cluster: RealCluster, port: int) -> None:
    await cluster.call("POST", "/api/v1/nodes", {"metadata": {"name": NODE}})
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    path, kind = f"/api/v1/nodes/{NODE}/status", "application/merge-patch+json"
    await cluster.call("PATCH", path, {"status": status}, kind=kind)


@asynccontextmanager
async def kubelet(cluster: RealCluster, folder: Path) -> AsyncIterator[int]:
    """Serve commands in pods, in place of a kubelet. Yields the port."""

    async def run(request: web.Request) -> web.StreamResponse:
        path = f"/api/v1/namespaces/{request.match_info['namespace']}/pods/{request.match_info['pod']}"
        pod = await cluster.call("GET", path)
        return await cluster.machine.exec(pod["metadata"]["uid"], request)

    app = web.Application()
    app.router.add_route("*", "/exec/{namespace}/{pod}/{container}", run)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    key, certificate = make_pair(folder, "kubelet")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
    try:
        yield port
    finally:
        await runner.cleanup()


async def run_pods(cluster: RealCluster) -> None:
    """Bind, run, report and remove pods, in place of a scheduler and a kubelet."""
    running: set[str] = set()
    reports: dict[str, Json] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            pods = {pod["metadata"]["uid"]: pod for pod in await cluster.pods()}
            for uid, pod in pods.items():
                path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
                if pod["metadata"].get("deletionTimestamp"):
                    await cluster.machine.kill(uid)
                    await cluster.call("DELETE", path, {"gracePeriodSeconds": 0})
                elif not pod["spec"].get("nodeName") and len(running) < cluster.room:
                    body = {"metadata": {"name": pod["metadata"]["name"]}, "target": {"kind": "Node", "name": NODE}}
                    await cluster.call("POST", f"{path}/binding", {"apiVersion": "v1", "kind": "Binding", **body})
                elif pod["spec"].get("nodeName") and uid not in running:
                    running.add(uid)
                    cluster.machine.start(pod, partial(reports.__setitem__, uid))
            for uid in running - pods.keys():
                running.discard(uid)
                group.create_task(cluster.machine.kill(uid))
            for uid in list(reports):
                status = reports.pop(uid)
                if uid in pods:
                    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pods[uid]['metadata']['name']}/status"
                    kind = "application/merge-patch+json"
                    with contextlib.suppress(AssertionError):  # the pod is gone
                        await cluster.call("PATCH", path, {"status": status}, kind=kind)
            await asyncio.sleep(0.1)
