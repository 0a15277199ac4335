"""`outrider engines`: lists, adds, drains and removes the engines of a running service."""

from __future__ import annotations

from typing import Annotated

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.engine_option import KIND, KIND_HELP, parse_engine
from outrider.cli.options import command
from outrider.cli.tables import engine_table
from outrider.cli.terminal import Terminal
from outrider.client.client import Client
from outrider.schemas import EngineList, EngineStatus

Name = Annotated[str, CliArgument(metavar="NAME", help="The engine's name.")]


@command
def list_engines(terminal: Terminal, service: Client) -> None:
    """List the engines with their load.

    The load of an engine is the number of requests in flight, of sessions, and
    of tokens generated since the engine was added.

    Example:

        outrider engines list --json
    """
    _show(terminal, service.engines())


@command
def add(
    terminal: Terminal,
    service: Client,
    engine: Annotated[str, CliArgument(metavar=KIND, help=KIND_HELP)],
    name: Annotated[
        str | None, CliOption(metavar="NAME", help="Name of the engine; by default its kind and a number.")
    ] = None,
    model: Annotated[str | None, CliOption(metavar="MODEL", help="The model's name on its server.")] = None,
    serves: Annotated[
        str | None, CliOption(metavar="FROZEN", help="The frozen model that it serves; without it, the policy.")
    ] = None,
) -> None:
    """Add an engine.

    The engine must be running. Its tokenizer must be the tokenizer of the model
    that it serves. This model is the policy or, with --serves, a frozen model.

    Examples:

        outrider engines add vllm=http://10.0.0.5:8000

        outrider engines add embedded=models/tiny --name spare

        outrider engines add vllm=http://10.0.0.6:8000 --serves judge
    """
    given = {"name": name, "model": model, "serves": serves}
    named = {key: value for key, value in given.items() if value is not None}
    _show(terminal, (service.add_engine(parse_engine(engine) | named),))


@command
def drain(terminal: Terminal, service: Client, name: Name) -> None:
    """Stop giving new sessions to an engine.

    The engine keeps its current sessions until they end.

    Example:

        outrider engines drain vllm-0
    """
    _show(terminal, service.drain_engine(name))


@command
def remove(terminal: Terminal, service: Client, name: Name) -> None:
    """Remove an engine from the pool.

    The sessions of the engine continue on other engines.

    Example:

        outrider engines rm vllm-0
    """
    _show(terminal, service.remove_engine(name))


def _show(terminal: Terminal, engines: tuple[EngineStatus, ...]) -> None:
    terminal.show(EngineList(engines=engines), engine_table(engines))
