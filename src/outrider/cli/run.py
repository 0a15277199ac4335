"""`outrider run`: submits a task, follows its sessions, and prints how they ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.exit_codes import FAILURE, INTERRUPTED, SUCCESS
from outrider.cli.options import command
from outrider.cli.progress import session_progress
from outrider.cli.tables import session_table
from outrider.cli.task_sources import load_group
from outrider.cli.terminal import Terminal
from outrider.client.client import AsyncClient
from outrider.concurrency.cancellation import shielded
from outrider.schemas import GroupView
from outrider.spec import GroupSpec

ANSWER_SECONDS = 10.0
"""Seconds for which Ctrl-C waits for the reply to the submission, because the service may have accepted the group. The
time is bounded, because no reply comes while the service's queue is full."""


@command
def run(
    terminal: Terminal,
    client: AsyncClient,
    task: Annotated[Path, typer.Argument(metavar="TASK.toml", help="The task, as docs/tasks.md describes it.")],
    n: Annotated[int, typer.Option("-n", metavar="N", help="Number of sessions.")] = 1,
    priority: Annotated[int, typer.Option(metavar="P", help="From -1000 to 1000; higher ones run first.")] = 0,
) -> None:
    """Run a task and wait for it.

    Files beside TASK.toml that its `upload` steps name are sent with it.
    Ctrl-C cancels the sessions.

    Exit code 0: every session ended without an error. 1: one did not.

    Examples:

        outrider run examples/count_words.toml -n 8

        outrider run task.toml --json | jq '.sessions[].result.verdict.reward'
    """
    group = load_group(task, n=n, priority=priority)
    raise typer.Exit(asyncio.run(_run(terminal, client, group)))


async def _run(terminal: Terminal, client: AsyncClient, spec: GroupSpec) -> int:
    """Submit the group, wait for it, and return the exit code. Ctrl-C cancels the group; a second Ctrl-C ends the
    command."""
    task = asyncio.current_task()
    assert task is not None
    interrupted = False
    accepted: list[GroupView] = []

    async def submit() -> None:
        accepted.append(await client.submit(spec))

    async with client:
        try:
            await shielded(submit, grace=ANSWER_SECONDS)
            [group] = accepted
            terminal.note(f"group {group.id}: {group.n} session{'s' if group.n > 1 else ''}")
            with session_progress(terminal) as watch:
                [group] = await client.wait([group.id], watch)
        except asyncio.CancelledError:
            # asyncio.run turns the first Ctrl-C into a cancellation and the second into a KeyboardInterrupt.
            task.uncancel()
            interrupted = True
            if not accepted:
                terminal.note("the service has not accepted the group")
                return INTERRUPTED
            [group] = accepted
            terminal.note(f"cancelling {group.id} (Ctrl-C again to leave at once)")
            await client.cancel(group.id)
            with session_progress(terminal) as watch:
                [group] = await client.wait([group.id], watch)
    failed = [each.id for each in group.sessions if each.result and each.result.error]
    terminal.show(group, session_table(group))
    if failed and not terminal.json:
        terminal.note(f"what went wrong: outrider show {failed[0]}")
    if interrupted:
        return INTERRUPTED
    return FAILURE if failed else SUCCESS
