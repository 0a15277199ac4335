"""Tokens over HTTP: what each role may do, quotas, revocation, and the audit log."""

from __future__ import annotations

import asyncio
import base64
import resource
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from fastapi.routing import APIRoute, APIWebSocketRoute

from outrider.api.access import OPEN_PATHS
from outrider.api.server import ROLES, control_app
from outrider.client.client import AsyncClient
from outrider.concurrency.chores import Failures
from outrider.concurrency.retries import RetryPolicy
from outrider.errors import Conflict, Forbidden, InvalidField, NotFound, QuotaExceeded, Unauthorized
from outrider.lifecycle import GroupState
from outrider.redaction import KEY_PREFIX
from outrider.relay import Worker
from outrider.service.audit import AuditEntry, AuditLimits, AuditLog
from outrider.service.principals import ALLOWED, LOCAL
from outrider.service.tokens import TokenRegistry
from outrider.spec import OPERATOR_TENANT, Role, TokenSpec
from outrider.store.rows import TokenRow
from outrider.store.sqlite import SqliteDatabase, sqlite_store
from outrider.store.store import Store
from support.service import running_node, running_service, say, scripted_engine

TASK = {
    "instruction": "say hello",
    "harness": {"agent": "tools"},
    "runtime": {"kind": "memory"},
    "evaluator": {"kind": "command", "run": "true"},
}
NEVER: list[str | dict[str, Any]] = [{"reply": say("never"), "stall": 1}]


async def made(client: AsyncClient, name: str, role: Role, **limits: Any) -> str:
    return (await client.create_token(name, role, **limits)).text


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def audited(folder: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in (folder / "audit.jsonl").read_bytes().splitlines()]


async def test_every_route_has_a_role(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, _):
        pending = list(control_app(service).routes)
    found = set()
    while pending:
        route: Any = pending.pop()
        pending.extend(getattr(getattr(route, "original_router", None), "routes", ()))
        if isinstance(route, APIRoute) and route.path not in OPEN_PATHS:
            found |= {f"{method} {route.path}" for method in route.methods}
        elif isinstance(route, APIWebSocketRoute):
            found.add(f"WEBSOCKET {route.path}")
    assert found == ROLES.keys()


@pytest.mark.parametrize("role", ALLOWED)
async def test_a_role_opens_its_routes_and_no_others(tmp_path: Path, role: Role) -> None:
    async with running_service(tmp_path=tmp_path, token="root") as (_, url):
        async with AsyncClient(url, token="root") as root:
            headers = {"Authorization": f"Bearer {await made(root, 'x', role, tenant=OPERATOR_TENANT)}"}
        async with aiohttp.ClientSession(url, headers=headers) as http:
            for route, needed in ROLES.items():
                method, path = route.split()
                path = path.replace("{path:any_path}", "x")
                for name in ("group_id", "session_id", "name", "digest", "engine"):
                    path = path.replace(f"{{{name}}}", "none")
                if route == "GET /v1/events" or method == "WEBSOCKET":
                    continue
                async with http.request(method, path, data=b"[]") as reply:
                    error = msgspec.json.decode(await reply.read()) if reply.status >= 400 else {}
                allowed = needed in ALLOWED[role]
                assert (reply.status != 403) is allowed, route
                if not allowed:
                    assert error["code"] == "forbidden"
                    assert repr(needed) in error["message"]


async def test_a_worker_of_a_relay_needs_an_admin(tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, [say("hello")])
    async with running_service(tmp_path=tmp_path, token="root") as (_, url), AsyncClient(url, token="root") as root:
        with pytest.raises(Forbidden, match="403"):
            await Worker(url, engine, token=await made(root, "sub", "submit")).run()
        with pytest.raises(Unauthorized):
            await Worker(url, engine, token="wrong").run()
        admin = await made(root, "adm", "admin")
        worker = Worker(url, engine, token=admin, reconnecting=RetryPolicy(first=0.01, longest=0.01))
        running = asyncio.create_task(worker.run())
        await worker.attached()
        await root.revoke_token("adm")
        with pytest.raises(Unauthorized, match="refuses this worker"):
            await running


