"""`outrider engines`: the engines of a running service. `parse_engine` reads KIND=WHERE on any command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from outrider.cli.options import Ca, Json, Token, Url, client
from outrider.cli.tables import engine_table
from outrider.cli.terminal import Terminal, terminal_of
from outrider.errors import InvalidField
from outrider.schemas import EngineList, EngineStatus

KIND = "KIND=WHERE"
KIND_HELP = (
    "vllm=URL, sglang=URL, openai=URL, vllm-router=URL, sglang-router=URL (each of a router's workers), "
    "embedded=FOLDER (a model's folder), relay=NAME (workers connect to the service) "
    "or scripted=FILE.json (fixed replies)."
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The engine's name.")]


def parse_engine(text: str, *, field: str = "engine") -> dict[str, Any]:
    """Return the fields of an engine spec from KIND=WHERE. Raises InvalidField."""
    kind, given, where = text.partition("=")
    if not (kind and given and where):
        raise InvalidField(f"{text!r} is not {KIND}", field=field, hint=f"give {KIND_HELP}")
    match kind:
        case "embedded":
            return {"kind": kind, "model": where}
        case "relay":
            return {"kind": kind, "name": where}
        case "scripted":
            try:
                options = msgspec.json.decode(Path(where).read_bytes(), type=dict[str, Any])
            except OSError as error:
                raise InvalidField(f"cannot read {where}: {error.strerror}", field=field) from error
            except msgspec.MsgspecError as error:
                raise InvalidField(f"{where} is not a JSON object: {error}", field=field) from error
            return {"kind": kind, "options": options}
        case _:
            return {"kind": kind, "url": where}


def engine_commands() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="List, add, drain and remove the engines of a running service.")
    app.command("list")(list_engines)
    app.command("add")(add)
    app.command("drain")(drain)
    app.command("rm")(remove)
    return app


def list_engines(ctx: typer.Context, url: Url = None, token: Token = None, ca: Ca = None, json: Json = False) -> None:
    """List the engines with their load.

    Load: requests in flight, sessions, and tokens generated since the service
    began.

    Example:

        outrider engines list --json
    """
    with client(url, token, ca) as service:
        _show(terminal_of(ctx), service.engines())


def add(
    ctx: typer.Context,
    engine: Annotated[str, typer.Argument(metavar=KIND, help=KIND_HELP)],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the engine; by default its kind and a number.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="The model's name on its server.")] = None,
    serves: Annotated[
        str | None, typer.Option(metavar="FROZEN", help="The frozen model that it serves; without it, the policy.")
    ] = None,
    url: Url = None,
    token: Token = None,
    ca: Ca = None,
    json: Json = False,
) -> None:
    """Add an engine.

    The engine must be up. Its tokenizer must be that of the policy, or of the
    frozen model that it serves.

    Examples:

        outrider engines add vllm=http://10.0.0.5:8000

        outrider engines add embedded=models/tiny --name spare

        outrider engines add vllm=http://10.0.0.6:8000 --serves judge
    """
    given = {"name": name, "model": model, "serves": serves}
    named = {key: value for key, value in given.items() if value is not None}
    with client(url, token, ca) as service:
        _show(terminal_of(ctx), (service.add_engine(parse_engine(engine) | named),))


def drain(
    ctx: typer.Context, name: Name, url: Url = None, token: Token = None, ca: Ca = None, json: Json = False
) -> None:
    """Give an engine no new sessions.

    Its present sessions stay with it until they end.

    Example:

        outrider engines drain vllm-0
    """
    with client(url, token, ca) as service:
        _show(terminal_of(ctx), service.drain_engine(name))


def remove(
    ctx: typer.Context, name: Name, url: Url = None, token: Token = None, ca: Ca = None, json: Json = False
) -> None:
    """Remove an engine from the pool.

    Its sessions continue on other engines.

    Example:

        outrider engines rm vllm-0
    """
    with client(url, token, ca) as service:
        _show(terminal_of(ctx), service.remove_engine(name))


def _show(terminal: Terminal, engines: tuple[EngineStatus, ...]) -> None:
    if terminal.json:
        terminal.write_json(EngineList(engines=engines))
    else:
        terminal.out.print(engine_table(engines))
