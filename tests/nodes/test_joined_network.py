"""The network of tasks on a node in another process: the node enforces the service's rules."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from network.test_session_attacks import ASK
from network.world import a_server, connect, get
from outrider.config import Config
from outrider.lifecycle import StopReason
from outrider.nodes import joined
from outrider.sandbox.network.rules import NetworkRules
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.service.admission import validate_group
from outrider.spec import EngineSpec
from service.program import program
from support.ports import free_port
from support.stamping import StampingEngine

from .conftest import Starts
from .test_joined import LENGTH, Machine
from .test_processes import ends, served


async def refused(rules: NetworkRules, place: str, addresses: list[str]) -> str:
    """Return the error of a tunnel to `place` through a dialer with these rules. No program listens at the place."""
    from outrider.sandbox.network.dialer import Dialer, ProxiedServer
    from outrider.sandbox.network.requests import NotPassedOn

    async def resolve(host: str, port: int, named: bool) -> Any:
        from ipaddress import ip_address

        return [ip_address(one) for one in {"service.test": ["203.0.113.9"]}.get(host, addresses)]

    host, _, port = place.rpartition(":")
    try:
        await Dialer(resolve, own=rules.own, environ={}).connect(
            ProxiedServer(host=host, port=int(port), internal=True), tunnel=True
        )
    except NotPassedOn as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("place", "addresses"),
    [
        ("service.test:8700", ["127.0.0.1"]),
        ("alias.test:8700", ["203.0.113.9"]),
        ("alias.test:8700", ["127.0.0.1", "203.0.113.9"]),
        ("mapped.test:8700", ["::ffff:203.0.113.9"]),
    ],
)
async def test_a_joined_node_reaches_not_its_service(place: str, addresses: list[str]) -> None:
    """The node refuses the name by which it has joined and other names for the same address, even if the operator has
    listed the destination as internal."""
    rules = NetworkRules(Config(port=9999), service_url="http://service.test:8700")
    assert "own" in await refused(rules, place, addresses)
    assert "cannot reach" in await refused(rules, "alias.test:1", ["127.0.0.1"])


async def test_a_service_is_not_reached_by_the_name_that_it_advertises() -> None:
    rules = NetworkRules(Config(advertise=("https://service.test:8700",)))
    assert await refused(rules, "service.test:8700", ["203.0.113.9"]) == "service.test:8700 is the service's own"
    assert "own" in await refused(rules, "alias.test:8700", ["203.0.113.9"])


@pytest.mark.deep
@pytest.mark.parametrize("far", [False, True])
async def test_a_node_in_another_process_enforces_the_rules_of_the_service(
    far: bool, start: Starts, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `far`, the node has joined over a WebSocket; its own settings allow every destination and have no effect."""
    if not (can := NamespaceRuntime.available()).ok:
        pytest.skip(f"namespace: {can.detail}")
    monkeypatch.setattr(joined, "host_id", lambda: "another machine")
    engine, port = StampingEngine(tokenizer, length=LENGTH), free_port()
    async with a_server() as allowed, a_server() as other:
        places = [f"127.0.0.1:{one.port}" for one in (allowed, other)]
        service = f"127.0.0.1:{port}"
        network = {"allow": [places[0], service, "*:*"], "internal": [places[0], service]}
        asked = [get(f"http://{places[0]}/"), connect(places[1]), connect(service), get(f"http://{service}/v1/status")]
        task: dict[str, Any] = {
            "instruction": "x",
            "harness": program("python3 ask.py replies.json"),
            "runtime": {
                "kind": "namespace",
                "network": {"allow": ["*:*"]},
                "prepare": [
                    {"write": ASK.replace("base64.b64decode(text)", "text.encode()"), "to": "ask.py"},
                    {"write": json.dumps(asked), "to": "requests.json"},
                ],
            },
            "artifacts": ["replies.json"],
            "evaluator": {"run": "true"},
        }
        processes = 0 if far else 1
        async with start(processes=processes, port=port, network=network) as running, served(engine) as url:
            await running.service.add_engine(EngineSpec(kind="vllm", name="near", url=url))
            machine = Machine().at(running.url, tmp_path, network={"allow": ["*:*"], "internal": places})
            async with machine if far else asyncio.timeout(300):
                view = await running.done(await running.service.submit(validate_group({"task": task})))
            assert ends(view) == {StopReason.COMPLETED: 1}, view
            [session] = view.sessions
            replies = json.loads(running.service.artifacts.file(session.id, "/work/replies.json").read_bytes())
        assert len(allowed.heard) == 1
        assert other.heard == []
    assert replies[0].endswith("hi")
    assert [reply.partition("\r\n")[0] for reply in replies[1:]] == ["HTTP/1.1 403 Forbidden"] * 3
