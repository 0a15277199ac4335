"""Sessions on a Ray cluster of three machines complete although one machine is cut off and another one dies. Each
machine is a network namespace. Needs root, `ip` and Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from nodes.acts import AGENT, GRADER
from outrider.client.client import AsyncClient
from outrider.schemas import GroupView
from support.tokenizer import write_tokenizer

pytestmark = [
    pytest.mark.trainers,  # Ray is installed with the trainers' packages
    pytest.mark.timeout(420),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and `ip`"),
]

SESSIONS = 200
SECONDS = 3
MACHINES = 3
NET = "10.77.34"
TESTS = Path(__file__).parent.parent
OUTRIDER = [sys.executable, "-P", "-c", "from outrider.cli import main; main()"]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr}")
    return done.stdout


@contextmanager
def machines() -> Iterator[list[str]]:
    """Create one network namespace per machine, all on one bridge, and yield their names. The host has the address .254
    on the bridge."""
    tag = f"or{os.getpid() % 100_000}"
    names = [f"{tag}n{number}" for number in range(MACHINES)]
    with ExitStack() as undo:
        try:
            ip("link", "add", f"{tag}b", "type", "bridge")
            undo.callback(ip, "link", "del", f"{tag}b")
            ip("addr", "add", f"{NET}.254/24", "dev", f"{tag}b")
            ip("link", "set", f"{tag}b", "up")
            for number, name in enumerate(names):
                ip("netns", "add", name)
                undo.callback(ip, "netns", "del", name)
                undo.callback(kill_all, name)
                ip("link", "add", f"{name}o", "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", f"{name}o", "master", f"{tag}b", "up")
                for words in (
                    ["link", "set", "lo", "up"],
                    ["link", "set", "eth0", "up"],
                    ["addr", "add", f"{NET}.{number + 1}/24", "dev", "eth0"],
                ):
                    ip("-n", name, *words)
        except RuntimeError as error:
            pytest.skip(f"no network namespaces on a bridge can be made here: {error}")
        yield names


def kill_all(name: str) -> None:
    """Kill all processes of a machine."""
    while pids := ip("netns", "pids", name).split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


class Cluster:
    def __init__(self, names: list[str], folder: Path) -> None:
        self.names = names
        self._started: list[subprocess.Popen[bytes]] = []
        self._folder = folder
        self._environment = os.environ | {
            "PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}",
            "OUTRIDER_TOKEN": "root",
            "OUTRIDER_HOME": str(folder / "home"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "f" * 64,
            "RAY_health_check_period_ms": "1000",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def run(self, number: int, *command: str) -> subprocess.Popen[bytes]:
        """Start a command on machine `number`. Its output goes to a log file."""
        log = self._folder / f"{number}-{len(list(self._folder.glob('*.log')))}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[number], *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                cwd=self._folder,
            )
        self._started.append(process)
        return process

    def end(self) -> None:
        for name in self.names:
            kill_all(name)
        for process in self._started:
            process.wait()

    def start_ray(self, temporary: str) -> None:
        common = ["--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats"]
        for number in range(MACHINES):
            if number == 0:
                place = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={temporary}"]
            else:
                place = [f"--address={NET}.1:6379"]
            started = self.run(number, *RAY, "start", f"--node-ip-address={NET}.{number + 1}", *place, *common)
            assert started.wait(120) == 0, self.said()

    def said(self) -> str:
        """Return the end of every log."""
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self._folder.glob("*.log")))


@asynccontextmanager
async def joined(cluster: Cluster, folder: Path) -> AsyncIterator[AsyncClient]:
    """Start the service on the first machine and join all machines as its nodes. Yields a client."""
    script = folder / "script.json"
    script.write_text(json.dumps({"replies": ["hello"]}))
    settings = ["--engine", f"scripted={script}", "--tokenizer", str(write_tokenizer(folder / "tokenizer"))]
    settings += [
        "--renderer",
        "qwen3",
        "--data",
        str(folder / "data"),
        "--processes",
        "0",
        "--allow-plugin",
        "nodes.acts",
    ]
    url = f"http://{NET}.1:8700"
    cluster.run(0, *OUTRIDER, "serve", "--host", f"{NET}.1", "--insecure", *settings)
    async with AsyncClient(url, token="root") as client:
        await until(client, lambda names: True)
        flags = ["--ray", f"{NET}.1:6379", "--run-lane", "24", "--processes", "1"]
        cluster.run(0, *OUTRIDER, "nodes", "join", url, *flags)
        await until(client, lambda names: len(names) == MACHINES)
        yield client


async def until(client: AsyncClient, is_so: Any) -> set[str]:
    """Wait until `is_so` accepts the names of the nodes that have capacity, and return these names."""
    async with asyncio.timeout(120):
        while True:
            with suppress(Exception):  # the service may not be up yet
                names = {node.name for node in await client.nodes() if node.capacity}
                if is_so(names):
                    return names
            await asyncio.sleep(0.05)


async def test_a_link_is_cut_and_a_machine_dies_while_sessions_run(tmp_path: Path) -> None:
    task = {
        "instruction": "do it",
        "harness": {"agent": AGENT, "options": {"do": ["ask", f"hold held {SECONDS}", "ask"], "folder": str(tmp_path)}},
        "evaluator": {"kind": "callable", "path": GRADER},
        "runtime": {"kind": "memory"},
    }
    # The path of pytest's folder is too long for Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temporary, machines() as names:
        cluster = Cluster(names, tmp_path)
        try:
            cluster.start_ray(temporary)
            async with joined(cluster, tmp_path) as client:
                nodes = await until(client, lambda names: len(names) == MACHINES)
                submitted = await client.submit({"task": task, "n": SESSIONS})
                await asyncio.sleep(SECONDS / 2)
                began = time.monotonic()
                ip("link", "set", f"{names[1]}o", "down")
                kill_all(names[2])
                left = await until(client, lambda names: len(names) == 1)
                detected = time.monotonic() - began
                assert left < nodes
                view = await done(client, submitted)
                ended = time.monotonic() - began
                results = [session.result for session in view.sessions if session.result is not None]
                assert len({result.session_id for result in results}) == SESSIONS
                assert {result.stop_reason.value for result in results} == {"completed"}, cluster.said()
                assert {result.turns for result in results} == {2}
                again = sum(session.attempt > 1 for session in view.sessions)
                print(
                    f"detected after {detected:.1f} s; {again} of {SESSIONS} sessions ran again; "
                    f"all done after {ended:.1f} s"
                )
                assert again > 0
                assert detected < 40
                ip("link", "set", f"{names[1]}o", "up")
                await until(client, lambda names: len(names) == 2)
        except BaseException:
            print(cluster.said())
            raise
        finally:
            cluster.end()


async def done(client: AsyncClient, group: GroupView) -> GroupView:
    async with asyncio.timeout(240):
        return (await client.wait([group.id]))[0]
