"""The program `outrider`: its commands, and how their errors are shown.

The commands' work is done in other modules. Invariant: an OutriderError, or a missing resource of the machine (disk,
descriptors, memory, threads, a file), is shown in one line, never as a traceback.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated

import typer

from outrider.cli.exit_codes import FAILURE, SUCCESS, USAGE
from outrider.cli.terminal import Terminal, terminal_of
from outrider.environment import installed_version, variables
from outrider.errors import OutriderError, RequestError, ServiceError, described, lacks_means

log = logging.getLogger("outrider.cli")

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
"""Hints for the user by errno of a system error."""

CLIENT_VARIABLES = {"OUTRIDER_URL", "OUTRIDER_TOKEN", "OUTRIDER_CA", "OUTRIDER_HOME"}
"""The variables of commands that call a service, which need no look at the settings."""

COMMANDS = {
    "serve": ("serve:serve", "Serve rollouts until Ctrl-C or SIGTERM."),
    "run": ("run:run", "Run a task, or all tasks of a data set, and wait for them."),
    "status": ("status:status", "Show the state of the service, or of one group."),
    "cancel": ("status:cancel", "Cancel a group, or one session of it."),
    "show": ("show:show", "Show a session: what the model was shown, what it sampled, and how it ended."),
    "regrade": ("regrade:regrade", "Grade sessions again, with another evaluator or the same one."),
    "artifacts": ("artifacts:artifacts", "List the files kept from a session's sandbox, or get one of them."),
    "export": ("export:export", "Write the training samples of done groups."),
    "gc": ("delivery:gc", "Remove old groups with their sessions, turns, images, artifacts and events."),
    "doctor": ("doctor:doctor", "Show what works on this machine, and how to get what does not."),
    "demo": ("demo:demo", "Run 32 sandboxed sessions with a tiny model."),
    "slurm": ("slurm:slurm", "Submit a job that runs a service and its nodes on a Slurm cluster."),
    "eval": ("evaluate:eval_", "Run the tasks of a source, and score the policy."),
}
"""The commands by name: each a module of this package and a function in the module, and the first line of the
function's help, which the list of commands shows without the module."""

GROUPS = {
    "consumers": (
        "List, move and remove the named consumers of the results.",
        {
            "list": "delivery:list_consumers",
            "ack": "delivery:acknowledge",
            "rm": "delivery:remove_consumer",
        },
    ),
    "callbacks": (
        "List, redeliver and discard callbacks that were given up.",
        {
            "list": "delivery:list_callbacks",
            "redeliver": "delivery:redeliver",
            "discard": "delivery:discard",
        },
    ),
    "engines": (
        "List, add, drain and remove the engines of a running service.",
        {"list": "engines:list_engines", "add": "engines:add", "drain": "engines:drain", "rm": "engines:remove"},
    ),
    "harness": (
        "List, install and check the agent programs of this machine.",
        {
            "list": "harness:list_harnesses",
            "install": "harness:install_harness",
            "check": "harness:check_harness",
        },
    ),
    "image": (
        "Make, list and remove images for sandboxes.",
        {
            "import": "image:import_image",
            "pull": "image:pull_image",
            "build": "image:build_image",
            "list": "image:list_images",
            "rm": "image:remove_image",
        },
    ),
    "nodes": (
        "List, drain and resume the nodes that run sessions; join with another one.",
        {
            "join": "join:join",
            "list": "nodes:list_nodes",
            "pull": "nodes:pull",
            "drain": "nodes:drain",
            "resume": "nodes:resume",
        },
    ),
    "policy": (
        "Show, pause, resume and update the policy that the engines serve.",
        {"show": "policy:show", "pause": "policy:pause", "resume": "policy:resume", "update": "policy:update"},
    ),
    "task": (
        "Look at tasks, and check them, before a model sees them.",
        {"list": "task:list_", "show": "task:show", "import": "task:import_", "check": "task:check"},
    ),
    "token": (
        "Make, list and revoke tokens, each with a name and a role.",
        {"create": "token:create", "list": "token:list_tokens", "revoke": "token:revoke"},
    ),
}
"""The groups of commands: the help of each, and its commands by name."""

# Some versions of Typer bring their own copy of click. In every version, its UsageError is the base of BadParameter.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def run_command(argv: Sequence[str] | None) -> int:
    """Run one command and return its exit code, for `outrider.cli.main`. Raises KeyboardInterrupt for Ctrl-C before the
    command runs."""
    terminal = Terminal()
    words = sys.argv[1:] if argv is None else list(argv)
    # Options before the command's name are those of `outrider` itself.
    name = next((word for word in words if not word.startswith("-")), None)
    command = typer.main.get_command(commands(name) if name in COMMANDS or name in GROUPS else listed_commands())
    try:
        code = command.main(args=words, prog_name="outrider", standalone_mode=False, obj=terminal)
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
            message = message.replace(": Value error, ", ": ")  # pydantic's words, in newer versions of Typer
            context = getattr(error, "ctx", None)
            hint = f"{context.command_path if context else 'outrider'} --help"
            terminal.error(RequestError(message, hint=hint).record())
        return USAGE
    except Exception as error:  # a missing resource is shown in one line; everything else is raised again
        if not _is_shown(error):
            raise
        return _failed(terminal, _shown(error))
    return code if isinstance(code, int) else SUCCESS


def commands(only: str | None = None) -> typer.Typer:
    """Return the command line as a Typer application: with all commands, or with the command or group `only`, whose
    modules alone are imported."""
    app = _without_commands()
    for name, (place, _) in COMMANDS.items():
        if only in (None, name):
            app.command(name)(_load(place))
    for name, (help, members) in GROUPS.items():
        if only in (None, name):
            group = typer.Typer(no_args_is_help=True, help=help)
            for own, place in members.items():
                group.command(own)(_load(place))
            app.add_typer(group, name=name)
    return app


def listed_commands() -> typer.Typer:
    """Return a Typer application for the help, and for the error after an unknown name: the names of all commands with
    their first lines, and none of their modules."""
    app = _without_commands()
    for name, (_, line) in COMMANDS.items():
        app.command(name, help=line)(lambda: None)
    for name, (line, _) in GROUPS.items():
        app.add_typer(typer.Typer(help=line), name=name)
    return app


def _without_commands() -> typer.Typer:
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
        if any(name.startswith("OUTRIDER_") and name not in CLIENT_VARIABLES for name in variables()):
            from outrider.config import unknown_variables  # late, because a client needs no settings and no pydantic

            for unknown in unknown_variables():
                terminal_of(ctx).note(f"warning: {unknown}")

    return app


def _load(place: str) -> Callable[..., None]:
    """Import the function of a command."""
    module, _, function = place.partition(":")
    loaded: Callable[..., None] = getattr(import_module(f"outrider.cli.{module}"), function)
    return loaded


def _version(given: bool) -> None:
    if given:
        typer.echo(f"outrider {installed_version('outrider')}")
        raise typer.Exit


def _is_shown(error: BaseException) -> bool:
    return isinstance(error, OutriderError) or lacks_means(error)


def _shown(error: BaseException) -> OutriderError:
    """Return the error as an OutriderError. An error about a missing resource of the machine gets a hint."""
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
