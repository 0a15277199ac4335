"""`outrider nodes`: the nodes of a running service."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.join import join
from outrider.cli.options import command
from outrider.cli.tables import node_table, table
from outrider.cli.terminal import Terminal, printable
from outrider.client.client import Client
from outrider.schemas import NodeList, NodeStats

MEGABYTE = 1_000_000
NO_NODES = "no nodes yet: `outrider nodes join` on a machine makes it one"
Name = Annotated[str, typer.Argument(metavar="NAME", help="The node's name.")]


def node_commands() -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True, help="List, drain and resume the nodes that run sessions; join with another one."
    )
    app.command("join")(join)
    app.command("list")(list_nodes)
    app.command("pull")(pull)
    app.command("drain")(drain)
    app.command("resume")(resume)
    return app


@command
def list_nodes(terminal: Terminal, service: Client) -> None:
    """List the nodes with their lanes and resources.

    Example:

        outrider nodes list --json
    """
    _show(terminal, service.nodes())


@command
def pull(
    terminal: Terminal,
    service: Client,
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", help="For example docker.io/library/python:3.12.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The image's name in a task's `runtime.image`.")],
) -> None:
    """Get an image from a container registry, on every machine that runs sessions.

    Needs the program skopeo on each of them. If another image has the name,
    the name passes to the new image.

    Exit code 1: a machine does not have the image, or there are no machines.

    Example:

        outrider nodes pull docker.io/library/python:3.12-slim python
    """
    terminal.note(f"pulling {reference} on every machine")
    pulled = service.pull_image(reference, name)
    if terminal.json:
        terminal.write_json(pulled)
    else:
        rows = [
            (
                machine.node,
                "-" if machine.bytes is None else f"{machine.bytes / MEGABYTE:,.1f} MB",
                printable(machine.error.message) if machine.error else "has it",
            )
            for machine in pulled.machines
        ]
        terminal.out.print(table(("node", "size>", name), rows) if rows else NO_NODES)
    if not pulled.machines or any(machine.error for machine in pulled.machines):
        raise typer.Exit(1)


@command
def drain(terminal: Terminal, service: Client, name: Name) -> None:
    """Give a node no new sessions.

    Its present sessions go on until they end. The node stays drained until it
    is resumed, even if the service is restarted.

    Example:

        outrider nodes drain local
    """
    _show(terminal, service.drain_node(name))


@command
def resume(terminal: Terminal, service: Client, name: Name) -> None:
    """Give a drained node sessions again.

    Example:

        outrider nodes resume local
    """
    _show(terminal, service.resume_node(name))


def _show(terminal: Terminal, nodes: tuple[NodeStats, ...]) -> None:
    if terminal.json:
        terminal.write_json(NodeList(nodes=nodes))
        return
    for node in nodes:
        terminal.out.print(node_table(node))
    if not nodes:
        terminal.out.print(NO_NODES)
