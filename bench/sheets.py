"""Converts results to sheets: a title, columns, rows of text, and notes. This module measures and prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.tables import Results, Sheet, number
from bench.targets import targets

CUTS = ("p50", "p95")
CUTS_MS = ("p50_ms", "p95_ms")


def sheets(results: Results) -> list[Sheet]:
    """Return the sheet of the targets that these results can be compared with, followed by the sheets of all
    results."""
    found = [sheet for name, result in results.items() for sheet in SHEETS[name](result)]
    first = targets(results)
    return [first, *found] if first.rows else found


def _gateway(found: Any) -> list[Sheet]:
    latency = [
        (
            kind,
            f"{byte} byte",
            through,
            *(number(figures["spent_ms"][cut]) for cut in ("p50", "p95", "p99")),
            *(number(figures["added_ms"][cut]) for cut in CUTS),
        )
        for kind, by_byte in found["latency"].items()
        for byte, by_way in by_byte.items()
        for through, figures in by_way.items()
    ]
    rates = [
        (kind, through, number(figures["per_second"]), *(number(value) for value in figures["cpu_ms"].values()))
        for kind in ("streamed", "whole")
        for through, figures in found["rate"][kind].items()
    ]
    return [
        Sheet(
            title="Gateway: latency of one call at a time",
            columns=("reply", "until", "through", "p50 ms", "p95 ms", "p99 ms", "added p50", "added p95"),
            rows=latency,
            note=f"{found['prompt_characters']} characters of fresh prompt, {found['reply_tokens']} tokens of reply. "
            "The relay copies bytes; the proxy is a bare ASGI application. Both pass on what the gateway would send.",
        ),
        Sheet(
            title=f"Gateway: calls per second at {found['rate']['concurrency']} at once",
            columns=("reply", "through", "per s", "CPU ms: client", "between", "engine"),
            rows=rates,
            note="Processor time is per call; all processes share the machine.",
        ),
    ]


def _rate(found: Any) -> list[Sheet]:
    rows = [
        (
            f"{point['protocol']}, {point['tokens_per_second']:,} in all, {point['event_tokens']} an event",
            str(point["at_once"]),
            *(number(point[way]["tokens_per_second"]) for way in ("direct", "through")),
            f"{point['ratio']:.2f}",
            *(number(point["through"]["us_per_token"][side]) for side in ("service", "engine", "client")),
            number(sum(point["through"]["cores"].values())),
        )
        for point in found["points"]
    ]
    parts, lengths = found["service_us"], found["reply_tokens"]
    return [
        Sheet(
            title=f"Rate: tokens per second through a service of {found['processes']} processes",
            columns=(
                *("engine", "at once", "direct", "through", "ratio"),
                *("CPU µs a token: service", "engine", "client", "cores taken"),
            ),
            rows=rows,
            note=f"Streamed replies of {lengths[0]} to {lengths[1]} tokens. All processes share the machine. The"
            f" service's processor time: {number(parts['call'])} µs for a call and {number(parts['token'])} µs for each"
            " token that comes by itself, at the most clients of the first engine.",
        )
    ]


def _turns(found: Any) -> list[Sheet]:
    names = ("own", "parse", "tokenizer", "engine_body", "direct", "through", "added")
    rows = [
        (f"{point['history_tokens']:,}", *(number(point[f"{name}_ms"]) for name in names)) for point in found["points"]
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
    rows = [
        (name, f"{byte} byte", *(number(figures[f"{what}_ms"][cut]) for what in ("spent", "added") for cut in CUTS))
        for name, by_byte in found["latency"].items()
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
            *(number(point["own_ms"][name]) for point in points),
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
            number(found["parse_us"]),
            *(number(figures[key]) for key in ("write_us", "both_us", "bytes_per_token")),
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
    rows = [("all", number(found["bytes_per_call"])), *((k, number(v)) for k, v in found["most_held_by"].items())]
    return [
        Sheet(
            title="Memory: kept per call of a live conversation",
            columns=("allocated in", "bytes per call"),
            rows=rows,
            note=f"{found['tokens_per_call']} tokens a call, over {found['calls']} calls.",
        )
    ]


def _floods(found: Any) -> list[Sheet]:
    rows = [
        (
            flood["kind"],
            number(flood["seconds"]),
            " ".join(map(str, flood["statuses"])),
            str(flood["calls"]),
            str(flood["failed"]),
            *(number(flood["call_ms"][cut]) for cut in ("p50", "p99")),
            str(flood["stalls"]),
        )
        for flood in found["floods"]
    ]
    sizes = ", ".join(f"{size / (1 << 20):.3g}" for size in found["sizes"])
    calm, flooded = found["calm_ms"], found["flooded_ms"]
    return [
        Sheet(
            title=f"Floods: calls of {found['sessions']} sessions while {found['attackers']} others send huge bodies",
            columns=("flood", "seconds", "answers", "calls", "failed", "p50 ms", "p99 ms", "stalls"),
            rows=rows,
            note=f"Bodies of {sizes} MiB, one after another. Calls took {number(calm['p50'])} ms (p99"
            f" {number(calm['p99'])}) before, {number(flooded['p50'])} (p99 {number(flooded['p99'])}) over all floods."
            f" Memory of the service grew by {number(found['memory_mib'])} MiB at most; its event loop stood still for"
            f" {number(found['longest_stall_ms'])} ms at the longest.",
        )
    ]


def _sessions(found: Any) -> list[Sheet]:
    runtimes = found["runtimes"]
    able = {kind: figures for kind, figures in runtimes.items() if "per_second" in figures}
    stages = [name for figures in list(able.values())[:1] for name in figures["stage_ms"]]
    rows = [
        (
            kind,
            number(figures["per_second"]),
            # Older results lack these figures.
            *(number(figures[name]) if name in figures else "-" for name in ("cpu_ms_each", "traces_cpu_ms_each")),
            *(number(value) for value in figures["stage_ms"].values()),
        )
        for kind, figures in able.items()
    ]
    unable = [f"{kind}: {figures['unavailable']}" for kind, figures in runtimes.items() if kind not in able]
    return [
        Sheet(
            title="Sessions: whole sessions per second, 64 at once",
            columns=("runtime", "per s", "CPU ms", "of its trace", *stages),
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
            *(number(figures[part][cut]) if part in figures else "-" for part in ("start", "stop") for cut in CUTS_MS),
            number(figures["per_second"]),
            number(figures["cpu_ms_each"]),
        )
        for kind, result in kinds.items()
        for lanes, figures in result["start"].items()
    ]
    with_calls = {kind: result["calls"] for kind, result in kinds.items() if "calls" in result}
    calls = [
        (kind, name, *(number(made[name][figure]) for figure in ("p50_ms", "p95_ms", "per_second")))
        for kind, made in with_calls.items()
        for name in ("exec", "bash", "python")
        if name in made
    ]
    calls += [
        (kind, "bash, 8 sandboxes at once", "-", "-", number(made["bash_in_8_sandboxes_per_second"]))
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
                    number(alive["mib_each"]),
                    number(alive["mib_each_with_bash"]),
                    *(number(alive[f"{what}_per_second"]) for what in ("calls", "starts", "stops")),
                )
            ],
        ),
    ]


def _tools(found: Any) -> list[Sheet]:
    rows = [
        (name, number(figures["p50_ms"]), number(figures["p95_ms"]), str(figures["calls"]))
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
    stores: dict[str, Any] = found["stores"]
    first = next(iter(stores.values()))
    at_once, queued = first["add_turn_concurrent"]["concurrency"], first["queue"]["sessions"]
    measures = (
        ("add a turn, alone: p50 ms", "add_turn", "p50_ms"),
        ("p99 ms", "add_turn", "p99_ms"),
        (f"add a turn, {at_once} at once: a second", "add_turn_concurrent", "per_second"),
        ("p50 ms", "add_turn_concurrent", "p50_ms"),
        ("p99 ms", "add_turn_concurrent", "p99_ms"),
        (f"groups of {found['group_size']} submitted a second", "groups", "submitted_per_second"),
        ("sessions started a second", "groups", "sessions_started_per_second"),
        ("sessions finished a second", "groups", "sessions_finished_per_second"),
        ("groups finished a second", "groups", "groups_finished_per_second"),
        ("results read a second", "groups", "results_read_per_second"),
        (f"read the queue of {queued:,}: p50 ms", "queue", "read_p50_ms"),
    )
    rows = [(what, *(number(store[part][name]) for store in stores.values())) for what, part, name in measures]
    return [Sheet(title="Store", columns=("what", *stores), rows=rows)]


def _service(found: Any) -> list[Sheet]:
    finished, live = f"{found['finished']:,} sessions finished", f"{found['live']:,} sessions under way"
    measures = (
        (f"groups accepted a second, {found['clients']} clients", "accepted_groups_per_second", ""),
        ("groups read a second", "results_per_second", "without_samples"),
        ("groups read a second, with samples", "results_per_second", "with_samples"),
        (f"seconds to start, {finished}", "ready_seconds", ""),
        (f"seconds to start after kill -9, {live}", "after_kill", "ready_seconds"),
        ("seconds until all of them run again", "after_kill", "running_seconds"),
        ("MiB of memory, nothing stored", "memory_mib", "empty"),
        (f"MiB, {finished}", "memory_mib", "with_finished"),
        (f"MiB, {live} beside them", "memory_mib", "with_live"),
        ("KiB for each session under way", "kib_per_live_session", ""),
    )
    stores: dict[str, Any] = found["stores"]
    rows = [
        (what, *(number(store[part][name] if name else store[part]) for store in stores.values()))
        for what, part, name in measures
    ]
    note = "Groups of 8 sessions with one model call each, over HTTP; the service is a process of its own."
    sheets = [
        Sheet(title="Service: groups in, results out, and kill -9", columns=("what", *stores), rows=rows, note=note)
    ]
    if (stalls := found.get("stalls")) is not None:
        measured = {
            "longest stall, ms": "longest_ms",
            "of it on the processor, ms": "longest_processor_ms",
            "stalls over 50 ms": "count",
            "KiB that each ended session has left": "grown_kib_per_session",
        }
        sheets.append(
            Sheet(
                title=f"Service: its event loop with {stalls['live']:,} live sessions in one process",
                columns=("what", "Python's collector of garbage", "ours"),
                rows=[
                    (what, *(number(stalls[of][name]) for of in ("python", "ours"))) for what, name in measured.items()
                ],
                note=f"As its own watchdog saw it, while {stalls['beside']:,} more sessions ran and ended.",
            )
        )
    return sheets


def _pages(found: Any) -> list[Sheet]:
    latency, cpu = found["latency_ms"], found["cpu_ms_per_second"]
    sides = (("no page", "closed"), (f"{found['pages']} pages", "open"))
    ratio, same = (
        f"{number(one['median'])} ({number(one['low'])} to {number(one['high'])})"
        for one in (found["ratio"], found["same"])
    )
    return [
        Sheet(
            title=f"Pages: a model call while {found['pages']} pages are open, {found['finished']:,} sessions stored",
            columns=("open", *(f"call {cut}, ms" for cut in CUTS), "CPU of the service, ms a second"),
            rows=[(what, *(number(latency[side][cut]) for cut in CUTS), number(cpu[side])) for what, side in sides],
            note=f"Medians of {found['pairs']} pairs of blocks, in turn. Ratio of the p50 of a pair, and the middle"
            f" half of the pairs: {ratio}. The same of two blocks without pages, which is the noise: {same}.",
        )
    ]


def _history(found: Any) -> list[Sheet]:
    rows = [
        (name, number(figures["empty_p50_ms"]), number(figures["full_p50_ms"]))
        for name, figures in found["operations"].items()
    ]
    removal = found["removal"]
    return [
        Sheet(
            title=f"History: the store beside {found['sessions']:,} finished sessions, p50 ms",
            columns=("what", "empty store", "with the history"),
            rows=rows,
            note=f"A file of {found['file_bytes'] / (1 << 30):.1f} GiB. Removal: "
            f"{number(removal['sessions_per_second'])} sessions per second; its longest step takes "
            f"{number(removal['longest_step_ms'])} ms.",
        )
    ]


def _scaling(found: Any) -> list[Sheet]:
    rows = [
        (
            str(point["processes"]),
            number(point["sessions_per_second"]),
            f"{100 * point['efficiency']:.0f} %",
            f"{100 * point['of_the_possible']:.0f} %",
        )
        for point in found["points"]
    ]
    return [
        Sheet(
            title="Scaling: sessions in several processes",
            columns=("processes", "sessions per second", "efficiency", "of what the slots allow"),
            rows=rows,
            note=f"{found['slots_each']} slots in each process; a session waits {found['session_seconds']:.1f} s.",
        )
    ]


def _graders(found: Any) -> list[Sheet]:
    names = ("p50_ms", "p95_ms", "per_second", "cpu_ms")
    rows = []
    for kind, by_width in found["kinds"].items():
        beside = by_width["beside"]
        for width, figures in by_width.items():
            if width != "beside":
                floor = figures.get("floor")
                cells = (
                    ("-",) * 4
                    if floor is None
                    else (
                        *(number(floor[name]) for name in ("p50_ms", "per_second", "cpu_ms")),
                        number(figures["cpu_ms"] / floor["cpu_ms"]),
                    )
                )
                rows.append((kind, width, *(number(figures[name]) for name in names), *cells, beside or "-"))
    left_out = "".join(f" Left out: {name} ({why})." for name, why in found["left_out"].items())
    return [
        Sheet(
            title="Graders: one verdict",
            columns=(
                *("kind", "at once", "p50 ms", "p95 ms", "per s", "CPU ms"),
                *("floor: p50 ms", "per s", "CPU ms", "that makes x", "the floor is"),
            ),
            rows=rows,
            note=f"{found['verdicts']} verdicts of each, {found['slow']} of those that start programs, in sandboxes of "
            f"kind {found['runtime']}. Answers differ. Processor time is per verdict, with all processes that were "
            f"started. The ratio is of processor time.{left_out}",
        )
    ]


def _starts(found: Any) -> list[Sheet]:
    return [
        Sheet(
            title="Starts: processor time of a short command",
            columns=("command", "CPU ms", "of a Python that does nothing"),
            rows=[
                (f"outrider {name}", number(1000 * seconds), f"{seconds / found['python']:.1f} x")
                for name, seconds in found["commands"].items()
            ],
            note=f"A Python that does nothing takes {number(1000 * found['python'])} ms.",
        )
    ]


def _sampling(found: Any) -> list[Sheet]:
    return [
        Sheet(
            title=f"Sampling: batches of {found['n']}-sample groups, {where}",
            columns=(
                "prompts that teach nothing",
                "groups are submitted",
                "per batch",
                "slots idle",
                "batches per hour",
            ),
            rows=[
                (
                    f"{100 * row['useless']:.0f} %",
                    row["way"],
                    number(row["per_batch"]),
                    f"{100 * row['idle']:.0f} %",
                    f"{waves['per_batch'] / row['per_batch']:.2f}",
                )
                for row in rows
                for waves in rows
                if waves["useless"] == row["useless"] and waves["way"].endswith("waves of 3 batches")
            ],
            note=note,
        )
        for where, rows, note in (
            (
                "simulated",
                found["simulated"],
                "Times are in shortest rollouts. Batches per hour are held against those of waves of 3 batches.",
            ),
            ("the whole service, sandboxes in memory", found["real"], "Times are in seconds."),
        )
    ]


def _staleness(found: Any) -> list[Sheet]:
    ages = [
        Sheet(
            title=f"Staleness: batches of {found['n']}-sample groups, {where}",
            columns=(
                "groups are submitted",
                "per batch",
                "slots idle",
                "of busy time trained on",
                "oldest token",
                "groups over the bound",
                "batches per hour",
            ),
            rows=[
                (
                    row["way"],
                    number(row["per_batch"]),
                    f"{100 * row['idle']:.0f} %",
                    f"{100 * row['trained']:.0f} %",
                    str(row["oldest"]),
                    f"{100 * row['overdue']:.0f} %",
                    f"{rows[0]['per_batch'] / row['per_batch']:.2f}",
                )
                for row in rows
            ],
            note=f"{note} The version is raised after each batch; ages are in versions. Batches per hour are held "
            "against those of the first row.",
        )
        for where, rows, note in (
            ("half of the prompts teach nothing", found["bounded"], "Times are in shortest rollouts."),
            (
                "a trainer that takes as long as sampling",
                found["with_trainer"],
                "Durations are log-normal, and every prompt is trained on; times are in median rollouts.",
            ),
        )
    ]
    bias = Sheet(
        title="Staleness: mean reward of the batches, if the reward depends on the duration",
        columns=("groups are submitted", "right answers are slow", "wrong answers are slow"),
        rows=[(row["way"], f"{row['right']:.3f}", f"{row['wrong']:.3f}") for row in found["bias"]],
        note="Half of all answers are right, so the mean without a bias is 0.5.",
    )
    return [*ages, bias]


def _samples(found: Any) -> list[Sheet]:
    forms = {"Arrow stream": found["stream"], "JSON": found["json"]}
    return [
        Sheet(
            title=f"Samples: from the service to a reader, {found['tokens']:,} tokens in {found['turns']} turns each",
            columns=("form", "CPU ms: service", "reader", "KB", "per s, one reader", "two readers"),
            rows=[
                (
                    form,
                    number(row["service_ms"]),
                    number(row["reader_ms"]),
                    f"{row['bytes'] / 1000:,.0f}",
                    f"{row['per_second']:,.0f}",
                    f"{row['per_second_of_two']:,.0f}",
                )
                for form, row in forms.items()
            ],
            note=f"{found['sampled']} of the tokens were sampled. Figures are per sample. Making the four columns as "
            f"arrays takes the reader a further {number(found['built_ms'])} ms.",
        ),
        Sheet(
            title="Samples: writing them to a file",
            columns=("format", "CPU ms", "KB", "per s"),
            rows=[
                (kind, number(row["ms"]), f"{row['bytes'] / 1000:,.0f}", f"{row['per_second']:,.0f}")
                for kind, row in found["files"].items()
            ],
            note="Without fetching them. The second of two files in a process.",
        ),
    ]


def _routing(found: Any) -> list[Sheet]:
    rows = found["rows"]
    return [
        Sheet(
            title=f"Routing: {case}",
            columns=(
                "policy",
                "cached",
                "anew M",
                "90 % s",
                "all s",
                "first s",
                "moves",
            ),
            rows=[
                (
                    row["policy"],
                    f"{100 * row['cached']:.1f} %",
                    number(row["read_tokens"] / 1e6),
                    f"{row['seconds_90']:,.0f}",
                    f"{row['seconds']:,.0f}",
                    number(row["first_token_p95"]),
                    number(row["moves_per_session"]),
                )
                for row in rows
                if row["case"] == case
            ],
            note=f"Simulated: {found['engines']} engines, {at_once} sessions at once; the same on every machine. Share "
            "of prompt tokens cached, millions read anew, seconds until 90 % and all of the sessions were done, p95 of "
            "the seconds to the first token, moves per session.",
        )
        for case, at_once in {row["case"]: row["at_once"] for row in rows}.items()
    ]


SHEETS: dict[str, Callable[[Any], list[Sheet]]] = {
    "gateway": _gateway,
    "rate": _rate,
    "turns": _turns,
    "dialects": _dialects,
    "floods": _floods,
    "memory": _memory,
    "sessions": _sessions,
    "sandboxes": _sandboxes,
    "tools": _tools,
    "store": _store,
    "service": _service,
    "pages": _pages,
    "scaling": _scaling,
    "history": _history,
    "graders": _graders,
    "sampling": _sampling,
    "staleness": _staleness,
    "samples": _samples,
    "starts": _starts,
    "routing": _routing,
}
