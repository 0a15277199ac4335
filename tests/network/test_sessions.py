"""Sessions whose tasks have a network, in real sandboxes and with a package index on this machine."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from network.world import a_server
from outrider.client.client import AsyncClient
from outrider.config import Config
from outrider.errors import InvalidField
from outrider.sandbox.network.rules import NetworkRules
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.schemas import SessionView, SpanView
from outrider.service.assembly import Opened
from outrider.service.principals import Principal
from outrider.service.service import Service
from outrider.spec import GroupSpec
from outrider.tasks.datasets import harbor_examples
from service.program import program
from support.service import running_node

RUNNER = """
import importlib.util, sys
failed = 0
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("tested", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, test in list(vars(module).items()):
        if name.startswith("test_"):
            try:
                test()
            except AssertionError:
                failed += 1
sys.exit(1 if failed else 0)
"""
TEST = """#!/bin/bash
python3 -m pip install --quiet --no-cache-dir --target /verifier/packages tinytest || exit 1
PYTHONPATH=/verifier/packages python3 -m tinytest /tests/test_answer.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
"""A verifier in the form of Terminal-Bench's: it installs its test runner and runs it."""
CHECK = "def test_answer():\n    assert open('/work/answer').read().strip() == '42'\n"


def wheel() -> bytes:
    """Return a wheel of the package `tinytest`, which runs test functions."""
    files = {
        "tinytest/__init__.py": "",
        "tinytest/__main__.py": RUNNER,
        "tinytest-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinytest\nVersion: 1.0\n",
        "tinytest-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(text)}")
    files["tinytest-1.0.dist-info/RECORD"] = "\n".join([*rows, "tinytest-1.0.dist-info/RECORD,,", ""])
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return written.getvalue()


class Index:
    """A package index with one package. While `down` is true, it replies with status 503, as an overloaded server
    does."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.down = False
        index, data = self, wheel()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.asked.append(self.path)
                page = f"<a href='http://127.0.0.1:{index.port}/files/tinytest-1.0-py3-none-any.whl'>tinytest</a>"
                found = {"/simple/tinytest/": page.encode(), "/files/tinytest-1.0-py3-none-any.whl": data}
                body = found.get(self.path, b"")
                self.send_response(503 if index.down else 200 if body else 404)
                self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/zip")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self.server.server_address[1]


@asynccontextmanager
async def an_index() -> AsyncIterator[Index]:
    index = Index()
    thread = Thread(target=index.server.serve_forever, name="index")
    thread.start()
    try:
        yield index
    finally:
        await asyncio.to_thread(index.server.shutdown)
        index.server.server_close()
        thread.join()


@asynccontextmanager
async def a_service(tmp_path: Path, *, port: int = 0, **network: Any) -> AsyncIterator[tuple[Opened, str]]:
    if not (can := NamespaceRuntime.available()).ok:
        pytest.skip(f"namespace: {can.detail}")
    async with running_node(tmp_path=tmp_path, port=port, network=network) as (opened, url):
        yield opened, url


def task(then: str, network: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    evaluator: dict[str, Any] = {"kind": "harbor", "options": {"tests": [{"write": TEST, "to": "/tests/test.sh"}]}}
    evaluator["options"]["tests"].append({"write": CHECK, "to": "/tests/test_answer.py"})
    runtime = {"prepare": [{"run": "mkdir -p /logs/verifier"}], **({"network": network} if network else {})}
    return {
        "instruction": "answer",
        "harness": program(then),
        "runtime": runtime,
        "evaluator": evaluator,
        "max_attempts": 1,
        **fields,
    }


async def run(url: str, task: dict[str, Any]) -> SessionView:
    async with AsyncClient(url) as client:
        group = await client.submit({"task": task})
        [done] = await client.wait([group.id])
        return await client.session(done.sessions[0].id)


async def spans(url: str, session: str, count: int = 1) -> list[SpanView]:
    """Poll the timeline until `count` network spans are stored and complete. Return the network spans. A node stores
    the last ones shortly after the session's end."""
    async with AsyncClient(url) as client, asyncio.timeout(20):
        while True:
            found = [span for span in (await client.timeline(session)).spans if span.kind == "network"]
            if len(found) >= count and not any("cut_off" in span.data for span in found):
                return found
            await asyncio.sleep(0.2)


@pytest.mark.deep
@pytest.mark.parametrize(("answer", "reward"), [("42", 1.0), ("41", 0.0)])
async def test_a_verifier_that_installs_its_runner_gives_its_true_reward(
    tmp_path: Path, answer: str, reward: float
) -> None:
    async with an_index() as index:
        index_url = f"http://127.0.0.1:{index.port}/simple/"
        async with a_service(tmp_path, allow=["mirror:pip"], pip_index=index_url) as (_, url):
            then = f"python3 -m pip download tinytest 2> answer.log; echo {answer} > answer"
            session = await run(url, task(then, {"verifier": ["mirror:pip"]}))
            assert session.result is not None
            assert session.result.verdict is not None, session.result.error
            assert session.result.verdict.reward == reward
            assert index.asked == ["/simple/tinytest/", "/files/tinytest-1.0-py3-none-any.whl"]
            seen = {(span.data["phase"], span.name): span.data for span in await spans(url, session.id, 2)}
    agent, verifier = seen["agent", "pip.mirror.internal:80"], seen["verifier", "pip.mirror.internal:80"]
    assert agent["requests"] == 0
    assert agent["refused"] > 0
    assert agent["refusal"] == "task.runtime.network does not allow pip.mirror.internal:80 in this phase"
    assert (verifier["requests"], verifier["refused"], verifier["failed"]) == (2, 0, 0)
    assert verifier["received"] > len(wheel())
    assert verifier["sandbox"] == "agent"


async def test_the_same_in_a_sandbox_of_the_graders(tmp_path: Path) -> None:
    async with an_index() as index:
        index_url = f"http://127.0.0.1:{index.port}/simple/"
        async with a_service(tmp_path, allow=["mirror:pip"], pip_index=index_url) as (_, url):
            made = task("echo 42 > answer", {"verifier": ["mirror:pip"]})
            made["evaluator"]["carry"] = ["answer"]
            session = await run(url, made)
            assert session.result is not None
            assert session.result.verdict is not None
            assert session.result.verdict.reward == 1.0
            [span] = await spans(url, session.id)
            assert (span.data["sandbox"], span.data["phase"], span.data["requests"]) == ("grading", "verifier", 2)


async def test_a_network_that_fails_is_never_a_zero_reward(tmp_path: Path) -> None:
    """If the verifier's index is down, the session ends with an error although test.sh writes 0."""
    zero = TEST.replace("|| exit 1", "|| { echo 0 > /logs/verifier/reward.txt; exit 0; }")
    async with an_index() as index:
        index.down = True
        index_url = f"http://127.0.0.1:{index.port}/simple/"
        async with a_service(tmp_path, allow=["mirror:pip"], pip_index=index_url) as (_, url):
            made = task("echo 42 > answer", {"verifier": ["mirror:pip"]})
            made["runtime"]["env"] = {"PIP_RETRIES": "0"}
            made["evaluator"]["options"]["tests"][0]["write"] = zero
            session = await run(url, made)
            assert session.result is not None
            assert session.result.verdict is None
            assert session.result.error is not None
            assert "the network failed while the outcome was graded" in session.result.error.message
            assert "pip.mirror.internal:80 answered with status 503" in session.result.error.message
            # If the agent's network fails, a reward that is not positive becomes an error, and a positive reward stays.
            fetch = "python3 -m pip download -q tinytest"
            for answer, reward in (("41", None), ("42", 1.0)):
                made = task(f"{fetch}; echo {answer} > answer", {"agent": ["mirror:pip"]})
                made["evaluator"] = {"run": "grep -q 42 answer"}
                made["runtime"]["env"] = {"PIP_RETRIES": "0"}
                session = await run(url, made)
                assert session.result is not None
                if reward is None:
                    assert session.result.error is not None
                    assert "the network failed while the agent ran" in session.result.error.message
                else:
                    assert session.result.verdict is not None
                    assert session.result.verdict.reward == reward


REACH = """
import os, socket, sys, urllib.request
found = []
for place in sys.argv[1:]:
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 2).close()
        found.append("direct " + place)
    except OSError:
        pass
    try:
        proxy = socket.create_connection(("127.0.0.1", 61080), 5)
        proxy.sendall(f"CONNECT {place} HTTP/1.1\\r\\n\\r\\n".encode())
        if b" 200 " in proxy.recv(100):
            found.append("proxy " + place)
    except OSError:
        pass
open("/work/reached", "w").write(" ".join(found))
"""


async def test_no_other_route_leads_out(tmp_path: Path) -> None:
    """An agent that may reach every host reaches neither the control API nor another server of this machine, directly
    or through the proxy."""
    async with a_server() as server, a_service(tmp_path, allow=["*:*"]) as (_, url):
        port = int(url.rpartition(":")[2])
        at = [f"{host}:{one}" for host in ("127.0.0.1", "0.0.0.0", "169.254.169.254") for one in (port, server.port)]
        made = task("exit 0", {"allow": ["*:*"]})
        made["harness"] = program(f"python3 reach.py {' '.join(at)} localhost:{port}")
        made["runtime"]["prepare"].append({"write": REACH, "to": "reach.py"})
        made["evaluator"] = {"run": "test -e reached && ! test -s reached"}
        session = await run(url, made)
        assert session.result is not None
        assert session.result.verdict is not None, session.result.error
        assert session.result.verdict.reward == 1.0
        assert server.heard == []
        assert all(span.data["requests"] == 0 or span.data["refused"] for span in await spans(url, session.id))


async def test_without_a_network_nothing_is_reached_and_nothing_noted(tmp_path: Path) -> None:
    async with a_service(tmp_path, allow=["*:*"]) as (_, url):
        made = task("exit 0", None)
        made["harness"]["command"][-1] = (
            "exec 3<>/dev/tcp/127.0.0.1/61080; printf 'CONNECT example.org:443 HTTP/1.1\\r\\n\\r\\n' >&3;"
            " head -c 12 <&3 > reply; test -z $http_proxy && echo none >> reply"
        )
        made["evaluator"] = {"run": "! grep -q ' 200' reply && grep -q none reply"}
        session = await run(url, made)
        assert session.result is not None
        assert session.result.verdict is not None
        assert session.result.verdict.reward == 1.0
        assert await spans(url, session.id, 0) == []


def asking(*allow: str, **more: Any) -> GroupSpec:
    runtime = {"network": {"allow": list(allow), **more}}
    harness = {"command": ["true"]}
    return GroupSpec.model_validate(
        {"task": {"instruction": "x", "harness": harness, "runtime": runtime, "evaluator": {"run": "true"}}}
    )


def refused_field(service: Service, spec: GroupSpec, caller: Principal) -> str | None:
    try:
        service._allow_lists.check(spec, caller)
    except InvalidField as error:
        return error.field
    return None


async def test_a_task_that_asks_for_more_is_refused_when_submitted(tmp_path: Path) -> None:
    tenants = [{"tenant": "alice", "allow": ["*.alice.org:443"]}]
    async with running_node(tmp_path=tmp_path, network={"allow": ["docs.example"], "tenants": tenants}) as (
        opened,
        url,
    ):
        service = opened.service
        alice, bob = (Principal(name, "submit", name) for name in ("alice", "bob"))
        admin = Principal("root", "admin", "operator")
        field = "task.runtime.network"
        for caller in (alice, bob, admin):
            assert refused_field(service, asking("docs.example:443", "Docs.Example:80"), caller) is None
            assert refused_field(service, asking("docs.example:22"), caller) == f"{field}.allow.0"
            assert refused_field(service, asking("docs.example", "*.docs.example"), caller) == f"{field}.allow.1"
            assert refused_field(service, asking(agent=["*"]), caller) == f"{field}.agent.0"
            assert refused_field(service, asking(verifier=["mirror:pip"]), caller) == f"{field}.verifier.0"
        # A tenant may not use the list of another tenant. An admin may use every list.
        for wanted in ("a.alice.org:443", "*.b.alice.org:443"):
            assert refused_field(service, asking(wanted), alice) is None
            assert refused_field(service, asking(wanted), bob) == f"{field}.allow.0"
            assert refused_field(service, asking(wanted), admin) is None
        async with AsyncClient(url) as client:
            with pytest.raises(InvalidField, match=r"'evil.org' is not allowed.* only docs.example") as refused:
                await client.submit(asking("evil.org"))
        assert "network.allow" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("mirror", "setting"), [("mirror:pip", "pip_index"), ("mirror:npm", "npm_registry"), ("mirror:apt", "apt_hosts")]
)
async def test_a_mirror_without_a_server_is_refused_when_submitted(tmp_path: Path, mirror: str, setting: str) -> None:
    async with running_node(tmp_path=tmp_path, network={"allow": [mirror]}) as (_, url), AsyncClient(url) as client:
        with pytest.raises(InvalidField, match="has no server here") as refused:
            await client.submit(asking(verifier=[mirror]))
    assert refused.value.field == "task.runtime.network.verifier.0"
    assert f"network.{setting}" in str(refused.value.hint)


