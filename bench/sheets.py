"""Results as sheets: a title, columns, rows of text, and what to know about them. It measures and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bench.sandboxes import BARE
from bench.yardstick import REFERENCE_MS

Results = dict[str, Any]
CUTS = ("p50", "p95")
CUTS_MS = ("p50_ms", "p95_ms")
SCALED = {"ms p50": 1, "ms": 1, "/s": -1}
"""Units that depend on the machine's speed, and how."""


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


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


def sheets(results: Results) -> list[Sheet]:
    """The targets that these results can speak to, then every result in full."""
    found = [sheet for name, result in results.items() for sheet in SHEETS[name](result)]
    targets = _targets(results)
    return [targets, *found] if targets.rows else found


def _targets(results: Results) -> Sheet:
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
                    f"{_number(value)} {target.unit}",
                    "-" if scaled is None else f"{_number(scaled)} {target.unit}",
                    f"{side} {_number(target.goal)} {target.unit}",
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
        f"The smallest HTTP call, aiohttp to uvicorn, took {_number(found['yardstick_ms'])} ms beside {name}, "
        f"{_number(slower)} times the {REFERENCE_MS} ms of the machine that the targets were set on."
        for name, found in results.items()
        if (slower := _slowness(found)) is not None
    ]


def _gateway(found: Any) -> list[Sheet]:
    latency = [
        (kind, f"{byte} byte", what, *(_number(figures[f"{what}_ms"][name]) for name in ("p50", "p95", "p99")))
        for kind, by_byte in found["latency"].items()
        for byte, figures in by_byte.items()
        for what in ("direct", "gateway", "added")
    ]
    rates = [
        (
            kind,
            *(_number(found["rate"][kind][f"{way}_per_second"]) for way in ("direct", "gateway")),
            *(_number(value) for value in found["rate"][kind]["cpu_ms_per_gateway_request"].values()),
        )
        for kind in ("streamed", "whole")
    ]
    return [
        Sheet(
            title="Gateway: latency of one call at a time",
            columns=("reply", "until", "way", "p50 ms", "p95 ms", "p99 ms"),
            rows=latency,
            note=f"{found['prompt_characters']} characters of fresh prompt, {found['reply_tokens']} tokens of reply.",
        ),
        Sheet(
            title=f"Gateway: calls per second at {found['rate']['concurrency']} at once",
            columns=("reply", "direct", "gateway", "CPU ms: client", "gateway", "engine"),
            rows=rates,
            note="Processor time is per call through the gateway; client and engine share the machine with it.",
        ),
    ]


def _turns(found: Any) -> list[Sheet]:
    names = ("own", "parse", "tokenizer", "engine_body", "direct", "through", "added")
    rows = [
        (f"{point['history_tokens']:,}", *(_number(point[f"{name}_ms"]) for name in names)) for point in found["points"]
    ]
    return [
        Sheet(
            title="Turns: one more turn on a long history, ms",
            columns=("history", "own", "parse", "tokenize", "ids", "direct", "gateway", "added"),
            rows=rows,
            note=f"{found['new_tokens']} new tokens, {found['reply_tokens']} in reply. Own work is processor time and "
            f"grows {found['growth']:.2f} times; parsing, tokenizing and writing the ids as JSON are parts of it.",
        )
    ]


def _dialects(found: Any) -> list[Sheet]:
    return [
        _dialect_calls(found["calls"]),
        _dialect_turns(found["turns"]),
        _dialect_streams(found["streams"]),
    ]


def _dialect_calls(found: Any) -> Sheet:
    latency = found["latency"]
    direct = next(iter(latency.values()))
    rows = [
        ("direct", f"{byte} byte", *(_number(direct[byte]["direct_ms"][cut]) for cut in CUTS), "-", "-")
        for byte in direct
    ]
    rows += [
        (name, f"{byte} byte", *(_number(figures[f"{what}_ms"][cut]) for what in ("gateway", "added") for cut in CUTS))
        for name, by_byte in latency.items()
        for byte, figures in by_byte.items()
    ]
    return Sheet(
        title="Dialects: latency of one streamed call at a time",
        columns=("dialect", "until", "p50 ms", "p95 ms", "added p50", "added p95"),
        rows=rows,
        note=f"{found['prompt_characters']} characters of fresh prompt, {found['reply_tokens']} tokens of reply.",
    )


def _dialect_turns(found: Any) -> Sheet:
    points = found["points"]
    rows = [
        (
            name,
            *(_number(point["own_ms"][name]) for point in points),
            f"{points[-1]['own_ms'][name] / points[0]['own_ms'][name]:.2f}",
            *(f"{point['request_bytes'][name] / 1000:,.0f}" for point in points),
        )
        for name in points[0]["own_ms"]
    ]
    lengths = [f"{point['history_tokens'] // 1000:,}k" for point in points]
    return Sheet(
        title="Dialects: own work of one more turn",
        columns=("conversation", *(f"ms at {at}" for at in lengths), "grows", *(f"KB sent at {at}" for at in lengths)),
        rows=rows,
        note=f"Processor time; {found['new_tokens']} new tokens, {found['reply_tokens']} in reply, not streamed. "
        "By id: previous_response_id and new items only; the others send their whole history.",
    )


