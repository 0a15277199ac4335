"""Tenants over HTTP: what each route returns to another tenant's token, and what the tokens of one tenant share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest

from outrider.api.server import ROLES
from outrider.client.client import AsyncClient
from outrider.config import Config
from outrider.errors import Conflict, Forbidden, NotFound
from outrider.lifecycle import SessionState
from outrider.schemas import Artifact, ArtifactList, EventView
from outrider.service.data_folder import open_store
from outrider.service.principals import ALLOWED
from outrider.service.service import Service
from outrider.spec import Role
from store.test_images import CAT, showing
from store.world import group_row, result, start, submit
from support.service import running_service, say

TASK = {
    "instruction": "say hello",
    "harness": {"agent": "tools"},
    "runtime": {"kind": "memory"},
    "evaluator": {"kind": "command", "run": "true"},
}
GROUP, SESSION, TENANT, CONSUMER, DIGEST = "alices", "alices.0", "team-a", "trainer", CAT.digest
NEW_GROUP = {"task": TASK, "idempotency_key": "step-1"}


class Gets(Enum):
    """The result of a request with another tenant's token, unless the token's role is refused (403)."""

    NOT_FOUND = "404, by the same words as for an id that does not exist"
    NOTHING = "a list or counts without anything in it"
    OWN = "what is its own: nothing that it did meets another tenant's"
    SHARED = "what the service has for all: nodes, engines, the policy"
    REFUSED = "403: only an admin or a node"
    OPERATORS = "403: about all tenants together, for admins and tokens of the operator's tenant"


class Row(NamedTuple):
    gets: Gets
    body: Any = None
    query: str = ""
    nothing: Any = None
    """For NOTHING, the expected values of these fields of the reply; other fields are not compared."""


UNKNOWN = Row(Gets.NOT_FOUND)
SHARED = Row(Gets.SHARED)
REFUSED = Row(Gets.REFUSED)
OPERATORS = Row(Gets.OPERATORS)
NO_SESSIONS = dict.fromkeys((state.value for state in SessionState), 0)

TABLE: dict[str, Row] = {
    "GET /v1/groups": Row(Gets.NOTHING, nothing={"groups": []}),
    "POST /v1/groups": Row(Gets.OWN, body=NEW_GROUP),
    "GET /v1/groups/{group_id}": UNKNOWN,
    "DELETE /v1/groups/{group_id}": UNKNOWN,
    "POST /v1/groups/{group_id}/regrade": Row(Gets.NOT_FOUND, body={}),
    "GET /v1/results": Row(Gets.NOTHING, nothing={"groups": [], "cursor": 0}),
    "GET /v1/consumers": Row(Gets.NOTHING, nothing={"consumers": []}),
    "POST /v1/consumers/{name}/ack": Row(Gets.NOT_FOUND, body={"cursor": 1}),
    "DELETE /v1/consumers/{name}": UNKNOWN,
    "GET /v1/events": Row(Gets.NOTHING),
    "GET /v1/callbacks/dead": Row(Gets.NOTHING, nothing={"callbacks": []}),
    "POST /v1/callbacks/dead/{group_id}/redeliver": REFUSED,
    "POST /v1/callbacks/dead/redeliver": REFUSED,
    "DELETE /v1/callbacks/dead/{group_id}": REFUSED,
    "POST /v1/gc": REFUSED,
    "POST /v1/sessions": Row(Gets.NOT_FOUND, body={"group_id": GROUP}),
    "GET /v1/sessions": Row(Gets.NOTHING, nothing={"sessions": []}),
    "GET /v1/query": Row(Gets.NOTHING, query="?sql=SELECT+id+FROM+sessions", nothing={"rows": []}),
    "POST /v1/query": Row(Gets.NOTHING, body={"sql": "SELECT * FROM turns"}, nothing={"rows": []}),
    "GET /v1/diff": Row(Gets.NOT_FOUND, query="?a={group_id}&b={group_id}"),
    "POST /v1/sessions/cancel": Row(Gets.NOTHING, body={"all": True}, nothing={"skipped": {}}),
    "POST /v1/sessions/retry": Row(Gets.NOTHING, body={"all": True, "dry_run": True}, nothing={"matched": 0}),
    "GET /v1/queue": Row(Gets.OWN),
    "POST /v1/queue/pause": Row(Gets.OWN, body={}),
    "POST /v1/queue/resume": Row(Gets.OWN, body={}),
    "POST /v1/sessions/{session_id}/complete": Row(Gets.NOT_FOUND, body={"reward": 1.0}),
    "POST /v1/sessions/{session_id}/reset": UNKNOWN,
    "GET /v1/sessions/{session_id}": UNKNOWN,
    "DELETE /v1/sessions/{session_id}": UNKNOWN,
    "POST /v1/sessions/{session_id}/regrade": Row(Gets.NOT_FOUND, body={}),
    "GET /v1/sessions/{session_id}/turns": UNKNOWN,
    "GET /v1/sessions/{session_id}/samples": UNKNOWN,
    "GET /v1/sessions/{session_id}/chat": UNKNOWN,
    "GET /v1/sessions/{session_id}/timeline": UNKNOWN,
    "GET /v1/sessions/{session_id}/artifacts": UNKNOWN,
    "GET /v1/sessions/{session_id}/artifacts/{path:any_path}": UNKNOWN,
    "GET /v1/images/{digest}": UNKNOWN,
    "GET /v1/diagnosis": Row(Gets.NOTHING, nothing={"groups": 0, "sessions": 0}),
    "GET /v1/status": Row(Gets.NOTHING, nothing={"sessions": NO_SESSIONS, "cursor": 0}),
    "GET /metrics": OPERATORS,
    "GET /v1/rates": OPERATORS,
    "GET /v1/engines": SHARED,
    "POST /v1/engines": REFUSED,
    "POST /v1/engines/{name}/drain": REFUSED,
    "DELETE /v1/engines/{name}": REFUSED,
    "WEBSOCKET /v1/relay/{engine}": REFUSED,
    "GET /v1/nodes": SHARED,
    "WEBSOCKET /v1/nodes/{name}/join": REFUSED,
    "POST /v1/nodes/pull": REFUSED,
    "POST /v1/nodes/{name}/drain": REFUSED,
    "POST /v1/nodes/{name}/resume": REFUSED,
    "GET /v1/policy": SHARED,
    "POST /v1/policy": REFUSED,
    "POST /v1/policy/pause": REFUSED,
    "POST /v1/policy/resume": REFUSED,
    "GET /v1/tokens": REFUSED,
    "POST /v1/tokens": REFUSED,
    "DELETE /v1/tokens/{name}": REFUSED,
}

REAL = {"group_id": GROUP, "session_id": SESSION, "name": CONSUMER, "digest": DIGEST, "path:any_path": "out.txt"}
FALSE = {name: value[:-1] + ("0" if value[-1] != "0" else "1") for name, value in REAL.items()} | {
    "path:any_path": "out.txt"
}


class Reply(NamedTuple):
    status: int
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class World(NamedTuple):
    service: Service
    url: str
    tokens: dict[str, str]

    @asynccontextmanager
    async def client(self, name: str) -> AsyncIterator[AsyncClient]:
        async with AsyncClient(self.url, token=self.tokens[name]) as client:
            yield client

    async def ask(self, name: str, route: str, ids: dict[str, str] = REAL, query: str = "") -> Reply:
        """Return the reply to one of the table's calls, with alice's ids or other ids."""
        method, path = route.split()
        path += query or TABLE[route].query
        for field, value in ids.items():
            path = path.replace(f"{{{field}}}", value)
        path = path.replace("{engine}", "scripted")
        headers = {"Authorization": f"Bearer {self.tokens[name]}"}
        async with aiohttp.ClientSession(self.url, headers=headers) as http:
            if method == "WEBSOCKET":
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await http.ws_connect(path)
                return Reply(refused.value.status, b"{}")
            body = TABLE[route].body
            data = None if body is None else msgspec.json.encode(body)
            async with http.request(method, path, data=data) as reply:
                return Reply(reply.status, await reply.read())


@asynccontextmanager
async def a_world(tmp_path: Path) -> AsyncIterator[World]:
    """Yield a world in which alice's tenant has a finished group with an image, an artifact, an idempotency key, a
    callback that was given up, and a consumer. Bob's tenant has nothing."""
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    async with open_store(Config(data=data)) as store:
        row = group_row(GROUP, n=1, key="step-1", callback_url="http://127.0.0.1:9/x")
        await submit(store, msgspec.structs.replace(row, tenant=TENANT, submitted_by="alice"))
        await start(store, SESSION)
        await store.add_turn(SESSION, 1, showing(0, CAT))
        await store.finish(SESSION, 1, msgspec.structs.replace(result(SESSION, 1), turns=1))
        await store.give_up_delivery(GROUP, fault="it answered 410 Gone")
    async with (
        running_service(tmp_path=tmp_path, replies=[say("hello")], data=data, token="root") as (service, url),
        AsyncClient(url, token="root") as root,
    ):
        sha256 = await service.artifacts.keep(SESSION, 1, b"what alice made")
        kept = (Artifact(path="/out.txt", size=15, sha256=sha256),)
        await service.artifacts.keep_index(ArtifactList(session_id=SESSION, attempt=1, artifacts=kept, left_out=()))
        tokens = {"root": "root"}
        roles: dict[str, tuple[Role, str | None]] = {
            "alice": ("submit", TENANT),
            "alice-reads": ("read", TENANT),
            "bob": ("submit", None),
            "bob-reads": ("read", "bob"),
        }
        for name, (role, tenant) in roles.items():
            tokens[name] = (await root.create_token(name, role, tenant=tenant)).text
        world = World(service, url, tokens)
        async with world.client("alice") as alice:
            await alice.results(consumer=CONSUMER)
        yield world


