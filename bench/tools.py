"""Tool calls: one `echo hi` or `1 + 1` through the tool server, compared with other common ways.

Run with `python -m bench tools`; `run` returns the figures to `bench/__main__.py`. The ways alternate, a few calls
each, so that the machine's other load affects all equally. A way whose program, package or daemon is missing is left
out, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.processes import a_round_trip
from bench.sandboxes import summary
from outrider.plugins import resolve
from outrider.sandbox.pythons.ipython import ipython_mounts
from outrider.sandbox.runtimes.base import SandboxContext, ShellKind
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import RuntimeSpec

RUNTIMES = ("namespace", "process")
SHELLS: dict[ShellKind, tuple[str, str]] = {
    "bash": ("echo hi", "hi"),
    "python": ("1 + 1", "2"),
    "ipython": ("1 + 1", "2"),
}
"""The input for each shell, and its output."""
SECONDS = 60.0
DAEMON_SECONDS = 20
BOX = ("--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
"""Arguments of the container engines. The limits are set, because Podman's default limits may be higher than the limits
of root."""
FIRST = 50
"""Number of first calls of a quick way that only warm it up and are not counted."""

Call = Callable[[], Awaitable[object]]


class Unavailable(Exception):
    """A way cannot be measured on this machine. The message is the reason."""


class Plan(msgspec.Struct, frozen=True):
    """Number of calls per round: `quick` for a quick way, `slow` for a slow way."""

    rounds: int
    quick: int
    slow: int


FULL = Plan(rounds=20, quick=100, slow=3)
QUICK = Plan(rounds=4, quick=50, slow=2)


class Way(msgspec.Struct):
    call: Call
    quick: bool
    spent: list[float] = []


def expect(answer: str, wanted: str) -> None:
    if wanted not in answer:
        raise RuntimeError(f"the answer of a tool call is {answer!r}, not {wanted!r}")


@asynccontextmanager
async def tool_server(kind: str) -> AsyncIterator[dict[str, Call]]:
    """Run a sandbox with a live shell of each kind."""
    cls = resolve("runtime", kind)
    if not (can := cls.available()).ok:
        raise Unavailable(can.detail)
    with tempfile.TemporaryDirectory(prefix="or-bench-") as folder:
        async with Host(Path(folder)) as host:
            directory, gateway = host.folder / "s", host.folder / "gateway.sock"
            directory.mkdir()
            gateway.touch()
            context = SandboxContext(
                session_id="s",
                attempt=1,
                directory=directory,
                host=host,
                gateway_url="http://127.0.0.1:1",
                gateway_socket=gateway,
                mounts=ipython_mounts(),
            )
            sandbox = cls.create(RuntimeSpec(kind=kind), context)
            await sandbox.start()
            try:
                yield {shell: await _asked(sandbox, shell) for shell in SHELLS}
            finally:
                await sandbox.stop()


async def _asked(sandbox: Any, kind: ShellKind) -> Call:
    shell = await sandbox.open_shell(kind)
    text, wanted = SHELLS[kind]

    async def call() -> None:
        expect((await shell.run(text, seconds=SECONDS)).output, wanted)

    await call()
    return call


@asynccontextmanager
async def tmux() -> AsyncIterator[Call]:
    """Run a tmux session. A call is send-keys, then capture-pane until the output is complete."""
    program = _program("tmux")
    numbers = itertools.count()
    with tempfile.TemporaryDirectory(prefix="or-tmux-") as folder:
        server = [program, "-S", f"{folder}/socket", "-f", "/dev/null"]
        _run(*server, "new-session", "-d", "-x", "80", "-y", "50", "bash --norc --noprofile")

        def ask() -> None:
            answer = f"hi{next(numbers)}"
            _run(*server, "send-keys", f"clear; echo {answer}", "Enter")
            until = time.monotonic() + SECONDS
            while f"\n{answer}\n" not in f"\n{_run(*server, 'capture-pane', '-p')}":
                if time.monotonic() > until:
                    raise RuntimeError("tmux does not show the answer")

        try:
            yield _blocking(ask)
        finally:
            _run(*server, "kill-server")


@asynccontextmanager
async def pexpect_defaults() -> AsyncIterator[Call]:
    if find_spec("pexpect") is None:
        raise Unavailable("pexpect is not installed: pip install 'outrider[bench]'")
    from pexpect import replwrap

    bash = replwrap.bash()
    try:
        yield _blocking(lambda: expect(bash.run_command("echo hi"), "hi"))
    finally:
        bash.child.close(force=True)


@asynccontextmanager
async def jupyter() -> AsyncIterator[Call]:
    """Run a Jupyter kernel. A call is sent over TCP, as by notebooks and most code interpreters."""
    if find_spec("jupyter_client") is None or find_spec("ipykernel") is None:
        raise Unavailable("ipykernel and jupyter_client are not installed: pip install 'outrider[bench]'")
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = manager.blocking_client()
    client.start_channels()
    shown: list[str] = []

    def keep(message: dict[str, Any]) -> None:
        if message["msg_type"] == "execute_result":
            shown.append(message["content"]["data"]["text/plain"])

    def ask() -> None:
        shown.clear()
        client.execute_interactive("1 + 1", store_history=False, timeout=SECONDS, output_hook=keep)
        expect("".join(shown), "2")

    try:
        client.wait_for_ready(timeout=SECONDS)
        yield _blocking(ask)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@asynccontextmanager
async def engine_exec(engine: str) -> AsyncIterator[Call]:
    """Run a container. A call is `docker exec` or `podman exec` of a program in it. The image has only a busybox."""
    program, busybox = _program(engine), _program("busybox")
    _daemon(program, "info")
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        _write_image(file.name, busybox)
        image = _daemon(program, "import", file.name).strip().splitlines()[-1]
    box = f"or-bench-{os.getpid()}"
    try:
        _daemon(program, "run", "-d", "--name", box, *BOX, image, "/bin/sh", "-c", "sleep 600")
        yield _blocking(lambda: expect(_run(program, "exec", box, "/bin/echo", "hi"), "hi"))
    finally:
        _remove(program, box, image)


def _remove(program: str, box: str, image: str) -> None:
    for removal in (("rm", "-f", box), ("rmi", "-f", image)):
        subprocess.run([program, *removal], capture_output=True, check=False)


def _write_image(target: str, busybox: str) -> None:
    with tarfile.open(target, mode="w") as archive:
        archive.add(busybox, "bin/busybox")
        for name in ("sh", "echo", "sleep"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)


def _daemon(*command: str) -> str:
    try:
        return _run(*command, seconds=DAEMON_SECONDS)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or ["it failed without a word"]
        raise Unavailable(f"{Path(command[0]).name} {command[1]}: {lines[-1][:200]}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{Path(command[0]).name} {command[1]} did not answer in {DAEMON_SECONDS} s") from error


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise Unavailable(f"{name} is not installed")
    return path


def _run(*command: str, seconds: float = SECONDS) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True).stdout


def _blocking(ask: Callable[[], object]) -> Call:
    """Return a call that blocks the event loop; the loop has nothing else to do."""

    async def call() -> None:
        ask()

    return call


OTHERS: dict[str, Callable[[], contextlib.AbstractAsyncContextManager[Call]]] = {
    "tmux send-keys, capture-pane": tmux,
    "pexpect, its defaults": pexpect_defaults,
    "jupyter_client over TCP": jupyter,
    "docker exec": lambda: engine_exec("docker"),
    "podman exec": lambda: engine_exec("podman"),
}


async def run(quick: bool = False) -> dict[str, Any]:
    """Return all figures: {"ways": {WAY: {"p50_ms", "p95_ms", "calls"}}, "left_out": {WAY: why}, "round_trip_ms":
    ...}."""
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan, *, others: bool = True) -> dict[str, Any]:
    ways: dict[str, Way] = {}
    left_out: dict[str, str] = {}
    async with AsyncExitStack() as stack, a_round_trip() as round_trip:
        for kind in RUNTIMES:
            try:
                shells = await stack.enter_async_context(tool_server(kind))
                ways |= {f"{kind}: {shell}": Way(call, True) for shell, call in shells.items()}
            except Unavailable as why:
                left_out[kind] = str(why)
        for name, other in OTHERS.items() if others else ():
            try:
                ways[name] = Way(await stack.enter_async_context(other()), False)
            except Unavailable as why:
                left_out[name] = str(why)
        for way in ways.values():
            await _repeat(way, FIRST if way.quick else 1)
            way.spent = []
        for _ in range(plan.rounds):
            await round_trip.take(plan.quick)
            for way in ways.values():
                await _repeat(way, plan.quick if way.quick else plan.slow)
    figures = {name: {**summary(way.spent), "calls": len(way.spent)} for name, way in ways.items()}
    return {"ways": figures, "left_out": left_out, "round_trip_ms": round_trip.median_ms()}


async def _repeat(way: Way, calls: int) -> None:
    for _ in range(calls):
        begun = time.perf_counter()
        await way.call()
        way.spent.append(time.perf_counter() - begun)


def show(results: dict[str, Any], console: Console) -> None:
    table = Table("way", "p50 ms", "p95 ms", "calls")
    for name, figures in results["ways"].items():
        table.add_row(name, *(str(figures[key]) for key in ("p50_ms", "p95_ms", "calls")))
    console.print(table)
    for name, why in results["left_out"].items():
        console.print(f"{name}: left out: {why}")


def main() -> dict[str, Any]:
    results = asyncio.run(run())
    show(results, Console())
    return results


if __name__ == "__main__":
    main()