def _dialect_streams(found: Any) -> Sheet:
    rows = [
        (
            name,
            _number(found["parse_us"]),
            *(_number(figures[key]) for key in ("write_us", "both_us", "bytes_per_token")),
        )
        for name, figures in found["dialects"].items()
    ]
    return Sheet(
        title="Dialects: processor time per streamed token",
        columns=("dialect", "parse µs", "write µs", "both µs", "bytes sent"),
        rows=rows,
        note=f"A reply of {found['tokens']:,} tokens, one at a time, its beginning and end included. Parsing knows no "
        "dialect and is measured once.",
    )


def _memory(found: Any) -> list[Sheet]:
    rows = [("all", _number(found["bytes_per_call"])), *((k, _number(v)) for k, v in found["most_held_by"].items())]
    return [
        Sheet(
            title="Memory: kept per call of a live conversation",
            columns=("allocated in", "bytes per call"),
            rows=rows,
            note=f"{found['tokens_per_call']} tokens a call, over {found['calls']} calls.",
        )
    ]


def _sessions(found: Any) -> list[Sheet]:
    runtimes = found["runtimes"]
    able = {kind: figures for kind, figures in runtimes.items() if "per_second" in figures}
    stages = [name for figures in list(able.values())[:1] for name in figures["stage_ms"]]
    rows = [
        (
            kind,
            _number(figures["per_second"]),
            _number(figures["cpu_ms_each"]),
            *(_number(value) for value in figures["stage_ms"].values()),
        )
        for kind, figures in able.items()
    ]
    unable = [f"{kind}: {figures['unavailable']}" for kind, figures in runtimes.items() if kind not in able]
    return [
        Sheet(
            title="Sessions: whole sessions per second, 64 at once",
            columns=("runtime", "per s", "CPU ms", *stages),
            rows=rows,
            note="Two model calls, one bash call and an evaluation each. CPU is per session; stages are medians in ms."
            + "".join(f" {reason}." for reason in unable),
        )
    ]


def _sandboxes(found: Any) -> list[Sheet]:
    kinds = found["kinds"]
    starts = [
        (
            kind,
            lanes,
            *(_number(figures[part][cut]) if part in figures else "-" for part in ("start", "stop") for cut in CUTS_MS),
            _number(figures["per_second"]),
            _number(figures["cpu_ms_each"]),
        )
        for kind, result in kinds.items()
        for lanes, figures in result["start"].items()
    ]
    with_calls = {kind: result["calls"] for kind, result in kinds.items() if "calls" in result}
    calls = [
        (kind, name, *(_number(made[name][figure]) for figure in ("p50_ms", "p95_ms", "per_second")))
        for kind, made in with_calls.items()
        for name in ("exec", "bash", "python")
    ]
    calls += [
        (kind, "bash, 8 sandboxes at once", "-", "-", _number(made["bash_in_8_sandboxes_per_second"]))
        for kind, made in with_calls.items()
    ]
    alive = found["alive"]
    left_out = " ".join(f"Left out: {kind} ({why})." for kind, why in found["left_out"].items())
    return [
        Sheet(
            title="Sandboxes: start and stop",
            columns=("runtime", "at once", "start ms", "p95 ms", "stop ms", "p95 ms", "per s", "CPU ms"),
            rows=starts,
            note=f"All kinds take turns. CPU that a daemon spends is not seen. {left_out}".strip(),
        ),
        Sheet(title="Sandboxes: tool calls", columns=("runtime", "call", "p50 ms", "p95 ms", "per second"), rows=calls),
        Sheet(
            title=f"Sandboxes: {alive['sandboxes']} namespace sandboxes alive at once",
            columns=(
                "MiB each",
                "with a live bash",
                "calls per second, all asked at once",
                "started per s",
                "stopped per s",
            ),
            rows=[
                (
                    _number(alive["mib_each"]),
                    _number(alive["mib_each_with_bash"]),
                    *(_number(alive[f"{what}_per_second"]) for what in ("calls", "starts", "stops")),
                )
            ],
        ),
    ]


def _tools(found: Any) -> list[Sheet]:
    rows = [
        (name, _number(figures["p50_ms"]), _number(figures["p95_ms"]), str(figures["calls"]))
        for name, figures in found["ways"].items()
    ]
    left_out = " ".join(f"Left out: {name} ({why})." for name, why in found["left_out"].items())
    return [
        Sheet(
            title="Tools: one call in a live shell or interpreter",
            columns=("way", "p50 ms", "p95 ms", "calls"),
            rows=rows,
            note=f"`echo hi` or `1 + 1`, taking turns. {left_out}".strip(),
        )
    ]


def _store(found: Any) -> list[Sheet]:
    alone, busy, queue = found["add_turn"], found["add_turn_concurrent"], found["queue"]
    rows = [
        ("add a turn, alone", _number(alone["p50_ms"]), _number(alone["p99_ms"]), _number(alone["per_second"])),
        (
            f"add a turn, {busy['concurrency']} at once",
            _number(busy["p50_ms"]),
            _number(busy["p99_ms"]),
            _number(busy["per_second"]),
        ),
        (f"read the queue of {queue['sessions']:,}", _number(queue["read_p50_ms"]), "-", "-"),
        ("submit a session", "-", "-", _number(queue["submitted_per_second"])),
    ]
    return [Sheet(title="Store: SQLite in a file", columns=("what", "p50 ms", "p99 ms", "per second"), rows=rows)]


def _number(value: float) -> str:
    """Three digits that mean something."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


SHEETS: dict[str, Callable[[Any], list[Sheet]]] = {
    "gateway": _gateway,
    "turns": _turns,
    "dialects": _dialects,
    "memory": _memory,
    "sessions": _sessions,
    "sandboxes": _sandboxes,
    "tools": _tools,
    "store": _store,
}