async def test_a_submitter_cancels_its_tenants_groups_only(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path, replies=NEVER, token="root") as (_, url),
        AsyncClient(url, token="root") as root,
    ):
        alice, bob = await made(root, "alice", "submit"), await made(root, "bob", "submit")
        async with AsyncClient(url, token=alice) as first, AsyncClient(url, token=bob) as second:
            own, other = await first.submit({"task": TASK}), await second.submit({"task": TASK})
            assert (own.submitted_by, other.submitted_by) == ("alice", "bob")
            for refused in (first.cancel(other.id), first.cancel_session(other.sessions[0].id)):
                with pytest.raises(NotFound, match="no "):
                    await refused
            with pytest.raises(NotFound, match="no group"):
                await first.cancel("g-none")
            assert (await first.cancel(own.id)).cancelled
            assert (await root.cancel(other.id)).cancelled
            listed = {group.id: group.submitted_by for group in await root.groups()}
            assert [group.id for group in await first.groups()] == [own.id]
        assert listed == {own.id: "alice", other.id: "bob"}


async def test_a_quota_counts_what_is_not_done(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path, replies=NEVER, token="root") as (_, url),
        AsyncClient(url, token="root") as root,
    ):
        text = await made(root, "alice", "submit", max_queued=3)
        async with AsyncClient(url, token=text) as alice:
            with pytest.raises(InvalidField, match="ever have queued"):
                await alice.submit({"task": TASK, "n": 4})
            first = await alice.submit({"task": TASK, "n": 2, "idempotency_key": "k"})
            with pytest.raises(QuotaExceeded, match="has 2 sessions"):
                await alice.submit({"task": TASK, "n": 2})
            assert (await alice.submit({"task": TASK, "n": 2, "idempotency_key": "k"})).id == first.id
            await root.submit({"task": TASK, "n": 5})
            second = await alice.submit({"task": TASK})
            await alice.cancel(first.id)
            await alice.wait([first.id])
            third = await alice.submit({"task": TASK, "n": 2})
            for group in (second, third):
                await alice.cancel(group.id)
            await alice.wait([second.id, third.id])
        headers = {"Authorization": f"Bearer {text}"}
        async with aiohttp.ClientSession(url, headers=headers) as http:
            body = msgspec.json.encode({"task": TASK, "n": 3})
            replies = [await http.post("/v1/groups", data=body) for _ in range(2)]
        assert replies[-1].status == 429
        assert int(replies[-1].headers["Retry-After"]) > 0


async def test_groups_submitted_at_once_do_not_share_a_quota(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path, replies=NEVER, token="root") as (service, url),
        AsyncClient(url, token="root") as root,
        AsyncClient(url, token=await made(root, "alice", "submit", max_queued=5)) as alice,
    ):
        ended = await asyncio.gather(*(alice.submit({"task": TASK}) for _ in range(20)), return_exceptions=True)
        refused = [error for error in ended if isinstance(error, QuotaExceeded)]
        assert len(refused) == 15
        assert len(await service.store.groups(state=GroupState.ACTIVE)) == 5


async def test_a_revoked_token_ends_at_once_also_for_calls_under_way(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path, token="root") as (_, url),
        AsyncClient(url, token="root") as root,
    ):
        text = await made(root, "alice", "read")
        async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {text}"}) as http:
            group = await root.submit({"task": TASK})
            await root.wait([group.id])
            stream = await http.get("/v1/events")
            assert (await stream.content.readline()).startswith((b"retry:", b"id:"))
            waiting = asyncio.ensure_future(http.get("/v1/results?after=999&wait=60"))
            async with http.get("/v1/status") as reply:
                assert reply.status == 200
            revoked = await root.revoke_token("alice")
            assert revoked.revoked is not None
            async with asyncio.timeout(30):
                await stream.content.read()
                assert (await waiting).status == 401
            async with http.get("/v1/status") as reply:
                assert (reply.status, (await reply.json())["message"]) == (401, "this token was revoked")
        assert (await root.revoke_token("alice")).revoked == revoked.revoked
        with pytest.raises(Conflict, match="there is, or was"):
            await root.create_token("alice", "read")
        with pytest.raises(NotFound):
            await root.revoke_token("nobody")


