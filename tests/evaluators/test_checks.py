"""The processes that check answers: each check has its own confined process, is killed in time, and leaves no process
behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from outrider.errors import EvaluatorError, InvalidField
from outrider.evaluators.base import Outcome
from outrider.evaluators.checks.confinement import calculation
from outrider.evaluators.checks.pool import MAX_MEMORY, QUICK_SECONDS, SUBMITTED_AT_ONCE, CheckResult, Checks, Library
from outrider.evaluators.checks.zygote import LIMITS
from outrider.sandbox.runtimes.guest.isolation import landlock
from outrider.sandbox.runtimes.guest.isolation.seccomp import MACHINES
from outrider.sandbox.runtimes.kernel.process_marks import marked
from outrider.sandbox.runtimes.node_host import Host
from outrider.service.admission import SubmissionChecks
from outrider.trajectory import Verdict

HOSTILE = Library(distribution="pytest", packages=("pytest",), install="none", checks="evaluators.hostile_checks")
PART = partial(Checks, library=HOSTILE)
CORES = len(os.sched_getaffinity(0))


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    folder = tmp_path / f"node-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    async with Host(folder) as made:
        yield made
    assert processes(made) == set()


def processes(host: Host) -> set[int]:
    """Return the pids of the zygote and of the running checks."""
    return marked(f"{host.folder.name}/")


async def until(host: Host, number: int) -> set[int]:
    """Wait until the number of processes is `number`, and return their pids."""
    async with asyncio.timeout(30):
        while len(found := processes(host)) != number:  # noqa: ASYNC110  # there is no event for the end of a process
            await asyncio.sleep(0.01)
    return found


async def only_check(host: Host) -> int:
    """Return the pid of the only check, which is the child of the zygote. Pids wrap, so the check's pid may be the
    smaller one."""
    pids = await until(host, 2)
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in pids}  # noqa: ASYNC240
    [check] = (pid for pid in pids if parents[pid] in pids)
    return check


async def act(host: Host, name: str, *, seconds: float = 5.0, **more: Any) -> CheckResult:
    return await (await host.part(PART)).check({"act": name, **more}, seconds=seconds)


@pytest.mark.parametrize(
    "name",
    [
        "write",
        "append",
        "remove",
        "folder",
        "connect",
        "unix",
        "program",
        "fork",
        "kill",
        "timer",
        "ignore",
    ],
)
async def test_a_check_can_do_nothing_but_calculate(host: Host, name: str, tmp_path: Path) -> None:
    file = tmp_path / "victim"
    file.write_text("safe")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = await act(host, name, path=str(file), port=port)
    assert done.answer == {"said": "refused"}
    assert file.read_text() == "safe"
    assert (await act(host, "nothing")).answer == {"said": "nothing"}


async def test_a_check_cannot_read_what_is_not_pythons(host: Host, tmp_path: Path) -> None:
    if landlock.version() == 0:
        pytest.skip("this kernel has no Landlock: a check can read files")
    file = tmp_path / "secret"
    file.write_text("secret")
    assert (await act(host, "read", path=str(file))).answer == {"said": "refused"}


async def test_a_check_that_hangs_is_ended_by_its_own_time_alone(host: Host) -> None:
    spinning = await act(host, "spin", seconds=0.4)
    assert spinning.answer is None
    assert spinning.fault == "too long to check: more than 0.4 s"
    assert len(processes(host)) == 1


async def test_time_in_which_the_machine_does_other_things_is_not_held_against_an_answer(host: Host) -> None:
    await act(host, "nothing")
    await until(host, 1)  # the process of this check has ended
    working = asyncio.ensure_future(act(host, "work", seconds=0.2))
    check = await only_check(host)
    os.kill(check, signal.SIGSTOP)
    await asyncio.sleep(0.5)
    os.kill(check, signal.SIGCONT)
    assert (await working).answer == {"said": "worked"}


@pytest.mark.deep
async def test_a_zygote_that_is_stopped_holds_up_no_later_check(host: Host) -> None:
    await act(host, "nothing")
    await until(host, 1)
    [stopped] = processes(host)
    os.kill(stopped, signal.SIGSTOP)
    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await act(host, "nothing")
        assert (await act(host, "nothing")).answer == {"said": "nothing"}
    assert stopped not in processes(host)


@pytest.mark.nightly
async def test_what_is_submitted_keeps_no_answer_waiting(host: Host) -> None:
    """Checks of submitted tasks have their own queues. However many of them hang, checks of answers and quick checks of
    other submitted tasks do not wait."""
    checks = await host.part(PART)
    await act(host, "nothing")
    submitted = [asyncio.ensure_future(checks.check({"act": "spin"}, seconds=60, submitted=True)) for _ in range(32)]
    await until(host, 1 + SUBMITTED_AT_ONCE)
    assert (await act(host, "work", seconds=5)).answer == {"said": "worked"}
    await until(host, 1 + SUBMITTED_AT_ONCE)
    assert (await checks.check({"act": "nothing"}, seconds=60, submitted=True)).answer == {
        "said": "nothing"
    }  # a quick check of another submitted task
    assert not any(one.done() for one in submitted)
    for one in submitted:
        one.cancel()
    await asyncio.wait(submitted)
    await until(host, 1)
    assert (await checks.check({"act": "nothing"}, seconds=5, submitted=True)).answer == {"said": "nothing"}
    assert (
        await checks.check({"act": "spin"}, seconds=0.3, submitted=True)
    ).fault == "too long to check: more than 0.3 s"


class Spins:
    """An evaluator whose check of the spec never ends."""

    spec: Mapping[str, Any] = MappingProxyType({"act": "spin"})

    async def check_spec(self, host: Host) -> None:
        await (await host.part(PART)).check(dict(self.spec), seconds=60, submitted=True)

    async def evaluate(self, outcome: Outcome) -> Verdict:
        raise NotImplementedError


class Works(Spins):
    """An evaluator whose check of the spec takes more than QUICK_SECONDS, and so needs the slow queue."""

    spec = MappingProxyType({"act": "work", "for": QUICK_SECONDS + 0.05})


@pytest.mark.deep
async def test_golds_of_one_tenant_that_hang_keep_no_other_waiting(host: Host) -> None:
    await act(host, "nothing")
    checks = SubmissionChecks(host)
    hanging = [asyncio.ensure_future(checks.check([Spins(), Spins()], "theirs")) for _ in range(8)]
    await until(host, 2)
    for _ in range(3):
        await checks.check([Works()], "mine")
    assert len(processes(host)) == 2
    assert not any(one.done() for one in hanging)
    for one in hanging:
        one.cancel()
    await asyncio.wait(hanging)


async def test_a_group_has_one_time_for_all_its_checks_and_its_wait(host: Host) -> None:
    await act(host, "nothing")
    checks = SubmissionChecks(host, seconds=0.3)
    hanging = [checks.check([Spins()] * 8, "theirs") for _ in range(3)]
    for error in await asyncio.gather(*hanging, return_exceptions=True):
        assert isinstance(error, EvaluatorError)
        assert error.retryable
        assert "within 0.3 s" in error.message


@pytest.mark.deep
async def test_a_check_that_takes_long_waits_for_one_of_each_other_bucket(host: Host) -> None:
    """Buckets take turns in the quick queue and in the slow queue, however many checks of another bucket hang."""
    checks = await host.part(PART)
    await act(host, "nothing")
    hanging = [
        asyncio.ensure_future(checks.check({"act": "spin"}, seconds=0.3, bucket="theirs")) for _ in range(6 * CORES)
    ]
    await until(host, 1 + CORES)
    mine = await checks.check({"act": "work", "for": QUICK_SECONDS + 0.05}, seconds=10, bucket="mine")
    assert mine.answer == {"said": "worked"}
    assert sum(one.done() for one in hanging) <= 4 * CORES
    assert {done.fault for done in await asyncio.gather(*hanging)} == {"too long to check: more than 0.3 s"}


@pytest.mark.parametrize("size", [1, 8 << 20])
async def test_a_check_that_crashes_is_told_from_one_that_was_killed(host: Host, size: int) -> None:
    """With 8 MiB, the check is killed while it still reads its request."""
    crashed = await act(host, "crash")
    assert crashed.answer is None
    assert crashed.fault.startswith("it makes pytest crash")
    slow = asyncio.ensure_future(act(host, "spin", seconds=60, rest="x" * size))
    os.kill(await only_check(host), signal.SIGKILL)  # the kernel kills a process in this way if memory runs out
    with pytest.raises(EvaluatorError, match="killed by signal 9"):
        await slow


async def test_the_end_of_a_check_that_is_killed_while_its_request_arrives_is_never_lost(host: Host) -> None:
    """The request has no end and comes from a thread, so it still arrives while the zygote closes the connection."""
    await act(host, "nothing")
    checks: Checks = await host.part(PART)
    assert checks._zygote is not None
    control = checks._zygote[1]

    def exchange() -> bytes:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(control, [LIMITS.pack(60.0, MAX_MEMORY, 0)], [theirs.fileno()])
            with suppress(BrokenPipeError):
                while True:
                    ours.sendall(b"x" * 65_536)
            return ours.recv(65_536)

    for _ in range(20):
        exchanging = asyncio.ensure_future(asyncio.to_thread(exchange))
        os.kill(await only_check(host), signal.SIGKILL)
        assert b'"status": 9' in await exchanging
        await until(host, 1)


@pytest.mark.parametrize("name", ["exit", "raise", "memory", "talk"])
async def test_a_check_without_a_result_is_an_error(host: Host, name: str) -> None:
    with pytest.raises(EvaluatorError):
        await act(host, name)
    assert (await act(host, "nothing")).answer == {"said": "nothing"}


async def test_no_check_reaches_another(host: Host) -> None:
    await act(host, "nothing")
    forging = asyncio.gather(*(act(host, "forge") for _ in range(8)), return_exceptions=True)
    honest = await asyncio.gather(*(act(host, "nothing") for _ in range(8)))
    assert [done.answer for done in honest] == [{"said": "nothing"}] * 8
    assert all(isinstance(done, EvaluatorError) for done in await forging)  # two results count as none


async def test_a_check_whose_caller_is_cancelled_is_killed(host: Host) -> None:
    await act(host, "nothing")
    waiting = asyncio.ensure_future(act(host, "spin", seconds=60))
    await until(host, 2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(host, 1)


async def test_another_process_takes_the_place_of_one_that_died(host: Host) -> None:
    await act(host, "nothing")
    waiting = asyncio.ensure_future(act(host, "spin", seconds=60))
    check = await only_check(host)
    before = processes(host)
    [zygote] = before - {check}
    os.kill(zygote, signal.SIGKILL)
    with pytest.raises(EvaluatorError, match="the process that checks answers failed"):
        await waiting
    assert (await act(host, "nothing")).answer == {"said": "nothing"}
    assert not before & processes(host)


HOLDER = """
import asyncio, sys
from pathlib import Path
from evaluators.test_checks import PART
from outrider.sandbox.runtimes.node_host import Host

