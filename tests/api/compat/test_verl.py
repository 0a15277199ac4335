"""The session proxy of verl's recipe, with a client written from the contract alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from external.world import Owner, elsewhere
from outrider.api.compat.harbor_runs import rollout_details
from outrider.spec import GroupSpec
from outrider.trajectory import unpack_ids
from support.service import call, running_service, say

REPLIES = (f"I look.{call('ls')}", say("It is in a file."), say("Done."))
GOLDEN = Path(__file__).parent / "golden" / "verl" / "a-session.txt"
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
TIMES = {"epoch": 0, "global_step": 7, "phases": {"gen": {"start": 1000.5, "end": 1009.25}, "update_actor": None}}
QUESTION = {"role": "user", "content": "Where is it?"}
CHANGING = (
    (re.compile(r"call_[0-9a-f]{12}\w*"), "call_ID"),
    (re.compile(r'"created_at":[0-9.e+-]+'), '"created_at":TIME'),
    (re.compile(r'"completion_logprobs":\[[^]]*\]'), '"completion_logprobs":[NUMBERS]'),
    (re.compile(r"s-[0-9a-f]{16}-"), "s-GROUP-"),
)


class TurnRecord(msgspec.Struct, forbid_unknown_fields=True):
    """A turn of the contract: exactly these fields."""

    request_messages: list[dict[str, Any]]
    completion_text: str
    completion_token_ids: list[int]
    completion_logprobs: list[float]
    finish_reason: str | None
    tool_calls: list[dict[str, Any]] | None
    timing: dict[str, float] | None
    node_id: str | None
    gpu_id: str | None
    worker_id: str | None
    rank_info: dict[str, Any] | None


class SessionRecord(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str
    turns: list[TurnRecord]
    created_at: float
    completed: bool


class Status(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str
    status: str


class Health(msgspec.Struct, forbid_unknown_fields=True):
    status: str
    mode: str


class Recipe:
    """The recipe's client."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http = http
        self.url = url

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        async with self.http.request(method, self.url + path, json=body) as reply:
            return reply.status, await reply.read()

    async def status(self, method: str, path: str, expected: str) -> None:
        code, body = await self.ask(method, path)
        assert code == 200, body
        assert msgspec.json.decode(body, type=Status).status == expected

    async def chat(self, sid: str, messages: list[dict[str, Any]], *, old: bool = False, **more: Any) -> dict[str, Any]:
        path = f"/v1/chat/completions/{sid}" if old else f"/{sid}/v1/chat/completions"
        code, body = await self.ask("POST", path, {"model": "m", "messages": messages, "max_tokens": 64, **more})
        assert code == 200, body
        completion = json.loads(body)
        assert completion["id"].startswith("chatcmpl-")
        message: dict[str, Any] = completion["choices"][0]["message"]
        return message

    async def record(self, sid: str) -> SessionRecord:
        code, body = await self.ask("GET", f"/sessions/{sid}")
        assert code == 200, body
        return msgspec.json.decode(body, type=SessionRecord)

    async def roll_out(self, sid: str) -> SessionRecord:
        """Roll out one trajectory as the recipe's agent loop does: register, run, close, read, delete."""
        await self.status("POST", f"/sessions/{sid}", "created")
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Where is it?"}]
        message = await self.chat(sid, messages, tools=[TOOL])
        result = {"role": "tool", "content": "a.txt", "tool_call_id": message["tool_calls"][0]["id"]}
        await self.chat(sid, [*messages, message, result], tools=[TOOL], old=True)
        await self.status("POST", f"/sessions/{sid}/complete", "completed")
        record = await self.record(sid)
        await self.status("DELETE", f"/sessions/{sid}", "deleted")
        return record


@asynccontextmanager
async def recipe(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Recipe, str]]:
    async with (
        aiohttp.ClientSession() as http,
        running_service(tmp_path=tmp_path, replies=REPLIES, compat=("verl",), **settings) as (_, url),
    ):
        yield Recipe(http, url), url


