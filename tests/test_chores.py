"""Background work continues after any error. Each failure is logged once, counted and listed."""

from __future__ import annotations

import ast
import asyncio
import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import outrider
from outrider.concurrency.chores import MOST_NAMES, QUIET_SECONDS, Chores, Failures
from outrider.concurrency.retries import RetryPolicy
from outrider.errors import FailingChore, ServiceError, may_come_from_machine

AT_ONCE = RetryPolicy(first=0.0, longest=0.0)
FULL = OSError(errno.ENOSPC, "No space left on device")
NO_THREAD = RuntimeError("can't start new thread")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Turns:
    """A chore's turn. Call number i raises `raised[i]`, or succeeds if it is None. The call after all of these sets
    `done` and waits for ever."""

    def __init__(self, *raised: BaseException | None) -> None:
        self._raised: Iterator[BaseException | None] = iter(raised)
        self.taken = 0
        self.done = asyncio.Event()

    async def __call__(self) -> None:
        try:
            error = next(self._raised)
        except StopIteration:
            self.done.set()
            await asyncio.Event().wait()
            return
        self.taken += 1
        if error is not None:
            raise error


@pytest.mark.parametrize(
    "error",
    [FULL, MemoryError(), NO_THREAD, ServiceError("gone"), KeyError("a bug"), asyncio.CancelledError()],
    ids=repr,
)
async def test_a_chore_goes_on_after_any_failure(error: BaseException) -> None:
    failures = Failures()
    turns, beside = Turns(error, error, error), Turns(None)
    async with asyncio.timeout(20), Chores(failures, pauses=AT_ONCE) as chores:
        chores.begin("it", turns)
        chores.begin("beside", beside)
        await turns.done.wait()
        await beside.done.wait()
        [failing] = failures.failing()
        assert (failing.name, failing.count) == ("it", 3)
        assert type(error).__name__ in failing.error or str(error) in failing.error
    assert turns.taken == 3
    assert failures.failing() == ()  # the owner's block has ended


