"""Makes functions into commands. `command` adds the options that several commands share, and passes the objects made
from these options, such as a client, to the function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from outrider.cli.setting_options import MACHINE, MachineConfig, option_of, read_settings, setting_options
from outrider.cli.terminal import Terminal, terminal_of
from outrider.config import Config
from outrider.environment import DEFAULT_URL, environment


def _json(ctx: typer.Context, given: bool) -> bool:
    # The option is eager: Typer reads --json before the other options, so that an error in another option is also
    # written as JSON.
    terminal_of(ctx).json = given
    return given


Url = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="The service's address.", show_default=f"$OUTRIDER_URL, else {DEFAULT_URL}"
    ),
]
Token = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN", help="The service's access token.", show_default="$OUTRIDER_TOKEN"),
]
Ca = Annotated[
    str | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        help="Certificate (PEM) of the authority of the service's.",
        show_default="$OUTRIDER_CA, else those of this machine",
    ),
]
Image = Annotated[
    str | None,
    typer.Option(
        "--image",
        "--image-template",
        metavar="NAME",
        help="Image of Harbor tasks that name none, and of the rows of a data set. {NAME} in it is the row's column"
        " NAME, {NAME/OLD/NEW} the same with NEW for each OLD.",
        show_default="the one that the row or its data set names",
    ),
]
TestCommand = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="Runs the tests of the rows of a data set; {tests} in it are the test files.",
        show_default="the one that the row or its data set names",
    ),
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Run Harbor tasks that ask for a network, or leave it open, without one.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="File to write.", show_default="standard output"),
]
Json = Annotated[
    bool, typer.Option("--json", callback=_json, is_eager=True, help="Write one JSON document to standard output.")
]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function for Typer. Parameters of the following types are not options; their values are made from the
    shared options.

    - `Terminal`: the command's output.
    - `Client`: an open client of the service that --url, --token and --ca name. `AsyncClient`: a client to be opened.
    - `Config`, `MachineConfig`: the settings, from --config and one option per setting.

    A command also has --json, unless the command takes settings and so runs until a signal ends it.
    """
    hints = get_type_hints(function, include_extras=True)
    made = {name: hint for name, hint in hints.items() if hint in _MADE or _is_client(hint)}
    options: list[Parameter] = [Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, parameter in signature(function).parameters.items():
        if hints[name] in _SETTINGS:
            options += setting_options(_SETTINGS[hints[name]])
        elif name not in made:
            options.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
    if any(map(_is_client, made.values())):
        options += [option_of("url", Url), option_of("token", Token), option_of("ca", Ca)]
    if not _SETTINGS.keys() & {*made.values()}:
        options.append(option_of("json", Json))

    @wraps(function)
    def run(ctx: typer.Context, **given: Any) -> None:
        passed = {name: value for name, value in given.items() if name in hints}
        with ExitStack() as stack:
            for name, kind in made.items():
                passed[name] = kind(**_service(given)) if _is_client(kind) else _MADE[kind](ctx, given)
                if isinstance(passed[name], AbstractContextManager):  # a `Client`
                    stack.enter_context(passed[name])
            function(**passed)

    run.__dict__["__signature__"] = Signature(options)
    return run


def _is_client(hint: Any) -> bool:
    # The module of the clients is compared by its name. Its import takes aiohttp, and a seventh of the processor time
    # of a service's start, and a service needs no client.
    return getattr(hint, "__module__", "") == "outrider.client.client"


def _service(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a client, from the options and the environment."""
    return {
        "url": given["url"] or environment("OUTRIDER_URL") or DEFAULT_URL,
        "token": given["token"] or environment("OUTRIDER_TOKEN"),
        "ca": given["ca"] or environment("OUTRIDER_CA"),
    }


_SETTINGS: dict[Any, frozenset[str] | None] = {Config: None, MachineConfig: MACHINE}
_MADE: dict[Any, Callable[[typer.Context, Mapping[str, Any]], Any]] = {
    Terminal: lambda ctx, _: terminal_of(ctx),
    Config: lambda _, given: read_settings(given),
    MachineConfig: lambda _, given: read_settings(given),
}