async def test_an_epoch_of_sessions(tmp_path: Path) -> None:
    """The records of 16 concurrent sessions have the tokens of a native session on the same engine."""
    async with elsewhere(tmp_path, replies=REPLIES, compat=("verl",)) as world, aiohttp.ClientSession() as http:
        client = Recipe(http, world.owner.url)
        records = await asyncio.gather(*(client.roll_out(f"swe-{number}-abc") for number in range(16)))
        opened = await world.owner.open()
        agent, messages = world.agent(opened), [{"role": "user", "content": "Where is it?"}]
        first = (await agent.post(messages, tools=[TOOL], max_tokens=64)).json()["choices"][0]["message"]
        result = {"role": "tool", "content": "a.txt", "tool_call_id": first["tool_calls"][0]["id"]}
        await agent.post([*messages, first, result], tools=[TOOL], max_tokens=64)
        ours = await world.service.store.turns(opened["session"]["id"])
        for record in records:
            assert record.completed
            for turn, own in zip(record.turns, ours, strict=True):
                assert turn.completion_token_ids == unpack_ids(own.output_ids).tolist()
                assert len(turn.completion_logprobs) == len(turn.completion_token_ids)
            assert [message["role"] for turn in record.turns for message in turn.request_messages] == ["user", "tool"]
            assert [turn.finish_reason for turn in record.turns] == ["tool_calls", "stop"]
            assert record.turns[0].completion_text == "I look."


async def test_the_session_ends_without_a_made_up_reward(tmp_path: Path) -> None:
    async with recipe(tmp_path) as (client, url):
        await client.roll_out("one")
        page = json.loads((await client.ask("GET", "/v1/results?after=0&wait=10"))[1])
        [session] = page["groups"][0]["sessions"]
        result = session["result"]
        assert (result["verdict"], result["stop_reason"], result["turns"]) == (None, "cancelled", 2)
        assert page["groups"][0]["labels"] == {"verl.session": "one", "verl.deleted": "true"}
        assert url


async def test_the_codes_of_the_contract(tmp_path: Path) -> None:
    async with recipe(tmp_path) as (client, _):
        health = msgspec.json.decode((await client.ask("GET", "/health"))[1], type=Health)
        assert (health.status, health.mode) == ("ok", "local")
        question: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Where is it?"}]}
        assert (await client.ask("POST", "/none/v1/chat/completions", question))[0] == 404, "no call makes a session"
        assert (await client.ask("GET", "/sessions/none"))[0] == 404
        assert (await client.ask("POST", "/sessions/none/complete"))[0] == 404
        assert (await client.ask("POST", "/sessions/none/reset"))[0] == 404
        await client.status("POST", "/sessions/a", "created")
        await client.status("POST", "/sessions/a", "created")
        await client.chat("a", question["messages"])
        assert (await client.ask("POST", "/sessions/a"))[0] == 409
        await client.status("POST", "/sessions/a/reset", "reset")
        assert (await client.record("a")).turns == []
        await client.chat("a", question["messages"])
        listed = json.loads((await client.ask("GET", "/sessions"))[1])
        assert listed == {"count": 1, "sessions": [{"session_id": "a", "turns": 1, "completed": False}]}
        await client.status("POST", "/sessions/a/complete", "completed")
        await client.status("POST", "/sessions/a/complete", "completed")
        assert (await client.ask("POST", "/a/v1/chat/completions", question))[0] == 410
        assert (await client.ask("POST", "/v1/chat/completions/a", question))[0] == 410
        assert (await client.ask("POST", "/sessions/a/reset"))[0] == 404
        assert (await client.ask("POST", "/sessions/a"))[0] == 409
        await client.status("DELETE", "/sessions/a", "deleted")
        assert (await client.ask("GET", "/sessions/a"))[0] == 404
        assert (await client.ask("POST", "/sessions/a"))[0] == 409, "an id is used once"
        assert (await client.ask("POST", "/api/v1/runs", {}))[0] == 422, "not multipart"
        assert (await client.ask("GET", "/training/timing/1/2"))[0] == 404
        assert (await client.ask("POST", "/sessions/a%20b"))[0] == 422
        assert (await client.ask("POST", "/sessions/s"))[0] == 422, "its first chat path is a path of the gateway"


