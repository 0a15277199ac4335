"""The program `outrider`: its commands, and how their errors are shown.

It does none of their work. Invariant: an OutriderError is shown in one line, never as a traceback. The exit code is 0
for success, 2 for a request that cannot be right, 130 for Ctrl-C and 1 for every other failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from outrider.cli.artifacts import artifacts
from outrider.cli.delivery import callback_commands, consumer_commands, gc
from outrider.cli.demo import demo
from outrider.cli.doctor import doctor
from outrider.cli.engines import engine_commands
from outrider.cli.evaluate import eval_
from outrider.cli.export import export
from outrider.cli.harness import harness_commands
from outrider.cli.image import image_commands
from outrider.cli.nodes import node_commands
from outrider.cli.policy import policy_commands
from outrider.cli.regrade import regrade
from outrider.cli.run import run
from outrider.cli.serve import serve
from outrider.cli.show import show
from outrider.cli.slurm import slurm
from outrider.cli.status import cancel, status
from outrider.cli.task import task_commands
from outrider.cli.terminal import Terminal, terminal_of
from outrider.cli.token import token_commands
from outrider.config import unknown_variables
from outrider.errors import OutriderError, RequestError

FAILURE = 1
USAGE = 2

# Typer brings its own copy of click in some versions; what both call UsageError is the base of this public name.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. `argv` lacks the program's name; by default it is the process's own."""
    terminal = Terminal()
    command = typer.main.get_command(commands())
    try:
        code = command.main(
            args=None if argv is None else list(argv), prog_name="outrider", standalone_mode=False, obj=terminal
        )
    except OutriderError as error:
        return _failed(terminal, error)
    except BaseExceptionGroup as failures:
        # Several tasks failed together. Anything but an OutriderError is a bug and needs its traceback.
        matched, others = failures.split(OutriderError)
        if matched is None or others is not None:
            raise
        first: OutriderError | BaseExceptionGroup[OutriderError] = matched
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        return _failed(terminal, first)
    except UsageError as error:
        # Without words click shows the help, and raises a UsageError with no message.
        if message := str(getattr(error, "format_message", error.__str__)()).removesuffix("."):
            context = getattr(error, "ctx", None)
            hint = f"{context.command_path if context else 'outrider'} --help"
            terminal.error(RequestError(message, hint=hint).record())
        return USAGE
    return code if isinstance(code, int) else 0


def commands() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,  # they may print local variables, and with these tokens
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        ctx: typer.Context,
        show_version: Annotated[
            bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        """Outrider serves agent rollouts to reinforcement-learning trainers.

        Try `outrider demo` first: it needs no engine, no network and no root.
        Then start a service with `outrider serve` and run a task with `outrider run`.
        """
        for unknown in unknown_variables():
            terminal_of(ctx).note(f"warning: {unknown}")

    for command in (serve, run, status, cancel, show, regrade, artifacts, export, gc, doctor, demo, slurm):
        app.command()(command)
    app.command("eval")(eval_)
    app.add_typer(consumer_commands(), name="consumers")
    app.add_typer(callback_commands(), name="callbacks")
    app.add_typer(engine_commands(), name="engines")
    app.add_typer(harness_commands(), name="harness")
    app.add_typer(image_commands(), name="image")
    app.add_typer(node_commands(), name="nodes")
    app.add_typer(policy_commands(), name="policy")
    app.add_typer(task_commands(), name="task")
    app.add_typer(token_commands(), name="token")
    return app


def _version(given: bool) -> None:
    if given:
        typer.echo(f"outrider {version('outrider')}")
        raise typer.Exit


def _failed(terminal: Terminal, error: OutriderError) -> int:
    terminal.error(error.record())
    return USAGE if isinstance(error, RequestError) else FAILURE
