"""`outrider nodes`: lists, drains and resumes the nodes of a running service, and pulls images onto them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from click.exceptions import Exit

from outrider.cli.command_line import CliArgument
from outrider.cli.exit_codes import FAILURE
from outrider.cli.options import command
from outrider.cli.tables import node_table, table
from outrider.cli.terminal import Terminal
from outrider.cli.wanted_images import HELP, pull_each, read_images
from outrider.client.client import Client
from outrider.errors import ErrorRecord
from outrider.schemas import NodeList, NodeStats, PulledImages

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


class PulledByName(msgspec.Struct, frozen=True):
    """The output of `outrider nodes pull --json` for several images. `images`: the results by image name. `failed`: the
    errors of images that the service refused to pull, by image name."""

    images: dict[str, PulledImages]
    failed: dict[str, ErrorRecord] = {}


@command
def pull(
    terminal: Terminal, service: Client, images: Annotated[list[str], CliArgument(metavar="IMAGE...", help=HELP)]
) -> None:
    """Get images from container registries, on every machine that runs sessions.

    Each machine needs the program skopeo. The command pulls up to four images at
    once. If one image cannot be pulled, the command still pulls the others. If an
    image on a machine already has the name, the name then belongs to the new
    image.

    Exit code 1: a machine lacks an image, or no machine runs sessions.

    Examples:

        outrider nodes pull docker.io/library/python:3.12-slim python

        outrider nodes pull python=docker.io/library/python:3.12 debian=docker.io/library/debian:13
    """
    wanted = read_images(images)
    terminal.note(f"pulling {', '.join(wanted.values())} on every machine")
    results = service.run(pull_each(wanted, service.asynchronous.pull_image, terminal))
    failed = {name: result for name, result in results.items() if isinstance(result, ErrorRecord)}
    pulled = {name: result for name, result in results.items() if isinstance(result, PulledImages)}
    if len(wanted) > 1 and terminal.json:
        terminal.write_json(PulledByName(pulled, failed))
    else:
        for name, result in pulled.items():
            rows = []
            for machine in result.machines:
                size = None if machine.bytes is None else f"{machine.bytes / MEGABYTE:,.1f} MB"
                rows.append((machine.node, size, machine.error.message if machine.error else "has it"))
            terminal.show(result, table(("node", "size>", name), rows) if rows else NO_NODES)
    lacking = (not result.machines or any(machine.error for machine in result.machines) for result in pulled.values())
    if failed or any(lacking):
        raise Exit(FAILURE)


@command
def drain(terminal: Terminal, service: Client, name: Name) -> None:
    """Stop giving new sessions to a node.

    The node's current sessions run to their end. The node stays drained until you
    resume it, even if the service is restarted.

    Example:

        outrider nodes drain local
    """
    _show(terminal, service.drain_node(name))


@command
def resume(terminal: Terminal, service: Client, name: Name) -> None:
    """Give new sessions to a drained node again.

    Example:

        outrider nodes resume local
    """
    _show(terminal, service.resume_node(name))


def _show(terminal: Terminal, nodes: tuple[NodeStats, ...]) -> None:
    terminal.show(NodeList(nodes=nodes), *(map(node_table, nodes) if nodes else [NO_NODES]))
