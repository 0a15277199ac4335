"""The network of a task in real containers: the same door as in a namespace sandbox, and no other way out."""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from network.test_session_attacks import ASK, own_addresses
from network.world import a_server, connect, get
from outrider.concurrency.chores import Chores, Failures
from outrider.config import Config
from outrider.destinations import Phase
from outrider.plugins import resolve
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.network.rules import NetworkRules
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.sandbox import Sandbox, Sandboxes
from outrider.spec import RuntimeSpec
from support.ports import free_port

from . import engines, sif_images
from .world import IN_CONTAINERS, KINDS, World

DIRECT = r"""
import json, socket, sys
reached = []
for host, port in json.loads(sys.argv[1]):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family, kind) as one:
                one.settimeout(2)
                one.connect((host, port))
                if kind == socket.SOCK_DGRAM:
                    one.send(b"x")
                reached.append([host, port, int(kind)])
        except OSError:
            pass
devices = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
try:
    names = socket.getaddrinfo("example.org", 80) and "found"
except OSError:
    names = "none"
print(json.dumps([reached, devices, names]))
"""


@asynccontextmanager
async def a_sandbox(world: World, kind: str, network: NetworkRules, asked: dict[str, Any]) -> AsyncIterator[Sandbox]:
    """Run a sandbox with a network, in no phase. The gateway's socket has no server."""
    fields: dict[str, Any] = {}
    if kind in engines.RUNTIMES:
        engines.engine(kind)
        fields["image"] = engines.prepared(kind, world.environment)
        world.folder.chmod(0o711)
    elif kind == "apptainer":
        if not (can := resolve("runtime", kind).available()).ok:
            pytest.skip(f"apptainer: {can.detail}")
        fields["rootfs"] = str(sif_images.python_root())
    spec = RuntimeSpec.model_validate({"kind": KINDS[kind], "network": asked, **fields})
    paths = HostPaths.of(None, [Path(fields["rootfs"])] if "rootfs" in fields else [])
    async with Chores(Failures()) as background:
        sandboxes = Sandboxes(
            host=world.host, background=background, paths=paths, gateway_socket=world.socket, network=network
        )
        made = await sandboxes.make(spec, "one", 1)
        mask = os.umask(0) if kind == "podman-rootless" else None  # the engine's user is not the tests' user
        try:
            if mask is not None:
                made.directory.chmod(0o711)
            try:
                await made.ready()
            finally:
                if mask is not None:
                    os.umask(mask)
            yield made
        finally:
            await made.stop()


async def answers(runtime: Runtime, requests: list[bytes]) -> list[str]:
    encoded = json.dumps([base64.b64encode(one).decode() for one in requests])
    await runtime.write("/tmp/requests.json", encoded.encode())
    await runtime.write("/tmp/ask.py", ASK.encode())
    done = await runtime.exec("cd /tmp && python3 ask.py replies.json && cat replies.json", seconds=60)
    assert done.exit_code == 0, done.log_tail()
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", [*IN_CONTAINERS, pytest.param("gvisor", marks=pytest.mark.real), "namespace"])
async def test_the_door_of_a_container(world: World, kind: str) -> None:
    """The attacks on a namespace sandbox's door fail in each kind of container: forbidden destinations, wrong phases,
    the service's address, direct connections and names."""
    port = free_port()
    async with a_server() as allowed, a_server() as other:
        place, service = f"127.0.0.1:{allowed.port}", f"127.0.0.1:{port}"
        settings = {"port": port, "network": {"allow": [place, "*:*"], "internal": [place, service]}}
        rules = NetworkRules(Config.model_validate(settings))
        asked = {"prepare": [], "agent": [place, "*:*"], "verifier": []}
        async with a_sandbox(world, kind, rules, asked) as made:
            own = [f"[{one}]" if ":" in one else one for one in own_addresses()]
            hosts = ["127.0.0.1", "127.1", "0.0.0.0", "2130706433", "[::1]", "[::ffff:127.0.0.1]", "localhost", *own]
            bad = [f"{host}:{number}" for host in hosts for number in (port, other.port)]
            bad += ["169.254.169.254:80", "[fd00:ec2::254]:80", "10.0.2.2:80", "host.docker.internal:80"]
            requests = [text.encode() for one in bad for text in (connect(one), get(f"http://{one}/"))]
            good = get(f"http://{place}/x").encode()
            assert "the sandbox has no network now" in (await answers(made.runtime, [good]))[0]
            async with made.network(Phase.AGENT):
                first, *rest = await answers(made.runtime, [good, *requests])
                direct = [(host.strip("[]"), number) for host in [*hosts, "10.0.2.2"] for number in (other.port, 53)]
                numeric = [(host, number) for host, number in direct if host.count(".") == 3 or ":" in host]
                done = await made.runtime.exec(["python3", "-c", DIRECT, json.dumps(numeric)], seconds=120)
                reached, devices, names = json.loads(done.stdout)
            async with made.network(Phase.VERIFIER):
                assert (await answers(made.runtime, [good]))[0].startswith("HTTP/1.1 403")
        assert first.endswith("hi")
        for request, reply in zip(requests, rest, strict=True):
            assert reply.startswith(("HTTP/1.1 403", "HTTP/1.1 400", "HTTP/1.1 502")), (request, reply)
        assert other.heard == []
        assert len(allowed.heard) == 1
        # A datagram to the sandbox's own loopback is sent, but has no receiver.
        assert [one for one in reached if not (one[2] == socket.SOCK_DGRAM and is_loopback(one[0]))] == []
        assert set(devices) <= {"lo", "tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0"}
        assert names == "none"


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("0.0.0.0", "::1", "::ffff:127.0.0.1")
