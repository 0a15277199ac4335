"""Builds the view of a session's timeline from the stored entries, turns and events.

Invariants: all times in a view are seconds since the epoch by the clock of the machine that runs the session's node;
each stored turn is exactly one span.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from outrider.errors import UNREADABLE
from outrider.lifecycle import SessionState
from outrider.schemas import AttemptView, EventView, SpanView, TimelineView
from outrider.store.rows import EventKind, SessionRow
from outrider.timeline import Entry, EntryKind
from outrider.tokens.branches.classify import lineages
from outrider.trajectory import Turn

ENTRIES = msgspec.msgpack.Decoder(list[Entry])

PLAIN = re.compile(r"[^A-Za-z0-9_]")
"""A character that agent programs may replace by `_` in the names of MCP tools."""

STAGE_OF_STATE = {
    SessionState.INITIALIZING: "init",
    SessionState.READY: "ready",
    SessionState.RUNNING: "run",
    SessionState.EVALUATING: "eval",
}
"""For each state of a session, the name of the stage that is shown as running."""


def timeline_view(
    session: SessionRow,
    attempt: int,
    parts: Iterable[bytes],
    turns: Sequence[Turn],
    frozen: Mapping[str, Sequence[Turn]],
    events: Sequence[EventView],
    *,
    now: float,
) -> TimelineView:
    """Return the view of one attempt.

    parts: the stored parts of the attempt's timeline. A part that cannot be read is left out.
    turns: the attempt's turns of the policy.
    frozen: its turns of frozen models, by model name.
    events: the events of the session."""
    entries, stored, left_out = _read(parts)
    attempts = _attempts(session, events)
    running = session.state is not SessionState.DONE and session.attempt == attempt
    spans = [_span(entry) for entry in entries.values()]
    spans += _calls(turns, frozen, stored, _mcp_tools(spans))
    spans += [
        SpanView(kind="error", name=one.error, start=one.ended, end=one.ended, data={"message": one.message})
        for one in attempts
        if one.attempt == attempt and one.error is not None and one.ended is not None
    ]
    if running and (stage := STAGE_OF_STATE.get(session.state)) is not None:
        ends = [span.end for span in spans if span.kind == EntryKind.STAGE and span.end is not None]
        spans.append(SpanView(kind=EntryKind.STAGE, name=stage, start=max(ends, default=session.updated), end=None))
    # If no stages were stored, usually because the agent ran elsewhere, show the whole attempt as the stage "run".
    if not running and not any(span.kind == EntryKind.STAGE for span in spans):
        spans += [
            SpanView(kind=EntryKind.STAGE, name="run", start=one.began, end=one.ended)
            for one in attempts
            if one.attempt == attempt
        ]
    spans += _queued(session, attempts, attempt)
    if not running:  # spans may have no end, because the node was lost or the end was not stored
        over = max((one.ended for one in attempts if one.attempt == attempt and one.ended), default=session.updated)
        spans = [span if span.end is not None else _cut(span, over) for span in spans]
    return TimelineView(
        session_id=session.id,
        group_id=session.group_id,
        attempt=attempt,
        state=session.state,
        now=now,
        attempts=tuple(attempts),
        spans=tuple(sorted(spans, key=lambda span: (span.start, span.end is None, -(span.end or 0.0)))),
        left_out=left_out,
    )


def with_short_commands(view: TimelineView) -> TimelineView:
    """Return the view with only the first word of each command and process, because a task's commands may contain
    secrets, and not every reader is allowed to see the task."""
    spans = [
        msgspec.structs.replace(span, name=span.name.split(maxsplit=1)[0] if span.name.strip() else "")
        if span.kind in (EntryKind.COMMAND, EntryKind.PROCESS)
        else span
        for span in view.spans
    ]
    return msgspec.structs.replace(view, spans=tuple(spans))


def _read(parts: Iterable[bytes]) -> tuple[dict[int, Entry], dict[str, float], dict[str, int]]:
    """Return the entries by number, the times at which turns were stored, and the number of entries left out, by
    kind."""
    entries: dict[int, Entry] = {}
    stored: dict[str, float] = {}
    left_out: dict[str, int] = {}
    for part in parts:
        try:
            found = ENTRIES.decode(part)
        except UNREADABLE:
            continue
        for entry in found:
            if entry.kind is EntryKind.STORED:
                stored.update(entry.data)
            elif entry.kind is EntryKind.LEFT_OUT:
                left_out.update(entry.data)
            else:
                entries[entry.number] = entry
    return entries, stored, left_out


def _span(entry: Entry) -> SpanView:
    return SpanView(kind=entry.kind.value, name=entry.name, start=entry.start, end=entry.end, data=entry.data)


def _cut(span: SpanView, over: float) -> SpanView:
    """End a span at `over`, the end of its attempt, and mark it as cut off."""
    return msgspec.structs.replace(span, end=max(over, span.start), data=span.data | {"cut_off": True})


def _calls(
    turns: Sequence[Turn],
    frozen: Mapping[str, Sequence[Turn]],
    stored: Mapping[str, float],
    mcp_tools: Mapping[str, str],
) -> Iterable[SpanView]:
    for turn, lineage in zip(turns, lineages(turns), strict=True):
        yield _call(turn, "", stored, mcp_tools, branch=lineage.kind.value, label=lineage.label, depth=lineage.depth)
    for model, found in frozen.items():
        for turn in found:
            yield _call(turn, model, stored, {}, branch="frozen", label="", depth=0)


def _mcp_tools(spans: Iterable[SpanView]) -> dict[str, str]:
    """Return the pattern of each MCP server's tool names, as given in the span of the agent's sandbox."""
    for span in spans:
        if span.kind == EntryKind.SANDBOX and isinstance(names := span.data.get("mcp_tools"), dict):
            return {str(server): str(name) for server, name in names.items()}
    return {}


def mcp_calls(tools: Iterable[str], names: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the server and the tool of each call of an MCP tool. `tools` are the names of the called tools, as the
    agent's program names them. `names` maps a server to the pattern of its tools' names, such as
    `mcp__files__{tool}`."""
    found = []
    for called in tools:
        plain = PLAIN.sub("_", called)
        fits = [
            (len(before), server, len(after))
            for server, name in names.items()
            for before, _, after in [name.partition("{tool}")]
            if plain.startswith(PLAIN.sub("_", before)) and plain.endswith(PLAIN.sub("_", after))
        ]
        if fits:
            before, server, after = max(fits)  # the longest match, because one server's name may begin with another's
            found.append({"server": server, "tool": called[before : len(called) - after]})
    return found


