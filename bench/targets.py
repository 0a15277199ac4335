"""What the figures should be, and whether they are. It measures nothing.

Targets are ratios to a floor that was measured in the same run (see `floors.py`), so that they mean the same on a slow
or busy machine; the few others are bytes, or bounds that a user sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from bench.sandboxes import BARE
from bench.tables import Results, Sheet, number

ROUND_TRIP = "the smallest HTTP round trip"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a figure of a benchmark should be at most; `floor` is what it is divided by, and what that is called."""

    name: str
    bench: str
    most: float
    unit: str
    of: Callable[[Any], float]
    floor: Callable[[Any], float] | None = None
    beside: str = ""


def _added(kind: str, byte: str) -> Target:
    def through(way: str) -> Callable[[Any], float]:
        return lambda found: float(found["latency"][kind][byte][way]["added_ms"]["p50"])

    return Target(
        name=f"gateway: added, {byte} byte, {kind}",
        bench="gateway",
        most=2.5,
        unit="ms",
        of=through("gateway"),
        floor=through("proxy"),
        beside="what a bare ASGI proxy adds",
    )


def _processor_time(kind: str, most: float) -> Target:
    def through(way: str) -> Callable[[Any], float]:
        return lambda found: float(found["rate"][kind][way]["cpu_ms"]["between"])

    return Target(
        name=f"gateway: processor time a call, 32 at once, {kind}",
        bench="gateway",
        most=most,
        unit="ms",
        of=through("gateway"),
        floor=through("proxy"),
        beside="a bare ASGI proxy's",
    )


def _round_trip(found: Any) -> float:
    return float(found["round_trip_ms"])


def _session(kind: str, most: float) -> Target:
    return Target(
        name=f"sessions: one of 64 at once, {kind} runtime",
        bench="sessions",
        most=most,
        unit="ms",
        of=lambda found: 1000 / found["runtimes"].get(kind, {}).get("per_second", 0.001),
        floor=_round_trip,
        beside=ROUND_TRIP,
    )


def _tool_call(shell: str, most: float) -> Target:
    return Target(
        name=f"tools: one {shell} call",
        bench="tools",
        most=most,
        unit="ms",
        of=lambda found: next(one["p50_ms"] for name, one in found["ways"].items() if name.endswith(f": {shell}")),
        floor=_round_trip,
        beside=ROUND_TRIP,
    )


def _started(kind: str) -> Callable[[Any], float]:
    return lambda found: float(found["kinds"][kind]["start"]["1"]["start"]["p50_ms"])


def _each_of_8(kind: str) -> Callable[[Any], float]:
    return lambda found: 1000 / found["kinds"][kind]["start"]["8"]["per_second"]


TARGETS = (
    _added("streamed", "first"),
    _added("streamed", "last"),
    _added("whole", "last"),
    _processor_time("streamed", 1.7),
    _processor_time("whole", 2.0),
    Target(
        name="turns: own work at 100k tokens",
        bench="turns",
        most=13.0,
        unit="ms",
        of=lambda found: found["points"][-1]["own_ms"],
        floor=_round_trip,
        beside=ROUND_TRIP,
    ),
    Target(
        name="turns: own work at 100k tokens",
        bench="turns",
        most=2.0,
        unit="ms",
        of=lambda found: found["points"][-1]["own_ms"],
        floor=lambda found: found["points"][0]["own_ms"],
        beside="the same at 1k",
    ),
    Target(
        name="floods: p99 of the others' calls",
        bench="floods",
        most=250,
        unit="ms",
        of=lambda found: found["flooded_ms"]["p99"],
    ),
    Target(
        name="floods: longest stall", bench="floods", most=50, unit="ms", of=lambda found: found["longest_stall_ms"]
    ),
    Target(
        name="service: stall of the loop with 5,000 live sessions, on the processor",
        bench="service",
        most=50,
        unit="ms",
        of=lambda found: found["stalls"]["ours"]["longest_processor_ms"],
    ),
    Target(name="floods: memory", bench="floods", most=500, unit="MiB", of=lambda found: found["memory_mib"]),
    Target(
        name="memory: kept per 2,000-token call",
        bench="memory",
        most=10_000,
        unit="bytes",
        of=lambda found: found["bytes_per_call"],
    ),
    Target(
        name="sandboxes: start, namespace",
        bench="sandboxes",
        most=2.0,
        unit="ms",
        of=_started("namespace"),
        floor=_started(BARE),
        beside="bwrap true",
    ),
    Target(
        name="sandboxes: one of 8 started and stopped at once",
        bench="sandboxes",
        most=2.0,
        unit="ms",
        of=_each_of_8("namespace"),
        floor=_each_of_8(BARE),
        beside="bwrap true",
    ),
    _tool_call("bash", 1.3),
    _tool_call("ipython", 2.2),
    _session("memory", 40),
    _session("namespace", 80),
)


def targets(results: Results) -> Sheet:
    """The targets that these results can speak to."""
    rows = []
    for target in TARGETS:
        if target.bench in results:
            value = target.of(results[target.bench])
            floor = None if target.floor is None else target.floor(results[target.bench])
            judged, unit = (value, f" {target.unit}") if floor is None else (value / floor, " x")
            rows.append(
                (
                    target.name,
                    f"{number(value)} {target.unit}",
                    "-" if floor is None else f"{number(floor)} {target.unit}",
                    target.beside or "-",
                    f"{number(judged)}{unit}",
                    f"{number(target.most)}{unit}",
                    "yes" if judged <= target.most else "no",
                )
            )
    columns = ("figure", "measured", "floor", "which is", "that makes", "at most", "met")
    return Sheet(title="Targets", columns=columns, rows=rows)