async def test_a_stream_and_a_hang_up(tmp_path: Path) -> None:
    async with recipe(tmp_path) as (client, url):
        await client.status("POST", "/sessions/t", "created")
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Where is it?"}]}
        async with client.http.post(f"{url}/t1/v1/chat/completions", json=body) as reply:
            assert reply.status == 404
        async with client.http.post(f"{url}/verl/t/v1/chat/completions", json=body) as reply:
            text = (await reply.read()).decode()
        assert text.endswith("data: [DONE]\n\n")
        assert len((await client.record("t")).turns) == 1


async def test_sessions_belong_to_a_tenant(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, replies=REPLIES, compat=("verl",), token="operator-token-1") as world:
        operator = Owner(world.http, world.owner.url, "operator-token-1")
        tokens = {}
        for name in ("alice", "bob"):
            made = await operator.call("POST", "/tokens", {"name": name, "role": "submit"})
            tokens[name] = made.json()["text"]

        async def status(name: str | None, method: str, path: str) -> int:
            headers = {} if name is None else {"Authorization": f"Bearer {tokens[name]}"}
            reply = await world.http.request(method, world.owner.url + path, headers=headers)
            return reply.status_code

        assert await status(None, "POST", "/sessions/a") == 401
        assert await status("alice", "POST", "/sessions/a") == 200
        for method, path in (("GET", ""), ("POST", "/complete"), ("POST", "/reset"), ("DELETE", "")):
            assert await status("bob", method, f"/sessions/a{path}") == 404
        assert await status("bob", "POST", "/a/v1/chat/completions") == 404
        assert await status("bob", "POST", "/sessions/a") == 200, "another session, of bob's"
        headers = {"Authorization": "Bearer operator-token-1"}
        listed = await world.http.get(world.owner.url + "/sessions", headers=headers)
        assert listed.json() == {"count": 0, "sessions": []}, "an admin's list has no ids that its own routes refuse"
        assert await status("alice", "GET", "/sessions/a") == 200
        as_alice = {"Authorization": f"Bearer {tokens['alice']}"}
        made = await world.http.post(world.owner.url + "/training/timing", json=TIMES, headers=as_alice)
        assert made.status_code == 200
        assert await status(None, "GET", "/training/timing") == 401
        for name, code in (("alice", 200), ("bob", 404)):
            assert await status(name, "GET", "/training/timing/0/7") == code


@pytest.mark.parametrize("compat", [("verl", "polar"), ("polar", "verl")])
async def test_the_paths_of_another_system_are_its_own(tmp_path: Path, compat: tuple[str, str]) -> None:
    """At the root, the recipe's chat path begins with a session's id, which could be the name of another system."""
    question = {"model": "m", "messages": [QUESTION]}
    async with (
        running_service(tmp_path=tmp_path, replies=REPLIES, compat=compat) as (_, url),
        aiohttp.ClientSession(url, headers={"X-Session-Id": "p"}) as http,
    ):
        for path in ("/polar/sessions", "/verl/sessions/v"):
            async with http.post(path, json={"session_id": "p"}) as reply:
                assert reply.status == 200
        for path in ("/polar/v1/chat/completions", "/verl/v/v1/chat/completions"):
            async with http.post(path, json=question) as reply:
                assert reply.status == 200, await reply.text()
        async with http.post("/verl/sessions/polar") as reply:
            assert reply.status == 422
            assert "/polar/ belongs to" in await reply.text()


async def test_the_list_has_the_newest_sessions_of_the_recipe(tmp_path: Path) -> None:
    """Newer sessions of other clients do not displace the recipe's sessions from the list."""
    async with elsewhere(tmp_path, replies=REPLIES, compat=("verl",)) as world, aiohttp.ClientSession() as http:
        client = Recipe(http, world.owner.url)
        await client.status("POST", "/sessions/a", "created")
        task = {"instruction": "x", "harness": {"external": {}}, "evaluator": {"kind": "reported"}}
        for _ in range(100):
            await world.service.submit(GroupSpec.model_validate({"task": task, "n": 1}))
        listed = json.loads((await client.ask("GET", "/sessions"))[1])
        assert [session["session_id"] for session in listed["sessions"]] == ["a"]


