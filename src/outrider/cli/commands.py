"""The program `outrider`: its commands, and how their errors are shown.

The commands' work is done in other modules. Invariant: an OutriderError, or the lack of something on the machine (disk,
descriptors, memory, threads, a file), is shown in one line, never as a traceback. The exit code is 0 for success, 2 for
an invalid request, 130 for Ctrl-C and 1 for every other failure.
"""

from __future__ import annotations

import errno
import logging
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
from outrider.errors import OutriderError, RequestError, ServiceError, described, lacks_means

log = logging.getLogger("outrider.cli")

FAILURE = 1
USAGE = 2

HINTS = {
    errno.ENOSPC: "free some space, or name another folder; temporary files are in TMPDIR",
    errno.EDQUOT: "free some space, or name another folder; temporary files are in TMPDIR",
    errno.EMFILE: "allow this user more open files: ulimit -n 65536",
    errno.ENFILE: "the machine has no descriptors left: look at what runs beside",
    errno.ENOMEM: "the machine has no memory left: look at what runs beside",
    errno.EAGAIN: "allow this user more processes: ulimit -u",
    errno.EACCES: "this user may not do that: name another file or folder, or change who may",
    errno.EPERM: "this user may not do that: name another file or folder, or change who may",
    errno.EROFS: "the file system is read-only: name another folder",
    errno.ENOENT: "is the path right, and does the folder exist that it is in?",
    errno.ENOTDIR: "a part of the path is a file: name another folder",
    errno.EEXIST: "something else has that name: choose another one",
    errno.EISDIR: "that is a folder: name a file",
}
"""Advice about a system error, by errno."""

# Some versions of Typer bring their own copy of click. In every version, its UsageError is the base of BadParameter.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def run_command(argv: Sequence[str] | None) -> int:
    """Run one command and return its exit code, for `outrider.cli.main`. Raises KeyboardInterrupt."""
    terminal = Terminal()
    command = typer.main.get_command(commands())
    try:
        code = command.main(
            args=None if argv is None else list(argv), prog_name="outrider", standalone_mode=False, obj=terminal
        )
    except OutriderError as error:
        return _failed(terminal, error)
    except BaseExceptionGroup as failures:
        # Several tasks failed together. Any error that is not shown in one line is a bug and needs its traceback.
        matched, others = failures.split(_is_shown)
        if matched is None or others is not None:
            raise
        first: BaseException = matched
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        return _failed(terminal, _shown(first))
    except UsageError as error:
        # Without arguments, click shows the help and raises a UsageError with no message.
        if message := str(getattr(error, "format_message", error.__str__)()).removesuffix("."):
            context = getattr(error, "ctx", None)
            hint = f"{context.command_path if context else 'outrider'} --help"
            terminal.error(RequestError(message, hint=hint).record())
        return USAGE
    except Exception as error:  # a lack of the machine is shown in one line; everything else is raised again
        if not _is_shown(error):
            raise
        return _failed(terminal, _shown(error))
    return code if isinstance(code, int) else 0


def commands() -> typer.Typer:
    """Return the whole command line."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,  # pretty tracebacks may show local variables, tokens included
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


def _is_shown(error: BaseException) -> bool:
    return isinstance(error, OutriderError) or lacks_means(error)


def _shown(error: BaseException) -> OutriderError:
    """Return the error as an OutriderError. If the machine lacks something, the error has a hint."""
    if isinstance(error, OutriderError):
        return error
    log.debug("the command failed", exc_info=error)
    if not isinstance(error, OSError):
        return ServiceError(
            described(error), hint="this machine, or this user's limits, allow no more: see `ulimit -a`"
        )
    place = f"{error.filename}: " if error.filename is not None else ""
    return ServiceError(f"{place}{error.strerror or error}", hint=HINTS.get(error.errno or 0))


def _failed(terminal: Terminal, error: OutriderError) -> int:
    terminal.error(error.record())
    return USAGE if isinstance(error, RequestError) else FAILURE
