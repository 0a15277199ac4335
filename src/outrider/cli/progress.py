"""One progress bar over the sessions of any number of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.cli.terminal import Terminal
from outrider.client import Watch
from outrider.lifecycle import SessionState
from outrider.schemas import GroupView


@contextmanager
def progress_bar(terminal: Terminal) -> Iterator[Watch]:
    """A bar on standard error while the block lasts; nothing where that is not a terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=terminal.err, disable=not terminal.err.is_terminal) as progress:
        bar = progress.add_task("starting", total=None)

        def watch(groups: Sequence[GroupView]) -> None:
            sessions = [session for group in groups for session in group.sessions]
            counts = Counter(session.state for session in sessions)
            states = ", ".join(f"{counts[state]} {state.value}" for state in SessionState if counts[state])
            progress.update(bar, total=len(sessions), completed=counts[SessionState.DONE], description=states)

        yield watch
