"""Attacks on the network of a task by programs in a real sandbox."""

from __future__ import annotations

import base64
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from network.test_sessions import a_service, run, spans, task
from network.world import a_server
from outrider.client.client import AsyncClient
from outrider.sandbox.network.proxy import WAITS
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from support.ports import free_port
from support.service import running_node

ASK = r"""
import base64, json, socket, sys
replies = []
for text in json.load(open("requests.json")):
    try:
        with socket.create_connection(("127.0.0.1", 61080), 5) as proxy:
            proxy.settimeout(30)
            proxy.sendall(base64.b64decode(text))
            proxy.shutdown(socket.SHUT_WR)
            got = b""
            while data := proxy.recv(65536):
                got += data
    except OSError as error:
        got = repr(error).encode()
    replies.append(got.decode("latin-1"))
json.dump(replies, open(sys.argv[1], "w"))
"""
"""A program that sends each request on a new connection, and writes the replies to a file."""


def own_addresses() -> list[str]:
    """Return the addresses from which this machine would send to other networks."""
    found = []
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((far, 9))  # sends nothing
                found.append(probe.getsockname()[0].partition("%")[0])
            except OSError:
                continue
    return found


def asking(requests: list[bytes], network: dict[str, Any]) -> dict[str, Any]:
    """Return a task whose agent sends these requests and leaves the replies as an artifact."""
    made = task("python3 ask.py replies.json", network)
    encoded = json.dumps([base64.b64encode(one).decode() for one in requests])
    made["runtime"]["prepare"] += [{"write": ASK, "to": "ask.py"}, {"write": encoded, "to": "requests.json"}]
    made["artifacts"] = ["replies.json"]
    made["evaluator"] = {"run": "true"}
    return made


async def replies_of(url: str, made: dict[str, Any]) -> tuple[str, list[str]]:
    session = await run(url, made)
    assert session.result is not None
    assert session.result.error is None, session.result.error
    async with AsyncClient(url) as client:
        replies: list[str] = json.loads(await client.artifact(session.id, "/work/replies.json"))
    return session.id, replies


