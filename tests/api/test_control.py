"""The control API over HTTP: its description, its token, its refusals, and its client."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import re
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop

from outrider.api.access import check_address
from outrider.client.client import MAX_CONNECTIONS, AsyncClient, Client
from outrider.config import Config, TlsConfig
from outrider.errors import InvalidField, ModelMismatch, NotFound, ServiceError, Unauthorized
from outrider.lab.fakes.memory_runtime.runtime import MemoryRuntime
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.lifecycle import GroupState, StopReason
from outrider.sandbox.runtimes.base import Availability
from outrider.sandbox.runtimes.host_process.landlock import LandlockRuntime
from support.service import running_node, running_service, say

TASK = {
    "instruction": "say hello",
    "harness": {"agent": "tools"},
    "runtime": {"kind": "memory"},
    "evaluator": {"kind": "command", "run": "true"},
}


async def test_a_group_from_submission_to_samples(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("hello")]) as (_, url), AsyncClient(url) as client:
        submitted = await client.submit({"task": TASK, "n": 3})
        assert (submitted.n, len(submitted.sessions)) == (3, 3)
        page = await client.results(wait=20, samples=True)
        [done] = page.groups
        assert (done.id, done.state, done.cursor) == (submitted.id, GroupState.DONE, page.cursor)
        assert done.samples is not None
        assert [sample.reward for sample in done.samples] == [1.0, 1.0, 1.0]
        assert list(await client.samples(done.sessions[0].id)) == [done.samples[0]]
        [turn] = await client.turns(done.sessions[0].id)
        assert turn.sampled.startswith("hello")
        assert (await client.results(after=page.cursor)).groups == ()
        assert (await client.status()).sessions["done"] == 3


async def test_events_tell_the_whole_life_of_a_session(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("hello")]) as (_, url), AsyncClient(url) as client:
        await client.submit({"task": TASK})
        seen: list[str] = []
        async for event in client.events():
            seen.append(event.data.get("state") or event.kind)
            if event.kind == "group.done":
                break
        assert seen == [
            "group.created",
            "initializing",
            "ready",
            "running",
            "evaluating",
            "session.done",
            "group.done",
        ]


def test_the_sync_client_has_what_the_async_one_has() -> None:
    def public(kind: type) -> dict[str, list[str]]:
        members = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(f).parameters) for name, f in members if not name.startswith("_")}

    blocking = public(Client)
    assert {name: blocking.pop(name) for name in ("run", "open", "impatient")} == {
        "impatient": ["self"],
        "run": ["self", "work"],
        "open": ["self", "manager"],
    }
    assert blocking == public(AsyncClient)


def test_the_sync_client_says_so_when_nobody_listens() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(ServiceError, match="cannot reach"):
        client.status()


async def test_a_client_is_opened_before_it_is_used() -> None:
    client = AsyncClient("http://127.0.0.1:9")
    for _ in range(2):
        with pytest.raises(ServiceError, match="not open"):
            await client.status()
        async with client:
            pass
    with pytest.raises(ServiceError, match="not open"):
        Client("http://127.0.0.1:9").status()


async def answering(answer: bytes, ask: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    """Return the result of `ask` with a client whose server gives one raw answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, AsyncClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        return await ask(client)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            b"HTTP/1.1 308 Moved\r\nLocation: https://far.example/v1\r\nContent-Length: 0\r\n\r\n",
            "308.*https://far.exa",
        ),
        (b"HTTP/1.1 502 Oh\r\nContent-Length: 4\r\n\r\n<ht>", "answered 502: <ht>"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", "cannot reach.*: the server closed the connection"),
        (b"SSH-2.0-OpenSSH_9\r\n", "cannot reach.*: the answer is not HTTP"),
        (b"", "cannot reach.*: the server closed the connection"),
    ],
)
async def test_what_a_client_tells_of_odd_answers(answer: bytes, told: str) -> None:
    with pytest.raises(ServiceError, match=told):
        await answering(answer, lambda client: client.status())


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"])
async def test_a_reply_that_takes_too_long_is_told_from_a_service_that_is_not_there(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            writer.write(answer)
            await reader.read()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, AsyncClient(url) as client:
        with pytest.raises(ServiceError, match=r"no complete reply from the service at .* within 0\.2 s"):
            await client.pull_image("a", "b", seconds=0.2)


@pytest.mark.deep
def test_the_time_limit_of_a_reply_is_known_on_uvloop() -> None:
    """The clock of uvloop has milliseconds, so that a limit can end a little early by this clock."""

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with closing(writer):
                await reader.read()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, AsyncClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            for milliseconds in range(20, 60):
                with pytest.raises(ServiceError, match="no complete reply"):
                    await client.pull_image("a", "b", seconds=milliseconds / 1000)

    uvloop.run(main())


async def test_a_user_and_a_password_in_the_address_are_sent() -> None:
    asked = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with AsyncClient(f"http://ann:p%40ss@127.0.0.1:{port}") as client:
            with suppress(Exception):
                await client.nodes()
        async with AsyncClient(f"http://ann:p%40ss@127.0.0.1:{port}", token="t") as client:
            with suppress(Exception):
                await client.nodes()
    assert b"\r\nAuthorization: Basic YW5uOnBAc3M=\r\n" in asked[0]
    assert b"\r\nAuthorization: Bearer t\r\n" in asked[1]


async def test_an_empty_id_is_refused_before_it_is_sent() -> None:
    async with AsyncClient("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidField, match="empty"):
            await client.cancel("")


async def test_a_client_sends_so_many_requests_at_once_and_not_more() -> None:
    waiting = 0
    most = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == MAX_CONNECTIONS:
            most.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=2 * MAX_CONNECTIONS)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, AsyncClient(url) as client, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(client.status()) for _ in range(MAX_CONNECTIONS + 20)]
        await most.wait()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert waiting == MAX_CONNECTIONS
        for each in asked:
            each.cancel()


