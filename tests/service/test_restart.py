"""After a stop or a crash of the service, every accepted group finishes and nothing is counted twice."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import sys
from collections import Counter
from pathlib import Path
from uuid import uuid4

import pytest

from outrider.config import Config
from outrider.errors import InvalidField, ServiceError
from outrider.lifecycle import StopReason
from outrider.plugins import resolve
from outrider.sandbox.node_folder import NodeFolder
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.schemas import GroupView
from outrider.service.assembly import open_service
from outrider.service.data_folder import open_store
from outrider.store.sqlite import sqlite_store
from support.waiting import until

from .conftest import MakeWorld
from .marks import marked, mounts, names
from .program import program
from .world import World, a_world, config, result_of

TESTS = Path(__file__).parent.parent
PLACES = ("door", "hall", "never", "exec")


async def finish_all(w: World, count: int) -> list[GroupView]:
    """Open all places of the stage. Returns the results, from the first one on, when there are `count`."""
    for place in PLACES:
        w.stage.open[place].set()
    seen: list[GroupView] = []
    while len(seen) < count:
        page = await w.service.results(after=len(seen), wait=30, limit=3, samples=True)
        seen += page.groups
    assert [view.cursor for view in seen] == list(range(1, count + 1))
    return seen


def assert_nothing_twice(groups: list[GroupView], done_events: list[str | None]) -> None:
    """Check that each session has one result, and samples only of the result's attempt."""
    sessions = [session for group in groups for session in group.sessions]
    assert Counter(done_events) == Counter(session.id for session in sessions)
    for group in groups:
        for sample in group.samples or ():
            result = result_of(group.sessions[sample.sample_index])
            assert (sample.session_id, sample.attempt) == (result.session_id, result.attempt)
            assert sample.rows == result.samples


async def done_events(w: World) -> list[str | None]:
    events = await w.service.store.events(after=0, limit=10_000)
    return [event.session_id for event in events if event.kind == "session.done"]


async def test_stopped_in_the_middle_and_started_again(world: MakeWorld) -> None:
    async with world() as w:
        first = await w.done((await w.submit("ask", n=2)).id, samples=True)
        await w.submit("ask", "wait door", "ask", n=10)
        await w.submit("ask", verdicts=["wait never"])
        await w.submit("ask", n=5)
        await w.stage.arrived["door"].wait()
    async with world() as w:
        groups = await finish_all(w, 4)
        assert groups[0] == first
        for group in groups:
            assert [result_of(session).stop_reason for session in group.sessions] == [StopReason.COMPLETED] * group.n
        assert_nothing_twice(groups, await done_events(w))
        errors = [session.last_error for group in groups for session in group.sessions if session.last_error]
        assert {error.code for error in errors} == {"lease_expired"}
        w.assert_quiet()