async def test_the_control_api_is_reached_in_no_way(tmp_path: Path) -> None:
    """The control API is refused even if the task may reach every host and the operator lists the service's addresses
    as internal. The agent tries many spellings of the addresses, host names, a second request on a connection, the
    model gateway, and the header `Host`."""
    port = free_port()
    hosts = ["127.0.0.1", "127.1", "127.0.0.2", "0.0.0.0", "0", "2130706433", "0x7f000001", "017700000001", "0x7f.1"]
    hosts += ["[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"]
    hosts += ["localhost", "LOCALHOST.", "localhost.localdomain", socket.gethostname(), "ip6-localhost"]
    hosts += [f"[{one}]" if ":" in one else one for one in own_addresses()]
    assert len(hosts) > 20, "an outer address of the machine is tried, too"
    status = b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    requests = []
    for host in hosts:
        place = f"{host}:{port}".encode()
        requests += [
            b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n%s" % (place, place, status),
            b"GET http://%s/v1/status HTTP/1.1\r\nHost: %s\r\n\r\n" % (place, place),
        ]
    place = f"127.0.0.1:{port}".encode()
    absolute = b"GET http://%s/v1/status HTTP/1.1\r\nHost: %s\r\n\r\n" % (place, place)
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n"
    gateway = [
        status,
        b"GET http://127.0.0.1:61080/v1/status HTTP/1.1\r\nHost: %s\r\n\r\n" % place,
        b"CONNECT 127.0.0.1:61080 HTTP/1.1\r\n\r\n" + absolute,
        b"GET /s/x/v1/models HTTP/1.1\r\nHost: x\r\n\r\n" + absolute + absolute,
        b"POST /s/x/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        + absolute,
        b"GET /v1/nodes/evil/join HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n",
        b"GET http://127.0.0.1:61080/v1/nodes/evil/join HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n",
        b"GET /s/../v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /s/%2e%2e/v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET //v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ]
    internal = [f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", f"{socket.gethostname()}:{port}"]
    async with a_service(tmp_path, port=port, allow=["*:*"], internal=internal) as (_, url):
        assert url.endswith(f":{port}")
        session, replies = await replies_of(url, asking(requests + gateway, {"allow": ["*:*"]}))
        async with AsyncClient(url) as client:
            spoken = repr(await client.status())
        used = await spans(url, session)
    for request, reply in zip(requests, replies, strict=False):
        assert reply.startswith(("HTTP/1.1 403", "HTTP/1.1 400", "HTTP/1.1 502")), (request, reply)
    for request, reply in zip(gateway, replies[len(requests) :], strict=True):
        assert " 101 " not in reply, (request, reply)
        assert "sessions" not in reply, (request, reply)
        for part in reply.split("HTTP/1.1 ")[1:]:
            assert not part.startswith("200 OK"), (request, reply)
    assert "sessions" in spoken, "what a reply of the control API would have"
    assert sum(span.data["received"] for span in used) == 0


PHASES = r"""
import json, socket, sys, time
who, place = sys.argv[1:]
seen = set()
end = time.time() + 60
while time.time() < end:
    try:
        with socket.create_connection(("127.0.0.1", 61080), 5) as proxy:
            proxy.settimeout(5)
            proxy.sendall(f"GET http://{place}/{who} HTTP/1.1\r\n\r\n".encode())
            seen.add(proxy.recv(12).decode() or "closed")
    except OSError:
        pass
    with open(f"/work/{who}.seen", "w") as file:
        json.dump(sorted(seen), file)
    time.sleep(0.05)
"""


@pytest.mark.deep
async def test_a_program_of_an_earlier_phase_has_the_rights_of_the_present_one(tmp_path: Path) -> None:
    """A program that a prepare step left running reaches nothing while the agent runs. A program that the agent left
    running does not use the verifier's network if the grading has its own sandbox."""
    async with a_server() as server:
        place = f"127.0.0.1:{server.port}"
        async with a_service(tmp_path, allow=[place], internal=[place]) as (_, url):
            start = f"setsid python3 phases.py {{}} {place} > /dev/null 2>&1 & sleep 1"
            made = task(start.format("agent") + "; sleep 1", {"prepare": [place], "verifier": [place]})
            made["runtime"]["prepare"] += [{"write": PHASES, "to": "phases.py"}, {"run": start.format("prepare")}]
            made["evaluator"] = {"run": "sleep 1", "carry": ["phases.py"]}
            session = await run(url, made)
            assert session.result is not None
            assert session.result.error is None, session.result.error
            used = {(span.data["sandbox"], span.data["phase"]): span.data for span in await spans(url, session.id, 4)}
    assert used["agent", "prepare"]["requests"] > 2
    assert used["agent", "prepare"]["refused"] == 0
    assert used["agent", "agent"]["requests"] == 0
    assert used["agent", "agent"]["refused"] > 10, "both programs asked on"
    # The task's prepare steps run again in the grading sandbox and start their program there. The agent's program does
    # not run there.
    assert used["grading", "verifier"]["requests"] > 2
    assert server.heard
    assert not any(b"/agent" in head for head in server.heard)


@pytest.mark.deep
async def test_graded_in_place_a_program_of_the_agent_has_the_network_of_the_verifier(tmp_path: Path) -> None:
    """If the outcome is graded in the agent's sandbox, a program that the agent left running uses the verifier's
    network. docs/network.md therefore recommends `carry`."""
    async with a_server() as server:
        place = f"127.0.0.1:{server.port}"
        async with a_service(tmp_path, allow=[place], internal=[place]) as (_, url):
            start = f"setsid python3 phases.py agent {place} > /dev/null 2>&1 & sleep 1"
            made = task(start, {"verifier": [place]})
            made["runtime"]["prepare"].append({"write": PHASES, "to": "phases.py"})
            made["evaluator"] = {"run": "sleep 1"}
            session = await run(url, made)
            used = {span.data["phase"]: span.data for span in await spans(url, session.id, 2)}
    assert used["agent"]["requests"] == 0
    assert used["verifier"]["requests"] > 2


@pytest.mark.nightly
async def test_a_silent_index_is_never_a_zero_reward(tmp_path: Path) -> None:
    """pip gives up before the proxy does, so the verifier's command fails. The session ends with an error instead of
    reward 0. `test_door_outages.py` tests the door's part, and `test_sessions.py` tests an overloaded index."""
    async with a_server(answer=_silent) as server:
        index = f"http://127.0.0.1:{server.port}/simple/"
        async with a_service(tmp_path, allow=["mirror:pip"], pip_index=index) as (_, url):
            made = task("exit 0", {"verifier": ["mirror:pip"]})
            made["evaluator"] = {
                "run": f"python3 -m pip download -q --retries 0 --timeout {WAITS.answer + 2:g} tinytest"
            }
            session = await run(url, made)
    assert session.result is not None
    assert session.result.verdict is None
    assert session.result.error is not None
    assert session.result.error.message == (
        "the network failed while the outcome was graded, and the reward is not positive: pip.mirror.internal:80 did"
        " not answer"
    )


async def _silent(reader: Any, writer: Any, head: bytes) -> None:
    await reader.read()


FLOOD = r"""
import multiprocessing, socket, sys
def flood(number):
    for count in range(int(sys.argv[1]) // 16):
        try:
            with socket.create_connection(("127.0.0.1", 61080), 20) as proxy:
                host = f"x{count % 100}.{number}.{'y' * 60}.test"
                proxy.sendall(f"CONNECT {host}:443 HTTP/1.1\r\nX-Evil: <script>\r\n\r\n".encode())
                while proxy.recv(65536):
                    pass
        except OSError:
            pass
with multiprocessing.Pool(16) as pool:
    pool.map(flood, range(16))
"""


@pytest.mark.parametrize(
    "count", [2_000, pytest.param(100_000, marks=[pytest.mark.deep, pytest.mark.nightly, pytest.mark.timeout(600)])]
)
async def test_a_flood_of_requests_leaves_a_short_timeline_and_other_sessions(tmp_path: Path, count: int) -> None:
    """The requests name more hosts than the timeline counts one by one. Another session that runs at the same time ends
    within a minute."""
    async with a_service(tmp_path, allow=["files.test"]) as (_, url):
        made = task(f"python3 flood.py {count}", {"allow": ["files.test"]})
        made["runtime"]["prepare"].append({"write": FLOOD, "to": "flood.py"})
        made["evaluator"] = {"run": "true"}
        quick = task("exit 0", None)
        quick["evaluator"] = {"run": "true"}
        async with AsyncClient(url) as client:
            group = await client.submit({"task": made})
            began = time.monotonic()
            other = await run(url, quick)
            assert time.monotonic() - began < 60
            [done] = await client.wait([group.id])
            session = done.sessions[0].id
            found = await spans(url, session, 200)
            page = len(repr(await client.timeline(session)))
        async with httpx.AsyncClient() as http:
            metrics = await http.get(f"{url}/metrics")
        assert "outrider_" in metrics.text
    assert other.result is not None
    assert other.result.verdict is not None
    assert len(found) <= 257
    assert sum(span.data["refused"] for span in found) > count * 0.9
    assert {span.name for span in found if not span.name.endswith(".test:443")} == {"other servers"}
    assert page < 400_000
    assert "yyyyy" not in metrics.text
    assert "script" not in str(found)


async def test_a_hard_link_to_a_file_of_the_service_is_not_replayed(tmp_path: Path) -> None:
    if not (can := NamespaceRuntime.available()).ok:
        pytest.skip(f"namespace: {can.detail}")
    for folder in (tmp_path / "data", tmp_path / "files"):
        folder.mkdir()
    secret = tmp_path / "data" / "secret"
    secret.write_bytes(b'{"phase":"agent"}\n')
    os.link(secret, tmp_path / "files" / "hard.jsonl")
    async with running_node(tmp_path=tmp_path, network={"allow": ["files.test"]}) as (_, url):
        session = await run(url, task("exit 0", {"allow": ["files.test"], "replay": "hard.jsonl"}))
    assert session.result is not None
    assert session.result.error is not None
    assert "hard link to a file that tasks may not read" in session.result.error.message
