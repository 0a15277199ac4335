"""`outrider run`: submits one task or the tasks of a data set, waits for the sessions, and prints how they ended."""

from __future__ import annotations

import asyncio
import secrets
import shlex
from pathlib import Path
from typing import Annotated, Any

import msgspec
from click.exceptions import Exit

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.exit_codes import FAILURE, INTERRUPTED, SUCCESS
from outrider.cli.options import (
    BUILT_IN,
    AgentName,
    HarnessName,
    Image,
    Limit,
    Network,
    Offline,
    TestCommand,
    command,
    with_harness,
)
from outrider.cli.progress import run_progress, session_progress
from outrider.cli.tables import counted, run_table, session_table
from outrider.cli.task_file import is_one_task, load_example
from outrider.cli.terminal import Terminal
from outrider.cli.waiting import waits_noted
from outrider.client.client import AsyncClient
from outrider.client.rollout import RolledOut, roll_out
from outrider.concurrency.cancellation import shielded
from outrider.environment import DEFAULT_URL, environment
from outrider.errors import InvalidField
from outrider.schemas import GroupView

ANSWER_SECONDS = 10.0
"""How many seconds to wait for the reply to a submission after Ctrl-C. A group that the service has accepted must be
cancelled, and this needs the group's id from the reply. The wait is limited, because no reply comes while the service's
queue is full."""


class Ran(msgspec.Struct, frozen=True):
    """The output of `outrider run --json` for a data set. `result`: the figures of the run. `export`: the command that
    writes the run's training rows."""

    result: RolledOut
    export: str


@command
def run(
    terminal: Terminal,
    client: AsyncClient,
    sources: Annotated[
        list[str],
        CliArgument(
            metavar="TASK.toml|SOURCE...", help="One task, or sources of tasks as of `outrider task list`: a data set."
        ),
    ],
    n: Annotated[int, CliOption("-n", metavar="N", help="Number of sessions of each task.")] = 1,
    priority: Annotated[int, CliOption(metavar="P", help="From -1000 to 1000; higher ones run first.")] = 0,
    harness: HarnessName = None,
    agent: AgentName = None,
    image: Image = None,
    test_command: TestCommand = None,
    offline: Offline = False,
    network: Network = None,
    limit: Limit = None,
    resume: Annotated[
        str | None,
        CliOption(metavar="RUN", help="Name of a data set's run: goes on with it if it was interrupted."),
    ] = None,
) -> None:
    """Run a task, or all tasks of a data set, and wait for them.

    If `upload` steps in TASK.toml name files beside it, the command sends these
    files with the task. Ctrl-C cancels the sessions of a single task. For a data
    set, Ctrl-C ends only this command: the sessions continue in the service.
    --resume RUN then waits for them, and submits the missing ones.

    Exit code 0: every session ended without an error.
    Exit code 1: at least one session ended with an error.

    Examples:

        outrider run examples/count_words.toml -n 8

        outrider run set.toml -n 4

        outrider run task.toml --json | jq '.sessions[].result.verdict.reward'
    """
    if resume is None and len(sources) == 1 and is_one_task(Path(sources[0])):
        task = with_harness(load_example(Path(sources[0])).task, harness, agent)
        raise Exit(asyncio.run(_run(terminal, client, {"task": task, "n": n, "priority": priority})))
    # Imported here, because only a data set needs these modules. A single task is validated by the service.
    from outrider.cli.task_sources import examples_in
    from outrider.service.admission import validate_group

    tasks = []
    for source in sources:
        for example in examples_in(
            source, limit=limit, image=image, test_command=test_command, offline=offline, network=network
        ):
            task = with_harness(example.task, harness, agent, default=BUILT_IN)
            try:
                validate_group({"task": task, "n": n, "priority": priority})
            except InvalidField as error:  # raised before any task is submitted
                raise InvalidField(
                    f"task {example.id!r} of {source}: {error.message}", field=error.field, hint=error.hint
                ) from error
            tasks.append(task)
    name = resume or secrets.token_hex(6)
    raise Exit(asyncio.run(_run_all(terminal, client, name, tasks, n=n, priority=priority)))


async def _run_all(
    terminal: Terminal, client: AsyncClient, run: str, tasks: list[dict[str, Any]], *, n: int, priority: int
) -> int:
    """Run the tasks of a data set, and return the exit code. After Ctrl-C, the sessions continue in the service."""
    terminal.note(f"run {run}: {counted(len(tasks), 'task')}, {counted(n, 'session')} each")
    try:
        async with client:
            with run_progress(terminal) as watch:
                async with waits_noted(terminal, client):
                    done = await roll_out(client, tasks, run=run, samples=n, priority=priority, watch=watch)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        terminal.note(f"the sessions go on in the service; go on with the same command and --resume {run}")
        return INTERRUPTED
    after = f" --after {done.after}" if done.after else ""
    export = f"outrider export --run {shlex.quote(run)}{after} -o {shlex.quote(run)}.jsonl{_address(client)}"
    terminal.show(Ran(done, export), run_table(done))
    for reason, count in sorted(done.failures.items()):
        terminal.note(f"{count} not graded: {reason}")
    if done.failed:
        terminal.note(f"what went wrong: outrider show {done.failed}{_address(client)}")
    if done.graded:
        terminal.note(f"its training rows: {export}")
    return FAILURE if done.failed else SUCCESS


def _address(client: AsyncClient) -> str:
    """Return the option that another command needs to call the same service: ` --url URL`. Returns "" if the other
    command would call this service without the option."""
    return "" if client.url == (environment("OUTRIDER_URL") or DEFAULT_URL).rstrip("/") else f" --url {client.url}"


async def _run(terminal: Terminal, client: AsyncClient, asked: dict[str, Any]) -> int:
    """Submit a group, wait for it, and return the exit code. The first Ctrl-C cancels the group. The second Ctrl-C ends
    the command."""
    task = asyncio.current_task()
    assert task is not None
    interrupted = False
    accepted: list[GroupView] = []

    async def submit() -> None:
        accepted.append(await client.submit(asked))

    async with client:
        try:
            await shielded(submit, grace=ANSWER_SECONDS)
            [group] = accepted
            terminal.note(f"group {group.id}: {counted(group.n, 'session')}")
            with session_progress(terminal) as watch:
                async with waits_noted(terminal, client):
                    [group] = await client.wait([group.id], watch)
        except asyncio.CancelledError:
            # For the first Ctrl-C, asyncio.run cancels this task. For the second, it raises KeyboardInterrupt.
            task.uncancel()
            interrupted = True
            if not accepted:
                terminal.note("the service has not accepted the group")
                return INTERRUPTED
            [group] = accepted
            terminal.note(f"cancelling {group.id} (Ctrl-C again to leave at once)")
            await client.cancel(group.id)
            with session_progress(terminal) as watch:
                async with waits_noted(terminal, client):
                    [group] = await client.wait([group.id], watch)
    failed = [each.id for each in group.sessions if each.result and each.result.error]
    terminal.show(group, session_table(group))
    if failed and not terminal.json:
        terminal.note(f"what went wrong: outrider show {failed[0]}{_address(client)}")
    elif not interrupted and not terminal.json:
        terminal.note(f"its training rows: outrider export --group {group.id} -o FILE.jsonl{_address(client)}")
    if interrupted:
        return INTERRUPTED
    return FAILURE if failed else SUCCESS
