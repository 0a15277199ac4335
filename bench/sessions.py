"""Whole sessions per second: the service as shipped, with an engine that replies at once from a script.

A session is a sandbox, the built-in tool agent with two model calls and one bash call between them, a callable
evaluator, and the storage of its records. Up to 64 sessions run at once, as with the default lanes. The model costs
nothing, so only the rest of a session is measured. `cpu_ms_each` is the processor time of the service and all its
descendants (the zygote, its forks and their programs; see processor_time.py), so cores * 1000 / cpu_ms_each is the
maximum number of sessions per second on this machine. `traces_cpu_ms_each` is the processor time of a session's trace,
which is made and sent to a collector after the session's end.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import orjson

from bench.corpus import Corpus
from bench.processes import a_round_trip, echo
from bench.processor_time import cpu_seconds
from outrider.api.server import serving
from outrider.config import Config, ModelConfig, PluginsConfig
from outrider.evaluators.base import Outcome
from outrider.messages import Role
from outrider.plugins import resolve
from outrider.sandbox.runtimes.base import RuntimeKind
from outrider.service.assembly import open_service
from outrider.service.service import Service
from outrider.service.trace_export import SETTLED_SECONDS, TraceExport
from outrider.spec import EngineSpec, GroupSpec
from outrider.trajectory import SessionResult, StageSeconds

GROUP_SIZE = 8
ROUND_TRIPS = 300
WAIT_SECONDS = 60.0
SAID = "hello from the sandbox"
ANSWER = "It is done.<|im_end|>"


class Plan(msgspec.Struct, frozen=True):
    """Number of sessions per runtime, a multiple of the group size. `command` runs in each sandbox and prints
    `SAID`."""

    sessions: dict[str, int]
    command: str = f"echo {SAID}"


FULL = Plan({"memory": 768, "namespace": 512})
QUICK = Plan({"memory": 128, "namespace": 64})
WARM_SESSIONS = GROUP_SIZE


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    """Measure the rate and the stages of each runtime; for a runtime that cannot run on this machine, return the
    reason."""
    found: dict[str, Any] = {}
    async with a_round_trip() as round_trip, echo() as collector:
        await round_trip.take(ROUND_TRIPS)
        for kind, sessions in plan.sessions.items():
            found[kind] = await _of(kind, sessions, plan.command, collector.urls[0])
            await round_trip.take(ROUND_TRIPS)
        return {"runtimes": found, "round_trip_ms": round_trip.median_ms()}


async def _of(kind: str, sessions: int, command: str, collector: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        corpus = await asyncio.to_thread(Corpus.make, Path(folder))
        runtime: RuntimeKind = resolve("runtime", kind)
        can = runtime.available()
        return await _rate(corpus, kind, sessions, command, collector) if can.ok else {"unavailable": can.detail}


def grade(outcome: Outcome) -> float:
    """Grade with 1 if the tool's output reached the model."""
    return float(any(message.role is Role.TOOL and SAID in message.content for message in outcome.transcript))


async def _rate(corpus: Corpus, kind: str, sessions: int, command: str, collector: str) -> dict[str, Any]:
    call = orjson.dumps({"name": "bash", "arguments": {"command": command}}).decode()
    replies = [f"<tool_call>\n{call}\n</tool_call><|im_end|>", ANSWER]
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as data:
        config = Config(
            port=0,
            data=Path(data),
            plugins=PluginsConfig(allow=("*",)),
            model=ModelConfig(tokenizer=str(corpus.folder), renderer="qwen3"),
            engines=(EngineSpec(kind="scripted", options={"replies": replies}),),
        )
        async with open_service(config) as (service, node), serving(service, node):
            await _finished(service, kind, WARM_SESSIONS, after=0)
            traces = TraceExport(service.store, service.reader, collector, model="policy", failures=service.failures)
            await traces.send()
            begun, used = time.perf_counter(), cpu_seconds()
            results = await _finished(service, kind, sessions, after=1)
            seconds, spent = time.perf_counter() - begun, cpu_seconds() - used
            return {
                "sessions": sessions,
                "concurrency": config.lanes.run,
                "per_second": sessions / seconds,
                "cpu_ms_each": 1000 * spent / sessions,
                "traces_cpu_ms_each": 1000 * await _cpu_of_sending(traces) / sessions,
                "cores": len(os.sched_getaffinity(0)),
                "stage_ms": _stages(results),
            }


async def _cpu_of_sending(traces: TraceExport) -> float:
    """Send the traces of all sessions that have ended. Returns the processor seconds."""
    await asyncio.sleep(SETTLED_SECONDS)
    used = cpu_seconds()
    await traces.send()
    return cpu_seconds() - used


async def _finished(service: Service, kind: str, sessions: int, *, after: int) -> list[SessionResult]:
    """Submit `sessions` sessions and wait for the last. Raises RuntimeError if one does not end as expected."""
    groups = sessions // GROUP_SIZE
    for _ in range(groups):
        await service.submit(_group(kind))
    results: list[SessionResult] = []
    while len(results) < sessions:
        page = await service.results(after=after, wait=WAIT_SECONDS, limit=groups, samples=False)
        if not page.groups:
            raise RuntimeError(f"no group was done within {WAIT_SECONDS:g} s")
        after = page.cursor
        results += [session.result for group in page.groups for session in group.sessions if session.result]
    for result in results:
        if result.error is not None or result.verdict is None or result.verdict.reward != 1.0:
            raise RuntimeError(f"session {result.session_id}: {result.error or result.verdict}")
    return results


def _group(kind: str) -> GroupSpec:
    task = {
        "instruction": "Say hello from the sandbox.",
        "harness": {"agent": "tools", "options": {"tools": ["bash"]}},
        "runtime": {"kind": kind},
        "evaluator": {"kind": "callable", "path": "bench.sessions:grade"},
    }
    return GroupSpec.model_validate({"task": task, "n": GROUP_SIZE})


def _stages(results: list[SessionResult]) -> dict[str, float]:
    """Return the median of each stage in milliseconds."""
    return {
        name: 1000 * statistics.median(getattr(result.seconds, name) for result in results)
        for name in StageSeconds.__struct_fields__
    }