async def test_a_cancel_that_the_service_did_not_live_to_carry_out(world: MakeWorld, tmp_path: Path) -> None:
    async with world() as w:
        view = await w.submit("ask", "wait door", n=3)
        await w.stage.arrived["door"].wait()
    async with sqlite_store(tmp_path / "data" / "outrider.sqlite3") as store:
        await store.cancel_group(view.id)
    async with world() as w:
        done = await w.done(view.id)
        assert [result_of(session).stop_reason for session in done.sessions] == [StopReason.CANCELLED] * 3
        # The results count the turns of the interrupted attempts, including those of calls that were cut off.
        turns = [await w.service.store.turns(session.id, 1) for session in done.sessions]
        assert any(turns)
        results = [result_of(session) for session in done.sessions]
        assert [result.turns for result in results] == list(map(len, turns))
        sampled = [sum(len(turn.output_ids) // 4 for turn in made) for made in turns]
        assert [result.tokens.sampled for result in results] == sampled
        w.assert_quiet()


async def test_an_attempt_whose_lease_has_lapsed_does_not_end_its_session(world: MakeWorld) -> None:
    """Another service may treat a slow node as dead. The test changes the store as that service would."""
    async with world() as w:
        view = await w.submit("ask", "wait door", n=2)
        await w.stage.arrived["door"].wait()
        assert len(await w.service.store.recover(now=float("inf"))) == 2
        w.stage.open["door"].set()
        done = await w.done(view.id)
        assert [result_of(session).attempt for session in done.sessions] == [2, 2]
        assert [result_of(session).stop_reason for session in done.sessions] == [StopReason.COMPLETED] * 2
        w.assert_quiet()


async def test_a_data_folder_has_one_service(world: MakeWorld, tmp_path: Path, tokenizer: Path) -> None:
    async with world() as w:
        with pytest.raises(ServiceError, match="another service is using"):
            async with open_service(config(tmp_path, tokenizer)):
                pass
        assert result_of(await w.run("ask")).stop_reason is StopReason.COMPLETED


async def test_a_data_folder_without_locks_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(InvalidField, match="cannot be locked: No locks available") as refused:
        async with open_store(Config(data=temporary / "data")):
            pass
    assert (refused.value.field, os.listdir("/proc/self/fd")) == ("data", before)
    with pytest.raises(OSError, match="No locks available"):
        NodeFolder.make()
    assert os.listdir("/proc/self/fd") == before


async def kill_when_ready(*arguments: str | Path) -> None:
    """Run crash.py, and kill it when it reports that it is ready."""
    command = [sys.executable, "-m", "service.crash", *map(str, arguments)]
    process = await asyncio.create_subprocess_exec(*command, cwd=TESTS, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
    finally:
        process.kill()
        await process.wait()


@pytest.mark.deep
async def test_killed_with_sessions_at_every_stage(
    world: MakeWorld, tmp_path: Path, tokenizer: Path, temporary: Path
) -> None:
    await kill_when_ready(tmp_path, tokenizer)
    (left,) = names(temporary)
    async with world() as w:
        assert left not in names(temporary)
        groups = await finish_all(w, 9)
        attempts = Counter(result_of(session).attempt for group in groups for session in group.sessions)
        assert attempts == {1: 4 + 3, 2: 6}  # the finished and the queued sessions; the sessions that were under way
        for group in groups:
            assert [result_of(session).stop_reason for session in group.sessions] == [StopReason.COMPLETED] * group.n
            assert all(sample.reward == 1.0 for sample in group.samples or ())
        assert_nothing_twice(groups, await done_events(w))
        w.assert_quiet()
    assert names(temporary) == []


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["process", "namespace"])
async def test_the_gateway_is_there_before_and_after_every_session(world: MakeWorld, kind: str, tmp_path: Path) -> None:
    """Neither a stop nor a start of the service fails a program that is calling its model."""
    if not (can := resolve("runtime", kind).available()).ok:
        pytest.skip(f"{kind}: {can.detail}")
    talking = program("until [[ $answer == *enough* ]]; do ask; done")
    async with world(["more<|im_end|>"], http=True) as w:
        view = await w.submit(harness=talking, runtime={"kind": kind}, max_attempts=1, n=3, limits={"turns": 100_000})
        for session in view.sessions:
            while len(await w.service.store.turns(session.id)) < 3:  # each program is in the middle of its calls
                assert (await w.service.reader.session(session.id)).result is None
    async with sqlite_store(tmp_path / "data" / "outrider.sqlite3") as store:
        assert [session.result for session in await store.sessions(view.id)] == [None] * 3
    async with world(["enough<|im_end|>"], http=True) as w:
        (done,) = await finish_all(w, 1)
        assert [result_of(session).error for session in done.sessions] == [None] * 3
        assert [result_of(session).attempt for session in done.sessions] == [2] * 3


@pytest.mark.deep
@pytest.mark.timeout(150)
async def test_killed_with_real_sandboxes(world: MakeWorld, tmp_path: Path, tokenizer: Path, temporary: Path) -> None:
    if not (can := NamespaceRuntime.available()).ok:
        pytest.skip(f"namespace: {can.detail}")
    mark = f"crash-{uuid4().hex}"
    await kill_when_ready(tmp_path, tokenizer, mark)
    await until(lambda: not marked(mark, str(temporary)))  # the processes die shortly after their parent
    assert mounts(temporary) == []
    async with world(http=True) as w:
        (group,) = await finish_all(w, 1)
        assert [result_of(session).attempt for session in group.sessions] == [2, 2, 2]
        assert [result_of(session).stop_reason for session in group.sessions] == [StopReason.COMPLETED] * 3
    assert names(temporary) == []
    assert not marked(mark, str(temporary))


async def test_another_service_keeps_its_folder(world: MakeWorld, temporary: Path, tokenizer: Path) -> None:
    """Only the folders of dead services are removed, and no files or folders with similar names."""
    (temporary / "outrider-notes").mkdir()
    (temporary / "outrider-file").touch()
    async with world() as w:
        async with a_world(temporary / "other", tokenizer) as other:
            assert w.node.gateway_socket.parent.is_dir()
            assert result_of(await other.run("ask")).stop_reason is StopReason.COMPLETED
        assert result_of(await w.run("ask")).stop_reason is StopReason.COMPLETED
    assert names(temporary) == ["other", "outrider-file", "outrider-notes"]