async def test_a_reply_that_no_agent_has_seen_is_not_in_the_record(tmp_path: Path) -> None:
    """The trainer trains on every turn of the record. For a generation that failed half-way, the agent got an error and
    called again, so the record must not have the failed turn."""
    replies = ({"reply": "half a reply", "fail": "unavailable", "after": 2}, *REPLIES)
    async with elsewhere(tmp_path, replies=replies, compat=("verl",)) as world, aiohttp.ClientSession() as http:
        client = Recipe(http, world.owner.url)
        await client.status("POST", "/sessions/a", "created")
        body = {"model": "m", "messages": [QUESTION]}
        assert (await client.ask("POST", "/a/v1/chat/completions", body))[0] == 503
        assert (await client.record("a")).turns == []
        await client.chat("a", [QUESTION])
        [turn] = (await client.record("a")).turns
        assert (turn.completion_text[:7], turn.finish_reason) == ("I look.", "stop")
        assert [message["content"] for message in turn.request_messages] == ["Where is it?"]
        listed = json.loads((await client.ask("GET", "/sessions"))[1])["sessions"]
        assert [session["turns"] for session in listed] == [1]
        [group] = await world.service.store.groups()
        [session] = await world.service.store.sessions(group.id)
        turns = await world.service.store.turns(session.id)
        assert [each.finish.value for each in turns] == ["abort", "stop"]
        [detail] = rollout_details(turns)
        assert [ids.tolist() for ids in detail["completion_token_ids"]] == [turn.completion_token_ids]


async def test_the_wire_is_as_before(tmp_path: Path) -> None:
    steps: list[tuple[str, str, Any]] = [
        ("GET", "/health", None),
        ("POST", "/sessions/swe-1", None),
        ("POST", "/swe-1/v1/chat/completions", {"model": "m", "messages": [QUESTION], "tools": [TOOL]}),
        ("GET", "/sessions/swe-1", None),
        ("POST", "/sessions/swe-1", None),
        ("POST", "/sessions/swe-1/complete", None),
        ("GET", "/sessions/swe-1", None),
        ("GET", "/sessions", None),
        ("DELETE", "/sessions/swe-1", None),
        ("GET", "/sessions/swe-1", None),
        ("POST", "/training/timing", {}),
        ("POST", "/training/timing", TIMES),
        ("GET", "/training/timing", None),
        ("GET", "/training/timing/0/7", None),
        ("GET", "/training/timing/0/8", None),
        ("GET", "/training/timing/0/x", None),
    ]
    lines = []
    async with recipe(tmp_path) as (client, _):
        for method, path, body in steps:
            code, reply = await client.ask(method, path, body)
            shown = "(a completion)" if "chat" in path else reply.decode()
            for pattern, name in CHANGING:
                shown = pattern.sub(name, shown)
            lines.append(f"{method} {path} {'' if body is None else json.dumps(body)}\n    {code} {shown}\n")
    text = "".join(lines)
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


async def test_sessions_stay_deleted_and_timings_stay_stored_after_a_restart(tmp_path: Path) -> None:
    async with recipe(tmp_path) as (client, _):
        for name in ("one", "two"):
            await client.status("POST", f"/sessions/{name}", "created")
            await client.chat(name, [QUESTION])
        await client.status("DELETE", "/sessions/one", "deleted")
        assert (await client.ask("POST", "/training/timing", TIMES))[0] == 200
    async with recipe(tmp_path) as (client, _):
        assert (await client.ask("GET", "/sessions/one"))[0] == 404
        assert (await client.ask("DELETE", "/sessions/one"))[0] == 404
        assert (await client.ask("POST", "/one/v1/chat/completions", {"model": "m", "messages": [QUESTION]}))[0] == 404
        assert (await client.ask("POST", "/sessions/one"))[0] == 409, "an id is used once"
        assert [each["session_id"] for each in json.loads((await client.ask("GET", "/sessions"))[1])["sessions"]] == [
            "two"
        ]
        assert json.loads((await client.ask("GET", "/training/timing/0/7"))[1]) == TIMES
        [group] = json.loads((await client.ask("GET", "/v1/results?after=0&wait=10"))[1])["groups"]
        assert group["labels"] == {"verl.session": "one", "verl.deleted": "true"}