async def test_kinds_that_cannot_filter_are_refused_by_name(tmp_path: Path) -> None:
    async with (
        running_node(tmp_path=tmp_path, network={"allow": ["docs.example"]}) as (_, url),
        AsyncClient(url) as client,
    ):
        for kind in ("process", "process-landlock", "memory"):
            spec = asking("docs.example").task
            spec = spec.model_copy(update={"runtime": spec.runtime.model_copy(update={"kind": kind})})
            with pytest.raises(InvalidField, match="cannot have a network of their own") as refused:
                await client.submit(GroupSpec(task=spec))
            assert refused.value.field == "task.runtime.network"


async def test_a_reply_of_the_index_is_recorded_and_replayed(tmp_path: Path) -> None:
    async with an_index() as index:
        index_url = f"http://127.0.0.1:{index.port}/simple/"
        async with a_service(tmp_path, allow=["mirror:pip"], pip_index=index_url) as (_, url):
            made = task("echo 42 > answer", {"verifier": ["mirror:pip"], "record": True})
            first = await run(url, made)
            async with AsyncClient(url) as client:
                record = await client.artifact(first.id, "outrider:network.jsonl")
            (tmp_path / "files" / "run.jsonl").write_bytes(record)
            index.down = True
            asked = len(index.asked)
            made["runtime"]["network"] = {"verifier": ["mirror:pip"], "replay": "run.jsonl"}
            again = await run(url, made)
            for session in (first, again):
                assert session.result is not None
                assert session.result.verdict is not None, session.result.error
                assert session.result.verdict.reward == 1.0
            assert len(index.asked) == asked


