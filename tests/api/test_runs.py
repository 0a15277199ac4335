"""Finding, comparing and changing many sessions over HTTP: filters, pages, queries, comparisons, retries, pauses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from outrider.client.client import AsyncClient
from outrider.errors import Conflict, InvalidField, NotFound
from outrider.lifecycle import SessionState
from outrider.schemas import RETRY_LABEL
from outrider.service.service import Service
from support.service import running_service, say

TASK: dict[str, Any] = {
    "instruction": "say hello",
    "harness": {"agent": "tools"},
    "runtime": {"kind": "memory"},
    "evaluator": {"kind": "command", "run": "true"},
}
FAILS = {**TASK, "evaluator": {"kind": "command", "run": "false"}}


@asynccontextmanager
async def a_client(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[AsyncClient, Service]]:
    async with (
        running_service(tmp_path=tmp_path, replies=[say("hello")], **settings) as (service, url),
        AsyncClient(url) as client,
    ):
        yield client, service


async def done(client: AsyncClient, task: dict[str, Any] = TASK, *, n: int = 1, **labels: str) -> str:
    group = await client.submit({"task": {**task, "labels": labels}, "n": n})
    await client.wait([group.id])
    return group.id


async def test_sessions_are_found_by_each_field(tmp_path: Path) -> None:
    async with a_client(tmp_path) as (client, _):
        solved = await done(client, n=2, run="a")
        failed = await done(client, FAILS, run="b", set="x")
        broken = await done(client, {**TASK, "evaluator": {"kind": "command", "run": "exit 7"}}, run="c")
        await client.pause_queue()
        waiting = (await client.submit({"task": TASK})).id

        async def groups(**wanted: Any) -> set[str]:
            sessions = (await client.sessions(**wanted)).sessions
            assert {
                each.id for each in (await client.group_page({k: v for k, v in wanted.items() if k != "state"})).groups
            }
            return {session.group_id for session in sessions}

        assert await groups() == {solved, failed, broken, waiting}
        assert await groups(state="done") == {solved, failed, broken}
        assert await groups(state=["queued", "running"]) == {waiting}
        assert await groups(labels={"run": "b", "set": "x"}) == {failed}
        assert await groups(min_reward=0.5) == {solved}
        assert failed in await groups(max_reward=0.5)
        assert await groups(stop_reason="completed", labels={"run": "a"}) == {solved}
        assert await groups(harness="tools") == {solved, failed, broken, waiting}
        assert await groups(groups=[failed, waiting]) == {failed, waiting}
        created = (await client.group(failed)).created
        assert await groups(since=created) == {failed, broken, waiting}
        assert await groups(until=created) == {solved}
        assert (await client.sessions(harness="nobody")).sessions == ()
        assert (await client.sessions(text="nothing that was written")).sessions == ()
        for wrong, field in (
            (client.sessions(state="odd"), "state"),
            (client.sessions(stop_reason="odd"), "stop_reason"),
        ):
            with pytest.raises(InvalidField, match="known: ") as refused:
                await wrong
            assert refused.value.field == field
        with pytest.raises(NotFound):
            await client.sessions(after="s-unknown-0")


@pytest.mark.parametrize("kind", ["groups", "sessions"])
async def test_both_lists_take_the_ids_of_groups(tmp_path: Path, kind: str) -> None:
    async with a_client(tmp_path) as (client, _), aiohttp.ClientSession(client.url) as http:
        solved = await done(client, n=2, run="a")
        failed = await done(client, FAILS, run="a")
        other = await done(client, run="b")

        async def found(query: str) -> set[str]:
            async with http.get(f"/v1/{kind}?{query}") as reply:
                rows = (await reply.json())[kind]
            return {row["id"] if kind == "groups" else row["group_id"] for row in rows}

        assert await found("") == {solved, failed, other}
        assert await found(f"group={failed}") == {failed}
        assert await found(f"group={failed}&group={other}") == {failed, other}
        assert await found(f"group={failed}&group={other}&label=run=a") == {failed}
        assert await found(f"group={solved}&group={failed}&min_reward=0.5&state=done") == {solved}
        assert await found(f"group={solved}&harness=nobody") == set()
        assert await found("group=g-none") == set()
        assert await found(f"group={solved}&group=g-none&limit=1") == {solved}


async def test_pages_have_each_session_once_in_order(tmp_path: Path) -> None:
    async with a_client(tmp_path) as (client, _):
        await client.pause_queue()
        ids = [
            session.id
            for group in reversed([await client.submit({"task": TASK, "n": n}) for n in (3, 1, 12, 2)])
            for session in group.sessions
        ]
        for limit in (1, 4, 5, 100):
            found: list[str] = []
            after = None
            while True:
                page = await client.sessions(after=after, limit=limit)
                found += [session.id for session in page.sessions]
                assert len(page.sessions) <= limit
                if (after := page.after) is None:
                    break
            assert found == ids
        groups = (await client.group_page(limit=2)).groups
        assert [group.n for group in groups] == [2, 12]
        older = await client.group_page(after=groups[-1].id, limit=9)
        assert [group.n for group in older.groups] == [1, 3]
        assert older.after is None
        # A page may also begin after a group, as in earlier versions.
        assert [s.id for s in (await client.sessions(after=groups[-1].id)).sessions] == ids[14:]


async def test_text_is_found_in_errors_and_answers(tmp_path: Path) -> None:
    async with a_client(tmp_path) as (client, _):
        await done(client)
        opened = await client.open_session({"labels": {"run": "x"}})
        await client.complete_session(opened.session.id, {"reward": 1.0, "answer": "The Answer Is 42"})
        lost = await client.open_session({})
        await client.complete_session(lost.session.id, {"error": "Its machine was LOST"})
        await client.wait([opened.session.group_id, lost.session.group_id])
        for text, session in (("answer is 42", opened.session.id), ("machine was lost", lost.session.id)):
            assert [each.id for each in (await client.sessions(text=text)).sessions] == [session]
        code = (await client.session(lost.session.id)).result
        assert code is not None
        assert code.error is not None
        assert lost.session.id in [each.id for each in (await client.sessions(error=code.error.code)).sessions]
        assert [each.id for each in (await client.group_page({"text": "LOST"})).groups] == [lost.session.group_id]


async def test_a_query_over_http(tmp_path: Path) -> None:
    async with a_client(tmp_path) as (client, _):
        group = await done(client, n=2)
        reply = await client.query("SELECT group_id, count(*) AS n, avg(reward) FROM sessions GROUP BY 1")
        assert (reply.columns, reply.rows, reply.truncated) == (
            ("group_id", "n", "avg(reward)"),
            ((group, 2, 1.0),),
            False,
        )
        assert (await client.query("SELECT count(*) FROM turns")).rows == ((2,),)
        with pytest.raises(InvalidField, match="ATTACH is not allowed"):
            await client.query("ATTACH 'x' AS y")
        # A query finds a group from the moment when a client has received the group's end until the group is removed.
        await client.gc(days=0)
        assert (await client.query("SELECT count(*) FROM sessions")).rows == ((0,),)
        assert (await client.sessions()).sessions == ()


@pytest.mark.deep
async def test_the_service_answers_while_queries_run(tmp_path: Path) -> None:
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    async with a_client(tmp_path) as (client, _):
        asks = [asyncio.create_task(client.query(endless)) for _ in range(2)]
        await asyncio.sleep(0)
        for _ in range(5):
            await done(client)
        for ask in asks:
            with pytest.raises(InvalidField, match="took longer than 5 s"):
                await ask


@pytest.mark.deep
async def test_odd_queries_never_get_a_server_error(tmp_path: Path) -> None:
    draw = random.Random(7)
    alphabet = "SELECT FROM sessions WHERE id='x' ()*,;%\"\\\0\n\t'-/é\ud83d😀0123456789.".replace("\ud83d", "")
    async with a_client(tmp_path) as (client, _), aiohttp.ClientSession(client.url) as http:
        for number in range(150):
            sql = "".join(draw.choices(alphabet, k=draw.randrange(60)))
            if number % 3 == 0:
                sql = f"SELECT {sql} FROM sessions"
            async with http.get("/v1/query", params={"sql": sql}) as reply:
                assert reply.status in (200, 422), (sql, await reply.text())
            body = draw.choice([{"sql": sql}, {"sql": number}, {}, {"sql": None}, {"sql": sql, "more": 1}, [sql]])
            async with http.post("/v1/query", json=body) as reply:
                assert reply.status in (200, 400, 422), (body, await reply.text())
            names = ("a", "b", "passed", "state", "label", "since", "min_reward", "text", "after", "limit", "group")
            query = {draw.choice(names): draw.choice([sql, "nan", "1e999", "-1", "", "=", "a=b"]) for _ in range(4)}
            for path in ("/v1/diff", "/v1/sessions", "/v1/groups"):
                async with http.get(path, params=query) as reply:
                    assert reply.status in (200, 404, 422), (path, query, await reply.text())
            for path in ("/v1/sessions/cancel", "/v1/sessions/retry", "/v1/queue/pause", "/v1/queue/resume"):
                field = draw.choice(
                    ["ids", "state", "labels", "min_reward", "since", "text", "all", "tenant", "harness"]
                )
                body = {field: draw.choice([sql, [sql], {sql: sql}, 1e300, -1, None, True])}
                async with http.post(path, json=body) as reply:
                    assert reply.status in (200, 400, 404, 409, 422), (path, body, await reply.text())


async def test_two_runs_are_compared(tmp_path: Path) -> None:
    async with a_client(tmp_path) as (client, _):
        for number in range(3):
            task = {**TASK, "instruction": f"task {number}"}
            await done(client, task, n=2, run="a")
            await done(client, {**task, "evaluator": FAILS["evaluator"]} if number == 0 else task, n=2, run="b")
        lost = await client.open_session({"labels": {"run": "b"}})
        await client.complete_session(lost.session.id, {"error": "lost"})
        await client.wait([lost.session.group_id])
        found = await client.diff("run=a", "run=b")
        assert (found.a.sessions, found.b.sessions, found.b.graded, found.paired) == (6, 7, 6, 3)
        assert found.a.reward is not None
        assert found.b.reward is not None
        assert found.reward is not None
        assert found.a.reward.value == 1.0
        assert found.b.reward.value == pytest.approx(2 / 3)
        assert found.reward.value == pytest.approx(-1 / 3)
        assert found.reward.low == pytest.approx(-1.0)
        assert found.reward.high == 0.0
        assert {k: each.value for k, each in found.pass_at.items()} == {
            1: pytest.approx(-1 / 3),
            2: pytest.approx(-1 / 3),
        }
        assert (found.gained, found.lost, len(found.flips)) == (0, 2, 2)
        assert {flip.sample for flip in found.flips} == {0, 1}
        assert sum(found.b.failures.values()) == 1
        for a, b, field in (("run=none", "run=a", "a"), ("run=a", "g-none", "b")):
            with pytest.raises(NotFound) as refused:
                await client.diff(a, b)
            assert refused.value.field == field
        with pytest.raises(InvalidField, match="name a run"):
            await client.diff(",", "run=a")


async def test_what_matches_is_cancelled(tmp_path: Path) -> None:
    async with a_client(tmp_path) as (client, service):
        ended = await done(client, run="a")
        await client.pause_queue()
        some = await client.submit({"task": {**TASK, "labels": {"run": "a"}}, "n": 3})
        other = await client.submit({"task": {**TASK, "labels": {"run": "b"}}})
        with pytest.raises(InvalidField, match="no field of the filter is given"):
            await client.cancel_sessions({})
        with pytest.raises(NotFound, match="no session 's-none'"):
            await client.cancel_sessions({"ids": ["s-none"]})
        dry = await client.cancel_sessions({"labels": {"run": "a"}, "dry_run": True})
        assert (dry.matched, dry.changed, dry.skipped) == (3, 0, {"done": 1})
        assert dry.sessions == tuple(session.id for session in some.sessions)
        with pytest.raises(Conflict, match="3 sessions match") as refused:
            await client.cancel_sessions({"labels": {"run": "a"}, "max_matches": 2})
        assert "--yes" in (refused.value.hint or "")
        assert (await client.cancel_sessions({"labels": {"run": "a"}})).changed == 3
        [view] = await client.wait([some.id])
        assert {session.result.stop_reason for session in view.sessions if session.result} == {"cancelled"}
        assert [(await client.group(id)).state for id in (ended, other.id)] == ["done", "active"]
        lines = (service.config.data / "audit.jsonl").read_text().splitlines()
        entry = msgspec.json.decode(lines[-1])
        assert (entry["call"], entry["ids"]) == ("POST /v1/sessions/cancel", {"sessions": "3", "matched": "3"})
        assert msgspec.json.decode(lines[-3])["ids"] == {"sessions": "0", "matched": "3", "dry_run": "true"}
        assert (await client.cancel_sessions({"all": True})).changed == 1


async def test_what_matches_is_submitted_again(tmp_path: Path) -> None:
    async with a_client(tmp_path) as (client, service):
        failed = await done(client, FAILS, n=3, run="a")
        solved = await done(client, n=2, run="a")
        sessions = (await client.group(failed)).sessions
        again = await client.retry_sessions({"ids": [sessions[1].id]})
        assert (again.matched, again.changed, len(again.groups)) == (1, 1, 1)
        [view] = await client.wait(again.groups)
        assert (view.n, view.labels) == (1, {"run": "a", RETRY_LABEL: failed})
        both = await client.retry_sessions({"labels": {"run": "a"}, "max_reward": 0.0})
        assert (both.matched, len(both.groups)) == (4, 2)  # the first retry failed, too
        assert sorted(each.n for each in await client.wait(both.groups)) == [1, 3]
        assert (await client.group(failed)).sessions == sessions
        assert (await client.retry_sessions({"groups": [solved], "state": ["queued"]})).matched == 0
        entry = msgspec.json.decode((service.config.data / "audit.jsonl").read_text().splitlines()[-2])
        assert (entry["call"], entry["ids"]["sessions"]) == ("POST /v1/sessions/retry", "4")


async def test_a_graded_again_group_is_not_submitted_again(tmp_path: Path) -> None:
    async with a_client(tmp_path) as (client, _):
        group = await done(client)
        graded = await client.regrade(group, {"evaluator": {"kind": "callable", "path": "support.coin:grade"}})
        await client.wait([graded.id])
        with pytest.raises(Conflict, match="graded earlier sessions again") as refused:
            await client.retry_sessions({"groups": [graded.id]})
        assert "outrider regrade" in (refused.value.hint or "")


async def test_a_pause_holds_what_it_names_until_it_ends(tmp_path: Path) -> None:
    async with a_client(tmp_path) as (client, service):
        first = await client.pause_queue(labels={"run": "a"})
        assert [(each.labels, each.harness, each.who) for each in first.pauses] == [({"run": "a"}, None, "local")]
        held = await client.submit({"task": {**TASK, "labels": {"run": "a", "x": "y"}}, "n": 2})
        await done(client, run="b")
        assert {each.state for each in (await client.group(held.id)).sessions} == {SessionState.QUEUED}
        assert (await client.pauses()).held == 2
        assert (await client.pause_queue(harness="tools")).changed == 0  # both are held already
        assert (await client.resume_queue(labels={"run": "a"})).changed == 0  # the other pause holds them
        with pytest.raises(NotFound, match="no such pause"):
            await client.resume_queue(labels={"run": "a"})
        assert (await client.resume_queue(harness="tools")).changed == 2
        await client.wait([held.id])
        assert (await client.pauses()).pauses == ()
        entry = msgspec.json.decode((service.config.data / "audit.jsonl").read_text().splitlines()[-1])
        assert (entry["call"], entry["ids"]) == ("POST /v1/queue/resume", {"sessions": "2"})


async def test_pauses_are_those_of_the_tenant(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path, replies=[say("hello")], token="root") as (_, url),
        AsyncClient(url, token="root") as root,
    ):
        text = (await root.create_token("alice", "submit")).text
        async with AsyncClient(url, token=text) as alice:
            assert (await alice.pause_queue()).pauses[0].tenant == "alice"
            group = await root.submit({"task": TASK})
            await root.wait([group.id])  # alice's pause does not hold the operator's group
            mine = await alice.submit({"task": TASK})
            with pytest.raises(NotFound, match="no tenant 'operator'"):
                await alice.pause_queue(tenant="operator")
            with pytest.raises(NotFound, match="no such pause"):
                await root.resume_queue()
            assert (await root.resume_queue(tenant="alice")).changed == 1
            await alice.wait([mine.id])
            await root.pause_queue()
            assert [each.tenant for each in (await alice.pauses()).pauses] == [None]
            with pytest.raises(NotFound, match="no such pause"):
                await alice.resume_queue()
            # An admin's retry of alice's session belongs to alice.
            again = await root.retry_sessions({"groups": [mine.id]})
            assert (await alice.group(again.groups[0])).tenant == "alice"
