"""The commands `outrider sessions`, `outrider cancel` and `outrider retry`, which list sessions by filters, cancel
them, or submit them again."""

from __future__ import annotations

from typing import Annotated

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.options import command
from outrider.cli.run_filter import RunFilter
from outrider.cli.tables import counted, group_table, session_table, sessions_table
from outrider.cli.terminal import Terminal
from outrider.client.client import Client
from outrider.errors import InvalidField
from outrider.schemas import ChangedSessions

ANY_NUMBER = (1 << 53) - 1

Which = Annotated[
    list[str] | None, CliArgument(metavar="[GROUP|SESSION]...", help="Ids of groups (g-…) or of sessions (s-…).")
]
All = Annotated[bool, CliOption("--all", help="All sessions, without a filter.")]
DryRun = Annotated[bool, CliOption("--dry-run", help="Only show what matches.")]
Yes = Annotated[bool, CliOption("--yes", help="Also change more than 1,000 sessions.")]


@command
def sessions(
    terminal: Terminal,
    service: Client,
    wanted: RunFilter,
    groups: Annotated[bool, CliOption("--groups", help="List groups; rewards are then mean rewards.")] = False,
    after: Annotated[
        str | None, CliOption("--after", metavar="ID", help="Continue a list after this session or group.")
    ] = None,
    limit: Annotated[int, CliOption("--limit", metavar="N", help="How many to list.", min=1)] = 20,
) -> None:
    """List sessions, or groups, newest first.

    Examples:

        outrider sessions --state done --max-reward 0 --label run=try

        outrider sessions --error sandbox_lost --since 2h --json

        outrider sessions --groups --min-reward 0.5
    """
    if groups:
        found = service.group_page(wanted.fields, after=after, limit=limit)
        terminal.show(found, group_table(found.groups))
        following = found.after
    else:
        page = service.sessions(after=after, limit=limit, **wanted.fields)
        terminal.show(page, sessions_table(page.sessions))
        following = page.after
    if following is not None:
        terminal.note(f"more: the same command with --after {following}")


@command
def cancel(
    terminal: Terminal,
    service: Client,
    wanted: RunFilter,
    ids: Which = None,
    everything: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Cancel groups, sessions, or all sessions that match a filter.

    Running sessions are stopped. Sessions that have ended keep their results.

    Examples:

        outrider cancel g-0019a4e2b6c1f3d2

        outrider cancel s-0019a4e2b6c1f3d2-0

        outrider cancel --label run=try --state queued --dry-run
    """
    if ids and not wanted and not dry_run and len(ids) == 1:
        [id] = ids
        group = service.group(service.cancel_session(id).group_id) if id.startswith("s-") else service.cancel(id)
        state = "cancelled, " if group.cancelled else ""
        terminal.show(group, f"group {group.id}: {state}{group.state.value}", session_table(group))
        return
    done = service.cancel_sessions(_asked(wanted, ids, everything=everything, dry_run=dry_run, yes=yes))
    _show(terminal, done, "cancelled", "cancel")


@command
def retry(
    terminal: Terminal,
    service: Client,
    wanted: RunFilter,
    ids: Which = None,
    everything: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Submit ended sessions again, in new groups with the same tasks.

    The service keeps the old results. Each new group has the label
    outrider.retry, whose value is the id of the old group.

    Examples:

        outrider retry s-0019a4e2b6c1f3d2-0

        outrider retry --error sandbox_lost --since 2h --dry-run
    """
    done = service.retry_sessions(_asked(wanted, ids, everything=everything, dry_run=dry_run, yes=yes))
    _show(terminal, done, "submitted again", "submit again")
    if done.groups and not terminal.json:
        terminal.note(f"new groups: {' '.join(done.groups[:10])}{' ...' if len(done.groups) > 10 else ''}")


def _asked(
    wanted: RunFilter, ids: list[str] | None, *, everything: bool, dry_run: bool, yes: bool
) -> dict[str, object]:
    fields = dict(wanted.fields)
    if ids:
        if everything:
            raise InvalidField("ids are given beside --all", field="--all")
        by_kind = {kind: [id for id in ids if id.startswith("s-") == (kind == "ids")] for kind in ("ids", "groups")}
        if all(by_kind.values()):
            raise InvalidField("groups and sessions cannot be named together", field="GROUP|SESSION")
        fields |= {kind: [*fields.get(kind, []), *named] for kind, named in by_kind.items() if named}
    if not fields and not everything:
        raise InvalidField(
            "no session is named", field="--all", hint="name ids, give a filter such as --label run=try, or --all"
        )
    fields |= {"all": True} if everything else {}
    return {**fields, "dry_run": dry_run, "max_matches": ANY_NUMBER if yes else 1000}


def _show(terminal: Terminal, done: ChangedSessions, past: str, verb: str) -> None:
    skipped = "".join(f", {count} skipped ({reason})" for reason, count in done.skipped.items())
    if done.dry_run:
        lines = [f"would {verb} {counted(done.matched, 'session')}{skipped}", *done.sessions[:20]]
        if done.matched > 20:
            lines.append(f"... and {done.matched - 20} more")
        terminal.show(done, "\n".join(lines))
        return
    terminal.show(done, f"{past}: {counted(done.changed, 'session')} of {done.matched} that match{skipped}")
    if done.error is not None:
        terminal.error(done.error)