def _call(turn: Turn, model: str, stored: Mapping[str, float], mcp_tools: Mapping[str, str], **branch: Any) -> SpanView:
    timings = turn.timings
    tools = [call.name for call in turn.reply.tool_calls] if turn.reply else []
    of_servers = mcp_calls(tools, mcp_tools)
    return SpanView(
        kind="call",
        name=model,
        start=timings.received,
        end=timings.finished,
        data={
            "turn": turn.index,
            "dialect": turn.dialect,
            "engine": turn.engine,
            **branch,
            "joined": timings.joined,
            "first_token": timings.first_token,
            "stored": stored.get(f"{model}/{turn.index}"),
            "prompt_tokens": turn.prompt_length,
            "output_tokens": len(turn.output_ids) // 4,
            "cached_tokens": turn.cached_tokens,
            "finish": turn.finish.value,
            "version": max((span.version for span in turn.versions), default=None),
            "parent": turn.parent,
            "agent_id": turn.agent_id,
            "malformed_calls": turn.malformed_calls,
            "tools": tools,
            **({"mcp_calls": of_servers} if of_servers else {}),
        },
    )


def _attempts(session: SessionRow, events: Sequence[EventView]) -> list[AttemptView]:
    """Return the attempts in order. If the session's events were removed, only the newest attempt is returned, from the
    session's row."""
    began: dict[int, tuple[float, str | None]] = {}
    ended: dict[int, tuple[float, str | None, str]] = {}
    for event in events:
        number = int(event.data.get("attempt", 0))
        if event.kind == EventKind.SESSION_STATE and event.data.get("state") == SessionState.INITIALIZING.value:
            began[number] = event.at, event.data.get("node")
        elif event.kind == EventKind.SESSION_RETRY:
            error = event.data["error"]
            ended[number] = event.at, error["code"], error["message"]
        elif event.kind == EventKind.SESSION_DONE:
            result = session.result
            message = "" if result is None or result.error is None else result.error.message
            ended[number] = event.at, event.data.get("error"), message
    if session.attempt and session.attempt not in began:
        began[session.attempt] = session.created, session.node
    views = []
    for number, (start, node) in sorted(began.items()):
        end, code, message = ended.get(number, (None, None, ""))
        views.append(AttemptView(attempt=number, began=start, ended=end, node=node, error=code, message=message))
    return views


def _queued(session: SessionRow, attempts: Sequence[AttemptView], attempt: int) -> Iterable[SpanView]:
    """Return the span of the wait in the queue before the attempt. It has no end while the session still waits."""
    before = [one for one in attempts if one.attempt < attempt]
    since = session.created if not before else (before[-1].ended or before[-1].began)
    until = next((one.began for one in attempts if one.attempt == attempt), None)
    if until is None and session.state is SessionState.DONE:
        until = session.updated
    yield SpanView(kind=EntryKind.STAGE, name="waiting", start=since, end=until)
