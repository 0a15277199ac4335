"""`outrider harness`: lists, installs, checks and records harnesses. A harness is an agent program that Outrider can
run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from click.exceptions import Exit

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.options import command
from outrider.cli.tables import table
from outrider.cli.terminal import Terminal
from outrider.harnesses.install import check, install, installed, installed_versions
from outrider.harnesses.presets import load_preset, preset_names

PRESET_HELP = "A preset's name: see `outrider harness list`."
Preset = Annotated[str, CliArgument(metavar="PRESET", help=PRESET_HELP)]


class HarnessRow(msgspec.Struct, frozen=True, kw_only=True):
    """A preset, and the agent program that it describes.

    version: the version that the preset pins. None if the preset has no program.
    path: the folder of this version, if it is installed.
    versions: all installed versions of the program.
    """

    name: str
    summary: str
    version: str | None
    installed: bool
    path: str | None
    versions: tuple[str, ...] = ()


class Harnesses(msgspec.Struct, frozen=True):
    """The output of `outrider harness list --json`."""

    harnesses: tuple[HarnessRow, ...]


@command
def list_harnesses(terminal: Terminal) -> None:
    """List the presets and whether their programs are installed here.

    A preset describes one agent program: how to install it, how to start it, and
    how to make it call the model of a session.

    Example:

        outrider harness list --json
    """
    rows = [_row(name) for name in preset_names()]
    columns = ("harness", "version", "installed", "what it is")
    cells = [(row.name, row.version, row.installed, row.summary) for row in rows]
    terminal.show(Harnesses(tuple(rows)), table(columns, cells))


@command
def install_harness(
    terminal: Terminal,
    name: Preset,
    version: Annotated[
        str | None, CliOption(metavar="VERSION", help="Another exact version.", show_default="the pinned one")
    ] = None,
) -> None:
    """Install a preset's program for this user.

    The program comes from PyPI or npm, in the version that the preset pins. It
    gets its own folder below ~/.cache/outrider (or $OUTRIDER_HOME). Several
    versions can be installed side by side. A task uses the pinned version, unless
    its field `harness.version` names another one.

    Examples:

        outrider harness install mini-swe-agent

        outrider harness install codex --version 0.170.0
    """
    path = install(name, terminal.note, version=version)
    if version is not None:
        check(name, version)  # raises an error if the preset does not fit this version
    terminal.show(_row(name), f"{name} is installed in {path}")


@command
def update_harness(
    terminal: Terminal,
    name: Preset,
    only_check: Annotated[bool, CliOption("--check", help="Change no pin.")] = False,
    runtime: Annotated[
        str | None, CliOption(metavar="KIND", help="The kind of sandbox.", show_default="namespace, else process")
    ] = None,
    row: Annotated[list[str] | None, CliOption(metavar="ROW", help="Try only this row. May be repeated.")] = None,
    seconds: Annotated[float, CliOption(metavar="SECONDS", help="Time limit of one row.")] = 180,
) -> None:
    """Try the newest version of a preset's program.

    The command installs the newest version in the registry beside the pinned
    version. It checks both, as `outrider harness check` does, and prints the
    differences. If the newest version passes, it becomes the pinned version.
    This change needs a checkout of Outrider's source. With --check, the pin
    does not change.

    Exit code 0: the newest version passes, or is already pinned.
    Exit code 1: the newest version does not pass.

    Example:

        outrider harness update pi --check
    """
    # Imported here, because the other commands of this group do not need the server's libraries.
    from outrider.cli.harness_update import update_and_print

    raise Exit(
        update_and_print(terminal, name, only_check=only_check, runtime=runtime, rows=tuple(row or ()), seconds=seconds)
    )


@command
def check_harness(
    terminal: Terminal,
    name: Annotated[str | None, CliArgument(metavar="[PRESET]", help=PRESET_HELP)] = None,
    command: Annotated[
        str | None, CliOption(metavar="COMMAND", help="Check this program instead, written as a task's `command`.")
    ] = None,
    venv: Annotated[
        Path | None, CliOption(metavar="DIR", help="The virtual environment in which COMMAND runs.")
    ] = None,
    task: Annotated[
        Path | None,
        CliOption(metavar="TASK.toml", help="Check the harness of this task instead, in the task's own runtime."),
    ] = None,
    dialect: Annotated[
        str | None,
        CliOption(metavar="DIALECT", help="The API it must speak: chat, messages, responses or gemini."),
    ] = None,
    runtime: Annotated[
        str | None, CliOption(metavar="KIND", help="The kind of sandbox.", show_default="namespace, else process")
    ] = None,
    version: Annotated[
        str | None, CliOption(metavar="VERSION", help="A version of PRESET.", show_default="the pinned one")
    ] = None,
    row: Annotated[list[str] | None, CliOption(metavar="ROW", help="Try only this row. May be repeated.")] = None,
    seconds: Annotated[float, CliOption(metavar="SECONDS", help="Time limit of one row.")] = 180,
) -> None:
    """Certify that a harness works with this version of Outrider.

    The agent program does small tasks with a scripted model. Each task is a row
    of the certificate. Together, the rows cover everything that makes clients
    rewrite a conversation. Every recorded token is compared with the model's
    own input and output. A row holds if all its checks succeed.

    Exit code 0: all rows that were tried hold.
    Exit code 1: a row does not hold, or a required row could not be tried.

    Examples:

        outrider harness check pi

        outrider harness check opencode --dialect messages --row three-turns --row sub-agent

        outrider harness check --command 'my-agent --url {base_url}/v1 {instruction}' --venv my-agent/.venv

        outrider harness check --task my-task.toml
    """
    # Imported here, because the other commands of this group do not need the server's libraries.
    from outrider.cli.harness_check import check_and_print, find_subject

    subject = find_subject(
        preset=name, command=command, venv=venv, task=task, dialect=dialect, runtime=runtime, version=version
    )
    raise Exit(check_and_print(terminal, subject, names=tuple(row or ()), seconds=seconds))


@command
def record_harness(
    terminal: Terminal,
    words: Annotated[list[str], CliArgument(metavar="COMMAND...", help="The program and its arguments, after --.")],
    name: Annotated[str, CliOption(metavar="NAME", help="Name of the files: NAME.toml and NAME.wire.jsonl.")],
    instruction: Annotated[
        str | None,
        CliOption(metavar="TEXT", help="The task for {instruction}.", show_default="a task without effect"),
    ] = None,
    stdin: Annotated[bool, CliOption(help="Give the program the instruction as standard input.")] = False,
    env: Annotated[
        list[str] | None, CliOption(metavar="NAME=VALUE", help="A variable of the program. May be repeated.")
    ] = None,
    home: Annotated[
        Path | None,
        CliOption(
            metavar="DIR",
            help="Folder with the program's settings files; a copy is the program's HOME.",
            show_default="your HOME",
        ),
    ] = None,
    output: Annotated[Path, CliOption(metavar="DIR", help="Folder for the two files.")] = Path("."),
    engine: Annotated[
        str | None,
        CliOption(metavar="KIND=WHERE", help="A real engine, as for `outrider serve`.", show_default="a script"),
    ] = None,
    tokenizer: Annotated[str | None, CliOption(metavar="PATH", help="The engine's tokenizer.")] = None,
    renderer: Annotated[str | None, CliOption(metavar="NAME", help="The renderer of the engine's model.")] = None,
) -> None:
    """Run a program once, record its model calls, and draft a task that runs it.

    The program runs on this machine, without a sandbox. The variables of all
    vendors (OPENAI_BASE_URL, ANTHROPIC_BASE_URL, ...) point to a model endpoint
    that records the calls. In the program's arguments, variables and settings
    files, the command replaces {base_url}, {api_key}, {model} and {instruction}.

    The command writes two files. NAME.toml is the draft of a task that runs the
    program. NAME.wire.jsonl has the model calls, without secrets. The exit code
    is the program's exit code.

    Examples:

        outrider harness record --name mine -- my-agent "Say hello."

        outrider harness record --name mine --home settings -- my-agent --model {model} {instruction}
    """
    # Imported here, because the other commands of this group do not need the server's libraries.
    from outrider.cli.harness_record import Answers, record_and_draft

    answers = Answers(
        name=name,
        words=tuple(words),
        instruction=instruction,
        stdin=stdin,
        env=tuple(env or ()),
        home=home,
        output=output,
        engine=engine,
        tokenizer=tokenizer,
        renderer=renderer,
    )
    if code := record_and_draft(terminal, answers):
        raise Exit(code)


def _row(name: str) -> HarnessRow:
    preset = load_preset(name)
    path = installed(name)
    return HarnessRow(
        name=name,
        summary=preset.summary,
        version=preset.install.version if preset.install else None,
        installed=preset.install is None or path is not None,
        path=str(path) if path else None,
        versions=installed_versions(preset),
    )