@pytest.mark.deep
async def test_a_harbor_folder_with_a_public_network_is_graded_through_a_mirror(tmp_path: Path) -> None:
    """The folder does not mention a mirror, and its test.sh expects the public Internet. Nevertheless, the task is
    graded if `harbor_examples` gets the mirror as the network."""
    folder = tmp_path / "tasks" / "answer"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text("[agent]\ntimeout_sec = 60\n")
    (folder / "instruction.md").write_text("Write the answer.\n")
    (folder / "tests" / "test.sh").write_text(TEST)
    (folder / "tests" / "test_answer.py").write_text(CHECK)
    async with an_index() as index:
        index_url = f"http://127.0.0.1:{index.port}/simple/"
        async with a_service(tmp_path, allow=["mirror:pip"], pip_index=index_url) as (_, url):
            [public] = harbor_examples(tmp_path / "tasks")
            with pytest.raises(InvalidField, match=r"'\*' is not allowed") as refused:
                await run(url, {**public.task, "harness": program("exit 0")})
            assert refused.value.field == "task.runtime.network.allow.0"
            assert "--offline" in str(refused.value.hint)
            [mirrored] = harbor_examples(tmp_path / "tasks", network=["mirror:pip"])
            assert mirrored.notes == ()
            for answer, reward in (("42", 1.0), ("43", 0.0)):
                session = await run(
                    url, {**mirrored.task, "instruction": "x", "harness": program(f"echo {answer} > answer")}
                )
                assert session.result is not None
                assert session.result.verdict is not None, session.result.error
                assert session.result.verdict.reward == reward


async def test_a_network_that_was_taken_away_ends_the_session_in_an_error(tmp_path: Path) -> None:
    """A node checks the task's network again when it makes the sandbox, because the settings may have changed since the
    group was submitted."""
    async with running_node(tmp_path=tmp_path, network={"allow": ["docs.example"]}) as (opened, _):
        sandboxes = opened.own_node._services.sandboxes
        sandboxes._network = NetworkRules(Config())
        with pytest.raises(InvalidField, match="is allowed to no task any more") as refused:
            await sandboxes.make(asking("docs.example").task.runtime, "session", 1)
        assert refused.value.field == "task.runtime.network.allow.0"
