"""Progress bars on standard error, drawn only on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outrider.cli.terminal import Terminal
from outrider.client.client import Watch
from outrider.client.rollout import Progress as RunProgress
from outrider.lifecycle import SessionState
from outrider.schemas import GroupView

if TYPE_CHECKING:
    from rich.progress import Progress

    from outrider.lab.certify.judge import RowVerdict


@contextmanager
def session_progress(terminal: Terminal, first: str = "submitting") -> Iterator[Watch]:
    """Show one progress bar for the sessions of several groups, with the number of sessions in each state. The block
    passes the groups to the yielded function. Until the block first calls this function, the bar shows the text
    `first`."""
    with _progress(terminal, transient=False) as progress:
        bar = progress.add_task(first, total=None)

        def watch(groups: Sequence[GroupView]) -> None:
            sessions = [session for group in groups for session in group.sessions]
            counts = Counter(session.state for session in sessions)
            states = ", ".join(f"{counts[state]} {state.value}" for state in SessionState if counts[state])
            progress.update(bar, total=len(sessions), completed=counts[SessionState.DONE], description=states)

        yield watch


@contextmanager
def run_progress(terminal: Terminal) -> Iterator[Callable[[RunProgress], None]]:
    """Show one progress bar for the sessions of a run, and the number of unfinished sessions in each state. Without a
    terminal, write a line each time another tenth of the sessions is done."""
    with _progress(terminal, transient=False) as progress:
        bar = progress.add_task("submitting", total=None)
        tenth = 0

        def watch(now: RunProgress) -> None:
            nonlocal tenth
            progress.update(bar, total=now.sessions, completed=now.ended, description=_states(now))
            if not terminal.err.is_terminal and now.ended * 10 // now.sessions > tenth:
                tenth = now.ended * 10 // now.sessions
                terminal.note(f"{now.ended} of {now.sessions} sessions ended")

        yield watch


def _states(now: RunProgress) -> str:
    if now.submitted < now.sessions:
        return f"{now.submitted} submitted"
    active = [f"{count} {state.value}" for state in SessionState if (count := now.states.get(state))]
    return ", ".join(each for each in active if not each.endswith(SessionState.DONE.value)) or "done"


@contextmanager
def row_progress(terminal: Terminal, rows: int) -> Iterator[Callable[[RowVerdict], None]]:
    """Show one progress bar for the rows of a harness's certificate. Also write a line for each verdict, even if there
    is no terminal for the bar."""
    with _progress(terminal, transient=True) as progress:
        bar = progress.add_task("starting a service", total=rows)

        def watch(verdict: RowVerdict) -> None:
            terminal.note(f"{verdict.row}: {verdict.verdict}")
            progress.update(bar, advance=1, description="rows")

        yield watch


def _progress(terminal: Terminal, *, transient: bool) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=terminal.err, disable=not terminal.err.is_terminal, transient=transient)
