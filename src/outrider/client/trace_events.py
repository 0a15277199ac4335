"""Converts timelines of sessions to events of the Trace Event Format, which ui.perfetto.dev and chrome://tracing show.

Each session becomes a process of the trace. Each kind of span gets one row, or several rows if spans overlap.
Invariant: the spans of a row do not overlap; the viewers would show overlapping spans as nested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from outrider.schemas import SpanView, TimelineView

ROWS = {
    "stage": "stages",
    "sandbox": "sandboxes",
    "call": "model calls",
    "failed_call": "failed calls",
    "command": "commands",
    "process": "processes",
    "network": "network",
    "error": "errors",
}
"""The name of the row for each kind of span, in display order. Other kinds, which a newer service may send, follow
under their own names."""

Event = dict[str, Any]


def trace_events(timelines: Iterable[tuple[str, TimelineView]]) -> Iterator[Event]:
    """Yield the events of timelines. Each timeline comes with the title of its process."""
    for number, (title, timeline) in enumerate(timelines, 1):
        yield _named("process_name", title, pid=number)
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        first = 1
        others = {span.kind: span.kind for span in timeline.spans if span.kind not in ROWS}
        for kind, name in (ROWS | others).items():
            rows = _rows(timeline, kind)
            for row, spans in enumerate(rows):
                tid = first + row
                yield _named("thread_name", name if row == 0 else f"{name} {row + 1}", pid=number, tid=tid)
                yield {"ph": "M", "name": "thread_sort_index", "pid": number, "tid": tid, "args": {"sort_index": tid}}
                for span in spans:
                    yield _event(span, timeline.now, number, tid)
            first += len(rows)


def _rows(timeline: TimelineView, kind: str) -> list[list[SpanView]]:
    """Distribute the spans of one kind over rows, so that the spans of a row do not overlap."""
    rows: list[list[SpanView]] = []
    for span in timeline.spans:
        if span.kind != kind:
            continue
        free = next((row for row in rows if _end(row[-1], timeline.now) <= span.start), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _end(span: SpanView, now: float) -> float:
    return now if span.end is None else span.end


def _event(span: SpanView, now: float, pid: int, tid: int) -> Event:
    end = max(_end(span, now), span.start)
    about: Mapping[str, Any] = span.data | ({"goes_on": True} if span.end is None else {})
    event = {
        "name": _name(span),
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": round(span.start * 1e6),
        "args": {name: value for name, value in about.items() if value not in (None, "", [])},
    }
    if span.kind == "error":
        return event | {"ph": "i", "s": "p"}
    return event | {"ph": "X", "dur": round(end * 1e6) - round(span.start * 1e6)}


def _name(span: SpanView) -> str:
    if span.kind != "call":
        return span.name or span.kind
    branch = ": ".join(filter(None, (span.data.get("branch"), span.data.get("label"))))
    return f"{span.name or branch} turn {span.data.get('turn')}"


def _named(what: str, name: str, **where: int) -> Event:
    return {"ph": "M", "name": what, "args": {"name": name}, **where}
