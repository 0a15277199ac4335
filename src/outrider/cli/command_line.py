"""Classes for commands, groups of commands, options, arguments and their help. They are built on click.

Annotations of a function's parameters declare the options and arguments, such as `Annotated[int | None, CliOption("-n",
metavar="N")]`. The module does not depend on any command. It uses click and not Typer, because Typer imports pydantic
as soon as it reads an option. Importing Typer and pydantic takes 0.2 s of processor time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from inspect import Parameter, cleandoc
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click

from outrider.cli.exit_codes import USAGE

ARGUMENTS = "Arguments"
OPTIONS = "Options"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""click's settings for every command: the options that print its help, and the maximum width of the help in columns."""

Callback = Callable[[click.Context, click.Parameter, Any], Any]
"""A function that click calls with the context, the parameter and the value of an option. The function returns the
value to use instead."""


class CliArgument:
    """Declares a positional argument of a command.

    show_default: a text that the help shows as the default value. If it is False, an option's help shows no default.
    min: the smallest number that the argument accepts."""

    def __init__(
        self, *, metavar: str | None = None, help: str = "", show_default: str | bool = True, min: float | None = None
    ) -> None:
        self._metavar = metavar
        self._help = f"{help}  [default: {show_default}]" if isinstance(show_default, str) else help
        self._show_default = show_default is True
        self._min = min

    def made(self, name: str, kind: Any, default: Any) -> click.Parameter:
        """Return the click parameter `name`, which accepts values of the type `kind`. If `kind` is a list, the
        parameter takes any number of values. If `default` is `inspect.Parameter.empty`, the parameter is required."""
        single, many = _single(kind)
        return _Argument([name], text=self._help, nargs=-1 if many else 1, **self._attributes(single, default))

    def _attributes(self, kind: Any, default: Any) -> dict[str, Any]:
        required = default is Parameter.empty
        attributes = {"type": kind, "required": required, "default": None if required else default}
        if get_origin(kind) is Literal:
            attributes["type"] = click.Choice(get_args(kind))
        elif issubclass(kind, Enum):
            attributes |= {
                "type": click.Choice([each.value for each in kind]),
                "default": default.value if isinstance(default, Enum) else None,
                "callback": lambda _ctx, _parameter, value: None if value is None else kind(value),
            }
        elif kind is Path:
            attributes["type"] = click.Path(path_type=Path)
        elif self._min is not None:
            attributes["type"] = click.IntRange(int(self._min)) if kind is int else click.FloatRange(self._min)
        return {**attributes, "metavar": self._metavar}


class CliOption(CliArgument):
    """Declares an option. The default name comes from the function's parameter: `min_reward` becomes `--min-reward`.
    `panel` is the section of the help that lists the option. click processes an option with a `callback` before all
    options without one."""

    def __init__(
        self,
        *names: str,
        metavar: str | None = None,
        help: str = "",
        show_default: str | bool = True,
        min: float | None = None,
        panel: str = OPTIONS,
        callback: Callback | None = None,
    ) -> None:
        super().__init__(metavar=metavar, help=help, show_default=show_default, min=min)
        self._names = names
        self._panel = panel
        self._callback = callback

    def made(self, name: str, kind: Any, default: Any) -> click.Parameter:
        single, many = _single(kind)
        attributes = self._attributes(single, default)
        if single is bool:
            attributes |= {"is_flag": True, "default": bool(default), "type": None}
        if self._callback is not None:
            attributes |= {"callback": self._callback, "is_eager": True}
        names = self._names or (f"--{name.replace('_', '-')}",)
        attributes |= {"help": self._help, "show_default": self._show_default, "multiple": many}
        return _Option([name, *names], panel=self._panel, **attributes)


class _Argument(click.Argument):
    def __init__(self, names: Sequence[str], *, text: str, **attributes: Any) -> None:
        super().__init__(names, **attributes)
        self.text = text