async def test_a_token_that_expires_ends_calls_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.service.tokens.EXPIRY_CHECK_SECONDS", 0.05, raising=False)
    ahead = 0.0
    async with (
        running_service(tmp_path=tmp_path, token="root") as (service, url),
        AsyncClient(url, token="root") as root,
    ):
        service.tokens._clock = lambda: time.time() + ahead
        text = (await root.create_token("alice", "admin", expires_days=1)).text
        headers = {"Authorization": f"Bearer {text}"}
        async with aiohttp.ClientSession(url, headers=headers) as http, http.ws_connect("/v1/relay/e") as socket:
            stream = await http.get("/v1/events")
            assert (await stream.content.readline()).startswith((b"retry:", b"id:"))
            waiting = asyncio.ensure_future(http.get("/v1/results?wait=60"))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            assert not socket.closed
            ahead = 2 * 86_400.0
            async with asyncio.timeout(60):
                await stream.content.read()
                refused = await waiting
                assert (refused.status, (await refused.json())["message"]) == (401, "this token has expired")
                while (message := await socket.receive()).type is not aiohttp.WSMsgType.CLOSE:
                    pass
                assert (message.data, message.extra) == (1008, "this token has expired")


async def test_each_refusal_says_what_is_wrong_and_nothing_of_other_tokens(tmp_path: Path) -> None:
    now = 1000.0
    async with sqlite_store(tmp_path / "db") as store:
        tokens = TokenRegistry(store, "root", clock=lambda: now)
        alice = await tokens.create(TokenSpec(name="alice", role="read", expires_days=1))
        assert (await tokens.caller(alice.text.encode())).name == "alice"
        refusals = []
        now += 86400
        for text in (None, b"", b"alice", b"outrider_alice", alice.token.name.encode() * 20, alice.text.encode()):
            with pytest.raises(Unauthorized) as caught:
                await tokens.caller(text)
            refusals.append(caught.value.message)
        assert refusals == [
            "this service requires a token",
            *["this is not a token of this service"] * 4,
            "this token has expired",
        ]


class Unlisted(Store):
    async def tokens(self) -> list[TokenRow]:
        raise AssertionError("every token was read")


async def test_a_call_without_a_token_lists_no_tokens() -> None:
    async with Unlisted(SqliteDatabase(None)) as store:
        tokens = TokenRegistry(store, None)
        assert await tokens.caller(b"outrider_mistyped") == LOCAL
        await tokens.create(TokenSpec(name="me", role="admin"))
        await tokens.revoke("me")
        for text in (None, b"outrider_mistyped"):
            with pytest.raises(Unauthorized):
                await tokens.caller(text)


async def test_the_store_has_no_text_of_a_token(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "db") as store:
        tokens = TokenRegistry(store, None)
        new = await tokens.create(TokenSpec(name="me", role="admin"))
        assert new.text.startswith(KEY_PREFIX)
        assert len(new.text) == len(KEY_PREFIX) + 43
    stored = b"".join(path.read_bytes() for path in files(tmp_path))
    assert b"me" in stored
    assert new.text.removeprefix(KEY_PREFIX).encode() not in stored


