"""One session for reading: its turns in order, with what the model sampled told apart from what it was shown.

The difference is in the margin ("> " before every sampled line) and in the colour, so that it survives a pipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from outrider.cli.tables import number
from outrider.cli.terminal import printable
from outrider.errors import ErrorRecord
from outrider.schemas import SessionView, TurnView

SAMPLED = "> "
CONTEXT = "  "


def print_session(console: Console, session: SessionView, turns: Sequence[TurnView]) -> None:
    """The whole session: heading, turns, how it ended."""
    for line in _lines(session, turns):
        console.print(line, soft_wrap=True)


def _lines(session: SessionView, turns: Sequence[TurnView]) -> Iterator[Text]:
    yield Text(f"session {session.id} · sample {session.sample_index} · attempt {session.attempt}", style="bold")
    yield Text(f'context is plain, what the model sampled is marked "{SAMPLED.strip()}"', style="dim")
    for turn in turns:
        yield Text()
        yield _heading(turn)
        yield from _block(turn.context, CONTEXT, "dim")
        yield from _block(turn.sampled, SAMPLED, "bold green")
        yield from _remarks(turn)
    yield Text()
    yield from _ending(session)


def _heading(turn: TurnView) -> Text:
    joined = turn.join if turn.parent is None else f"{turn.join} to turn {turn.parent}"
    seconds = turn.timings.finished - turn.timings.received
    what = [] if turn.kind == "main" else [printable(": ".join(filter(None, (turn.kind, turn.label))))]
    parts = (
        f"turn {turn.index}",
        *what,
        joined,
        f"{turn.prompt_tokens} prompt + {turn.output_tokens} sampled tokens",
        f"{turn.finish} after {seconds:.2f} s",
        turn.engine,
    )
    heading = Text("── " + " · ".join(parts), style="cyan")
    if turn.cause is not None:
        away = "" if turn.forked_from is None else f" from turn {turn.forked_from}"
        heading.append(f" · fork{away}: {turn.cause}", style="bold yellow")
    return heading


def _block(text: str, margin: str, style: str) -> Iterator[Text]:
    for line in printable(text).rstrip("\n").split("\n") if text else ():
        yield Text(margin, style="bold" if margin == SAMPLED else "") + Text(line, style=style)


def _remarks(turn: TurnView) -> Iterator[Text]:
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


def _ending(session: SessionView) -> Iterator[Text]:
    result = session.result
    if result is None:
        yield Text(f"{session.state.value}, not ended yet", style="bold")
        if session.last_error is not None:
            yield Text("its last attempt failed:", style="yellow")
            yield from _error(session.last_error)
        return
    tokens = result.tokens
    aside = {"masked": tokens.masked, "dropped": tokens.dropped, "of drift": tokens.drift}
    yield Text(
        f"{result.stop_reason.value} · {result.turns} turns · {tokens.sampled} tokens, {tokens.trained} trained on"
        + "".join(f", {count} {name}" for name, count in aside.items() if count),
        style="bold",
    )
    if result.forks:
        counted = ", ".join(f"{count} {cause}" for cause, count in sorted(result.forks.items()))
        yield Text(f"forks: {counted}", style="yellow")
    if result.ignored:
        counted = ", ".join(f"{name} ({count})" for name, count in sorted(result.ignored.items()))
        yield Text(printable(f"asked for without effect (turns): {counted}"), style="yellow")
    if (verdict := result.verdict) is not None:
        metrics = "".join(f" · {name} {number(value)}" for name, value in sorted(verdict.metrics.items()))
        reason = f" · {verdict.reason}" if verdict.reason else ""
        yield Text(printable(f"reward {number(verdict.reward)}{metrics}{reason}"), style="bold")
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
