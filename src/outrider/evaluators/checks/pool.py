"""Checks of answers in processes of their own: the end of the service, or of a node.

It knows no library but by name. Invariants: each check has a limit of processor time and of memory; a check that
hangs holds up no other for longer than QUICK_SECONDS of a processor; a check whose caller is cancelled is killed; and
what is the machine's fault (no process, no time to run) is an EvaluatorError, never the answer's.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any, Self

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.turns import Turns
from outrider.errors import EvaluatorError, InvalidField
from outrider.evaluators.base import Aside
from outrider.evaluators.checks.zygote import LIMITS
from outrider.runtimes.kernel.child import Child
from outrider.runtimes.kernel.process_marks import VARIABLE
from outrider.runtimes.node_host import Host
from outrider.runtimes.tool_server.launch import connection
from outrider.spec import tenant_of

QUICK_SECONDS = 0.2
"""Processor time after which a check goes to the line of the slow ones. Most checks take a tenth of it."""
SLOW_NICER = 5
"""By how much slow checks give way to the others, and to the service."""
SUBMITTED_AT_ONCE = 2
"""Checks of submitted tasks in each line, so that one that takes its full time is not in the way of all others."""
MAX_MEMORY = 512 << 20
"""Bytes that a check may use beside what its library takes."""
MAX_ANSWER = 1 << 20
STOP_SECONDS = 5.0
PAUSE_SECONDS = 0.001
GONE_SECONDS = 0.2
"""How long a process may take to be dead after its connections have ended."""
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
BOOT = """
import sys, types
root, module, *paths = sys.argv[1:]
sys.path[:] = paths
for name in ("outrider", "outrider.evaluators", "outrider.runtimes"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [root + "/" + name.replace(".", "/")]
from outrider.evaluators.checks.zygote import main
main(module)
"""
"""Empty modules stand for the packages above, because the real ones import much that no check needs."""


version = functools.cache(importlib.metadata.version)
"""By the name of a distribution; it reads a file."""


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """`distribution` is its name on PyPI, `packages` are what is imported, `install` is the argument of `pip install`,
    and `checks` is the module of this folder that uses it."""

    distribution: str
    packages: tuple[str, ...]
    install: str
    checks: str

    def require(self) -> None:
        """Raises InvalidField where it is not installed. Does not import it."""
        if any(importlib.util.find_spec(package) is None for package in self.packages):
            raise InvalidField(
                f"this evaluator needs {self.distribution}",
                field="task.evaluator.kind",
                hint=f"pip install {self.install}",
            )

    def __str__(self) -> str:
        """Its name with its version, as verdicts say it."""
        return f"{self.distribution} {version(self.distribution)}"


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """How a check ended: with an answer, or with the reason for which the text that it was given made that impossible.
    `seconds` of processor time."""

    answer: dict[str, Any] | None
    fault: str = ""
    seconds: float


class Lines:
    """Where checks wait for their turn, `at_once` of which run in each line: the `quick` line, and the `slow` one of
    those that did not end there. In the quick one they are `nicer` by so much."""

    def __init__(self, at_once: int, *, nicer: int) -> None:
        self.quick = Turns(at_once)
        self.slow = Turns(at_once)
        self.nicer = nicer


class Ended(msgspec.Struct, frozen=True):
    """What the zygote says of a check: its status as of `os.wait4`, and its processor time."""

    status: int
    seconds: float


async def checks_of(host: Host | None, part: Callable[[Host], Checks]) -> Checks:
    """The host's part. Raises EvaluatorError without a host."""
    if host is None:
        raise EvaluatorError("this evaluator runs on a node only", hint="give the Outcome the `host` of a node")
    return await host.part(part)


class Checks:
    """A part of a host (see runtimes/node_host.py): `await host.part(partial(Checks, library=...))`. The process behind
    it starts with the first check, and another one if it dies."""

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
        aside: Aside = nullcontext,
    ) -> Checked:
        """Let the library check what is in `request`, for up to `seconds` of processor time. However long it waits for
        its turn, a slow machine or many others are not held against it. Tenants take turns, and the buckets of each; a
        long wait is spent in a block of `aside`: see `Outcome`. Raises EvaluatorError."""
        return await self._check(request, seconds, self._answers, bucket, aside)

    async def check_submitted(self, request: dict[str, Any], *, seconds: float) -> Checked:
        """As `check`, for what comes with a task: few at a time and at a low priority, whoever submits how much. The
        answers of sessions do not wait for it. The service asks for one tenant once at a time (`SubmissionChecks`), so
        that no tenant has all of the line."""
        return await self._check(request, seconds, self._submitted, "", nullcontext)

    async def _check(
        self,
        request: dict[str, Any],
        seconds: float,
        lines: Lines,
        bucket: str,
        aside: Aside,
    ) -> Checked:
        body = await asyncio.to_thread(msgspec.json.encode, request)
        quick = min(seconds, QUICK_SECONDS)
        async with lines.quick.take(tenant_of(bucket), bucket):
            checked = await self._run(body, quick, nicer=lines.nicer)
        if checked is None and quick < seconds:
            # Begun anew, in another line: else answers that hang would keep those that do not waiting.
            async with AsyncExitStack() as held:
                async with aside():
                    await held.enter_async_context(lines.slow.take(tenant_of(bucket), bucket))
                checked = await self._run(body, seconds, nicer=SLOW_NICER)
        return checked or self._too_long(seconds)

    def _too_long(self, seconds: float) -> Checked:
        return Checked(answer=None, fault=f"too long to check: more than {seconds:g} s", seconds=seconds)

    async def _run(self, body: bytes, seconds: float, *, nicer: int) -> Checked | None:
        """One check in one process; None if its time was over."""
        child, control = self._zygote or await self._spawn()
        try:
            said = await self._ask(control, body, LIMITS.pack(seconds, MAX_MEMORY, nicer))
        except OSError as error:
            raise await self._failure(child, control, str(error)) from error
        answer, _, end = said.rpartition(b"\n")
        try:
            ended = msgspec.json.decode(end, type=Ended)
        except msgspec.DecodeError as error:
            raise await self._failure(child, control, "it said nothing of the check's end") from error
        if os.WIFSIGNALED(ended.status):
            number = os.WTERMSIG(ended.status)
            if number in (signal.SIGPROF, signal.SIGXCPU):
                return None
            if number in CRASHES:  # the same library has checked the gold
                fault = f"it makes {self._library.distribution} crash ({signal.Signals(number).name})"
                return Checked(answer=None, fault=fault, seconds=ended.seconds)
            raise EvaluatorError(
                f"the check of an answer was killed by signal {number}",
                hint="the machine may be out of memory",
            )
        try:
            return Checked(answer=msgspec.json.decode(answer, type=dict[str, Any]), seconds=ended.seconds)
        except msgspec.DecodeError as error:
            raise EvaluatorError(f"the check of an answer ended with status {ended.status} and no result") from error

    async def _ask(self, control: socket.socket, body: bytes, limits: bytes) -> bytes:
        """All that is said on the connection of a new check. Raises OSError."""
        with connection() as (ours, theirs):
            while True:
                try:
                    socket.send_fds(control, [limits], [theirs.fileno()])
                    break
                except BlockingIOError:  # it is busy: it has one thread, and imports its library first
                    await asyncio.sleep(PAUSE_SECONDS)
            reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(body)
            writer.write_eof()
            said = b""
            while piece := await reader.read(MAX_ANSWER):
                said += piece
                if len(said) > MAX_ANSWER:
                    raise ConnectionError("it says too much")
            return said
        finally:
            writer.transport.abort()  # now: on this the zygote kills a check that still runs

    async def _spawn(self) -> tuple[Child, socket.socket]:
        await shielded(self._await_deaths)
        if self._zygote is None:  # nobody has started it meanwhile
            root = str(Path(__file__).parents[3])
            paths = [path for path in sys.path if os.path.isabs(path)]
            command = [sys.executable, "-I", "-S", "-c", BOOT, root, self._library.checks, *paths]
            # Numerical libraries start threads otherwise, and a process with threads must not fork.
            env = {VARIABLE: self._mark, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            with connection(socket.SOCK_SEQPACKET) as (ours, theirs):
                child = Child.spawn(command, env, theirs)
            ours.setblocking(False)
            self._zygote = child, ours
        return self._zygote

    async def _failure(self, child: Child, control: socket.socket, why: str) -> EvaluatorError:
        """The error of a check whose connection broke. Another process is started for the next if this one is dead."""
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
