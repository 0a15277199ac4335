"""Sessions leave no reference cycles, so their objects are freed without the garbage collector."""

from __future__ import annotations

import gc
from collections import Counter
from types import CoroutineType, FrameType, FunctionType
from typing import Any

import pytest

from outrider.errors import RuntimeFailure

from .conftest import MakeWorld

SESSIONS = 20


def of_ours(thing: object) -> str | None:
    """Return a name for an object of Outrider's code, and None for any other object."""
    code = getattr(thing, "__code__", None) or getattr(thing, "cr_code", None) or getattr(thing, "f_code", None)
    if isinstance(thing, FunctionType | CoroutineType | FrameType) and code is not None:
        return code.co_qualname if "/outrider/" in code.co_filename else None
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__.startswith("outrider.") else None


@pytest.mark.deep
@pytest.mark.parametrize(
    ("do", "fields"),
    [
        (["ask"], {}),
        (["ask", "ask", "ask"], {}),
        (["crash"], {"max_attempts": 1}),
        (["ask", "crash"], {}),
        (["ask", "wait"], {"limits": {"agent_seconds": 0.2}}),
        (["ask"], {"limits": {"turns": 1}}),
    ],
    ids=["a call", "calls", "a crash", "a crash after a call", "out of time", "out of turns"],
)
async def test_sessions_leave_no_cycles(world: MakeWorld, do: list[str], fields: dict[str, Any]) -> None:
    assert await cycles_of(world, do, fields) == {}


@pytest.mark.deep
async def test_neither_does_a_run_that_crashes_before_its_collection_fails(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = 0

    async def fails(*args: object) -> None:
        nonlocal failed
        failed += 1
        raise RuntimeFailure("the sandbox is gone")

    monkeypatch.setattr("outrider.sessions.rollout.collect", fails)
    assert await cycles_of(world, ["ask", "crash"], {"max_attempts": 1}) == {}
    assert failed == SESSIONS + 1


async def cycles_of(world: MakeWorld, do: list[str], fields: dict[str, Any]) -> dict[str, int]:
    """Return the names of Outrider's objects in reference cycles, with their numbers, if each of SESSIONS sessions has
    left at least one."""
    async with world() as it:
        await it.done((await it.submit(*do, **fields)).id)  # for objects that are made only once
        gc.collect()
        gc.disable()
        try:
            await it.done((await it.submit(*do, n=SESSIONS, **fields)).id)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = Counter(filter(None, map(of_ours, gc.garbage)))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    return {name: count for name, count in found.items() if count >= SESSIONS}
