"""`outrider trace`: writes the timelines of sessions as a trace that ui.perfetto.dev shows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Annotated, BinaryIO

import msgspec

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.options import Output, command
from outrider.cli.tables import counted
from outrider.cli.terminal import Terminal
from outrider.client.client import Client
from outrider.client.sample_files import whole_file
from outrider.client.trace_events import trace_events
from outrider.errors import InvalidField, NotFound, ServiceError
from outrider.schemas import SessionView, TimelineView

PAGE = 100


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `outrider trace --json`."""

    sessions: int
    events: int
    output: str


@command
def trace(
    terminal: Terminal,
    service: Client,
    what: Annotated[
        list[str] | None,
        CliArgument(metavar="[SESSION|GROUP]...", help="Ids of sessions and groups.", show_default=False),
    ] = None,
    minutes: Annotated[
        float | None, CliOption(min=0, metavar="N", help="All sessions of the groups of the last N minutes.")
    ] = None,
    label: Annotated[
        list[str] | None,
        CliOption(metavar="NAME=VALUE", help="With --minutes: only groups with this label. May be repeated."),
    ] = None,
    output: Output = None,
) -> None:
    """Write the timelines of sessions as a trace for ui.perfetto.dev.

    In the trace, each session is a process, with rows for its stages,
    sandboxes, model calls, failed calls, commands, processes, network and
    errors. Only the newest attempt of a session is written.

    Examples:

        outrider trace s-0019a4e2b6c1f3d2-0 -o session.json

        outrider trace --minutes 10 --label run=night -o batch.json
    """
    if bool(what) == (minutes is not None):
        raise InvalidField("give ids of sessions and groups, or --minutes N", field="what")
    if terminal.json and output is None:
        raise InvalidField("--json needs a file to write to", field="output", hint="add -o FILE")
    sessions = list(_named(service, what or ()) if minutes is None else _recent(service, minutes, label or ()))
    if not sessions:
        raise NotFound("there is no such session", hint="`outrider status` lists the newest groups")
    try:
        with nullcontext(sys.stdout.buffer) if output is None else whole_file(output, field="output") as file:
            events = _write(file, _timelines(service, sessions))
    except BrokenPipeError:
        raise  # the program that reads the output, such as `head`, has exited; the command ends without a message
    except OSError as error:
        raise ServiceError(f"cannot write {output or 'standard output'}: {error.strerror}") from error
    if terminal.json:
        terminal.write_json(Traced(sessions=len(sessions), events=events, output=str(output)))
    elif output is not None:
        terminal.note(f"{counted(len(sessions), 'session')} in {output}: open it at https://ui.perfetto.dev")


def _named(service: Client, ids: Sequence[str]) -> Iterator[SessionView]:
    for each in ids:
        try:
            yield from service.group(each).sessions
        except NotFound:
            yield service.session(each)


def _recent(service: Client, minutes: float, label: Sequence[str]) -> Iterator[SessionView]:
    pairs = [each.partition("=") for each in label]
    labels = {name: value for name, _, value in pairs}
    since, after = max(0.0, time.time() - 60 * minutes), None
    while True:
        page = service.sessions(since=since, labels=labels, after=after, limit=PAGE)
        yield from page.sessions
        if (after := page.after) is None:
            return


def _timelines(service: Client, sessions: list[SessionView]) -> Iterator[tuple[str, TimelineView]]:
    for session in sessions:
        verdict = None if session.result is None else session.result.verdict
        ending = session.state.value if session.result is None else session.result.stop_reason.value
        reward = "" if verdict is None else f" · reward {verdict.reward:g}"
        yield f"{session.id} · {ending}{reward}", service.timeline(session.id)


def _write(file: BinaryIO, timelines: Iterator[tuple[str, TimelineView]]) -> int:
    """Write one event per line, each as soon as its timeline has been read. Returns the number of events."""
    count = 0
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    for count, event in enumerate(trace_events(timelines), 1):
        file.write((b",\n" if count > 1 else b"") + msgspec.json.encode(event))
    file.write(b"\n]}\n")
    file.flush()
    return count