@pytest.mark.deep
async def test_the_wait_for_other_requests_is_not_part_of_a_requests_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.client.client.MAX_CONNECTIONS", 1)
    seconds = iter([2.0, 0.0])
    begun = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            begun.set()
            await asyncio.sleep(next(seconds))
            writer.write(b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 14\r\n\r\n{"groups": []}')
            await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, AsyncClient(url) as client, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client._fetch("GET", "/v1/groups", seconds=30.0))
        await begun.wait()
        second = tasks.create_task(client._fetch("GET", "/v1/groups", seconds=1.5))
    assert first.result() == second.result()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
async def test_what_json_cannot_say_is_refused_before_it_is_sent(value: Any) -> None:
    async with AsyncClient("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidField, match="JSON"):
            await client.submit({"task": TASK, "priority": value})


async def test_what_is_stored_is_for_its_own_user_alone(tmp_path: Path) -> None:
    async with running_node(tmp_path=tmp_path, data=tmp_path / "new" / "data") as ((service, node), _):
        for folder in (service.config.data, node.gateway_socket.parent):
            assert folder.stat().st_mode & 0o077 == 0


async def test_a_sandbox_can_say_nothing_to_the_control_api(tmp_path: Path) -> None:
    async with (
        running_node(tmp_path=tmp_path) as ((service, node), _),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(node.gateway_socket))) as http,
    ):
        for method, path in (("GET", "/v1/status"), ("POST", "/v1/groups"), ("GET", "/openapi.json"), ("GET", "/")):
            async with http.request(method, f"http://any{path}", data=msgspec.json.encode({"task": TASK})) as reply:
                assert reply.status == 404
        assert await service.store.groups() == []


async def test_unknown_ids_are_not_found(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        for ask in (client.group("g-none"), client.session("s-none"), client.turns("s-none"), client.cancel("g-none")):
            with pytest.raises(NotFound):
                await ask


@pytest.mark.parametrize("query", ["wait=-1", "wait=61", "after=-1", "limit=0", "after=x"])
async def test_a_bad_query_names_its_parameter(tmp_path: Path, query: str) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), aiohttp.ClientSession(url) as http:
        async with http.get(f"/v1/results?{query}") as reply:
            error = await reply.json()
        assert (reply.status, error["field"]) == (422, query.partition("=")[0])


async def test_unknown_routes_and_methods_are_404_in_our_shape(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), aiohttp.ClientSession(url) as http:
        for method, path in (("GET", "/v1/nothing"), ("PUT", "/v1/groups"), ("GET", "/nothing")):
            async with http.request(method, path) as reply:
                assert (reply.status, (await reply.json())["code"]) == (404, "not_found")


