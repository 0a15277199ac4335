"""Computations in pieces: in which thread they run, in which order, and how they are cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from outrider.concurrency.cancellation import INLINE_BYTES, OffloadThread, Steps


@pytest.fixture
async def offload() -> AsyncIterator[OffloadThread]:
    made = OffloadThread()
    yield made
    await made.close()


def named(*sizes: int) -> Steps[list[str]]:
    """Return the names of the threads in which the pieces run."""
    names = []
    for size in sizes:
        yield size
        names.append(threading.current_thread().name)
    return names


async def test_small_work_stays_on_the_event_loop_and_large_work_leaves_it(offload: OffloadThread) -> None:
    here = threading.current_thread().name
    assert await offload.run_steps(named(INLINE_BYTES // 2, INLINE_BYTES // 2)) == [here, here]
    first, *others = await offload.run_steps(named(INLINE_BYTES, 1, 1))
    assert first == here
    assert others == ["outrider-offload_0"] * 2


async def test_an_error_of_a_piece_is_the_callers(offload: OffloadThread) -> None:
    def failing() -> Steps[None]:
        yield INLINE_BYTES + 1
        raise KeyError("in a thread")

    with pytest.raises(KeyError):
        await offload.run_steps(failing())
    assert await offload.run_steps(named(INLINE_BYTES + 1)) == ["outrider-offload_0"]


async def test_long_works_take_turns(offload: OffloadThread) -> None:
    order = []

    def long(name: str) -> Steps[None]:
        for _ in range(3):
            yield INLINE_BYTES + 1
            order.append(name)

    await asyncio.gather(*(offload.run_steps(long(name)) for name in "abc"))
    assert order == list("abcabcabc")


async def test_cancelled_work_ends_with_its_piece_and_the_next_has_its_turn(offload: OffloadThread) -> None:
    started, gate = threading.Event(), threading.Event()
    pieces = []

    def long() -> Steps[None]:
        for piece in range(100):
            yield INLINE_BYTES + 1
            pieces.append(piece)
            started.set()
            gate.wait()

    work = asyncio.ensure_future(offload.run_steps(long()))
    await asyncio.to_thread(started.wait)
    waiting = [asyncio.ensure_future(offload.run_steps(named(INLINE_BYTES + 1))) for name in "bc"]
    await asyncio.sleep(0)
    for one in (work, waiting[0]):
        one.cancel()
    gate.set()
    for one in (work, waiting[0]):
        with suppress(asyncio.CancelledError):
            await one
    assert await waiting[1] == ["outrider-offload_0"]
    assert pieces == [0]
