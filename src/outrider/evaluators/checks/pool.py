"""Runs checks of answers in separate processes, for the service or for a node.

This module does not import the libraries that check answers. Invariants:

- Each check has a limit of processor time and of memory.
- A hanging check delays quick checks by at most QUICK_SECONDS of processor time.
- A check is killed if its caller is cancelled.
- If the machine cannot run a check, EvaluatorError is raised, and the answer is not judged.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.turns import Turns
from outrider.environment import installed_version
from outrider.errors import EvaluatorError, InvalidField
from outrider.evaluators.base import OffTheClock
from outrider.evaluators.checks.zygote import LIMITS
from outrider.sandbox.runtimes.kernel.child import Child
from outrider.sandbox.runtimes.kernel.process_marks import VARIABLE
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.runtimes.tool_server.launch import connection
from outrider.spec import tenant_of

QUICK_SECONDS = 0.2
"""Seconds of processor time after which a check is stopped and starts over in the slow queue. Most checks need a tenth
of this time."""
SLOW_NICER = 5
"""Niceness added to slow checks and to checks of tasks that are being submitted, so that other checks and the service
run first."""
SUBMITTED_AT_ONCE = 2
"""Maximum concurrent checks of tasks that are being submitted, in each queue. With a maximum of 1, one long check would
block all others."""
MAX_MEMORY = 512 << 20
"""Maximum bytes of memory of a check. The memory of the loaded library does not count."""
MAX_ANSWER = 1 << 20
STOP_SECONDS = 5.0
PAUSE_SECONDS = 0.001
GONE_SECONDS = 0.2
"""Maximum seconds to wait for a zygote's exit after its connection broke."""
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
BOOT = """
import sys, types
root, module, *paths = sys.argv[1:]
sys.path[:] = paths
for name in ("outrider", "outrider.evaluators", "outrider.sandbox", "outrider.sandbox.runtimes"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [root + "/" + name.replace(".", "/")]
from outrider.evaluators.checks.zygote import main
main(module)
"""
"""The program of the zygote, the process from which checks are forked. Empty modules replace the parent packages,
because the real ones import many modules that checks do not need."""


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """A library that checks answers.

    distribution: its name on PyPI.
    packages: the names of its Python packages.
    install: the argument of `pip install`.
    checks: the module of Outrider that uses the library."""

    distribution: str
    packages: tuple[str, ...]
    install: str
    checks: str

    def require(self) -> None:
        """Raise InvalidField if the library is not installed. Does not import the library."""
        if any(importlib.util.find_spec(package) is None for package in self.packages):
            raise InvalidField(
                f"this evaluator needs {self.distribution}",
                field="task.evaluator.kind",
                hint=f"pip install {self.install}",
            )

    def __str__(self) -> str:
        """Return the name and version of the library, for verdicts."""
        return f"{self.distribution} {installed_version(self.distribution)}"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check.

    answer: what the check returned, or None if the text cannot be checked.
    fault: why the text cannot be checked.
    seconds: the check's processor time."""

    answer: dict[str, Any] | None
    fault: str = ""
    seconds: float


class Lines:
    """Two queues of checks. A check starts in `quick`, and moves to `slow` if it exceeds QUICK_SECONDS. Each queue runs
    at most `at_once` checks at a time. `nicer` is the niceness added to checks in `quick`."""

    def __init__(self, at_once: int, *, nicer: int) -> None:
        self.quick = Turns(at_once)
        self.slow = Turns(at_once)
        self.nicer = nicer


class Ended(msgspec.Struct, frozen=True):
    """The zygote's report about a check that has ended: the check's status from `os.wait4`, and its processor time."""

    status: int
    seconds: float


async def checks_of(host: Host | None, part: Callable[[Host], Checks]) -> Checks:
    """Return the `Checks` that the host shares. On first use, `part` makes this object. Raises EvaluatorError if `host`
    is None."""
    if host is None:
        raise EvaluatorError("this evaluator runs on a node only", hint="give the Outcome the `host` of a node")
    return await host.part(part)