async def first_event(client: AsyncClient) -> EventView:
    async for event in client.events():
        return event
    raise AssertionError("the stream of events ended")


@pytest.mark.parametrize(("name", "role"), [("bob", "submit"), ("bob-reads", "read")])
async def test_what_another_tenants_token_gets_of_every_route(tmp_path: Path, name: str, role: Role) -> None:
    assert TABLE.keys() == ROLES.keys()
    async with a_world(tmp_path) as world:
        async with world.client("root") as root:
            before = (await root.groups(), await root.consumers(), await root.dead_callbacks(), await root.results())
        for route, row in TABLE.items():
            if ROLES[route] not in ALLOWED[role]:
                assert (await world.ask(name, route)).status == 403, route
                continue
            match row.gets:
                case Gets.NOT_FOUND:
                    theirs, none = await world.ask(name, route), await world.ask(name, route, FALSE)
                    same = none.body.decode()
                    for real, false in zip(REAL.values(), FALSE.values(), strict=True):
                        same = same.replace(false, real)
                    assert (theirs.status, theirs.body.decode()) == (404, same), route
                case Gets.NOTHING if route == "GET /v1/events":
                    continue  # an endless stream, which is checked below
                case Gets.NOTHING:
                    theirs = await world.ask(name, route)
                    assert theirs.status == 200
                    assert {field: theirs.json()[field] for field in row.nothing} == row.nothing, route
                case Gets.SHARED:
                    assert (await world.ask(name, route)) == (await world.ask("alice", route)), route
                case Gets.OPERATORS:
                    assert (await world.ask(name, route)).status == 403, route
                case _:
                    assert row.gets is Gets.OWN, route  # `submit` is checked below, the queue's routes in test_runs.py
        async with world.client("root") as root:
            after = (await root.groups(), await root.consumers(), await root.dead_callbacks(), await root.results())
        assert after == before


