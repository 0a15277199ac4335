"""`outrider queue`: pause and resume the start of queued sessions, and list the pauses."""

from __future__ import annotations

from typing import Annotated

from outrider.cli.command_line import CliOption
from outrider.cli.options import command
from outrider.cli.run_filter import pairs_of
from outrider.cli.tables import age, counted, table
from outrider.cli.terminal import Terminal, printable
from outrider.client.client import Client
from outrider.schemas import QueuePauses

Labels = Annotated[
    list[str] | None, CliOption("--label", metavar="NAME=VALUE", help="A label of the groups. May be repeated: all.")
]
Harness = Annotated[str | None, CliOption("--harness", metavar="NAME", help="The harness of the groups.")]
Tenant = Annotated[str | None, CliOption("--tenant", metavar="NAME", help="The tenant, for an admin.")]


@command
def pause(
    terminal: Terminal, service: Client, label: Labels = None, harness: Harness = None, tenant: Tenant = None
) -> None:
    """Start no more sessions of the groups that the options name.

    Without options, no session of any group starts. Running sessions continue,
    and the service still accepts groups. The pause survives a restart of the
    service. Sessions that a pause holds back do not expire.

    Examples:

        outrider queue pause --label run=try

        outrider queue pause
    """
    found = service.pause_queue(labels=pairs_of(label), harness=harness, tenant=tenant)
    _show(terminal, found, f"paused: {counted(found.changed, 'more session')} held")


@command
def resume(
    terminal: Terminal, service: Client, label: Labels = None, harness: Harness = None, tenant: Tenant = None
) -> None:
    """End the pause that was started with the same options.

    Examples:

        outrider queue resume --label run=try
    """
    found = service.resume_queue(labels=pairs_of(label), harness=harness, tenant=tenant)
    _show(terminal, found, f"resumed: {counted(found.changed, 'session')} released")


@command
def list_(terminal: Terminal, service: Client) -> None:
    """List the pauses of the queue.

    Example:

        outrider queue list
    """
    found = service.pauses()
    _show(terminal, found, f"{counted(found.held, 'session')} held")


def _show(terminal: Terminal, found: QueuePauses, line: str) -> None:
    rows = [
        (
            " ".join(f"{name}={value}" for name, value in each.labels.items()) or "any",
            each.harness or "any",
            each.tenant or "*",
            age(each.since),
            printable(each.who),
        )
        for each in found.pauses
    ]
    shown = [table(("labels", "harness", "tenant", "since>", "by"), rows)] if rows else []
    terminal.show(found, line, *shown)
