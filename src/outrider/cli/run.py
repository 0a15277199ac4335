"""`outrider run`: submit a task, follow its sessions, print how they ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Json, Token, Url, async_client
from outrider.cli.progress import progress_bar
from outrider.cli.tables import session_table
from outrider.cli.task_file import load_group
from outrider.cli.terminal import Terminal, terminal_of
from outrider.client import AsyncClient
from outrider.lifecycle import StopReason
from outrider.schemas import GroupView, SessionView
from outrider.spec import GroupSpec

FAILED = 1
INTERRUPTED = 130


def run(
    ctx: typer.Context,
    task: Annotated[Path, typer.Argument(metavar="TASK.toml", help="The task: the `task` object of POST /v1/groups.")],
    n: Annotated[int, typer.Option("-n", metavar="N", help="How many sessions of it.")] = 1,
    priority: Annotated[int, typer.Option(help="Higher ones first, from -1000 to 1000.")] = 0,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Run a task and wait for it.

    Files beside TASK.toml that its `upload` steps name are sent along. Ends with 0 when every session ended without
    an error, else with 1. Ctrl-C cancels the group.

    Examples:

        outrider run examples/count_words.toml -n 8

        outrider run task.toml --json | jq '.sessions[].result.verdict.reward'
    """
    terminal = terminal_of(ctx)
    group = load_group(task, n=n, priority=priority)
    raise typer.Exit(asyncio.run(_run(terminal, async_client(url, token), group)))


async def _run(terminal: Terminal, client: AsyncClient, spec: GroupSpec) -> int:
    async with client:
        group = await client.submit(spec)
        terminal.note(f"group {group.id}: {group.n} session{'s' if group.n > 1 else ''}")
        group, interrupted = await _finished(terminal, client, group)
    _report(terminal, group)
    if interrupted:
        return INTERRUPTED
    return FAILED if _failed(group) else 0


async def _finished(terminal: Terminal, client: AsyncClient, group: GroupView) -> tuple[GroupView, bool]:
    """The group once it is done, and whether Ctrl-C cancelled it. A second Ctrl-C leaves at once."""
    task = asyncio.current_task()
    assert task is not None
    with progress_bar(terminal) as watch:
        try:
            return (await client.wait([group.id], watch))[0], False
        except asyncio.CancelledError:
            # asyncio.run makes a cancellation of the first Ctrl-C, and a KeyboardInterrupt of the second.
            task.uncancel()
            terminal.note(f"cancelling {group.id} (Ctrl-C again to leave at once)")
            await client.cancel(group.id)
            return (await client.wait([group.id], watch))[0], True


def _report(terminal: Terminal, group: GroupView) -> None:
    if terminal.json:
        terminal.write_json(group)
        return
    terminal.out.print(session_table(group))
    if failed := _failed(group):
        terminal.note(f"what went wrong: outrider show {failed[0].id}")


def _failed(group: GroupView) -> list[SessionView]:
    return [session for session in group.sessions if session.result and session.result.stop_reason is StopReason.ERROR]
