"""The program `outrider`: lists all commands, runs one of them, and prints its error.

The work of each command is done in another module. Invariant: an OutriderError is printed as one line, never as a
traceback. So is an error that comes from the machine: a full disk, a missing file, or a lack of descriptors, memory or
threads.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click
from click.exceptions import Exit, UsageError

from outrider.cli.command_line import CliCommand, CliGroup, CliOption
from outrider.cli.exit_codes import FAILURE, SUCCESS, USAGE
from outrider.cli.terminal import Terminal, terminal_of
from outrider.environment import installed_version, variables
from outrider.errors import OutriderError, RequestError, ServiceError, described, may_come_from_machine

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
"""Hints for the user about errors of the operating system, by errno."""

HELP = """Outrider serves agent rollouts to reinforcement-learning trainers.

Try `outrider demo` first: it needs no engine, no network and no root.
Then start a service with `outrider serve` and run a task with `outrider run`.
"""

CLIENT_VARIABLES = {"OUTRIDER_URL", "OUTRIDER_TOKEN", "OUTRIDER_CA", "OUTRIDER_HOME"}
"""Environment variables for commands that call a service. If any other OUTRIDER_ variable is set, the program checks
its name and may warn about it."""

COMMANDS = {
    "serve": ("serve:serve", "Serve rollouts until Ctrl-C or SIGTERM."),
    "run": ("run:run", "Run a task, or all tasks of a data set, and wait for them."),
    "status": ("status:status", "Show the state of the service, or of one group."),
    "sessions": ("sessions:sessions", "List sessions, or groups, newest first."),
    "cancel": ("sessions:cancel", "Cancel groups, sessions, or all sessions that match a filter."),
    "retry": ("sessions:retry", "Submit ended sessions again, in new groups with the same tasks."),
    "query": ("query:query", "Run an SQL query over groups, sessions, turns, errors, rewards, tokens."),
    "diff": ("diff:diff", "Compare two runs: rewards, pass@k, turns, tokens, failures, flips."),
    "show": ("show:show", "Show a session: what the model was shown, what it sampled, and how it ended."),
    "trace": ("trace:trace", "Write the timelines of sessions as a trace for ui.perfetto.dev."),
    "diagnose": ("diagnose:diagnose", "List the faults of a run, with evidence and the next step."),
    "view": ("view:view", "Look at a finished run in the browser, without a service."),
    "top": ("top:top", "Show what the service does, live in the terminal."),
    "mcp": ("mcp:mcp", "Serve the MCP tools of a service over standard input and output."),
    "regrade": ("regrade:regrade", "Grade sessions again, with another evaluator or the same one."),
    "capture": ("session:capture", "Run a program here as the agent of a session, and show what it did."),
    "artifacts": ("artifacts:artifacts", "List the files kept from a session's sandbox, or get one of them."),
    "export": ("export:export", "Write the training samples of done groups."),
    "gc": ("delivery:gc", "Remove old groups with their sessions, turns, images, artifacts and events."),
    "doctor": ("doctor:doctor", "Show what works on this machine, and how to get the rest."),
    "demo": ("demo:demo", "Run 32 sandboxed sessions with a tiny model."),
    "slurm": ("slurm:slurm", "Submit a job that runs a service and its nodes on a Slurm cluster."),
    "eval": ("evaluate:eval_", "Run the tasks of a source, and score the policy."),
}
"""The commands: for each name, its function as `module:function` in this package, and the first line of its help. The
line is repeated here, so that `outrider --help` can list the commands without importing their modules."""

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
        {
            "list": "engines:list_engines",
            "add": "engines:add",
            "drain": "engines:drain",
            "rm": "engines:remove",
            "dial": "dial:dial",
        },
    ),
    "harness": (
        "List, install, check and record the agent programs of this machine.",
        {
            "list": "harness:list_harnesses",
            "install": "harness:install_harness",
            "check": "harness:check_harness",
            "update": "harness:update_harness",
            "record": "harness:record_harness",
        },
    ),
    "image": (
        "Make, list and remove images for sandboxes.",
        {
            "import": "image:import_image",
            "pull": "image:pull_image",
            "pull-ahead": "image:pull_ahead_image",
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
    "queue": (
        "Pause and resume queued sessions, and list the pauses.",
        {"list": "queue:list_", "pause": "queue:pause", "resume": "queue:resume"},
    ),
    "session": (
        "Open, complete, reset and list sessions whose agents run elsewhere.",
        {
            "open": "session:open_",
            "complete": "session:complete",
            "reset": "session:reset",
            "list": "sessions:sessions",
        },
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
"""The groups of commands: for each name, its help and its commands. A command is written as `module:function`."""


def run_command(argv: Sequence[str] | None) -> int:
    """Run one command and return its exit code. Raises KeyboardInterrupt for Ctrl-C."""
    terminal = Terminal()
    code = FAILURE
    try:
        code = _run(terminal, sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except OSError as error:
        # Standard output cannot be written, for example because the disk is full or because the program that reads it,
        # such as `head`, has exited. Python also flushes it at exit, which would fail again. So standard output is
        # replaced by /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == SUCCESS:  # otherwise, the command has already printed its error
            code = FAILURE if isinstance(error, BrokenPipeError) else _failed(terminal, _shown(error))
    return code


def _run(terminal: Terminal, words: list[str]) -> int:
    """Run one command, print its error, and return its exit code. Raises OSError if standard output cannot be
    written."""
    try:
        root = commands()
        with root.make_context("outrider", words, obj=terminal) as context:
            root.invoke(context)
    except Exit as end:
        return end.exit_code
    except OutriderError as error:
        return _failed(terminal, error)
    except BaseExceptionGroup as failures:
        # Several asyncio tasks failed together. If one of the errors is a bug, the whole group is raised again to get a
        # traceback.
        matched, others = failures.split(_is_shown)
        if matched is None or others is not None:
            raise
        first: BaseException = matched
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        return _failed(terminal, _shown(first))
    except UsageError as error:
        program = error.ctx.command_path if error.ctx else "outrider"
        message = error.format_message().removesuffix(".")
        terminal.error(RequestError(message, hint=f"{program} --help").record())
        return USAGE
    except BrokenPipeError:  # `run_command` handles it
        raise
    except Exception as error:  # a bug is raised again to get a traceback
        if not _is_shown(error):
            raise
        return _failed(terminal, _shown(error))
    return SUCCESS


def commands() -> CliGroup:
    """Return the group of all commands. A command's module is imported only when the command runs, or when its own help
    or the help of its group is shown. `outrider --help` imports none."""
    version = CliOption("--version", callback=_version, help="Show the version and exit.")
    return CliGroup(
        {name: line for name, (_, line) in COMMANDS.items()} | {name: line for name, (line, _) in GROUPS.items()},
        _command,
        help=HELP,
        params=[version.made("show_version", bool, False)],
        callback=_check_variables,
    )


def _command(name: str) -> click.Command:
    """Return the command or the group with this name."""
    if name in COMMANDS:
        return _load(COMMANDS[name][0])
    help, members = GROUPS[name]
    return CliGroup(dict.fromkeys(members), lambda member: _load(members[member]), help=help, name=name)


def _load(place: str) -> CliCommand:
    """Import a command. `place` has the form `module:function`, such as `serve:serve`."""
    module, _, name = place.partition(":")
    loaded: CliCommand = getattr(import_module(f"outrider.cli.{module}"), name)
    return loaded


@click.pass_context
def _check_variables(ctx: click.Context, show_version: bool) -> None:
    if any(name.startswith("OUTRIDER_") and name not in CLIENT_VARIABLES for name in variables()):
        # Imported here, because a command that only calls a service needs neither the settings nor pydantic.
        from outrider.config import unknown_variables

        for unknown in unknown_variables():
            terminal_of(ctx).note(f"warning: {unknown}")


def _version(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    if given:
        click.echo(f"outrider {installed_version('outrider')}")
        ctx.exit()


def _is_shown(error: BaseException) -> bool:
    return isinstance(error, OutriderError) or may_come_from_machine(error)


def _shown(error: BaseException) -> OutriderError:
    """Return the error as an OutriderError. An error that comes from the machine, such as a full disk, gets a hint if
    there is one for it."""
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
