"""`outrider show`: prints one session for people to read: its turns in order, its verdict and its error.

Each line that the model sampled begins with "> ", so that it differs from other text even without colours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from rich.text import Text

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.options import command
from outrider.cli.tables import counted, number
from outrider.cli.terminal import Terminal, printable
from outrider.client.client import Client
from outrider.client.sample_files import whole_file
from outrider.errors import ErrorRecord, ServiceError
from outrider.schemas import SessionView, SpanView, TurnView
from outrider.trajectory import SessionResult

SAMPLED = "> "
CONTEXT = "  "


class Record(msgspec.Struct, frozen=True):
    """The output of `outrider show --json`."""

    session: SessionView
    turns: tuple[TurnView, ...]
    network: tuple[SpanView, ...] = ()
    """The parts of the session's timeline that describe its network calls."""


class SessionFile(msgspec.Struct, frozen=True):
    """The output of `outrider show --html --json`."""

    output: str
    size: int


@command
def show(
    terminal: Terminal,
    service: Client,
    session: Annotated[str, CliArgument(metavar="SESSION", help="The session's id.")],
    html: Annotated[
        Path | None, CliOption(metavar="FILE", help="Write the page's view to one HTML file.", show_default="print")
    ] = None,
) -> None:
    """Show a session: what the model was shown, what it sampled, and how it ended.

    If the session had several attempts, the newest one is shown. With --html,
    the command writes the session to a file that needs neither a service nor a
    network, so that you can send it to others or keep it.

    Examples:

        outrider show s-0019a4e2b6c1f3d2-0

        outrider show s-0019a4e2b6c1f3d2-0 --html session.html
    """
    if html is not None:
        from outrider.cli.session_file import session_page  # imported late, because only --html needs it

        write_page(terminal, session_page(service, session), html)
        return
    network = tuple(span for span in service.timeline(session).spans if span.kind == "network")
    record = Record(service.session(session), service.turns(session), network)
    if terminal.json:
        terminal.write_json(record)
    else:
        print_session(terminal.out, record.session, record.turns, record.network)


def write_page(terminal: Terminal, page: bytes, file: Path) -> None:
    """Write an HTML file. Raises InvalidField if the file cannot be created, and ServiceError if it cannot be
    written."""
    try:
        with whole_file(file, field="--html") as written:
            written.write(page)
    except OSError as error:
        raise ServiceError(f"cannot write {file}: {error.strerror}", hint="name another file: --html FILE") from error
    if terminal.json:
        terminal.write_json(SessionFile(str(file), len(page)))
    else:
        terminal.note(f"{file}: {len(page):,} bytes; open the file in a browser")


def print_session(
    console: Console, session: SessionView, turns: Sequence[TurnView], network: Sequence[SpanView] = ()
) -> None:
    """Print a session: a heading, the turns, the servers that its sandbox called, and the result or the state."""
    for line in _lines(session, turns, network):
        console.print(line, soft_wrap=line.no_wrap is True)


def _lines(session: SessionView, turns: Sequence[TurnView], network: Sequence[SpanView]) -> Iterator[Text]:
    yield Text(f"session {session.id} · sample {session.sample_index} · attempt {session.attempt}", style="bold")
    yield Text(f'context is plain, what the model sampled is marked "{SAMPLED.strip()}"', style="dim")
    for turn in turns:
        yield Text()
        yield from _turn(turn)
    yield Text()
    yield from map(_server, network)
    if session.result is not None:
        yield from _ending(session.result)
        return
    yield Text(f"{session.state.value}, not ended yet", style="bold")
    if session.last_error is not None:
        yield Text("its last attempt failed:", style="yellow")
        yield from _error(session.last_error)


def _server(span: SpanView) -> Text:
    """Return the line for a server that a sandbox has called."""
    data = span.data
    parts = [f"{data['requests']} requests", f"{data['sent']:,} bytes sent, {data['received']:,} received"]
    for name, reason in (("refused", "refusal"), ("failed", "failure")):
        if data.get(name):
            parts.append(f"{data[name]} {name}: {data.get(reason, '')}")
    style = "yellow" if data.get("refused") or data.get("failed") else "dim"
    return Text(
        printable(f"network ({data['phase']}, {data['sandbox']}) {span.name} · {' · '.join(parts)}"), style=style
    )


