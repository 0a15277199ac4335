"""What the figures should be on two cores, and whether they are. It measures nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from bench.sandboxes import BARE
from bench.tables import Results, Sheet, number
from bench.yardstick import REFERENCE_MS

SCALED = {"ms p50": 1, "ms": 1, "/s": -1}
"""Units that depend on the machine's speed, and how."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a figure should be on two cores; `of` finds it in all results. `most` says on which side to be."""

    name: str
    bench: str
    goal: float
    unit: str
    most: bool
    of: Callable[[Any], float]


def _added(kind: str, byte: str) -> Target:
    return Target(
        name=f"gateway: added, {byte} byte, {kind}",
        bench="gateway",
        goal=1.5,
        unit="ms p50",
        most=True,
        of=lambda found: found["latency"][kind][byte]["added_ms"]["p50"],
    )


def _requests(kind: str) -> Target:
    return Target(
        name=f"gateway: 32 at once, {kind}",
        bench="gateway",
        goal=600,
        unit="/s",
        most=False,
        of=lambda found: found["rate"][kind]["gateway_per_second"],
    )


def _whole_sessions(kind: str) -> Target:
    return Target(
        name=f"sessions: {kind} runtime",
        bench="sessions",
        goal=50,
        unit="/s",
        most=False,
        of=lambda found: found["runtimes"].get(kind, {}).get("per_second", 0.0),
    )


def _tool_call(shell: str, goal: float) -> Target:
    return Target(
        name=f"tools: one {shell} call",
        bench="tools",
        goal=goal,
        unit="ms p50",
        most=True,
        of=lambda found: next(one["p50_ms"] for name, one in found["ways"].items() if name.endswith(f": {shell}")),
    )


def _ratio(found: Any) -> float:
    ours, bare = (found["kinds"][kind]["start"]["1"]["start"]["p50_ms"] for kind in ("namespace", BARE))
    return float(ours / bare)


TARGETS = (
    _added("streamed", "first"),
    _added("streamed", "last"),
    _added("whole", "last"),
    _requests("streamed"),
    _requests("whole"),
    Target(
        name="turns: own work at 100k tokens",
        bench="turns",
        goal=3.0,
        unit="ms",
        most=True,
        of=lambda found: found["points"][-1]["own_ms"],
    ),
    Target(
        name="turns: growth from 1k to 100k",
        bench="turns",
        goal=2.0,
        unit="x",
        most=True,
        of=lambda found: found["growth"],
    ),
    Target(
        name="floods: p99 of the others' calls",
        bench="floods",
        goal=250,
        unit="ms",
        most=True,
        of=lambda found: found["flooded_ms"]["p99"],
    ),
    Target(
        name="floods: longest stall",
        bench="floods",
        goal=50,
        unit="ms",
        most=True,
        of=lambda found: found["longest_stall_ms"],
    ),
    Target(
        name="floods: memory",
        bench="floods",
        goal=500,
        unit="MiB",
        most=True,
        of=lambda found: found["memory_mib"],
    ),
    Target(
        name="memory: kept per 2,000-token call",
        bench="memory",
        goal=10_000,
        unit="bytes",
        most=True,
        of=lambda found: found["bytes_per_call"],
    ),
    Target(
        name="sandboxes: start, namespace",
        bench="sandboxes",
        goal=10,
        unit="ms p50",
        most=True,
        of=lambda found: found["kinds"]["namespace"]["start"]["1"]["start"]["p50_ms"],
    ),
    Target(
        name="sandboxes: started and stopped, 8 at once",
        bench="sandboxes",
        goal=200,
        unit="/s",
        most=False,
        of=lambda found: found["kinds"]["namespace"]["start"]["8"]["per_second"],
    ),
    Target(
        name="sandboxes: start beside bwrap true",
        bench="sandboxes",
        goal=2.0,
        unit="x",
        most=True,
        of=_ratio,
    ),
    _tool_call("bash", 0.3),
    _tool_call("ipython", 0.5),
    _whole_sessions("memory"),
    _whole_sessions("namespace"),
)


def targets(results: Results) -> Sheet:
    """The targets that these results can speak to."""
    rows = []
    for target in TARGETS:
        if target.bench in results:
            found = results[target.bench]
            value, slower = target.of(found), _slowness(found)
            scaled = None if slower is None or target.unit not in SCALED else value / slower ** SCALED[target.unit]
            side = "at most" if target.most else "at least"
            rows.append(
                (
                    target.name,
                    f"{number(value)} {target.unit}",
                    "-" if scaled is None else f"{number(scaled)} {target.unit}",
                    f"{side} {number(target.goal)} {target.unit}",
                    _met(target, value, scaled),
                )
            )
    columns = ("figure", "measured", "at reference speed", "target", "met")
    note = "\n".join(_yardsticks(results))
    return Sheet(title="Targets (on 2 cores)", columns=columns, rows=rows, note=note)


def _slowness(found: Any) -> float | None:
    """How many times as long the yardstick took as on the machine of the targets; None if it was not measured."""
    return found["yardstick_ms"] / REFERENCE_MS if "yardstick_ms" in found else None


def _met(target: Target, value: float, scaled: float | None) -> str:
    def good(figure: float) -> bool:
        return figure <= target.goal if target.most else figure >= target.goal

    if good(value):
        return "yes"
    return "at reference speed" if scaled is not None and good(scaled) else "no"


def _yardsticks(results: Results) -> list[str]:
    return [
        f"The smallest HTTP call, aiohttp to uvicorn, took {number(found['yardstick_ms'])} ms beside {name}, "
        f"{number(slower)} times the {REFERENCE_MS} ms of the machine that the targets were set on."
        for name, found in results.items()
        if (slower := _slowness(found)) is not None
    ]
