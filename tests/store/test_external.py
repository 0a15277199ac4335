"""Sessions in the store whose agents run outside of the service: turns, reports, failed calls, remote runs and keys."""

from __future__ import annotations

import msgspec
import pytest

from outrider.errors import Conflict, NotFound
from outrider.redaction import redacted
from outrider.store.queue import QueueKind
from outrider.store.store import Store
from outrider.store.task_key import TaskKey

from .world import FAILURE, group_row, result, session_ids, start, submit, turn

NO_TENANT = "somebody"


async def test_turns_are_taken_over_by_the_next_attempt(store: Store) -> None:
    await submit(store, group_row())
    await start(store, "g.0")
    await store.add_turn("g.0", 1, turn(0, text="first"))
    await store.add_turn("g.0", 1, turn(0, text="judge"), model="judge")
    await store.requeue("g.0", 1, FAILURE)
    assert await store.turns("g.0") == [turn(0, text="first")]
    await start(store, "g.0", continues_turns=True)
    assert await store.turns("g.0") == [turn(0, text="first")]
    await store.add_turn("g.0", 2, turn(1, text="second"))
    assert await store.turns("g.0") == [turn(0, text="first"), turn(1, text="second")]
    assert await store.frozen_turns("g.0") == {"judge": [turn(0, text="judge")]}
    assert await store.turns("g.0", 1) == []
    await store.requeue("g.0", 2, FAILURE)
    await start(store, "g.0")
    assert await store.turns("g.0") == [], "this attempt does not continue the turns"


async def test_a_turn_that_was_lost_leaves_no_gap(store: Store) -> None:
    await submit(store, group_row())
    await start(store, "g.0")
    kept = [turn(0), msgspec.structs.replace(turn(2), parent=0), msgspec.structs.replace(turn(3), parent=2)]
    kept[1] = msgspec.structs.replace(kept[1], forked_from=1)
    for each in kept:
        await store.add_turn("g.0", 1, each)
    await store.requeue("g.0", 1, FAILURE)
    await start(store, "g.0", continues_turns=True)
    found = await store.turns("g.0")
    assert [(each.index, each.parent, each.forked_from) for each in found] == [
        (0, None, None),
        (1, 0, None),
        (2, 1, None),
    ]


async def test_turns_are_dropped_until_there_is_a_report(store: Store) -> None:
    await submit(store, group_row())
    await start(store, "g.0")
    await store.add_turn("g.0", 1, turn(0))
    await store.drop_turns("g.0", 1)
    assert await store.turns("g.0") == []
    [event] = [each for each in await store.events(after=0, limit=100) if each.kind == "session.reset"]
    assert event.data == {"attempt": 1, "turns": 1}
    await store.add_turn("g.0", 1, turn(0))
    await store.add_report("g.0", b"{}")
    with pytest.raises(Conflict, match="was completed"):
        await store.drop_turns("g.0", 1)
    assert len(await store.turns("g.0")) == 1


async def test_a_report_is_stored_once(store: Store) -> None:
    await submit(store, group_row())
    assert await store.report("g.0") is None
    first = b'{"reward":0.0,"metrics":{"a":1,"b":2}}'
    await store.add_report("g.0", first)
    await store.add_report("g.0", b'{"metrics":{"b":2,"a":1.0},"reward":-0.0}')  # equal content
    with pytest.raises(Conflict, match="another report"):
        await store.add_report("g.0", b'{"reward":1.0}')
    assert await store.report("g.0") == first
    with pytest.raises(NotFound):
        await store.add_report("g.9", b'{"reward":0.0}')
    with pytest.raises(NotFound):
        await store.add_report("g.1", b'{"reward":0.0}', tenant=NO_TENANT)
    await store.cancel_session("g.1")
    with pytest.raises(Conflict, match="cancelled"):
        await store.add_report("g.1", b"{}")


async def test_failed_calls_are_kept_until_the_agent_starts_over(store: Store) -> None:
    await submit(store, group_row())
    await start(store, "g.0")
    assert await store.failed_calls("g.0") == {}
    await store.keep_failed_calls("g.0", 1, b"[1]")
    await store.keep_failed_calls("g.0", 1, b"[2]")
    await store.keep_failed_calls("g.0", 1, b"[3]", model="judge")
    assert await store.failed_calls("g.0") == {None: b"[2]", "judge": b"[3]"}
    with pytest.raises(Conflict):
        await store.keep_failed_calls("g.0", 2, b"[]")
    await store.drop_turns("g.0", 1)
    assert await store.failed_calls("g.0") == {}


async def test_the_run_of_an_agent_service_is_kept_by_its_name(store: Store) -> None:
    await submit(store, group_row())
    await start(store, "g.0")
    assert await store.remote_run("g.0", "g.0-1") is None
    await store.keep_remote_run("g.0", 1, "g.0-1", "run-7")
    assert await store.remote_run("g.0", "g.0-1") == "run-7"
    await store.keep_remote_run("g.0", 1, "g.0-2", "run-8")
    assert (await store.remote_run("g.0", "g.0-1"), await store.remote_run("g.0", "g.0-2")) == (None, "run-8")
    with pytest.raises(Conflict):
        await store.keep_remote_run("g.0", 2, "g.0-2", "run-9")


async def test_a_session_that_is_done_takes_no_report(store: Store) -> None:
    await submit(store, group_row())
    await start(store, "g.0")
    await store.finish("g.0", 1, result("g.0", 1))
    with pytest.raises(Conflict, match="is over: completed"):
        await store.add_report("g.0", b"{}")


async def test_external_sessions_wait_in_a_line_of_their_own(store: Store) -> None:
    for id, external in (("a", False), ("b", True)):
        group = group_row(id, n=1)
        await store.create_group(group, b"{}", session_ids(group), external=external)
    assert [each.id for each in await store.queued(9)] == ["a.0"]
    assert [each.id for each in await store.queued(9, kind=QueueKind.EXTERNAL)] == ["b.0"]
    assert (await store.queue_length()).sessions == 2


async def test_keys_belong_to_one_session_and_one_service(store: Store) -> None:
    key = store.credential_of("s-1-0")
    assert store.session_of_credential(key) == "s-1-0"
    assert key == store.credential_of("s-1-0")
    assert key not in redacted(f"POST /s/{key}/v1/chat")
    mac = key[-32:]
    assert store.credential_of("s-1-1")[-32:] != mac
    for wrong in (
        key[:-1],
        f"{key}x",
        key.replace("s-1-0", "s-1-1"),
        "outrider_x_",
        "",
        f"outrider_x_s-1-0_{'A' * 32}",
        mac,
    ):
        assert store.session_of_credential(wrong) is None
    assert TaskKey.new().keyed_digest("x") != TaskKey.new().keyed_digest("x")