async def main():
    async with Host(Path(sys.argv[1])) as host:
        checks = await host.part(PART)
        await checks.check({"act": "nothing"}, seconds=5)
        print("ready", flush=True)
        await checks.check({"act": "spin"}, seconds=60)

asyncio.run(main())
"""


@pytest.mark.deep
async def test_nothing_outlives_a_service_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / f"node-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    env = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, folder, env=env, stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"ready\n"
    while len(marked(f"{folder.name}/")) < 2:  # noqa: ASYNC110  # there is no event for a new process
        await asyncio.sleep(0.01)
    holder.kill()
    await holder.wait()
    while marked(f"{folder.name}/"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_library_that_cannot_be_imported_is_an_error_with_its_traceback(host: Host) -> None:
    missing = Library(distribution="x", packages=("no_such_package",), install="x", checks="evaluators.no_such_checks")
    with pytest.raises(EvaluatorError) as caught:
        await (await host.part(partial(Checks, library=missing))).check({}, seconds=1)
    assert "no_such_checks" in str(caught.value.log_tail)
    with pytest.raises(InvalidField, match="needs x"):
        missing.require()


@pytest.mark.parametrize("machine", MACHINES)
def test_there_is_a_filter_for_each_machine(machine: str) -> None:
    assert len(calculation(machine)) % 8 == 0
