"""The targets of the figures, and the check whether the targets are met. This module measures nothing.

Targets are ratios to a floor that was measured in the same run (see `floors.py`), so that they hold on slow and busy
machines, too. A few targets are numbers of bytes, or limits that a user notices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from bench.rate import EIGHT_TOGETHER, ONE_BY_ONE, SLOWER, Engine
from bench.sandboxes import BARE
from bench.tables import Results, Sheet, number

ROUND_TRIP = "the smallest HTTP round trip"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The largest value that a figure should have. `floor` is the figure's divisor, and `beside` is the name of the
    floor. `elsewhere` is the value measured by three runs on another machine, if that value is larger."""

    name: str
    bench: str
    most: float
    unit: str
    of: Callable[[Any], float]
    floor: Callable[[Any], float] | None = None
    beside: str = ""
    elsewhere: str = ""


def _added(kind: str, byte: str) -> Target:
    def through(way: str) -> Callable[[Any], float]:
        return lambda found: found["latency"][kind][byte][way]["added_ms"]["p50"]

    return Target(
        name=f"added by the gateway to the {byte} byte, p50, one call at a time, {kind}",
        bench="gateway",
        most=2.5,
        unit="ms",
        of=through("gateway"),
        floor=through("proxy"),
        beside="added by a bare ASGI proxy",
    )


def _processor_time(kind: str, most: float) -> Target:
    def through(way: str) -> Callable[[Any], float]:
        return lambda found: found["rate"][kind][way]["cpu_ms"]["between"]

    return Target(
        name=f"processor time of a call in the gateway, 32 at once, {kind}",
        bench="gateway",
        most=most,
        unit="ms",
        of=through("gateway"),
        floor=through("proxy"),
        beside="in a bare ASGI proxy",
    )


def _rate(engine: Engine, at_once: int) -> Target:
    def of(way: str) -> Callable[[Any], float]:
        def rate(found: Any) -> float:
            tokens: float = _point(found, engine, at_once)[way]["tokens_per_second"]
            return tokens

        return rate

    return Target(
        name=f"tokens a second straight from an engine of {engine.tokens_per_second:,}, {engine.event_tokens} an event,"
        f" {at_once} at once",
        bench="rate",
        most=1.05,
        unit="a second",
        of=of("direct"),
        floor=of("through"),
        beside="through a service of 4 processes",
    )


def _token_time(side: str) -> Callable[[Any], float]:
    def of(found: Any) -> float:
        spent: float = _point(found, ONE_BY_ONE, 64)["through"]["us_per_token"][side]
        return spent

    return of


def _point(found: Any, engine: Engine, at_once: int) -> Any:
    """Return the result of one point. Raises KeyError for a point that was not measured, as in a quick run."""
    wanted = (*msgspec.structs.astuple(engine), at_once)
    for point in found["points"]:
        if wanted == tuple(point[name] for name in (*Engine.__struct_fields__, "at_once")):
            return point
    raise KeyError(wanted)


def _round_trip(found: Any) -> float:
    milliseconds: float = found["round_trip_ms"]
    return milliseconds


def _session(kind: str, most: float) -> Target:
    return Target(
        name=f"one of 64 whole sessions at once, {kind} runtime",
        bench="sessions",
        most=most,
        unit="ms",
        of=lambda found: 1000 / found["runtimes"].get(kind, {}).get("per_second", 0.001),
        floor=_round_trip,
        beside=ROUND_TRIP,
    )


def _tool_call(shell: str, most: float) -> Target:
    return Target(
        name=f"one {shell} call through the tool server",
        bench="tools",
        most=most,
        unit="ms",
        of=lambda found: next(one["p50_ms"] for name, one in found["ways"].items() if name.endswith(f": {shell}")),
        floor=_round_trip,
        beside=ROUND_TRIP,
    )


def _started(kind: str) -> Callable[[Any], float]:
    return lambda found: found["kinds"][kind]["start"]["1"]["start"]["p50_ms"]


def _each_of_8(kind: str) -> Callable[[Any], float]:
    return lambda found: 1000 / found["kinds"][kind]["start"]["8"]["per_second"]


