"""`python scripts/soak.py --minutes 30`: runs a service for a long time at 80 % of its peak rate, and measures growth.

The service is `outrider serve`, with an engine that replies from a script; each session is a namespace sandbox, the
built-in agent with a tool call, and a grader in a new sandbox. First all lanes are kept full for a while, which gives
the peak rate. Then groups are submitted at 80 % of that rate, and a consumer reads and acknowledges their results.
Every ten seconds the service is measured from outside: resident memory, file descriptors, threads, and its descendant
processes. The last output is one line of JSON; the exit code is 1 if a session did not end well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from outrider.client.client import AsyncClient
from outrider.schemas import GroupView

ROOT = Path(__file__).parent.parent
POLICY = ROOT / "src" / "outrider" / "lab" / "demo" / "policy"
CONSUMER = "soak"
SHARE = 0.8
GROUP_SIZE = 8
OUTSTANDING = 16
"""Number of groups under way that keep all lanes full."""
LOOK_SECONDS = 10.0
SETTLING_SHARE = 0.2
"""Fraction of the run after which memory counts as settled: pools and caches are full by then."""
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo found > out.txt"}}\n</tool_call><|im_end|>'
TASK = {
    "instruction": "Write the word found into out.txt.",
    "harness": {"agent": "tools", "options": {"tools": ["bash"]}},
    "runtime": {"kind": "namespace"},
    "evaluator": {"run": "grep -qx found out.txt", "carry": ["out.txt"]},
}


class Look(msgspec.Struct, frozen=True):
    """One measurement of the service: seconds since the start, memory in MiB, and numbers of descriptors, threads and
    processes."""

    at: float
    memory_mb: float
    descriptors: int
    threads: int
    processes: int


class Done(msgspec.Struct):
    """The number of sessions that have ended since the start, and the number of these sessions without reward 1."""

    sessions: int = 0
    failed: int = 0

    def add(self, group: GroupView) -> None:
        for session in group.sessions:
            self.sessions += 1
            verdict = session.result.verdict if session.result else None
            if verdict is None or verdict.reward != 1.0:
                self.failed += 1
                print(f"session {session.id}: {session.result and (session.result.error or verdict)}", flush=True)


def look(pid: int, began: float) -> Look:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Look(
        at=time.monotonic() - began,
        memory_mb=int(status["VmRSS"].split()[0]) / 1024,
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
        processes=_below(pid),
    )


def _below(pid: int) -> int:
    count = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                count += 1 + _below(int(child))
    return count


async def submitting(client: AsyncClient, every: float, until: float) -> None:
    """Submit a group every `every` seconds. A late submission does not delay the following submissions."""
    due = time.monotonic()
    while due < until:
        await client.submit({"task": TASK, "n": GROUP_SIZE})
        due += every
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def peak(client: AsyncClient, seconds: float, done: Done) -> float:
    """Measure the sessions per second with all lanes full."""

    async def one_after_another() -> None:
        while time.monotonic() < end:
            group = await client.submit({"task": TASK, "n": GROUP_SIZE})
            for view in await client.wait([group.id]):
                done.add(view)

    began = time.monotonic()
    end = began + seconds
    async with asyncio.TaskGroup() as tasks:
        for _ in range(OUTSTANDING):
            tasks.create_task(one_after_another())
    return done.sessions / (time.monotonic() - began)


async def consuming(client: AsyncClient, done: Done) -> None:
    while True:
        page = await client.results(consumer=CONSUMER, wait=30.0)
        for group in page.groups:
            done.add(group)
        await client.ack(CONSUMER, page.cursor)


async def under_way(client: AsyncClient) -> int:
    """Return the number of sessions that have not ended."""
    return sum(count for state, count in (await client.status()).sessions.items() if state != "done")


def growth(looks: Sequence[Look]) -> float:
    """Return the growth of the memory in MiB per hour, by linear regression."""
    slope, _ = statistics.linear_regression([each.at for each in looks], [each.memory_mb for each in looks])
    return slope * 3600


async def soak(minutes: float, peak_seconds: float, folder: Path) -> dict[str, float]:
    script = folder / "script.json"
    script.write_text(json.dumps({"replies": [CALL, "It is done.<|im_end|>"]}))
    command = [sys.executable, "-c", "from outrider.cli import main; main()", "serve", "--port", "0"]
    command += ["--engine", f"scripted={script}", "--tokenizer", str(POLICY), "--renderer", "template:qwen3"]
    command += ["--data", str(folder / "data"), "--processes", "1"]
    with (folder / "log").open("wb") as log:
        service = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert service.stdout is not None
        url = (await service.stdout.readline()).decode().split()[-1]
        began = time.monotonic()
        first, done = Done(), Done()
        async with AsyncClient(url) as client:
            rate = await peak(client, peak_seconds, first)
            print(f"peak: {rate:.1f} sessions a second", flush=True)
            await client.results(consumer=CONSUMER, limit=1)
            await client.ack(CONSUMER, (await client.status()).cursor)
            looks: list[Look] = []
            end = time.monotonic() + minutes * 60
            steady = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                consumer = tasks.create_task(consuming(client, done))
                submitter = tasks.create_task(submitting(client, GROUP_SIZE / (SHARE * rate), end))
                while not submitter.done():
                    await asyncio.sleep(LOOK_SECONDS)
                    now = look(service.pid, began)
                    looks.append(now)
                    print(
                        f"{now.at:6.0f} s  {done.sessions:7d} sessions  {now.memory_mb:7.1f} MiB  "
                        f"{now.descriptors:4d} descriptors  {now.threads:3d} threads  {now.processes:4d} processes",
                        flush=True,
                    )
                seconds = time.monotonic() - steady
                while await under_way(client):  # noqa: ASYNC110  # sessions end in another process
                    await asyncio.sleep(LOOK_SECONDS / 10)
                await asyncio.sleep(LOOK_SECONDS / 10)
                consumer.cancel()
        last = look(service.pid, began)
        settled = looks[int(len(looks) * SETTLING_SHARE) :]
        return {
            "minutes": round(seconds / 60, 2),
            "peak_per_second": round(rate, 2),
            "sessions_per_second": round(done.sessions / seconds, 2),
            "sessions": done.sessions + first.sessions,
            "failed": done.failed + first.failed,
            "settled_memory_mb": round(settled[0].memory_mb, 1),
            "last_memory_mb": round(settled[-1].memory_mb, 1),
            "growth_mb_per_hour": round(growth(settled), 2),
            "settled_descriptors": max(each.descriptors for each in settled[: len(settled) // 2]),
            "last_descriptors": max(each.descriptors for each in settled[len(settled) // 2 :]),
            "idle_descriptors": last.descriptors,
            "idle_processes": last.processes,
        }
    finally:
        service.send_signal(signal.SIGTERM)
        await service.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a service for a long time, and look for growth.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long at 80 %% of the peak (default: 30)")
    parser.add_argument("--peak-seconds", type=float, default=60.0, help="how long the peak is measured (default: 60)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outrider-soak-") as folder:
        found = asyncio.run(soak(options.minutes, options.peak_seconds, Path(folder)))
    print(json.dumps(found))
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