async def test_timings_are_stored_by_step(tmp_path: Path) -> None:
    async with recipe(tmp_path) as (client, _):

        async def post(record: Any) -> tuple[int, Any]:
            code, reply = await client.ask("POST", "/training/timing", record)
            return code, json.loads(reply)

        for step in (2, 1):
            code, reply = await post(TIMES | {"global_step": step})
            assert (code, reply) == (200, {"status": "recorded", "epoch": 0, "global_step": step})
        changed = {"epoch": 0, "global_step": 1, "gen": {"start": 1e9, "end": None}, "note": "é"}
        assert (await post(changed))[0] == 200
        listed = json.loads((await client.ask("GET", "/training/timing"))[1])
        assert listed == {"count": 2, "timings": [changed, TIMES | {"global_step": 2}]}
        assert json.loads((await client.ask("GET", "/verl/training/timing/0/1"))[1]) == changed
        for wrong, field in (
            ({"global_step": 1}, "epoch"),
            ({"epoch": 0}, "global_step"),
            ({"epoch": True, "global_step": 1}, "epoch"),
            ({"epoch": 0, "global_step": 1.5}, "global_step"),
            ({"epoch": 0, "global_step": 10**18}, "global_step"),
            ({"epoch": 0, "global_step": 1, "text": "x" * 9000}, "body"),
            ([], "body"),
        ):
            code, reply = await post(wrong)
            assert code == 422
            assert reply["detail"].startswith(f"{field}: ")
        assert (await client.ask("GET", f"/training/timing/{'9' * 5000}/1"))[0] == 422


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[" * 7000, 422),
        (b'{"epoch": 0, "global_step": NaN}', 422),
        (b'{"epoch": 0, "global_step": ' + b"9" * 5000 + b"}", 422),
        (b'{"epoch": 0, "global_step": 1, "t": ' + b"9" * 300 + b"}", 200),
        (b'{"epoch": 0, "global_step": 1, "t": "\xff"}', 422),
    ],
)
async def test_odd_timings(tmp_path: Path, body: bytes, code: int) -> None:
    async with recipe(tmp_path) as (client, url):
        async with client.http.post(f"{url}/training/timing", data=body) as reply:
            assert reply.status == code
        stored = (await client.ask("GET", "/training/timing"))[1]
        assert stored == (b'{"count":1,"timings":[' + body + b"]}" if code == 200 else b'{"count":0,"timings":[]}')


PARTS = st.sampled_from(
    ["sessions", "v1", "chat", "completions", "a", "..", "%00", "é", "x" * 300, "training", "timing", "1"]
)
BODIES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


async def test_random_requests_get_no_5xx(tmp_path: Path) -> None:
    requests: list[tuple[str, list[str], Any]] = []

    @given(st.sampled_from(["GET", "POST", "DELETE", "PUT"]), st.lists(PARTS, max_size=5), BODIES)
    def collect(method: str, parts: list[str], body: Any) -> None:
        requests.append((method, parts, body))

    collect()
    async with recipe(tmp_path) as (client, _):
        await client.status("POST", "/sessions/a", "created")
        for method, parts, body in requests:
            code, reply = await client.ask(method, "/" + "/".join(parts), body)
            assert code < 500, (method, parts, body, reply)


async def test_random_timings_get_no_5xx(tmp_path: Path) -> None:
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | BODIES
    records: list[Any] = []

    @given(st.dictionaries(st.text(), BODIES), numbers, numbers)
    def collect(more: dict[str, Any], epoch: Any, step: Any) -> None:
        records.append(more | {"epoch": epoch, "global_step": step})

    collect()
    async with recipe(tmp_path) as (client, _):
        kept = {}
        for record in records:
            code, reply = await client.ask("POST", "/training/timing", record)
            assert code in (200, 422), (record, reply)
            if code == 200:
                made = json.loads(reply)
                kept[made["epoch"], made["global_step"]] = record
        assert kept
        listed = json.loads((await client.ask("GET", "/training/timing"))[1])
        assert listed == {"count": len(kept), "timings": [kept[step] for step in sorted(kept)]}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 1}'])
async def test_odd_bodies_of_calls(tmp_path: Path, body: bytes) -> None:
    async with recipe(tmp_path) as (client, url):
        await client.status("POST", "/sessions/a", "created")
        async with client.http.post(f"{url}/a/v1/chat/completions", data=body) as reply:
            assert 400 <= reply.status < 500
            assert "error" in await reply.json()
