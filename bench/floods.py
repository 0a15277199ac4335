"""The effect of two attacking sessions on other sessions, in each dialect. The attackers send bodies that cause as much
work as possible.

Fifty sessions make calls, with a pause between them, first alone and then while the two attackers send bodies: of 64
MiB, of the maximum size accepted, and of 1 MiB. Durations are milliseconds.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson

from bench.bodies import CHAT, FLOODS
from bench.corpus import Corpus
from bench.http import Client
from bench.processes import ROOT, World, world
from outrider.sessions.calls.limits import MAX_TEXT_BODY

INNOCENT = 50
ATTACKERS = 2
PAUSE_SECONDS = 0.5
CALM_SECONDS = 5.0
REPLY_TOKENS = 16
PERCENTILES = (50, 99)
SIZES = (64 << 20, MAX_TEXT_BODY - (64 << 10), 1 << 20)


class Plan(msgspec.Struct, frozen=True):
    """The kinds of floods, the sizes that every attacker sends of each, and the duration of the calls before the
    floods, in seconds."""

    kinds: Sequence[str]
    sizes: Sequence[int] = SIZES
    calm_seconds: float = CALM_SECONDS


FULL = Plan(tuple(FLOODS))
QUICK = Plan(("chat messages", "messages results", "responses items", "gemini contents"), calm_seconds=2.0)


class _Call(msgspec.Struct, frozen=True):
    began: float
    milliseconds: float
    status: int


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        corpus = await asyncio.to_thread(Corpus.make, Path(folder))
        async with world(corpus, reply_tokens=REPLY_TOKENS, sessions=INNOCENT + ATTACKERS) as processes:
            return await _measured(plan, processes)


async def _measured(plan: Plan, processes: World) -> dict[str, Any]:
    gateway = processes.gateway
    calls: list[_Call] = []
    async with Client() as client, asyncio.TaskGroup() as group:
        innocent = [group.create_task(_calling(client, url, calls)) for url in gateway.urls[:INNOCENT]]
        await asyncio.sleep(plan.calm_seconds)
        calm, memory, stalls = list(calls), gateway.memory_mib(), await _stalls(gateway.control)
        calls.clear()
        floods = []
        for kind in plan.kinds:
            began, before = time.perf_counter(), await _stalls(gateway.control)
            statuses = await asyncio.gather(*(_flooding(url, kind, plan.sizes) for url in gateway.urls[INNOCENT:]))
            after = await _stalls(gateway.control)
            during = [call for call in calls if call.began >= began]
            floods.append(
                {
                    "kind": kind,
                    "seconds": time.perf_counter() - began,
                    "statuses": statuses[0],
                    "calls": len(during),
                    "failed": sum(call.status != 200 for call in during),
                    "call_ms": _percentiles(during),
                    "stalls": after["count"] - before["count"],
                }
            )
        for task in innocent:
            task.cancel()
    after = await _stalls(gateway.control)
    return {
        "sessions": INNOCENT,
        "attackers": ATTACKERS,
        "sizes": list(plan.sizes),
        "calm_ms": _percentiles(calm),
        "flooded_ms": _percentiles(calls),
        "failed": sum(call.status != 200 for call in calls),
        "memory_mib": gateway.peak_memory_mib() - memory,
        "longest_stall_ms": 1000 * after["longest"],
        "longest_stall_before_ms": 1000 * stalls["longest"],
        "floods": floods,
    }


async def _calling(client: Client, url: str, calls: list[_Call]) -> None:
    """Run one innocent session: calls with a pause after each."""
    body = orjson.dumps(
        {"model": "policy", "max_tokens": REPLY_TOKENS, "messages": [{"role": "user", "content": "Hi"}]}
    )
    while True:
        began = time.perf_counter()
        async with client.post(url + CHAT, body) as answer:
            await answer.whole()
            calls.append(_Call(began, 1000 * (time.perf_counter() - began), answer.status))
        await asyncio.sleep(PAUSE_SECONDS)


async def _flooding(url: str, kind: str, sizes: Sequence[int]) -> list[int]:
    """Send a flood of each size and return the statuses of the replies."""
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.bodies", url, kind, *map(str, sizes)), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    out, _ = await sender.communicate()
    return list(map(int, out.split()))


async def _stalls(url: str) -> dict[str, float]:
    """Return the stalls recorded by the service's watchdog."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /v1/status HTTP/1.0\r\nHost: localhost\r\n\r\n")
    answer = await reader.read()
    writer.close()
    found: dict[str, float] = orjson.loads(answer.partition(b"\r\n\r\n")[2])["nodes"][0]["stalls"]
    return found


def _percentiles(calls: Sequence[_Call]) -> dict[str, float]:
    if len(calls) < 2:
        return {f"p{cut}": calls[0].milliseconds if calls else 0.0 for cut in PERCENTILES}
    cuts = statistics.quantiles([call.milliseconds for call in calls], n=100, method="inclusive")
    return {f"p{cut}": cuts[cut - 1] for cut in PERCENTILES}
