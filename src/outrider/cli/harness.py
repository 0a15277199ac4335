"""`outrider harness`: lists, installs, checks and records the agent programs of this machine."""

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
    """A preset. `version` is the pinned version of its program, None if it has no program; `path` is the folder in
    which this version is installed, None if it is not installed. `versions` are all installed versions."""

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

    A preset defines how one agent program is installed, started and pointed at
    its model.

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
    gets a folder of its own below ~/.cache/outrider (or $OUTRIDER_HOME).
    Several versions may be installed. A task selects another version than the
    pinned one by `harness.version`.

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

    The newest version in the registry is installed beside the pinned one.
    Both are certified as by `outrider harness check`, and the differences are
    printed. In a checkout of Outrider's source, the version is then written
    into the preset, unless --check is given. Exit code 0: the newest version
    is certified, or pinned already. 1: it is not certified.

    Example:

        outrider harness update pi --check
    """
    # The import is here, because the other commands of this group do not need the server's libraries.
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

    A scripted model makes the program do small tasks, one for each row. The
    tasks cover everything that makes clients rewrite a conversation. Every
    recorded token is compared with the model's own input and output.

    A row holds if all its checks succeed. Exit code 0: all tried rows hold.
    1: a row does not hold, or a row that every harness needs could not be
    tried.

    Examples:

        outrider harness check pi

        outrider harness check opencode --dialect messages --row three-turns --row sub-agent

        outrider harness check --command 'my-agent --url {base_url}/v1 {instruction}' --venv my-agent/.venv

        outrider harness check --task my-task.toml
    """
    # The import is here, because the other commands of this group do not need the server's libraries.
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
    """Run a program by hand, and write down how to run it in tasks.

    The program runs here, not confined, with the variables of all vendors set
    to a recording model endpoint. {base_url}, {api_key}, {model} and
    {instruction} are filled in in its arguments, variables and settings files.
    NAME.toml becomes a draft of a task with the program, NAME.wire.jsonl the
    model calls, without secrets. The exit code is that of the program.

    Examples:

        outrider harness record --name mine -- my-agent "Say hello."

        outrider harness record --name mine --home settings -- my-agent --model {model} {instruction}
    """
    # The import is here, because the other commands of this group do not need the server's libraries.
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
