"""`outrider nodes`: the nodes of a running service."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.join import join
from outrider.cli.options import Ca, Json, Token, Url, client
from outrider.cli.tables import node_table
from outrider.cli.terminal import Terminal, terminal_of
from outrider.schemas import NodeList, NodeStats

Name = Annotated[str, typer.Argument(metavar="NAME", help="The node's name.")]


def node_commands() -> typer.Typer:
    """The sub-commands of `outrider nodes`."""
    app = typer.Typer(
        no_args_is_help=True, help="List, drain and resume the nodes that run sessions; join with another one."
    )
    app.command("join")(join)
    app.command("list")(list_nodes)
    app.command("drain")(drain)
    app.command("resume")(resume)
    return app


def list_nodes(ctx: typer.Context, url: Url = None, token: Token = None, ca: Ca = None, json: Json = False) -> None:
    """List the nodes with their lanes and resources.

    Example:

        outrider nodes list --json
    """
    with client(url, token, ca) as service:
        _show(terminal_of(ctx), service.nodes())


def drain(
    ctx: typer.Context, name: Name, url: Url = None, token: Token = None, ca: Ca = None, json: Json = False
) -> None:
    """Give a node no new sessions.

    Its present sessions go on until they end. It stays drained until it is
    resumed, also when the service is started again.

    Example:

        outrider nodes drain local
    """
    with client(url, token, ca) as service:
        _show(terminal_of(ctx), service.drain_node(name))


def resume(
    ctx: typer.Context, name: Name, url: Url = None, token: Token = None, ca: Ca = None, json: Json = False
) -> None:
    """Give a drained node sessions again.

    Example:

        outrider nodes resume local
    """
    with client(url, token, ca) as service:
        _show(terminal_of(ctx), service.resume_node(name))


def _show(terminal: Terminal, nodes: tuple[NodeStats, ...]) -> None:
    if terminal.json:
        terminal.write_json(NodeList(nodes=nodes))
        return
    for node in nodes:
        terminal.out.print(node_table(node))
    if not nodes:
        terminal.out.print("no nodes yet: `outrider nodes join` on a machine makes it one")
