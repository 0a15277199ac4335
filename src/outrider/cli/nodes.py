"""`outrider nodes`: lists, drains and resumes the nodes of a running service, and pulls images onto them."""

from __future__ import annotations

from typing import Annotated

from click.exceptions import Exit

from outrider.cli.command_line import CliArgument
from outrider.cli.exit_codes import FAILURE
from outrider.cli.options import command
from outrider.cli.tables import node_table, table
from outrider.cli.terminal import Terminal
from outrider.client.client import Client
from outrider.schemas import NodeList, NodeStats

MEGABYTE = 1_000_000
NO_NODES = "no nodes yet: `outrider nodes join` on a machine makes it one"
Name = Annotated[str, CliArgument(metavar="NAME", help="The node's name.")]


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
    reference: Annotated[str, CliArgument(metavar="REFERENCE", help="For example docker.io/library/python:3.12.")],
    name: Annotated[str, CliArgument(metavar="NAME", help="The image's name in a task's `runtime.image`.")],
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
    rows = []
    for machine in pulled.machines:
        size = None if machine.bytes is None else f"{machine.bytes / MEGABYTE:,.1f} MB"
        rows.append((machine.node, size, machine.error.message if machine.error else "has it"))
    terminal.show(pulled, table(("node", "size>", name), rows) if rows else NO_NODES)
    if not pulled.machines or any(machine.error for machine in pulled.machines):
        raise Exit(FAILURE)


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
    terminal.show(NodeList(nodes=nodes), *(map(node_table, nodes) if nodes else [NO_NODES]))