async def test_the_tenants_own_tokens_get_it_all(tmp_path: Path) -> None:
    """Without this test, a service that shows nothing to any token would also pass the test of the table."""
    async with a_world(tmp_path) as world:
        roles: tuple[tuple[str, Role], ...] = (("alice-reads", "read"), ("alice", "submit"))
        for name, role in roles:
            for route, row in TABLE.items():
                if ROLES[route] not in ALLOWED[role] or route in ("GET /v1/events", "POST /v1/groups"):
                    continue
                reply = await world.ask(name, route)
                if row.gets is Gets.NOT_FOUND:
                    # The stored run has no spec of this version, so it cannot be graded again.
                    needs_spec = route == "POST /v1/sessions" or route.endswith(("/regrade", "/complete", "/reset"))
                    assert reply.status == (409 if needs_spec else 200), route
                elif row.gets is Gets.NOTHING:
                    assert {field: reply.json()[field] for field in row.nothing} != row.nothing, route


async def test_events_are_those_of_the_tenant(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world, world.client("bob") as bob, world.client("alice-reads") as alice:
        group = await bob.submit({"task": TASK})
        await bob.wait([group.id])
        assert (await first_event(bob)).group_id == group.id
        assert (await first_event(alice)).group_id == GROUP
        seen = set()
        async for event in bob.events():
            seen.add(event.group_id)
            if event.kind == "group.done":
                break
        assert seen == {group.id}
        with pytest.raises(Conflict, match="the newest is"):
            async for _ in alice.events(after=event.cursor):  # bob's newest event: alice's events end before it
                pass


async def test_idempotency_keys_are_those_of_the_tenant(tmp_path: Path) -> None:
    """A key that another tenant has used is free: the submission returns neither the other group nor a conflict."""
    async with a_world(tmp_path) as world, world.client("bob") as bob, world.client("root") as root:
        own, admins = await bob.submit(NEW_GROUP), await root.submit(NEW_GROUP)
        assert len({own.id, admins.id, GROUP}) == 3
        assert (await bob.submit(NEW_GROUP)).id == own.id
        assert (own.tenant, admins.tenant) == ("bob", "operator")
        async with world.client("alice") as alice:
            with pytest.raises(Conflict, match=f"group {GROUP}"):
                await alice.submit(NEW_GROUP)
            assert [group.id for group in await alice.groups()] == [GROUP]
        assert {group.id for group in await root.groups()} == {own.id, admins.id, GROUP}
        await root.wait([own.id, admins.id])
        assert [group.id for group in (await bob.results()).groups] == [own.id]
        assert [group.id for group in (await root.results()).groups][:1] == [GROUP]


async def test_tokens_of_one_tenant_act_on_its_groups(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world, world.client("root") as root, world.client("alice") as alice:
        other = (await root.create_token("alices-laptop", "submit", tenant=TENANT)).text
        async with AsyncClient(world.url, token=other) as laptop:
            group = await alice.submit({"task": TASK, "n": 3})
            assert (await laptop.cancel(group.id)).cancelled
            assert (await laptop.ack(CONSUMER, 1)).cursor == 1
            assert (await laptop.session(SESSION)).id == SESSION


async def test_a_reader_changes_nothing_as_a_consumer(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world, world.client("alice-reads") as reader, world.client("root") as root:
        before = await root.consumers()
        for name in (CONSUMER, "another"):
            for after in (None, 0):
                with pytest.raises(Forbidden, match="read with `after`"):
                    await reader.results(consumer=name, after=after)
        for refused in (
            reader.ack(CONSUMER, 1),
            reader.ack(CONSUMER, 0, rewind=True),
            reader.remove_consumer(CONSUMER),
        ):
            with pytest.raises(Forbidden):
                await refused
        # A reader may list consumers.
        assert [(each.name, each.cursor) for each in await reader.consumers()] == [(CONSUMER, 0)]
        assert [group.id for group in (await reader.results(after=0)).groups] == [GROUP]
        assert await root.consumers() == before


async def test_a_consumer_is_its_tenants_and_an_admin_names_it_by_the_tenant(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world, world.client("bob") as bob, world.client("root") as root:
        assert (await bob.results(consumer=CONSUMER)).groups == ()  # bob's own consumer of the same name
        # The admin's consumer of the same name.
        assert [group.id for group in (await root.results(consumer=CONSUMER)).groups] == [GROUP]
        listed = [(each.tenant, each.name, each.cursor) for each in await root.consumers()]
        assert listed == [(None, CONSUMER, 0), ("bob", CONSUMER, 0), (TENANT, CONSUMER, 0)]
        for name in (TENANT, "nobody"):
            for refused in (bob.ack(CONSUMER, 1, tenant=name), bob.remove_consumer(CONSUMER, tenant=name)):
                with pytest.raises(NotFound, match=f"no consumer 'trainer' of tenant '{name}'"):
                    await refused
        assert (await root.ack(CONSUMER, 1, tenant=TENANT)).cursor == 1
        assert [each.tenant for each in await root.remove_consumer(CONSUMER, tenant="bob")] == [None, TENANT]
        assert [each.tenant for each in await root.remove_consumer(CONSUMER)] == [TENANT]


async def test_one_tenants_consumer_keeps_nothing_of_another(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world, world.client("bob") as bob, world.client("root") as root:
        group = await bob.submit({"task": TASK})
        await bob.wait([group.id])
        await root.discard_callback(GROUP)
        report = await root.gc(days=0)
        assert (report.groups, report.unacknowledged) == (1, 1)  # alice's consumer keeps her group
        assert [each.id for each in await root.groups()] == [GROUP]
        async with world.client("alice") as alice:
            await alice.ack(CONSUMER, 1)
        assert (await root.gc(days=0)).groups == 1


async def test_a_tenant_is_joined_only_on_purpose(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world, world.client("root") as root:
        with pytest.raises(Conflict, match="there is a tenant 'team-a'") as refused:
            await root.create_token(TENANT, "read")
        assert "--tenant team-a" in (refused.value.hint or "")
        assert (await root.create_token(TENANT, "read", tenant=TENANT)).token.tenant == TENANT
        assert (await root.create_token("carol", "read")).token.tenant == "carol"
        watcher = (await root.create_token("watcher", "read", tenant="operator")).text
        group = await root.submit({"task": TASK})
        async with AsyncClient(world.url, token=watcher) as client:
            assert [each.id for each in await client.groups()] == [group.id]
