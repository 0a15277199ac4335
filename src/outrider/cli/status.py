"""`outrider status`: shows the state of the service, or of one group."""

from __future__ import annotations

from typing import Annotated

import msgspec

from outrider.cli.command_line import CliArgument
from outrider.cli.options import command
from outrider.cli.tables import engine_table, failing_table, group_table, node_table, policy_line, session_table
from outrider.cli.terminal import Terminal, printable
from outrider.client.client import Client
from outrider.schemas import GroupSummary, GroupView, ServiceStatus

RECENT = 10
"""Number of newest groups that `outrider status` shows."""


class Overview(msgspec.Struct, frozen=True):
    """The output of `outrider status --json`: the state of the service, and its newest groups."""

    service: ServiceStatus
    groups: tuple[GroupSummary, ...]


@command
def status(
    terminal: Terminal,
    service: Client,
    group: Annotated[str | None, CliArgument(metavar="[GROUP]", help="A group's id: show its sessions.")] = None,
) -> None:
    """Show the state of the service, or of one group.

    Without GROUP, the command shows the service's lanes, engines and newest
    groups. With GROUP, it shows the sessions of this group.

    Examples:

        outrider status

        outrider status g-0019a4e2b6c1f3d2
    """
    if group is not None:
        _show_group(terminal, service.group(group))
        return
    overview = Overview(service.status(), service.groups(limit=RECENT))
    running = overview.service
    states = ", ".join(f"{count} {state}" for state, count in running.sessions.items() if count)
    models = printable(", ".join((running.model, *(f"{name} (frozen)" for name in running.frozen))))
    terminal.show(
        overview,
        f"outrider {running.version} · model {models} · sessions: {states or 'none'}",
        *([policy_line(running.policy)] if running.policy.paused is not None else []),
        *([failing_table(running.failing)] if running.failing else []),
        *map(node_table, running.nodes),
        engine_table(running.engines),
        *([group_table(overview.groups)] if overview.groups else []),
    )


def _show_group(terminal: Terminal, group: GroupView) -> None:
    state = "cancelled, " if group.cancelled else ""
    terminal.show(group, f"group {group.id}: {state}{group.state.value}", session_table(group))
