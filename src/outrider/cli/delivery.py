"""The commands `outrider consumers` and `outrider callbacks`, which manage how results are delivered, and `outrider
gc`, which removes old groups."""

from __future__ import annotations

from typing import Annotated

import msgspec

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.options import command
from outrider.cli.tables import callback_table, consumer_table
from outrider.cli.terminal import Terminal
from outrider.client.client import Client
from outrider.errors import InvalidField
from outrider.schemas import CallbackList, CallbackView, ConsumerList, ConsumerView, Redelivered

Consumer = Annotated[str, CliArgument(metavar="NAME", help="The consumer's name.")]
Tenant = Annotated[
    str | None,
    CliOption(metavar="NAME", help="Whose consumer it is, for an admin.", show_default="the admins' own"),
]
LISTED = 1000
"""Maximum number of callbacks shown."""


@command
def list_consumers(terminal: Terminal, service: Client) -> None:
    """List the consumers with their positions.

    A consumer is a named reader of the results. The service keeps a group until
    every consumer that reads it has acknowledged it. Only `outrider gc --force`
    removes the group earlier. A consumer that no longer reads would make the
    service keep its groups, so remove a consumer that was last seen long ago.

    Example:

        outrider consumers list
    """
    _show_consumers(terminal, service.consumers())


@command
def acknowledge(
    terminal: Terminal,
    service: Client,
    name: Consumer,
    cursor: Annotated[int, CliArgument(metavar="CURSOR", min=0, help="Cursor of the last group that it is done with.")],
    rewind: Annotated[bool, CliOption("--rewind", help="Also move it back: it gets groups again.")] = False,
    tenant: Tenant = None,
) -> None:
    """Move a consumer to a cursor.

    The consumer has then acknowledged all groups up to this cursor.

    Examples:

        outrider consumers ack trainer 1200

        outrider consumers ack trainer 0 --rewind
    """
    _show_consumers(terminal, (service.ack(name, cursor, rewind=rewind, tenant=tenant),))


@command
def remove_consumer(
    terminal: Terminal,
    service: Client,
    name: Consumer,
    tenant: Tenant = None,
) -> None:
    """Remove a consumer.

    The service no longer keeps groups for this consumer to read.

    Examples:

        outrider consumers rm trainer

        outrider consumers rm trainer --tenant team-a
    """
    _show_consumers(terminal, service.remove_consumer(name, tenant=tenant))


@command
def list_callbacks(terminal: Terminal, service: Client) -> None:
    """List the callbacks that were given up, the newest first.

    A callback is a request that sends a finished group to a URL.

    Example:

        outrider callbacks list
    """
    _show_callbacks(terminal, service.dead_callbacks(limit=LISTED))


@command
def redeliver(
    terminal: Terminal,
    service: Client,
    group: Annotated[str | None, CliArgument(metavar="[GROUP]", help="The group whose callback it is.")] = None,
    everything: Annotated[bool, CliOption("--all", help="All callbacks that were given up.")] = False,
) -> None:
    """Try again to deliver callbacks that were given up.

    Examples:

        outrider callbacks redeliver g-0019a4e2b6c1f3d2

        outrider callbacks redeliver --all
    """
    if (group is None) is not everything:
        raise InvalidField("give either a GROUP or --all", field="group", hint="see outrider callbacks list")
    count = service.redeliver(group)
    terminal.show(Redelivered(callbacks=count), f"{count} callbacks are tried anew")


@command
def discard(
    terminal: Terminal,
    service: Client,
    group: Annotated[str, CliArgument(metavar="GROUP", help="The group whose callback it is.")],
) -> None:
    """Discard a callback that was given up.

    Its group can then be removed, for example by `outrider gc`.

    Example:

        outrider callbacks discard g-0019a4e2b6c1f3d2
    """
    _show_callbacks(terminal, service.discard_callback(group))


@command
def gc(
    terminal: Terminal,
    service: Client,
    days: Annotated[
        float | None,
        CliOption(
            min=0, metavar="N", help="Remove groups that ended N days ago or earlier.", show_default="the setting"
        ),
    ] = None,
    size_mb: Annotated[
        int | None,
        CliOption(min=0, metavar="MIB", help="Remove the oldest until so much is left.", show_default="the setting"),
    ] = None,
    force: Annotated[bool, CliOption("--force", help="Also what some consumer has not acknowledged.")] = False,
    dry_run: Annotated[bool, CliOption("--dry-run", help="Remove nothing, only count.")] = False,
) -> None:
    """Remove old groups with their sessions, turns, images, artifacts and events.

    The command keeps these groups:

    - groups that have not ended
    - groups that a consumer has not acknowledged; --force removes them too
    - groups with a callback that is neither delivered nor discarded

    Examples:

        outrider gc --days 7 --dry-run

        outrider gc --size-mb 20000
    """
    report = service.gc(days=days, size_mb=size_mb, force=force, dry_run=dry_run)
    while report.more:
        terminal.note(f"removed {report.groups} groups, {report.bytes / (1 << 20):,.1f} MiB")
        rest = service.gc(days=days, size_mb=size_mb, force=force)
        done = {name: getattr(report, name) + getattr(rest, name) for name in ("groups", "sessions", "bytes")}
        report = msgspec.structs.replace(rest, **done)
    kept = {"not acknowledged by a consumer": report.unacknowledged, "with a callback to deliver": report.undelivered}
    held = ", ".join(f"{count} {why}" for why, count in kept.items() if count)
    terminal.show(
        report,
        f"{'would remove' if report.dry_run else 'removed'} {report.groups} groups with {report.sessions} sessions, "
        f"{report.bytes / (1 << 20):,.1f} MiB; {report.stored_bytes / (1 << 20):,.1f} MiB are stored"
        + (f"; kept: {held}" if held else ""),
    )


def _show_consumers(terminal: Terminal, consumers: tuple[ConsumerView, ...]) -> None:
    terminal.show(ConsumerList(consumers=consumers), consumer_table(consumers))


def _show_callbacks(terminal: Terminal, callbacks: tuple[CallbackView, ...]) -> None:
    terminal.show(CallbackList(callbacks=callbacks), callback_table(callbacks))
