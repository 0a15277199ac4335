"""`outrider trace`: one session, a group and a time window, as valid events of the format."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cli.world import PROGRAM, REPLIES, Cli, write_task
from docs.pages import page
from outrider.client.trace_events import ROWS, trace_events
from outrider.lifecycle import SessionState
from outrider.schemas import SpanView, TimelineView
from support.service import running_service


def checked(text: str) -> list[dict[str, Any]]:
    """Return the events of a trace, after a check against the Trace Event Format."""
    document = json.loads(text)
    assert document.keys() == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = document["traceEvents"]
    rows: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    named: set[tuple[int, int | None]] = set()
    for event in events:
        assert isinstance(event["pid"], int)
        match event["ph"]:
            case "M":
                assert event["name"] in {
                    "process_name",
                    "process_sort_index",
                    "thread_name",
                    "thread_sort_index",
                }
                named.add((event["pid"], event.get("tid")))
            case "X":
                assert isinstance(event["ts"], int)
                assert isinstance(event["dur"], int)
                assert event["dur"] >= 0
                rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case other:
                assert (other, event["s"]) == ("i", "p")
    for row, spans in rows.items():
        assert row in named
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), row
    return events


async def test_a_session_a_group_and_a_time_window(cli: Cli, tmp_path: Path) -> None:
    task, file = write_task(tmp_path), tmp_path / "trace.json"
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        ran = await cli("run", str(task), "--url", url, "--json", "-n", "2")
        group = ran.document["id"]
        session = ran.document["sessions"][0]["id"]
        one = await cli("trace", session, "--url", url)
        both = await cli("trace", group, "-o", str(file), "--url", url, "--json")
        recent = await cli("trace", "--minutes", "5", "--url", url)
        none = await cli("trace", "--minutes", "5", "--label", "a=b", "--url", url)
        wrong = [
            await cli("trace", *words, "--url", url)
            for words in ((), (session, "--minutes", "1"), (session, "--json"), ("s-unknown-0",))
        ]
    events = checked(one.out)
    assert {event["cat"] for event in events if "cat" in event} >= {"stage", "call"}
    assert any(event["name"] == "main turn 0" for event in events)
    (title,) = (event["args"]["name"] for event in events if event["name"] == "process_name")
    assert title.startswith(f"{session} · completed · reward 1")
    written = checked(file.read_text())
    assert both.document == {"sessions": 2, "events": len(written), "output": str(file)}
    assert {event["pid"] for event in checked(recent.out)} == {1, 2}
    assert none.code == 2
    assert [each.code for each in wrong] == [2, 2, 2, 2]


def test_overlapping_spans_have_rows_of_their_own() -> None:
    spans = (
        SpanView(kind="call", name="", start=1.0, end=5.0, data={"turn": 0, "branch": "main"}),
        SpanView(kind="call", name="judge", start=2.0, end=3.0, data={"turn": 0, "branch": "frozen"}),
        SpanView(kind="call", name="", start=3.5, end=None, data={"turn": 1, "branch": "subagent", "label": "task"}),
        SpanView(kind="error", name="lost", start=4.0, end=4.0, data={"message": "gone"}),
    )
    view = TimelineView(
        session_id="s-1", group_id="g-1", attempt=1, state=SessionState.RUNNING, now=6.0, attempts=(), spans=spans
    )
    events = list(trace_events([("one", view)]))
    checked(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    calls = [(event["name"], event["tid"], event.get("dur")) for event in events if event.get("cat") == "call"]
    assert calls == [
        ("main turn 0", 1, 4_000_000),
        ("judge turn 0", 2, 1_000_000),
        ("subagent: task turn 1", 2, 2_500_000),
    ]
    assert [event["ts"] for event in events if event["ph"] == "i"] == [4_000_000]


def test_every_kind_of_span_has_a_row() -> None:
    """A row that was missing here once hid all requests to the network."""
    documented = [row[0].strip("`") for row in page("docs/timeline.md").tables("`kind`")[0].rows]
    spans = tuple(
        SpanView(kind=kind, name=f"a {kind}", start=1.0, end=2.0) for kind in [*documented, "of_a_newer_service"]
    )
    view = TimelineView(
        session_id="s-1", group_id="g-1", attempt=1, state=SessionState.DONE, now=6.0, attempts=(), spans=spans
    )
    events = list(trace_events([("one", view)]))
    assert {event["cat"] for event in events if "cat" in event} == {span.kind for span in spans}
    rows = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert rows == [*(ROWS[kind] for kind in ROWS if kind in documented), "of_a_newer_service"]
    assert ROWS.keys() == set(documented)


@pytest.mark.parametrize("name", ["<b>", "\u202e", "x" * 500])
def test_hostile_names_stay_text(name: str) -> None:
    view = TimelineView(
        session_id="s-1",
        group_id="g-1",
        attempt=1,
        state=SessionState.DONE,
        now=6.0,
        attempts=(),
        spans=(SpanView(kind="command", name=name, start=1.0, end=2.0),),
    )
    assert [event["name"] for event in trace_events([("one", view)]) if event["ph"] == "X"] == [name]


async def test_a_reader_that_has_ended_is_no_error(cli: Cli, tmp_path: Path) -> None:
    """An example of such a reader is `head`."""
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        ran = await cli("run", write_task(tmp_path), "--url", url, "--json")
        reading, writing = os.pipe()
        os.close(reading)
        words = (*PROGRAM, "trace", ran.document["id"], "--url", url)
        process = await asyncio.create_subprocess_exec(*words, stdout=writing, stderr=asyncio.subprocess.PIPE)
        os.close(writing)
        _, said = await process.communicate()
    assert (process.returncode, said) == (1, b"")
