"""The event loop in a thread: where work runs, the errors of the work, and the end of the thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from outrider.concurrency.loop_thread import LoopThread


async def where() -> str:
    return threading.current_thread().name


async def task() -> asyncio.Task[object] | None:
    return asyncio.current_task()


def test_work_runs_in_the_thread_which_ends_with_the_block() -> None:
    with LoopThread("a loop") as loop:
        assert loop.run(where()) == "a loop"
    assert "a loop" not in {thread.name for thread in threading.enumerate()}


def test_an_error_of_the_work_is_raised_to_the_caller() -> None:
    async def fails() -> None:
        raise ValueError("no")

    with LoopThread("a loop") as loop, pytest.raises(ValueError, match="no"):
        loop.run(fails())


def test_a_context_manager_is_entered_and_left_in_one_task_also_after_an_error() -> None:
    tasks = []

    @asynccontextmanager
    async def manager() -> AsyncIterator[str]:
        tasks.append(await task())
        async with asyncio.timeout(60), asyncio.TaskGroup():  # both refuse to be left in another task
            try:
                yield "value"
            finally:
                tasks.append(await task())

    with LoopThread("a loop") as loop:
        with loop.open(manager()) as value:
            assert (value, loop.run(where())) == ("value", "a loop")
        with pytest.raises(KeyError), loop.open(manager()):
            raise KeyError
    assert tasks[0] is tasks[1] is not None
    assert tasks[2] is tasks[3] is not None
    assert tasks[0] is not tasks[2]


def test_a_context_manager_that_cannot_be_entered_says_why() -> None:
    @asynccontextmanager
    async def manager(fails: bool = True) -> AsyncIterator[None]:
        if fails:
            raise OSError("gone")
        yield

    with LoopThread("a loop") as loop, pytest.raises(OSError, match="gone"), loop.open(manager()):
        pytest.fail("it was entered")


def test_a_context_manager_that_fails_to_leave_says_why() -> None:
    @asynccontextmanager
    async def manager() -> AsyncIterator[None]:
        yield
        raise OSError("gone")

    with LoopThread("a loop") as loop, pytest.raises(OSError, match="gone"), loop.open(manager()):
        pass
