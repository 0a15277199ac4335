"""`outrider harness`: the agent programs of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from outrider.cli.options import Json
from outrider.cli.tables import table, word
from outrider.cli.terminal import terminal_of
from outrider.harnesses.install import install, installed
from outrider.harnesses.presets import load_preset, preset_names

Preset = Annotated[str, typer.Argument(metavar="PRESET", help="One that `outrider harness list` names.")]


class HarnessRow(msgspec.Struct, frozen=True, kw_only=True):
    """A preset. `version` is the program's pinned version, None when it brings no program; `path` is where it is
    installed."""

    name: str
    summary: str
    version: str | None
    installed: bool
    path: str | None


class Harnesses(msgspec.Struct, frozen=True):
    harnesses: tuple[HarnessRow, ...]


def harness_commands() -> typer.Typer:
    """The sub-commands of `outrider harness`."""
    app = typer.Typer(no_args_is_help=True, help="List, install and check the agent programs of this machine.")
    app.command("list")(list_harnesses)
    app.command("install")(install_harness)
    app.command("check")(check_harness)
    return app


def list_harnesses(ctx: typer.Context, json: Json = False) -> None:
    """List the presets, and whether their programs are installed."""
    terminal = terminal_of(ctx)
    rows = [_row(name) for name in preset_names()]
    if terminal.json:
        terminal.write_json(Harnesses(tuple(rows)))
        return
    columns = ("harness", "version", "installed", "what it is")
    cells = [(row.name, row.version or "-", word("yes" if row.installed else "no"), row.summary) for row in rows]
    terminal.out.print(table(columns, cells))


def install_harness(ctx: typer.Context, name: Preset, json: Json = False) -> None:
    """Install a preset's program for this user.

    It comes from the package registry and gets a folder of its own.

    Example:

        outrider harness install mini-swe-agent
    """
    terminal = terminal_of(ctx)
    path = install(name, terminal.note)
    if terminal.json:
        terminal.write_json(_row(name))
    else:
        terminal.out.print(f"{name} is installed in {path}", soft_wrap=True)


def check_harness(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[PRESET]", help="One that `outrider harness list` names.")
    ] = None,
    command: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="A program of your own instead, as in a task's `command`.")
    ] = None,
    venv: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The virtual environment that COMMAND runs in.")
    ] = None,
    task: Annotated[
        Path | None,
        typer.Option(metavar="TASK.toml", help="The harness and the runtime of this task instead, with all they say."),
    ] = None,
    dialect: Annotated[
        str | None, typer.Option(metavar="DIALECT", help="What it is to speak: chat, messages, responses or gemini.")
    ] = None,
    runtime: Annotated[
        str | None, typer.Option(metavar="KIND", help="Where it runs.", show_default="namespace, else process")
    ] = None,
    row: Annotated[list[str] | None, typer.Option(metavar="ROW", help="Only this row; may be given again.")] = None,
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="The most that one row's run may take.")] = 180,
    json: Json = False,
) -> None:
    """Certify a harness against this build, with a verdict a row.

    A scripted model has the program do small tasks, with all that makes clients rewrite a history. Every token that
    comes back is held against what the model was given and said. Ends with 0 when it holds, and with 1 when a row does
    not hold or, of those that every harness needs, could not be tried.

    Examples:

        outrider harness check pi

        outrider harness check opencode --dialect messages --row three-turns --row sub-agent

        outrider harness check --command 'my-agent --url {base_url}/v1 {instruction}' --venv my-agent/.venv

        outrider harness check --task my-task.toml
    """
    # Late, because it needs the server's libraries.
    from outrider.cli.harness_check import Asked, certify_and_show

    asked = Asked(
        name=name,
        command=command,
        venv=venv,
        task=task,
        dialect=dialect,
        runtime=runtime,
        rows=tuple(row or ()),
        seconds=seconds,
    )
    raise typer.Exit(certify_and_show(terminal_of(ctx), asked))


def _row(name: str) -> HarnessRow:
    preset = load_preset(name)
    path = installed(name)
    return HarnessRow(
        name=name,
        summary=preset.summary,
        version=preset.install.version if preset.install else None,
        installed=preset.install is None or path is not None,
        path=str(path) if path else None,
    )