class Checks:
    """Runs the checks of one library, as a shared part of a host: `await host.part(partial(Checks, library=...))`. The
    first check starts the zygote, the process from which checks are forked. If the zygote exits, the next check starts
    another zygote."""

    def __init__(self, host: Host, *, library: Library) -> None:
        self._mark = f"{host.folder.name}/"
        self._library = library
        self._zygote: tuple[Child, socket.socket] | None = None
        self._given_up: list[Child] = []
        self._answers = Lines(len(os.sched_getaffinity(0)), nicer=0)
        self._submitted = Lines(SUBMITTED_AT_ONCE, nicer=SLOW_NICER)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._zygote is not None:
            self._give_up(*self._zygote)
        await shielded(self._await_deaths)

    async def check(
        self,
        request: dict[str, Any],
        *,
        seconds: float,
        bucket: str = "",
        off_the_clock: OffTheClock = nullcontext,
        submitted: bool = False,
    ) -> CheckResult:
        """Run the library's check of `request`, for up to `seconds` of processor time. Waits in queues do not count.
        Tenants take turns in each queue, and so do the buckets of each tenant. The wait for the slow queue runs inside
        `off_the_clock()` (see `Outcome`). Raises EvaluatorError.

        `submitted` is true for a check of a task that is being submitted. Such checks have low priority and their own
        queues, so that checks of answers never wait for them. The service makes at most one such call per tenant at a
        time (`SubmissionChecks`), so that no tenant can fill these queues."""
        lines = self._submitted if submitted else self._answers
        body = await asyncio.to_thread(msgspec.json.encode, request)
        quick = min(seconds, QUICK_SECONDS)
        async with lines.quick.take(tenant_of(bucket), bucket):
            checked = await self._run(body, quick, nicer=lines.nicer)
        if checked is None and quick < seconds:
            # Start the check over in the slow queue. If checks went on here, a hanging check would block the quick
            # queue.
            async with AsyncExitStack() as held:
                async with off_the_clock():
                    await held.enter_async_context(lines.slow.take(tenant_of(bucket), bucket))
                checked = await self._run(body, seconds, nicer=SLOW_NICER)
        fault = f"too long to check: more than {seconds:g} s"
        return checked or CheckResult(answer=None, fault=fault, seconds=seconds)

    async def _run(self, body: bytes, seconds: float, *, nicer: int) -> CheckResult | None:
        """Run a check in a process. Returns None if the check exceeded `seconds`."""
        child, control = self._zygote or await self._spawn()
        try:
            output = await self._exchange(control, body, LIMITS.pack(seconds, MAX_MEMORY, nicer))
        except OSError as error:
            raise await self._failure(child, control, str(error)) from error
        except asyncio.CancelledError:
            # If a signal has stopped the zygote, no check gets an answer. The next check starts another zygote.
            if (child, control) == self._zygote and child.stopped_by_signal():
                self._give_up(child, control)
            raise
        answer, _, end = output.rpartition(b"\n")
        try:
            ended = msgspec.json.decode(end, type=Ended)
        except msgspec.DecodeError as error:
            raise await self._failure(child, control, "it said nothing of the check's end") from error
        if os.WIFSIGNALED(ended.status):
            number = os.WTERMSIG(ended.status)
            if number in (signal.SIGPROF, signal.SIGXCPU):
                return None
            # The answer is the cause of the crash: at submission, the library checked the gold answers and did not
            # crash.
            if number in CRASHES:
                fault = f"it makes {self._library.distribution} crash ({signal.Signals(number).name})"
                return CheckResult(answer=None, fault=fault, seconds=ended.seconds)
            raise EvaluatorError(
                f"the check of an answer was killed by signal {number}",
                hint="the machine may be out of memory",
            )
        try:
            return CheckResult(answer=msgspec.json.decode(answer, type=dict[str, Any]), seconds=ended.seconds)
        except msgspec.DecodeError as error:
            raise EvaluatorError(f"the check of an answer ended with status {ended.status} and no result") from error

    async def _exchange(self, control: socket.socket, body: bytes, limits: bytes) -> bytes:
        """Send a new check to the zygote. Returns all bytes from the check's own connection. Raises OSError."""
        with connection() as (ours, theirs):
            while True:
                try:
                    socket.send_fds(control, [limits], [theirs.fileno()])
                    break
                except BlockingIOError:  # the zygote is still importing the library or handling other requests
                    await asyncio.sleep(PAUSE_SECONDS)
        # Use plain calls on the socket. When a write fails, asyncio's streams would drop the data that has already
        # arrived.
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        with ours:  # at the end, the connection closes, and the zygote kills a check that still runs
            with suppress(BrokenPipeError):  # the check ended before it read everything: the zygote sends its status
                await loop.sock_sendall(ours, body)
                ours.shutdown(socket.SHUT_WR)
            output = b""
            while piece := await loop.sock_recv(ours, MAX_ANSWER):
                output += piece
                if len(output) > MAX_ANSWER:
                    raise ConnectionError("it says too much")
            return output

    async def _spawn(self) -> tuple[Child, socket.socket]:
        await shielded(self._await_deaths)
        if self._zygote is None:  # no other caller has started a zygote in the meantime
            root = str(Path(__file__).parents[3])
            paths = [path for path in sys.path if os.path.isabs(path)]
            command = [sys.executable, "-I", "-S", "-c", BOOT, root, self._library.checks, *paths]
            # The last two variables keep numerical libraries from starting threads, because a process with threads must
            # not fork.
            env = {VARIABLE: self._mark, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            with connection(socket.SOCK_SEQPACKET) as (ours, theirs):
                child = Child.spawn(command, env, theirs)
            ours.setblocking(False)
            self._zygote = child, ours
        return self._zygote

    async def _failure(self, child: Child, control: socket.socket, why: str) -> EvaluatorError:
        """Return the error of a check whose connection has broken. If the zygote has exited, forget it, so that the
        next check starts another zygote."""
        tail = None
        if (child, control) == self._zygote and await child.ends_within(GONE_SECONDS):
            tail = child.log_tail() or None
            if (child, control) == self._zygote:
                self._give_up(child, control)
        return EvaluatorError(f"the process that checks answers failed: {why}", log_tail=tail)

    def _give_up(self, child: Child, control: socket.socket) -> None:
        control.close()
        self._given_up.append(child)
        self._zygote = None

    async def _await_deaths(self) -> None:
        while self._given_up:
            await self._given_up.pop().end(STOP_SECONDS)