class _Option(click.Option):
    def __init__(self, names: Sequence[str], *, panel: str, **attributes: Any) -> None:
        super().__init__(names, **attributes)
        self.panel = panel


class CliCommand(click.Command):
    """A command. Its help is the docstring of the command's function, with unchanged line breaks."""

    def __init__(
        self, callback: Callable[..., Any], params: Sequence[click.Parameter], *, help: str, name: str | None = None
    ) -> None:
        super().__init__(name, callback=callback, params=list(params), help=cleandoc(help), context_settings=CONTEXT)

    def invoke(self, ctx: click.Context) -> Any:
        if not gc.isenabled():
            # `main` may have turned garbage collection off for the imports. `gc.freeze` then excludes the imported
            # objects from collection, because they are never garbage. Scanning them, during the imports and when Python
            # exits, would take a quarter of a short command's time.
            gc.freeze()
            gc.enable()
        return super().invoke(ctx)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        _write_text(formatter, self.help)
        _write_parameters(formatter, ctx, self.get_params(ctx))


class CliGroup(click.Group):
    """A group of commands and of smaller groups. A member is loaded only when it runs, or when its own help is shown.

    `load` returns the member with a given name. `lines` has the first line of each member's help, by name. If a line is
    None, the member is also loaded when the group's help is shown, to read the line.
    """

    def __init__(
        self,
        lines: Mapping[str, str | None],
        load: Callable[[str], click.Command],
        *,
        help: str,
        name: str | None = None,
        params: Sequence[click.Parameter] = (),
        callback: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(
            name,
            params=list(params),
            callback=callback,
            help=cleandoc(help),
            context_settings=CONTEXT,
            no_args_is_help=False,
        )
        self._lines = lines
        self._load = load

    @property
    def names(self) -> list[str]:
        """The names of the members, in the order of the help."""
        return list(self._lines)

    def member(self, name: str) -> click.Command:
        """Return the command or group with this name. Raises KeyError for an unknown name."""
        if name not in self._lines:
            raise KeyError(name)
        return self._load(name)

    def first_line(self, name: str) -> str:
        """Return the first line of a member's help."""
        line = self._lines[name]
        return (self.member(name).help or "").partition("\n")[0] if line is None else line

    def list_commands(self, ctx: click.Context) -> list[str]:
        return self.names

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.member(cmd_name) if cmd_name in self._lines else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self._lines and not args[0].startswith("-"):
            from difflib import get_close_matches  # imported late, because only a mistyped name needs it

            meant = get_close_matches(args[0], self.names, n=1)
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {meant[0]!r}?" if meant else ""))
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            click.echo(ctx.get_help())
            ctx.exit(USAGE)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        _write_text(formatter, self.help)
        _write_parameters(formatter, ctx, self.get_params(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.first_line(name)) for name in self.names])


def _single(kind: Any) -> tuple[Any, bool]:
    """Return the type of a single value, and whether the parameter takes a list of such values. For example, `list[str]
    | None` gives `str` and True."""
    [given] = [each for each in get_args(kind) if each is not NoneType] if NoneType in get_args(kind) else [kind]
    return (get_args(given)[0], True) if get_origin(given) is list else (given, False)


def _write_text(formatter: click.HelpFormatter, text: str | None) -> None:
    formatter.write_paragraph()
    for line in (text or "").splitlines():
        formatter.write(f"  {line}".rstrip() + "\n")


def _write_parameters(
    formatter: click.HelpFormatter, ctx: click.Context, parameters: Sequence[click.Parameter]
) -> None:
    sections: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], OPTIONS: []}
    for each in parameters:
        if isinstance(each, _Argument):
            sections[ARGUMENTS].append((each.make_metavar(ctx), each.text))
        elif record := each.get_help_record(ctx):
            panel = each.panel if isinstance(each, _Option) else OPTIONS
            sections.setdefault(panel, []).append(record)
    for name, rows in sections.items():
        if rows:
            with formatter.section(name):
                formatter.write_dl(rows)
