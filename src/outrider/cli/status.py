"""`outrider status` and `outrider cancel`: how the service and its groups stand."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from outrider.cli.options import Json, Token, Url, client
from outrider.cli.tables import engine_table, group_table, node_table, session_table
from outrider.cli.terminal import Terminal, terminal_of
from outrider.schemas import GroupSummary, GroupView, ServiceStatus

RECENT = 10


class Overview(msgspec.Struct, frozen=True):
    """What `outrider status --json` writes: the service, and its newest groups."""

    service: ServiceStatus
    groups: tuple[GroupSummary, ...]


def status(
    ctx: typer.Context,
    group: Annotated[str | None, typer.Argument(metavar="[GROUP]", help="A group's id, to see its sessions.")] = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Show how the service or one group stands.

    Examples:

        outrider status

        outrider status g-0019a4e2b6c1f3d2
    """
    terminal = terminal_of(ctx)
    with client(url, token) as service:
        if group is not None:
            _show_group(terminal, service.group(group))
            return
        overview = Overview(service.status(), service.groups(limit=RECENT))
    if terminal.json:
        terminal.write_json(overview)
    else:
        _show_overview(terminal, overview)


def cancel(
    ctx: typer.Context,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group's id.")],
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Cancel a group.

    Its sessions end, whatever they are doing; those that had ended keep their results.

    Example:

        outrider cancel g-0019a4e2b6c1f3d2
    """
    with client(url, token) as service:
        _show_group(terminal_of(ctx), service.cancel(group))


def _show_group(terminal: Terminal, group: GroupView) -> None:
    if terminal.json:
        terminal.write_json(group)
        return
    state = "cancelled, " if group.cancelled else ""
    terminal.out.print(f"group {group.id}: {state}{group.state.value}")
    terminal.out.print(session_table(group))


def _show_overview(terminal: Terminal, overview: Overview) -> None:
    service = overview.service
    states = ", ".join(f"{count} {state}" for state, count in service.sessions.items() if count)
    terminal.out.print(f"outrider {service.version} · model {service.model} · sessions: {states or 'none'}")
    for node in service.nodes:
        terminal.out.print(node_table(node))
    terminal.out.print(engine_table(service.engines))
    if overview.groups:
        terminal.out.print(group_table(overview.groups))