async def test_the_first_token_closes_the_service_and_is_an_admins(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as anybody:
        with pytest.raises(InvalidField, match="first token must be an admin"):
            await anybody.create_token("alice", "read")
        admin = await made(anybody, "me", "admin")
        with pytest.raises(Unauthorized, match="requires a token"):
            await anybody.status()
        async with AsyncClient(url, token=admin) as client:
            assert [token.name for token in await client.tokens()] == ["me"]
            with pytest.raises(InvalidField, match="is reserved"):
                await client.create_token("operator", "read")


async def test_the_audit_log_says_who_did_what(tmp_path: Path) -> None:
    async with running_node(tmp_path=tmp_path, replies=NEVER, token="root") as ((service, _), url):
        async with AsyncClient(url, token="root") as root:
            text = await made(root, "alice", "submit")
            async with AsyncClient(url, token=text) as alice:
                group = await alice.submit({"task": TASK})
                await alice.status()
                for _ in range(2):  # only the first creates the consumer
                    await alice.results(consumer="trainer")
                await alice.results()
                with pytest.raises(Forbidden):
                    await alice.pause_policy()
                await alice.cancel(group.id)
            async with AsyncClient(url, token="wrong") as stranger:
                with pytest.raises(Unauthorized):
                    await stranger.cancel(group.id)
        lines = audited(service.config.data)
        assert [(line["who"], line["call"], line["status"], line.get("ids")) for line in lines] == [
            ("operator", "POST /v1/tokens", 201, {"name": "alice"}),
            ("alice", "POST /v1/groups", 201, {"group_id": group.id}),
            ("alice", "GET /v1/results", 200, {"consumer": "trainer"}),
            ("alice", "POST /v1/policy/pause", 403, None),
            ("alice", "DELETE /v1/groups/{group_id}", 200, {"group_id": group.id}),
        ]
        assert {line["place"] for line in lines} == {"127.0.0.1"}
        assert (service.config.data / "audit.jsonl").stat().st_mode & 0o077 == 0
        assert text not in (service.config.data / "audit.jsonl").read_text()


async def test_the_audit_log_is_bounded(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, limits=AuditLimits(file_bytes=300, files=3))
    for number in range(100):
        await log.add(AuditEntry(at=float(number), who="me", role="admin", call="x", status=200))
    kept = sorted(files(tmp_path), key=lambda path: path.name.replace("audit.jsonl", "audit.0.jsonl"), reverse=True)
    assert {path.name for path in kept} <= {"audit.2.jsonl", "audit.1.jsonl", "audit.jsonl"}
    newest = [msgspec.json.decode(line)["at"] for path in kept for line in path.read_bytes().splitlines()]
    assert newest == [float(number) for number in range(100 - len(newest), 100)]
    assert len(newest) > 3


async def test_a_line_that_does_not_fit_the_disk_leaves_nothing_in_the_audit_log(tmp_path: Path) -> None:
    """A limit on the size of files cuts the first write short, and refuses the next."""
    failures = Failures()
    log = AuditLog(tmp_path, failures)

    async def add(who: str) -> None:
        await log.add(AuditEntry(at=0.0, who=who, role="admin", call="x", status=200))

    await add("first")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "audit.jsonl").stat().st_size + 10, before[1]))
    try:
        await add("second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [failing.name for failing in failures.failing()] == ["audit log"]
    await add("third")
    assert [line["who"] for line in audited(tmp_path)] == ["first", "third"]
    assert not failures.failing()


async def test_a_token_may_be_the_password_of_basic_authentication(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, token="root") as (_, url), aiohttp.ClientSession() as http:

        async def status(user: str, password: str) -> int:
            header = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
            async with http.get(f"{url}/v1/status", headers={"Authorization": header}) as reply:
                return reply.status

        assert await status("anybody", "root") == await status("", "root") == 200
        assert await status("root", "wrong") == await status("root", "") == 401
        place = url.removeprefix("http://")
        async with http.get(f"http://trainer:root@{place}/v1/status") as reply:  # like clients that take only a URL
            assert reply.status == 200
        for header in ("Basic ???", "Basic", "Basic cm9vdA==", "Digest root"):
            async with http.get(f"{url}/v1/status", headers={"Authorization": header}) as reply:
                assert reply.status == 401