async def test_the_token_guards_control_and_nothing_else(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, token="secret") as (_, url):
        async with AsyncClient(url) as stranger:
            with pytest.raises(Unauthorized):
                await stranger.status()
        async with AsyncClient(url, token="secret") as client:
            assert (await client.status()).model
        async with aiohttp.ClientSession(url) as http:
            for path in ("/healthz", "/readyz", "/openapi.json"):
                async with http.get(path) as reply:
                    assert reply.status == 200
            async with http.post("/s/no-such-key/v1/chat/completions", json={}) as reply:
                assert (reply.status, "error" in await reply.json()) == (401, True)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "rebound.example:8700"},
        {"Origin": "https://some.page.example"},
        {"Origin": "null"},
        {"Host": "rebound.example", "Origin": "http://rebound.example"},
        {"Host": "[half"},
    ],
)
async def test_a_page_in_a_browser_cannot_use_a_service_without_a_token(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url), aiohttp.ClientSession(url) as http:
        body = msgspec.json.encode({"task": TASK})  # with a content type that needs no preflight
        async with http.post("/v1/groups", data=body, headers={"Content-Type": "text/plain"} | headers) as reply:
            error = await reply.json()
        assert (reply.status, error["code"]) == (401, "unauthorized")
        assert await service.store.groups() == []


@pytest.mark.parametrize("place", ["localhost", "LOCALHOST:80", "127.0.0.1:8700", "[::1]:8700"])
async def test_every_name_of_this_machine_will_do(tmp_path: Path, place: str) -> None:
    headers = {"Host": place, "Origin": f"http://{place}"}
    async with (
        running_service(tmp_path=tmp_path) as (_, url),
        aiohttp.ClientSession(url, headers=headers) as http,
        http.get("/v1/status") as reply,
    ):
        assert reply.status == 200


async def test_a_token_may_have_any_characters(tmp_path: Path) -> None:
    token = "pässword"
    async with running_service(tmp_path=tmp_path, token=token) as (_, url), AsyncClient(url, token=token) as client:
        assert (await client.status()).model == "policy"


class Unwell(MemoryRuntime):
    @classmethod
    def available(cls) -> Availability:
        raise ZeroDivisionError("a runtime's own mistake")


async def test_a_bug_is_told_in_our_shape(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        task = TASK | {"runtime": {"kind": f"{__name__}:Unwell"}}
        with pytest.raises(ServiceError, match="ZeroDivisionError: a runtime's own mistake"):
            await client.submit({"task": task})


async def test_no_request_outlives_its_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with aiohttp.ClientSession() as http:
        async with running_service(tmp_path=tmp_path) as (_, url):
            async with AsyncClient(url) as client:
                await client.submit({"task": TASK})
            stream = await http.get(f"{url}/v1/events")
            assert [await stream.content.readline() for _ in range(3)] == [b"retry: 1000\n", b"\n", b"id: 1\n"]
        assert [task for task in asyncio.all_tasks() if "run_asgi" in repr(task)] == []
        with pytest.raises(aiohttp.ClientPayloadError):
            await stream.read()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_client_that_leaves_in_its_body_is_no_error_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url):
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/groups HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 60000\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        log = service.config.data / "audit.jsonl"
        async with asyncio.timeout(10):
            while not log.exists() or not log.read_bytes():  # noqa: ASYNC110  # the file is written by the service
                await asyncio.sleep(0.01)
        assert msgspec.json.decode(log.read_bytes())["status"] == 400
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "some-host"])
def test_a_public_address_needs_a_token_and_tls(host: str) -> None:
    with pytest.raises(InvalidField, match="no token"):
        check_address(Config(host=host, tls=TlsConfig(insecure=True)), has_token=False)
    with pytest.raises(InvalidField, match="unencrypted"):
        check_address(Config(host=host), has_token=True)
    check_address(Config(host=host, tls=TlsConfig(insecure=True)), has_token=True)
    check_address(Config(host=host, tls=TlsConfig(certificate=Path("c.pem"))), has_token=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_the_loopback_needs_neither(host: str) -> None:
    check_address(Config(host=host), has_token=False)


async def test_a_public_address_is_not_listened_on_without_a_token(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="no token"):
        async with running_service(tmp_path=tmp_path, host="0.0.0.0", tls=TlsConfig(insecure=True)):
            pass


async def test_the_description_is_served_and_every_reference_in_it_resolves(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path) as (_, url),
        aiohttp.ClientSession(url) as http,
        http.get("/openapi.json") as reply,
    ):
        text = await reply.text()
    document: dict[str, Any] = msgspec.json.decode(text)
    schemas = document["components"]["schemas"]
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in schemas
    body = document["paths"]["/v1/groups"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/GroupSpec"}
    assert set(document["paths"]) >= {"/v1/results", "/v1/events", "/v1/engines", "/v1/sessions/{session_id}/samples"}


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"not json", 400, None),
        (b"[]", 400, None),
        (b"{}", 422, "kind"),
        (b'{"kind": "scripted", "colour": 1}', 422, "colour"),
        (b'{"kind": "no-such"}', 422, "kind"),
        (b'{"kind": "scripted", "options": {"replis": []}}', 422, "options"),
        (b'{"kind": "vllm"}', 422, "url"),
    ],
)
async def test_a_wrong_engine_is_refused_by_field(tmp_path: Path, body: bytes, status: int, field: str | None) -> None:
    async with (
        running_service(tmp_path=tmp_path) as (service, url),
        aiohttp.ClientSession(url) as http,
        http.post("/v1/engines", data=body) as reply,
    ):
        assert (reply.status, (await reply.json())["field"]) == (status, field)
        assert len(service.pool.status()) == 1


