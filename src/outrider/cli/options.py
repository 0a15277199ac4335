"""Turns functions into commands. `command` adds options that several commands share, such as --url. It also makes the
objects that these options describe, such as a client, and passes them to the function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import click

from outrider.cli.command_line import CliCommand, CliOption
from outrider.cli.run_filter import OPTIONS, RunFilter
from outrider.cli.terminal import Terminal, terminal_of
from outrider.environment import DEFAULT_URL, environment


def _json(ctx: click.Context, _: click.Parameter, given: bool) -> bool:
    # This option is read before all others, because `CliOption` makes options with a callback eager. So if another
    # option is invalid, --json is already known, and the error is also written as JSON.
    terminal_of(ctx).json = given
    return given


Url = Annotated[
    str | None,
    CliOption("--url", metavar="URL", help="The service's address.", show_default=f"$OUTRIDER_URL, else {DEFAULT_URL}"),
]
Token = Annotated[
    str | None,
    CliOption("--token", metavar="TOKEN", help="The service's access token.", show_default="$OUTRIDER_TOKEN"),
]
Ca = Annotated[
    str | None,
    CliOption(
        "--ca",
        metavar="FILE",
        help="Certificate (PEM) of the authority of the service's.",
        show_default="$OUTRIDER_CA, else those of this machine",
    ),
]
Image = Annotated[
    str | None,
    CliOption(
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
    CliOption(
        metavar="COMMAND",
        help="Runs the tests of the rows of a data set; {tests} in it are the test files.",
        show_default="the one that the row or its data set names",
    ),
]
Offline = Annotated[
    bool, CliOption("--offline", help="Run Harbor tasks that ask for a network, or leave it open, without one.")
]
Network = Annotated[
    list[str] | None,
    CliOption(
        "--network",
        metavar="DESTINATION",
        help="What Harbor tasks that ask for a public network get in its place, such as mirror:pip. May be repeated.",
    ),
]
HarnessName = Annotated[
    str | None,
    CliOption("--harness", metavar="PRESET", help="Agent program for all tasks.", show_default="their own"),
]
BUILT_IN = "tools"
"""Name of the built-in agent. It runs the tasks of a data set that name no agent."""
AgentName = Annotated[
    str | None,
    CliOption("--agent", metavar="NAME", help="Agent in Python for tasks that name none.", show_default=BUILT_IN),
]
Limit = Annotated[
    int | None, CliOption("--limit", metavar="N", min=1, help="Tasks of each source.", show_default="all")
]
Output = Annotated[
    Path | None,
    CliOption("--output", "-o", metavar="FILE", help="File to write.", show_default="standard output"),
]
Json = Annotated[bool, CliOption("--json", callback=_json, help="Write one JSON document to standard output.")]


def command(function: Callable[..., None]) -> CliCommand:
    """Return the command that runs a function. Each parameter of the function becomes an option or an argument, except
    parameters of these types:

    - `Terminal`: the command's output.
    - `Client`: an open client of the service that --url, --token and --ca describe.
    - `AsyncClient`: an asynchronous client of the same service. The client is not open yet.
    - `RunFilter`: a filter of sessions, made from the options in `run_filter.py`.
    - `Config`, `MachineConfig`: the settings, made from --config and one option per setting.

    A command with settings runs until a signal ends it. All other commands also have the option --json.
    """
    hints = get_type_hints(function, include_extras=True)
    made = {
        name: hint
        for name, hint in hints.items()
        if hint is Terminal or hint is RunFilter or _is_client(hint) or _is_config(hint)
    }
    parameters: list[click.Parameter] = []
    for name, parameter in signature(function).parameters.items():
        if _is_config(hints[name]):
            parameters += _setting_options(hints[name])
        elif hints[name] is RunFilter:
            parameters += [_parameter(option, annotation) for option, annotation in OPTIONS.items()]
        elif name not in made:
            parameters.append(_parameter(name, hints[name], parameter.default))
    if any(map(_is_client, made.values())):
        parameters += [_parameter("url", Url), _parameter("token", Token), _parameter("ca", Ca)]
    if not any(map(_is_config, made.values())):
        parameters.append(_parameter("json", Json))

    @click.pass_context
    def run(ctx: click.Context, /, **given: Any) -> None:
        passed = {name: _listed(value) for name, value in given.items() if name in hints}
        with ExitStack() as stack:
            for name, kind in made.items():
                passed[name] = _made(kind, ctx, given)
                if isinstance(passed[name], AbstractContextManager):  # closes a `Client` after the command
                    stack.enter_context(passed[name])
            function(**passed)

    return CliCommand(run, parameters, help=function.__doc__ or "")


FOR_ANY_HARNESS = ("mcp_servers", "skills")
"""Fields of a task's `harness` that do not choose an agent. They stay in the task if the user chooses another agent."""


def with_harness(
    task: Mapping[str, Any], harness: str | None, agent: str | None, *, default: str | None = None
) -> dict[str, Any]:
    """Return the task with the agent that the command line chooses. The preset `harness` replaces the task's own agent.
    If no preset is given, a task that names no agent gets the Python agent `agent`. If `agent` is not given either,
    such a task gets the Python agent `default`."""
    own = task.get("harness") or {}
    given = {name: own[name] for name in FOR_ANY_HARNESS if name in own}
    if harness:
        return {**task, "harness": {**given, "preset": harness}}
    if own.keys() - given.keys() or not (agent or default):
        return dict(task)
    return {**task, "harness": {**given, "agent": agent or default}}


def _made(kind: Any, ctx: click.Context, given: Mapping[str, Any]) -> Any:
    """Return the object for a function's parameter that is not an option, such as a client."""
    if kind is Terminal:
        return terminal_of(ctx)
    if kind is RunFilter:
        return RunFilter(given)
    if _is_client(kind):
        return kind(**_service(given))
    # imported here, because a client does not need the settings, which load slowly
    from outrider.cli.setting_options import read_settings

    return read_settings(given)


# The next two functions recognise a class by the name of its module, so that the module need not be imported. Importing
# the client or the settings takes most of a command's start. A service does not need the client, and a client does not
# need the settings.


def _is_client(hint: Any) -> bool:
    return getattr(hint, "__module__", "") == "outrider.client.client"


def _is_config(hint: Any) -> bool:
    """Return True for `Config` and for `MachineConfig`, which is an annotated `Config`."""
    return getattr(getattr(hint, "__origin__", hint), "__module__", "") == "outrider.config"


def _setting_options(hint: Any) -> list[click.Parameter]:
    from outrider.cli.setting_options import setting_options

    [only] = getattr(hint, "__metadata__", [None])
    return [_parameter(name, annotation) for name, annotation in setting_options(only)]


def _parameter(name: str, annotation: Any, default: Any = None) -> click.Parameter:
    """Return the click parameter for one parameter of a function. `annotation` holds the parameter's type, and a
    CliOption or CliArgument."""
    kind, declared = get_args(annotation)
    found: click.Parameter = declared.made(name, kind, default)
    return found


def _listed(value: Any) -> Any:
    """Convert the value of a repeatable option from click's tuple to a list, or to None if it is empty. Other values
    are returned unchanged."""
    return (list(value) or None) if isinstance(value, tuple) else value


def _service(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for making a client, from the command's options and the environment."""
    return {
        "url": given["url"] or environment("OUTRIDER_URL") or DEFAULT_URL,
        "token": given["token"] or environment("OUTRIDER_TOKEN"),
        "ca": given["ca"] or environment("OUTRIDER_CA"),
    }
