"""`outrider consumers`, `outrider callbacks` and `outrider gc` against a live service."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.world import REPLIES, Cli, write_task
from outrider.client.client import AsyncClient
from support.service import running_service


@pytest.mark.deep
async def test_consumers_are_listed_moved_and_removed(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        await cli("run", write_task(tmp_path), "--url", url)
        await client.results(consumer="trainer")
        shown = await cli("consumers", "list", "--url", url)
        moved = await cli("consumers", "ack", "trainer", "1", "--url", url, "--json")
        beyond = await cli("consumers", "ack", "trainer", "2", "--url", url)
        back = await cli("consumers", "ack", "trainer", "0", "--rewind", "--url", url, "--json")
        removed = await cli("consumers", "rm", "trainer", "--url", url, "--json")
        again = await cli("consumers", "rm", "trainer", "--url", url)
    assert shown.out.splitlines()[-1].split()[:4] == ["trainer", "*", "0", "1"]
    assert [each["cursor"] for each in moved.document["consumers"]] == [1]
    assert (beyond.code, beyond.err.splitlines()[0]) == (2, "error: no group has the cursor 2: the newest is 1")
    assert [each["lag"] for each in back.document["consumers"]] == [1]
    assert removed.document == {"consumers": []}
    assert (again.code, again.err.splitlines()[0]) == (2, "error: no consumer 'trainer'")


async def test_dead_letters_are_listed_redelivered_and_discarded(cli: Cli, tmp_path: Path) -> None:
    task = {
        "instruction": "x",
        "harness": {"agent": "tools"},
        "runtime": {"kind": "memory"},
        "evaluator": {"run": "true"},
    }
    async with running_service(tmp_path=tmp_path) as (service, url), AsyncClient(url) as client:
        group = await client.submit({"task": task, "callback_url": "http://127.0.0.1:9/done?token=secret"})
        await client.wait([group.id])
        await service.store.give_up_delivery(group.id, fault="gone \x1b[31m")
        shown = await cli("callbacks", "list", "--url", url)
        neither = await cli("callbacks", "redeliver", "--url", url)
        both = await cli("callbacks", "redeliver", group.id, "--all", "--url", url)
        one = await cli("callbacks", "redeliver", group.id, "--url", url, "--json")
        every = await cli("callbacks", "redeliver", "--all", "--url", url)
        unknown = await cli("callbacks", "discard", group.id, "--url", url)
        await service.store.give_up_delivery(group.id, fault="gone")
        discarded = await cli("callbacks", "discard", group.id, "--url", url, "--json")
    assert group.id in shown.out
    assert "http://127.0.0.1:9/done" in shown.out
    assert "secret" not in shown.out
    assert "\x1b" not in shown.out
    assert neither.code == both.code == unknown.code == 2
    assert one.document == {"callbacks": 1}
    assert every.out == "0 callbacks are tried anew\n"
    assert discarded.document == {"callbacks": []}


async def test_old_groups_are_counted_and_removed(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        await cli("run", write_task(tmp_path), "--url", url)
        await client.results(consumer="trainer")
        unbound = await cli("gc", "--url", url)
        planned = await cli("gc", "--days", "0", "--dry-run", "--url", url)
        forced = await cli("gc", "--days", "0", "--dry-run", "--force", "--url", url)
        await cli("consumers", "rm", "trainer", "--url", url)
        removed = await cli("gc", "--days", "0", "--url", url, "--json")
        left = await client.groups()
    assert (unbound.code, unbound.err.splitlines()[0]) == (2, "error: days: there is no bound to keep to")
    assert planned.out.startswith("would remove 0 groups with 0 sessions")
    assert "kept: 1 not acknowledged by a consumer" in planned.out
    assert forced.out.startswith("would remove 1 groups with 1 sessions")
    assert (removed.document["groups"], removed.document["sessions"], removed.document["more"]) == (1, 1, False)
    assert left == ()