def _turn(turn: TurnView) -> Iterator[Text]:
    whose = "" if turn.model is None else f"{turn.model} "
    joined = turn.join if turn.parent is None else f"{turn.join} to {whose}turn {turn.parent}"
    seconds = turn.timings.finished - turn.timings.received
    what = [] if turn.kind == "main" else [": ".join(filter(None, (turn.kind, turn.label)))]
    parts = (
        f"{whose}turn {turn.index}",
        *([f"step {turn.step + 1}"] if turn.step else []),
        *what,
        joined,
        f"{turn.prompt_tokens} prompt + {turn.output_tokens} sampled tokens",
        f"{turn.finish} after {seconds:.2f} s",
        turn.engine,
    )
    heading = Text(printable("── " + " · ".join(parts)), style="cyan")
    if turn.cause is not None:
        away = "" if turn.forked_from is None else f" from turn {turn.forked_from}"
        heading.append(f" · fork{away}: {turn.cause}", style="bold yellow")
    yield heading
    yield from _block(turn.context, CONTEXT, "dim")
    yield from _block(turn.sampled, SAMPLED, "bold green")
    remarks = []
    if turn.tool_calls:
        remarks.append(f"{turn.tool_calls} tool call{'s' if turn.tool_calls > 1 else ''}")
    if turn.malformed_calls:
        remarks.append(f"{turn.malformed_calls} malformed, given back as text")
    if turn.mode != "tokens":
        remarks.append(f"recorded in {turn.mode} mode")
    if turn.altered:
        remarks.append("drawn from an altered distribution")
    if turn.drift_tokens:
        remarks.append(f"{turn.drift_tokens} tokens of drift")
    if remarks:
        yield Text(f"{CONTEXT}[{', '.join(remarks)}]", style="yellow")


def _block(text: str, margin: str, style: str) -> Iterator[Text]:
    for line in printable(text).rstrip("\n").split("\n") if text else ():
        # Without `no_wrap`, rich would break long lines at the width of the terminal.
        yield Text(margin, style="bold" if margin == SAMPLED else "", no_wrap=True) + Text(line, style=style)


def _ending(result: SessionResult) -> Iterator[Text]:
    tokens = result.tokens
    others = {
        "masked": tokens.masked,
        "dropped": tokens.dropped,
        "in unsure branches": tokens.unsure,
        "of drift": tokens.drift,
    }
    figures = f"{counted(result.turns, 'turn')} · {counted(tokens.sampled, 'token')}, {tokens.trained} trained on"
    yield Text(
        f"{result.stop_reason.value} · {figures}"
        + "".join(f", {count} {name}" for name, count in others.items() if count),
        style="bold",
    )
    if result.forks:
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(result.forks.items()))
        yield Text(f"forks: {causes}", style="yellow")
    for name, use in sorted(result.frozen.items()):
        yield Text(printable(f"{name} (frozen): {counted(use.turns, 'turn')} · {counted(use.tokens, 'token')}"))
    if result.ignored:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(result.ignored.items()))
        yield Text(printable(f"asked for without effect (turns): {names}"), style="yellow")
    if result.failed_calls:
        kinds = ", ".join(f"{name} ({count})" for name, count in sorted(result.failed_calls.items()))
        yield Text(printable(f"model calls answered with an error: {kinds}"), style="yellow")
    if (verdict := result.verdict) is not None:
        metrics = "".join(f" · {name} {number(value)}" for name, value in sorted(verdict.metrics.items()))
        reason = f" · {verdict.reason}" if verdict.reason else ""
        yield Text(printable(f"reward {number(verdict.reward)}{metrics}{reason}"), style="bold")
    if result.artifact_bytes:
        kept = f"kept: {result.artifact_bytes:,} bytes of files and of the graders' output"
        yield Text(f"{kept}; see: outrider artifacts {result.session_id}", style="dim")
    if (ended := result.harness_exit) is not None:
        yield Text(f"the agent's program exited with code {ended.code}; the end of its output:", style="yellow")
        yield from _block(ended.log_tail, CONTEXT, "dim")
    if result.error is not None:
        yield from _error(result.error)


def _error(error: ErrorRecord) -> Iterator[Text]:
    yield Text(printable(f"error ({error.boundary.value}, {error.code}): {error.message}"), style="bold red")
    if error.hint:
        yield Text(printable(f"hint: {error.hint}"), style="cyan")
    if error.log_tail:
        yield Text("end of its log:", style="dim")
        yield from _block(error.log_tail, CONTEXT, "dim")