class OtherFamily(ScriptedEngine):
    async def token_check(self, text: str) -> list[int] | None:
        return [1, 2, 3]


async def test_an_engine_of_another_family_is_refused(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url), AsyncClient(url) as client:
        with pytest.raises(ModelMismatch, match="tokenises text differently"):
            await client.add_engine({"kind": f"{__name__}:OtherFamily", "name": "other"})
        assert [engine.name for engine in service.pool.status()] == ["scripted"]


async def test_engines_are_added_drained_and_removed_while_it_runs(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        added = await client.add_engine({"kind": "scripted", "name": "second", "options": {"replies": [say("x")]}})
        assert (added.name, added.ok) == ("second", True)
        drained = await client.drain_engine("second")
        assert [engine.draining for engine in drained if engine.name == "second"] == [True]
        assert [engine.name for engine in await client.remove_engine("second")] == ["scripted"]
        with pytest.raises(NotFound):
            await client.remove_engine("second")
        odd = "scripted?b#2 %23"
        await client.add_engine({"kind": "scripted", "name": odd, "options": {"replies": [say("x")]}})
        assert [engine.name for engine in await client.drain_engine(odd) if engine.draining] == [odd]
        assert [engine.name for engine in await client.remove_engine(odd)] == ["scripted"]
        with pytest.raises(InvalidField) as refused:
            await client.add_engine({"kind": "no-such-kind"})
        assert refused.value.field == "kind"


NUMBERS = (
    "results?after=",
    "results?limit=",
    "results?wait=",
    "events?after=",
    "groups?limit=",
    "groups/g-1?wait=",
    "sessions/s-1/artifacts?attempt=",
    "sessions/s-1/artifacts/a?attempt=",
)


async def test_numbers_beyond_all_bounds_are_refused_by_name(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), aiohttp.ClientSession() as http:
        for path, number in itertools.product(NUMBERS, (10**23, 1 << 63, -(10**23), int("9" * 300))):
            field = path.removesuffix("=").split("?")[1]
            async with http.get(f"{url}/v1/{path}{number}") as reply:
                assert (reply.status, (await reply.json())["field"]) == (422, field), path


async def test_the_last_cursor_is_a_cursor(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        assert (await client.results(after=(1 << 63) - 1)).groups == ()


async def test_an_engine_has_an_address_that_can_be(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, base), AsyncClient(base) as client:
        for url in ("http://127.0.0.1:99999999999", "http://127.0.0.1:x", "http://[::1", "http://"):
            with pytest.raises(InvalidField) as refused:
                await client.add_engine({"kind": "vllm", "url": url})
            assert refused.value.field == "url"


ASK_FOR_CONTROL = """\
python3 - <<'END'
import json, os, urllib.error, urllib.request
base = os.environ["OPENAI_BASE_URL"]
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, {"Content-Type": "application/json"}))
for path in ("/v1/status", "/v1/groups", "/v1/engines", "/healthz", "/openapi.json"):
    try:
        urllib.request.urlopen(base.partition("/s/")[0] + path)
    except urllib.error.HTTPError as error:
        assert error.code == 404, (path, error.code)
    else:
        raise AssertionError(path)
END
"""


@pytest.mark.parametrize("kind", ["process", "process-landlock", "namespace"])
async def test_the_address_that_a_sandbox_is_given_serves_models_alone(tmp_path: Path, kind: str) -> None:
    """The service has no token, so a program that reached the control API could run programs outside of any sandbox."""
    if kind == "process-landlock" and not (can := LandlockRuntime.available()).ok:
        pytest.skip(can.detail)
    task = {
        "instruction": "say hello",
        "harness": {"command": ["/bin/sh", "-c", ASK_FOR_CONTROL]},
        "runtime": {"kind": kind},
        "evaluator": {"kind": "command", "run": "true"},
        "max_attempts": 1,
    }
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        (done,) = await client.wait([(await client.submit({"task": task})).id])
        result = done.sessions[0].result
        assert (result.stop_reason, result.turns) == (StopReason.COMPLETED, 1), result
