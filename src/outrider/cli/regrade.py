"""`outrider regrade`: grades ended sessions again, and shows the old rewards beside the new ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from click.exceptions import Exit

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.exit_codes import FAILURE
from outrider.cli.options import command
from outrider.cli.progress import session_progress
from outrider.cli.tables import counted, table
from outrider.cli.task_file import load_example
from outrider.cli.terminal import Terminal
from outrider.cli.waiting import waits_noted
from outrider.client.client import Client
from outrider.errors import InvalidField
from outrider.schemas import Regraded, RegradedSession, SessionView
from outrider.trajectory import Verdict


@command
def regrade(
    terminal: Terminal,
    service: Client,
    ids: Annotated[list[str], CliArgument(metavar="ID...", help="Groups, or single sessions.")],
    task: Annotated[
        Path | None,
        CliOption(metavar="TASK.toml", help="A task whose evaluator grades them.", show_default="their own"),
    ] = None,
) -> None:
    """Grade sessions again, with another evaluator or the same one.

    No agent runs. For each ID, the service makes a new group, and delivers it
    like any other group. The old group keeps its verdicts. Ctrl-C ends only this
    command: the grading continues in the service until you cancel the new groups.

    Exit code 0: every session was graded.
    Exit code 1: at least one session was not.

    Examples:

        outrider regrade g-0019a4e2b6c1f3d2

        outrider regrade g-0019a4e2b6c1f3d2 g-0019a4e2b6c20a11 --task mended.toml

        outrider regrade s-0019a4e2b6c1f3d2-0 --json
    """
    asked = {} if task is None else {"evaluator": _evaluator(task)}
    old: dict[str, Verdict | None] = {}
    new: list[str] = []
    for id in ids:
        named = (service.session(id),) if id.startswith("s-") else service.group(id).sessions
        old |= {_graded(session): _verdict(session) for session in named}
        group = service.regrade(id, asked)
        new.append(group.id)
        terminal.note(f"{id} is graded again as group {group.id}: {counted(group.n, 'session')}")
    with session_progress(terminal) as watch, service.open(waits_noted(terminal, service.asynchronous)):
        groups = service.wait(new, watch)
    sessions = [session for group in groups for session in group.sessions]
    regraded = Regraded(
        sessions=tuple(
            RegradedSession(
                session_id=_graded(session),
                regraded_as=session.id,
                was=old.get(_graded(session)),
                now=_verdict(session),
                error=session.result.error if session.result else None,
            )
            for session in sessions
        )
    )
    rows = []
    for one in regraded.sessions:
        was, now = (verdict and verdict.reward for verdict in (one.was, one.now))
        why = f"{one.error.code}: {one.error.message}" if one.error else (one.now and one.now.reason) or ""
        rows.append((one.session_id, was, now, one.regraded_as, why))
    terminal.show(regraded, table(("session", "was>", "now>", "graded as", "why"), rows))
    if any(one.now is None for one in regraded.sessions):
        raise Exit(FAILURE)


def _evaluator(path: Path) -> Mapping[str, Any]:
    evaluator: Any = load_example(path).task.get("evaluator")
    if not isinstance(evaluator, Mapping):
        raise InvalidField(f"{path} has no [evaluator]", field="task", hint="see docs/evaluators.md")
    return evaluator


def _graded(session: SessionView) -> str:
    """Return the id of the session in which the agent did the graded work. If `session` is a regrade, this is the
    earlier session, otherwise `session` itself."""
    return session.result.regrades or session.id if session.result else session.id


def _verdict(session: SessionView) -> Verdict | None:
    return session.result.verdict if session.result else None
