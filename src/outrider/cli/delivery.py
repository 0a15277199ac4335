"""`outrider consumers`, `outrider callbacks` and `outrider gc`: consumers of the results, callbacks, removal of old
groups."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from outrider.cli.options import Ca, Json, Token, Url, client
from outrider.cli.tables import callback_table, consumer_table
from outrider.cli.terminal import Terminal, terminal_of
from outrider.errors import InvalidField
from outrider.schemas import CallbackList, CallbackView, ConsumerList, ConsumerView, GcReport, Redelivered

Consumer = Annotated[str, typer.Argument(metavar="NAME", help="The consumer's name.")]
Tenant = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Whose consumer it is, for an admin.", show_default="the admins' own"),
]
LISTED = 1000
"""Maximum number of callbacks shown."""


def consumer_commands() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="List, move and remove the named consumers of the results.")
    app.command("list")(list_consumers)
    app.command("ack")(acknowledge)
    app.command("rm")(remove_consumer)
    return app


def callback_commands() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="List, redeliver and discard callbacks that were given up.")
    app.command("list")(list_callbacks)
    app.command("redeliver")(redeliver)
    app.command("discard")(discard)
    return app


def list_consumers(ctx: typer.Context, url: Url = None, token: Token = None, ca: Ca = None, json: Json = False) -> None:
    """List the consumers with their positions.

    Groups that a consumer has not acknowledged are not removed: look for
    consumers that were last seen long ago.

    Example:

        outrider consumers list
    """
    with client(url, token, ca) as service:
        _show_consumers(terminal_of(ctx), service.consumers())


def acknowledge(
    ctx: typer.Context,
    name: Consumer,
    cursor: Annotated[
        int, typer.Argument(metavar="CURSOR", min=0, help="Cursor of the last group that it is done with.")
    ],
    rewind: Annotated[bool, typer.Option("--rewind", help="Also move it back: it gets groups again.")] = False,
    tenant: Tenant = None,
    url: Url = None,
    token: Token = None,
    ca: Ca = None,
    json: Json = False,
) -> None:
    """Move a consumer to a cursor.

    Examples:

        outrider consumers ack trainer 1200

        outrider consumers ack trainer 0 --rewind
    """
    with client(url, token, ca) as service:
        _show_consumers(terminal_of(ctx), (service.ack(name, cursor, rewind=rewind, tenant=tenant),))


def remove_consumer(
    ctx: typer.Context,
    name: Consumer,
    tenant: Tenant = None,
    url: Url = None,
    token: Token = None,
    ca: Ca = None,
    json: Json = False,
) -> None:
    """Remove a consumer.

    Groups are no longer kept for it.

    Examples:

        outrider consumers rm trainer

        outrider consumers rm trainer --tenant team-a
    """
    with client(url, token, ca) as service:
        _show_consumers(terminal_of(ctx), service.remove_consumer(name, tenant=tenant))


def list_callbacks(ctx: typer.Context, url: Url = None, token: Token = None, ca: Ca = None, json: Json = False) -> None:
    """List the callbacks that were given up, the newest first.

    Example:

        outrider callbacks list
    """
    with client(url, token, ca) as service:
        _show_callbacks(terminal_of(ctx), service.dead_callbacks(limit=LISTED))


def redeliver(
    ctx: typer.Context,
    group: Annotated[str | None, typer.Argument(metavar="[GROUP]", help="The group whose callback it is.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All callbacks that were given up.")] = False,
    url: Url = None,
    token: Token = None,
    ca: Ca = None,
    json: Json = False,
) -> None:
    """Try again to deliver callbacks that were given up.

    Examples:

        outrider callbacks redeliver g-0019a4e2b6c1f3d2

        outrider callbacks redeliver --all
    """
    terminal = terminal_of(ctx)
    if (group is None) is not everything:
        raise InvalidField("give either a GROUP or --all", field="group", hint="see outrider callbacks list")
    with client(url, token, ca) as service:
        count = service.redeliver(group)
    if terminal.json:
        terminal.write_json(Redelivered(callbacks=count))
    else:
        terminal.out.print(f"{count} callbacks are tried anew")


def discard(
    ctx: typer.Context,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group whose callback it is.")],
    url: Url = None,
    token: Token = None,
    ca: Ca = None,
    json: Json = False,
) -> None:
    """Discard a callback that was given up.

    Its group is then kept no longer than other groups.

    Example:

        outrider callbacks discard g-0019a4e2b6c1f3d2
    """
    with client(url, token, ca) as service:
        _show_callbacks(terminal_of(ctx), service.discard_callback(group))


def gc(
    ctx: typer.Context,
    days: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="N", help="Remove groups that ended N days ago or earlier.", show_default="the setting"
        ),
    ] = None,
    size_mb: Annotated[
        int | None,
        typer.Option(min=0, metavar="MIB", help="Remove the oldest until so much is left.", show_default="the setting"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also what some consumer has not acknowledged.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, only count.")] = False,
    url: Url = None,
    token: Token = None,
    ca: Ca = None,
    json: Json = False,
) -> None:
    """Remove old groups with their sessions, turns, images, artifacts and events.

    Groups that have not ended, that a consumer has not acknowledged, or whose callback is not delivered, are kept.

    Examples:

        outrider gc --days 7 --dry-run

        outrider gc --size-mb 20000
    """
    terminal = terminal_of(ctx)
    with client(url, token, ca) as service:
        report = service.gc(days=days, size_mb=size_mb, force=force, dry_run=dry_run)
        while report.more:
            terminal.note(f"removed {report.groups} groups, {report.bytes / (1 << 20):,.1f} MiB")
            rest = service.gc(days=days, size_mb=size_mb, force=force)
            done = {name: getattr(report, name) + getattr(rest, name) for name in ("groups", "sessions", "bytes")}
            report = msgspec.structs.replace(rest, **done)
    if terminal.json:
        terminal.write_json(report)
    else:
        terminal.out.print(_told(report))


def _told(report: GcReport) -> str:
    kept = {"not acknowledged by a consumer": report.unacknowledged, "with a callback to deliver": report.undelivered}
    held = ", ".join(f"{count} {why}" for why, count in kept.items() if count)
    return (
        f"{'would remove' if report.dry_run else 'removed'} {report.groups} groups with {report.sessions} sessions, "
        f"{report.bytes / (1 << 20):,.1f} MiB; {report.stored_bytes / (1 << 20):,.1f} MiB are stored"
        + (f"; kept: {held}" if held else "")
    )


def _show_consumers(terminal: Terminal, consumers: tuple[ConsumerView, ...]) -> None:
    if terminal.json:
        terminal.write_json(ConsumerList(consumers=consumers))
    else:
        terminal.out.print(consumer_table(consumers))


def _show_callbacks(terminal: Terminal, callbacks: tuple[CallbackView, ...]) -> None:
    if terminal.json:
        terminal.write_json(CallbackList(callbacks=callbacks))
    else:
        terminal.out.print(callback_table(callbacks))
