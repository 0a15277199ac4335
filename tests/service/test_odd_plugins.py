"""A faulty plugin ends only its own session. The service and the outcomes of other sessions are not affected."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import Boundary
from outrider.lifecycle import StopReason
from outrider.sessions import grading
from outrider.store.sqlite import sqlite_store

from .conftest import MakeWorld
from .stage import ODD_GRADER
from .test_failures import failed
from .world import World, put, result_of

RENAMED = "UPDATE groups SET spec = ?"


async def assert_alive(w: World) -> None:
    assert result_of(await w.run("ask")).stop_reason is StopReason.COMPLETED
    w.assert_quiet()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", "it tried to exit the process: SystemExit(3)"),
        ("cancelled", "it raised CancelledError, but nobody had cancelled it"),
        ("half a character", "ValueError: caf\\udce9"),
    ],
)
async def test_an_agent(world: MakeWorld, how: str, says: str) -> None:
    async with world() as w:
        session = await w.run("ask", f"oddly {how}", max_attempts=2)
        error = failed(session, Boundary.HARNESS, "harness_error").error
        assert error is not None
        assert says in error.message
        assert session.attempt == 2
        await assert_alive(w)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", "it tried to exit the process"),
        ("cancelled", "it raised CancelledError, but nobody had cancelled it"),
        ("half a character", "ValueError: caf\\udce9"),
        ("no text", "'x'"),
        ("nothing", "returned no verdict: reward must be a number, not NoneType"),
        ("not a number", "returned no verdict: reward must be finite"),
    ],
)
async def test_an_evaluator(world: MakeWorld, how: str, says: str) -> None:
    async with world() as w:
        session = await w.run("ask", evaluator={"kind": ODD_GRADER, "options": {"how": how}}, max_attempts=2)
        error = failed(session, Boundary.EVALUATOR, "evaluator_error").error
        assert error is not None
        assert says in error.message
        assert w.stage.count["graded"] == 2
        await assert_alive(w)


async def test_what_an_evaluator_gives_is_read_like_any_verdict(world: MakeWorld) -> None:
    async with world() as w:
        for how in ("a number", "odd text"):
            session = await w.run("ask", evaluator={"kind": ODD_GRADER, "options": {"how": how}})
            verdict = result_of(session).verdict
            assert verdict is not None
            assert verdict.reward == 0.5
        assert (verdict.reason, verdict.metrics) == ("caf\\udce9", {"m\\udce9": 1.0})


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_stored_task_that_cannot_be_read(world: MakeWorld, tmp_path: Path, *, cancelled: bool) -> None:
    """A stored task in the form of an older version, in which a field had another name."""
    (tmp_path / "data").mkdir()
    async with sqlite_store(tmp_path / "data" / "outrider.sqlite3") as store:
        await put(store, "old", "s1", "s2")
        spec = (await store.spec("old")).replace(b'"instruction"', b'"prompt"')
        await store._db.write(lambda tx: tx.execute(RENAMED, (spec,)))
        if cancelled:
            await store.cancel_group("old")
        await put(store, "new", "s3")
    async with world() as w:
        for session in (await w.done("old")).sessions:
            if cancelled:
                assert result_of(session).stop_reason is StopReason.CANCELLED
            else:
                failed(session, Boundary.SERVICE, "unreadable_task")
        (session,) = (await w.done("new")).sessions
        assert result_of(session).stop_reason is StopReason.COMPLETED
        await assert_alive(w)


async def test_a_result_that_cannot_be_stored(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that cannot be stored is a bug of the service. The session fails, and the service goes on."""
    monkeypatch.setattr(grading, "read_verdict", lambda given: given)
    async with world() as w:
        session = await w.run("ask", evaluator={"kind": ODD_GRADER, "options": {"how": "not a number"}})
        failed(session, Boundary.SERVICE, "internal_error")
        await assert_alive(w)