TARGETS = (
    _added("streamed", "first"),
    _added("streamed", "last"),
    _added("whole", "last"),
    _processor_time("streamed", 1.7),
    _processor_time("whole", 2.0),
    _rate(EIGHT_TOGETHER, 64),
    _rate(EIGHT_TOGETHER, 256),
    _rate(SLOWER, 64),
    Target(
        name="a streamed token through a service of 4 processes, its part of the call included, 64 at once",
        bench="rate",
        most=2.5,
        unit="µs",
        of=_token_time("service"),
        floor=_token_time("engine"),
        beside="of a bare server that writes it",
    ),
    Target(
        name="a turn's own work at 100k tokens of history",
        bench="turns",
        most=13.0,
        unit="ms",
        elsewhere="18 to 20",
        of=lambda found: found["points"][-1]["own_ms"],
        floor=_round_trip,
        beside=ROUND_TRIP,
    ),
    Target(
        name="the same, beside that at 1k tokens",
        bench="turns",
        most=2.0,
        unit="ms",
        of=lambda found: found["points"][-1]["own_ms"],
        floor=lambda found: found["points"][0]["own_ms"],
        beside="at 1k tokens",
    ),
    Target(
        name="p99 of fifty sessions' calls while two others send the worst bodies",
        bench="floods",
        most=250,
        unit="ms",
        of=lambda found: found["flooded_ms"]["p99"],
    ),
    Target(
        name="longest block of the event loop meanwhile; 0 if none was above 50 ms",
        bench="floods",
        most=50,
        unit="ms",
        of=lambda found: found["longest_stall_ms"],
    ),
    Target(
        name="memory that the service took for 30 kinds of such bodies",
        bench="floods",
        most=500,
        unit="MiB",
        of=lambda found: found["memory_mib"],
    ),
    Target(
        name="p50 of a model call while five pages are open",
        bench="pages",
        most=1.2,
        unit="ms",
        of=lambda found: found["latency_ms"]["open"]["p50"],
        floor=lambda found: found["latency_ms"]["closed"]["p50"],
        beside="while no page is open",
    ),
    Target(
        name="longest block of the event loop with 5,000 live sessions, on the processor",
        bench="service",
        most=50,
        unit="ms",
        of=lambda found: found["stalls"]["ours"]["longest_processor_ms"],
    ),
    Target(
        name="memory kept per call of 2,000 tokens",
        bench="memory",
        most=10_000,
        unit="bytes",
        of=lambda found: found["bytes_per_call"],
        elsewhere="10,121",
    ),
    Target(
        name="a namespace sandbox started, with its limits and tool server",
        bench="sandboxes",
        most=2.0,
        unit="ms",
        of=_started("namespace"),
        elsewhere="1.7 to 2.2",
        floor=_started(BARE),
        beside="`bwrap true`",
    ),
    Target(
        name="one of 8 started and stopped at once",
        bench="sandboxes",
        most=2.0,
        unit="ms",
        of=_each_of_8("namespace"),
        elsewhere="1.9 to 2.4",
        floor=_each_of_8(BARE),
        beside="`bwrap true`",
    ),
    _tool_call("bash", 1.3),
    _tool_call("ipython", 2.2),
    _session("memory", 40),
    _session("namespace", 80),
)


def targets(results: Results) -> Sheet:
    """Return the targets of the benchmarks in these results."""
    rows = [_row(target, results[target.bench]) for target in TARGETS if target.bench in results]
    columns = ("what", "measured", "floor", "the floor is", "that makes", "our target", "met")
    return Sheet(title="Targets", columns=columns, rows=rows, note=_rates(results))


def _row(target: Target, found: Any) -> tuple[str, ...]:
    most = f"{number(target.most)} {'x' if target.floor else target.unit}"
    try:
        value = target.of(found)
        floor = None if target.floor is None else target.floor(found)
    except KeyError:  # the results are older than this figure, or the machine cannot measure this figure
        value, floor = None, None
    if value is None or floor == 0:  # a short run may take no tick of the processor's clock
        return target.name, "not measured", "-", target.beside or "-", "-", most, "-"
    judged, unit = (value, f" {target.unit}") if floor is None else (value / floor, " x")
    elsewhere = f"; another machine: {target.elsewhere}{unit}" if target.elsewhere else ""
    return (
        target.name,
        f"{number(value)} {target.unit}",
        "-" if floor is None else f"{number(floor)} {target.unit}",
        target.beside or "-",
        f"{number(judged)}{unit}{elsewhere}",
        most,
        "yes" if judged <= target.most else "no",
    )


def _rates(results: Results) -> str:
    if "gateway" not in results:
        return ""
    streamed, whole = (results["gateway"]["rate"][kind]["gateway"]["per_second"] for kind in ("streamed", "whole"))
    return (
        f"In the same run calls came at {number(streamed)} (streamed) and {number(whole)} (whole) a second, 32 at once."
    )