async def test_a_turn_that_succeeds_takes_it_from_the_list(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    turns = Turns(FULL, FULL, FULL, None)
    with caplog.at_level(logging.INFO, "outrider.chores"):
        async with asyncio.timeout(20), Chores(failures, pauses=AT_ONCE) as chores:
            chores.begin("pulse", turns)
            await turns.done.wait()
            assert failures.failing() == ()
    assert [record.getMessage() for record in caplog.records] == [
        "pulse: failed, and is tried again: OSError: [Errno 28] No space left on device",
        "pulse: works again, after 3 failures in 0 s",
    ]
    assert caplog.records[0].exc_info is None  # a full disk needs no traceback


async def test_what_its_owner_calls_fatal_ends_the_owner() -> None:
    async def until_cancelled() -> None:
        async with Chores(Failures(), fatal=lambda error: not may_come_from_machine(error), pauses=AT_ONCE) as chores:
            chores.begin("beside", asyncio.Event().wait)
            await chores.begin("books", Turns(FULL, KeyError("a bug")))

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(20):
            await until_cancelled()
    assert [type(error) for error in raised.value.exceptions] == [KeyError]


async def test_work_that_is_done_once_is_waited_for_and_noted() -> None:
    failures, ended = Failures(), []

    async def work() -> None:
        await asyncio.sleep(0)
        ended.append("work")

    async def fail() -> None:
        raise FULL

    async with asyncio.timeout(20), Chores(failures) as chores:
        chores.create_task(work(), name="work of a session", chore="work")
        chores.create_task(fail(), name="push to somebody", chore="pushes")
    assert ended == ["work"]
    assert [failing.name for failing in failures.failing()] == ["pushes"]


async def test_work_that_awaits_something_cancelled_is_noted() -> None:
    failures = Failures()

    async def work() -> None:
        awaited = asyncio.get_running_loop().create_future()
        awaited.cancel()
        await awaited

    async with asyncio.timeout(20), Chores(failures) as chores:
        task = chores.create_task(work(), name="work")
    assert task.cancelled()
    assert [failing.name for failing in failures.failing()] == ["work"]


async def test_work_is_tried_until_it_is_done() -> None:
    failures, tries = Failures(), []

    async def work() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise FULL

    async with asyncio.timeout(20), Chores(failures, pauses=AT_ONCE) as chores:
        await chores.until_done("work", work)
    assert (len(tries), failures.failing()) == (3, ())


async def test_a_block_that_raises_waits_for_nothing() -> None:
    async def own() -> None:
        async with Chores(Failures()) as chores:
            chores.create_task(asyncio.Event().wait(), name="for ever")
            chores.begin("also", asyncio.Event().wait)
            raise LookupError

    with pytest.raises(LookupError):
        await asyncio.wait_for(own(), 20)


async def test_a_cancelled_owner_cancels_all() -> None:
    begun = asyncio.Event()

    async def own() -> None:
        async with Chores(Failures()) as chores:
            chores.create_task(asyncio.Event().wait(), name="for ever")
            begun.set()
            await chores.begin("also", asyncio.Event().wait)

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(own())
        await begun.wait()
        task.cancel()
    assert task.cancelled()


def test_what_fails_every_other_time_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    failures = Failures(clock)
    with caplog.at_level(logging.INFO, "outrider.chores"):
        for _ in range(50):
            failures.note("it", FULL)
            failures.note_success("it")
            clock.now += QUIET_SECONDS / 100
        assert len(caplog.records) == 2
        clock.now += QUIET_SECONDS
        failures.note("it", FULL)
        assert len(caplog.records) == 3
        failures.note_success("it")
        failures.note("it", FULL)  # from here on, the work always fails
        assert len(caplog.records) == 4
        clock.now += QUIET_SECONDS
        for _ in range(2):
            failures.note("it", FULL)
        assert len(caplog.records) == 5
        failures.note_success("it")
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"] * 3


def test_the_list_says_since_when_how_often_and_why() -> None:
    clock = Clock()
    failures = Failures(clock)
    failures.note("it", FULL)
    clock.now = 1010.0
    failures.note("it", ServiceError("postgresql://me:secret@host/db is gone"))
    assert failures.failing() == (
        FailingChore(name="it", since=1000.0, last=1010.0, count=2, error="postgresql://[redacted]@host/db is gone"),
    )


def test_names_have_a_bound() -> None:
    failures = Failures()
    for number in range(2 * MOST_NAMES):
        failures.note(f"probe {number}", FULL)
    assert len(failures.failing()) == MOST_NAMES


SOURCES = Path(outrider.__file__).parent


def _calls(word: str, is_it: Callable[[ast.Call], bool]) -> list[tuple[str, ast.Call]]:
    """Return the calls for which `is_it` returns True, with the paths of their files. Only files that contain the word
    are parsed."""
    texts = [(path, path.read_text()) for path in sorted(SOURCES.rglob("*.py"))]
    return [
        (str(path.relative_to(SOURCES)), node)
        for path, text in texts
        if word in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and is_it(node)
    ]


OTHER_TASKS = {
    "cli/export.py": "the next page of one command",
    "cli/dial.py": "the parts of one command, which ends with the first error",
    "relay/verl.py": "the calls and pings of one connection to a proxy",
    "api/compat/verl_workers.py": "the reading and the pings of one connection of a worker",
    "api/gateway.py": "pings of one reply, within its request",
    "api/gateway_server.py": "the HTTP servers: they are what is served",
    "sessions/external.py": "the remote run of one session: what it raises is the session's",
    "trainers/shared_client.py": "the trainer's process",
    "trainers/nemo_gym.py": "the agent server's process",
    "trainers/verifiers.py": "verifiers' process",
    "trainers/trl.py": "the trainer's process",
    "lab/certify/gateway_tap.py": "one connection of a check",
    "cli/wanted_images.py": "the pulls of one command, which are its results",
    "cli/waiting.py": "the notes of one command, which takes errors out of their group",
    "cli/node_process.py": "the parts of a process of its own, which its starter starts again",
    "lab/demo/train.py": "a demo",
    "engines/relay/engine.py": "one connection of a relay worker, or one question to all",
    "wire/link.py": "one connection",
    "nodes/dialling.py": "one connection of a node",
    "nodes/joined.py": "one node: it catches what that raises",
    "nodes/joining.py": "the processes of a machine: started again whatever ends them",
    "nodes/processes.py": "the processes of a service: started again whatever ends them",
    "nodes/ray_machines.py": "the machines of one command",
    "nodes/remote_node.py": "one connection of a node",
    "wire/resumable.py": "one connection",
    "nodes/service_proxy.py": "one connection to the service",
    "relay/worker.py": "the trainer's process",
    "sandbox/network/door.py": "one connection of a sandbox to the model gateway",
    "sandbox/network/proxy.py": "one connection of a sandbox or a build to a server",
    "sandbox/runtimes/tool_server/archive_download.py": "one download",
    "client/sampling.py": "the trainer's process",
    "service/service.py": "the scheduler, which is the one that may end the service, and those that hold chores",
    "store/postgresql.py": "the writer, which gives each failure to the caller of the write",
    "lab/fakes/memory_runtime/runtime.py": "one command of a sandbox",
    "lab/fakes/kubernetes/machine.py": "one pod of a test",
    "sandbox/runtimes/e2b/envd.py": "one process of a sandbox: it catches what they raise",
    "lab/fakes/e2b_server/envd.py": "one process of a sandbox",
}
"""Files that use asyncio.TaskGroup directly. If a task of a group fails, the other tasks end. Each value is the reason
why this is right in that file."""


def test_background_work_is_a_chore() -> None:
    groups = _calls("TaskGroup", lambda node: isinstance(node.func, ast.Attribute) and node.func.attr == "TaskGroup")
    used = {path for path, _ in groups} - {"concurrency/chores.py"}
    assert used == OTHER_TASKS.keys()


def test_only_the_scheduler_has_errors_that_end_the_service() -> None:
    fatal = _calls("fatal", lambda node: any(word.arg == "fatal" for word in node.keywords))
    assert [path for path, _ in fatal] == ["service/scheduler.py"]
