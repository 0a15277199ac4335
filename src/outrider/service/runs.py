"""Lists, compares, cancels and retries sessions that match a filter, for people and programs that inspect runs.

Matching sessions are found in the index of runs (`store/run_index/`). Their data is read, and changed, in the store.
Invariant: a caller who is not an admin sees and changes only sessions of the caller's own tenant.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from outrider.errors import Busy, Conflict, InvalidField, NotFound, OutriderError, record_of
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.schemas import (
    RETRY_LABEL,
    ChangedSessions,
    GroupList,
    GroupView,
    QueuePauses,
    RunDiff,
    SessionList,
    SessionView,
    reply_of,
)
from outrider.service.admission import stored_group
from outrider.service.principals import Principal
from outrider.service.run_diff import compare
from outrider.service.views import group_summary
from outrider.spec import GroupSpec, PauseSpec, SessionsSpec, StoredGroupSpec
from outrider.store.rows import GroupRow, SessionRow
from outrider.store.run_index import lists
from outrider.store.run_index.index import RunIndex
from outrider.store.run_index.lists import SessionFilter
from outrider.store.run_index.queries import Queries
from outrider.store.store import Store

MOST_COMPARED = 200_000
"""Maximum number of sessions in each of the two runs that are compared."""
SHOWN = 100
"""Maximum number of session ids in the reply to a request that cancels or retries sessions."""
CHANGED_AT_ONCE = 100
"""Number of sessions that are changed concurrently. The store puts their changes into one commit."""
UNFINISHED = tuple(state.value for state in SessionState if state is not SessionState.DONE)

Submit = Callable[[GroupSpec, Principal], Awaitable[GroupView]]
End = Callable[[Sequence[SessionRow]], Awaitable[None]]


class Runs:
    """The service's operations on runs. `submit` is `Service.submit`, and `end` is `Scheduler.end`. `wake` makes the
    scheduler read the queue."""

    def __init__(self, store: Store, index: RunIndex, *, submit: Submit, end: End, wake: Callable[[], None]) -> None:
        self._store = store
        self._index = index
        self._queries = Queries(index)
        self._submit = submit
        self._end = end
        self._wake = wake

    async def query(self, sql: str, caller: Principal) -> bytes:
        """Run an SQL query, and return the reply as the JSON of a QueryReply. See `Queries.run`."""
        return await self._queries.run(sql, caller.sees)

    async def sessions(self, wanted: SessionFilter, *, after: str | None, limit: int, caller: Principal) -> SessionList:
        """Return a page of sessions, beginning with those of the newest group. Raises NotFound if `after` is an unknown
        id, and InvalidField for an unknown state or stop reason."""
        check_filter(wanted, SessionState)
        await self._index.catch_up()
        find = partial(lists.find_sessions, wanted=wanted, tenant=caller.sees, after=after, limit=limit)
        ids = await self._index.read(find, tenant=caller.sees)
        rows = await self._store.runs.sessions(ids)
        views = tuple(reply_of(SessionView, row) for row in rows)
        return SessionList(sessions=views, after=ids[-1] if len(ids) == limit else None)

    async def groups(self, wanted: SessionFilter, *, after: str | None, limit: int, caller: Principal) -> GroupList:
        """Return a page of groups, newest first. Raises the errors of `sessions`."""
        check_filter(wanted, GroupState)
        if after is None and wanted == SessionFilter(states=wanted.states[:1]):
            # The store itself has an index for this list, so the reply need not wait until the index of runs is built.
            state = GroupState(wanted.states[0]) if wanted.states else None
            return _group_list(await self._store.groups(state=state, limit=limit, tenant=caller.sees), limit)
        await self._index.catch_up()
        find = partial(lists.find_groups, wanted=wanted, tenant=caller.sees, after=after, limit=limit)
        ids = await self._index.read(find, tenant=caller.sees)
        listed = _group_list(await self._store.runs.groups(ids), limit)
        return GroupList(groups=listed.groups, after=ids[-1] if len(ids) == limit else None)

    async def diff(self, a: str, b: str, *, passed: float, caller: Principal) -> RunDiff:
        """Compare two runs. `a` and `b` each select a run by its labels or by the ids of its groups, separated by
        commas, such as `run=try,step=3`. Raises NotFound if a run has no sessions."""
        sides = []
        await self._index.catch_up()
        for field, selector in (("a", a), ("b", b)):
            wanted = selected(selector, field)
            find = partial(lists.compared_sessions, wanted=wanted, tenant=caller.sees, limit=MOST_COMPARED + 1)
            runs = await self._index.read(find, tenant=caller.sees)
            if not runs:
                raise NotFound(
                    f"no session of {selector!r}", field=field, hint="see `outrider sessions --groups` for groups"
                )
            if len(runs) > MOST_COMPARED:
                raise InvalidField(f"{selector!r} names more than {MOST_COMPARED} sessions", field=field)
            sides.append(runs)
        return await asyncio.to_thread(compare, sides[0], sides[1], names=(a, b), passed=passed)

    async def cancel(self, asked: SessionsSpec, caller: Principal) -> ChangedSessions:
        """Cancel the matching sessions that are not done. Raises Conflict if more than `max_matches` sessions match."""
        found, skipped = await self._matching(asked, UNFINISHED, caller)
        ids = [id for id, _ in found]
        if asked.dry_run:
            return _changed(ids, 0, skipped, dry_run=True)
        changed = 0
        for start in range(0, len(ids), CHANGED_AT_ONCE):
            some = ids[start : start + CHANGED_AT_ONCE]
            tried = await asyncio.gather(*(self._cancelled(id, caller) for id in some))
            rows = [row for row in tried if row is not None]
            changed += len(rows)
            await self._end(rows)
        if changed < len(ids):
            skipped["done meanwhile"] += len(ids) - changed
        return _changed(ids, changed, skipped)

    async def retry(self, asked: SessionsSpec, caller: Principal) -> ChangedSessions:
        """Retry the matching sessions that are done. For each group with matching sessions, a new group of the same
        task and tenant is submitted. The new group has one session for each match, and the label RETRY_LABEL.

        Raises Conflict if more than `max_matches` sessions match. The error of a group that cannot be retried, such as
        an error of `Service.submit`, is raised only in two cases: there is no other group, or the service is busy and
        has accepted no group before. In all other cases, and if the group was removed, the reply contains the reason.
        """
        found, skipped = await self._matching(asked, (SessionState.DONE.value,), caller)
        ids = [id for id, _ in found]
        if asked.dry_run:
            return _changed(ids, 0, skipped, dry_run=True)
        of_group = Counter(group_id for _, group_id in found)
        groups: list[str] = []
        changed = 0
        for group_id, n in of_group.items():
            try:
                group = await self._store.group(group_id, tenant=caller.sees)
                spec = await stored_group(self._store, group_id)
                if spec.regrades:
                    raise Conflict(
                        f"group {group_id} graded earlier sessions again, and ran no agent",
                        hint="retry the earlier sessions, or grade them again: outrider regrade",
                    )
                made = await self._submit(_again(spec, group_id, n), caller._replace(tenant=group.tenant))
            except NotFound:
                skipped["removed meanwhile"] += n
            except OutriderError as error:
                if not changed and (isinstance(error, Busy) or len(of_group) == 1):
                    raise
                if isinstance(error, Busy):
                    return _changed(ids, changed, skipped, groups=groups, error=error)
                skipped[error.code] += n
            else:
                groups.append(made.id)
                changed += n
        return _changed(ids, changed, skipped, groups=groups)

    async def pauses(self, caller: Principal, *, changed: int = 0) -> QueuePauses:
        pauses = self._store.pauses
        listed, held = await pauses.listed(tenant=caller.sees), await pauses.held(tenant=caller.sees)
        return QueuePauses(pauses=listed, held=held, changed=changed)

    async def pause(self, asked: PauseSpec, caller: Principal) -> QueuePauses:
        """Pause queued sessions, so that they do not start. See `Pauses.pause`."""
        owner = _owner(asked, caller)
        changed = await self._store.pauses.pause(asked.labels, asked.harness, tenant=owner, who=caller.name)
        return await self.pauses(caller, changed=changed)

    async def resume(self, asked: PauseSpec, caller: Principal) -> QueuePauses:
        """End a pause of queued sessions. See `Pauses.resume`."""
        changed = await self._store.pauses.resume(asked.labels, asked.harness, tenant=_owner(asked, caller))
        self._wake()
        return await self.pauses(caller, changed=changed)

    async def _cancelled(self, session_id: str, caller: Principal) -> SessionRow | None:
        """Cancel a session. Returns None if the session is already done or was removed."""
        try:
            row = await self._store.cancel_session(session_id, tenant=caller.sees)
        except NotFound:
            return None
        return None if row.state is SessionState.DONE else row

    async def _matching(
        self, asked: SessionsSpec, states: Sequence[str], caller: Principal
    ) -> tuple[list[tuple[str, str]], Counter[str]]:
        """Return the session id and group id of each matching session whose state is in `states`. The second value
        counts the other matching sessions, which are skipped, by reason: "done" or "not done"."""
        wanted = SessionFilter(
            ids=tuple(asked.ids),
            groups=tuple(asked.groups),
            states=tuple(asked.state),
            labels=asked.labels,
            harness=asked.harness,
            min_reward=asked.min_reward,
            max_reward=asked.max_reward,
            stop_reason=asked.stop_reason,
            error=asked.error,
            since=asked.since,
            until=asked.until,
            text=asked.text,
        )
        check_filter(wanted, SessionState)
        if wanted.empty != asked.all:
            raise InvalidField(
                "no field of the filter is given" if wanted.empty else "`all` is given beside a filter",
                field="all",
                hint='give a filter, such as {"labels": {"run": "try"}}, or {"all": true} for all sessions',
            )
        await self._index.catch_up()
        found = await self._index.read(partial(lists.matching, wanted=wanted, tenant=caller.sees), tenant=caller.sees)
        if asked.ids:
            named = partial(lists.find_sessions, wanted=SessionFilter(ids=wanted.ids), tenant=caller.sees, after=None)
            known = set(await self._index.read(partial(named, limit=len(asked.ids)), tenant=caller.sees))
            for id in asked.ids:
                if id not in known:
                    raise NotFound(f"no session {id!r}", field="ids", hint="see `outrider sessions`")
        usable = [(id, group_id) for id, group_id, state in found if state in states]
        skipped: Counter[str] = Counter()
        if len(usable) < len(found):
            skipped["not done" if SessionState.DONE in states else "done"] = len(found) - len(usable)
        if len(usable) > asked.max_matches and not asked.dry_run:
            raise Conflict(
                f"{len(usable)} sessions match, and at most {asked.max_matches} are expected",
                field="max_matches",
                hint="look at them with a dry run; then raise max_matches, or give --yes on the command line",
            )
        return usable, skipped


def selected(selector: str, field: str) -> SessionFilter:
    """Convert the selector of a run to a filter. Raises InvalidField for an empty selector."""
    parts = [part.strip() for part in selector.split(",") if part.strip()]
    if not parts:
        raise InvalidField("name a run", field=field, hint="by labels, such as run=try, or by ids of groups")
    labels = [part.partition("=") for part in parts if "=" in part]
    groups = tuple(part for part in parts if "=" not in part)
    return SessionFilter(groups=groups, labels={name: value for name, _, value in labels})


def _again(spec: StoredGroupSpec, group_id: str, n: int) -> GroupSpec:
    """Return a group with `n` sessions of an earlier group's task. If the earlier group was submitted through another
    system's API, the new group has no callback, because the client of that API does not expect the new group."""
    labels = {**spec.task.labels, RETRY_LABEL: group_id}
    return GroupSpec(
        task=spec.task.model_copy(update={"labels": labels}),
        n=n,
        priority=spec.priority,
        callback_url=None if spec.translated else spec.callback_url,
    )


def check_filter(wanted: SessionFilter, states: type[SessionState] | type[GroupState]) -> None:
    """Raise InvalidField if a filter has an unknown state or stop reason."""
    kind = "group" if states is GroupState else "session"
    for name in wanted.states:
        if name not in list(states):
            known = ", ".join(each.value for each in states)
            raise InvalidField(f"{name!r} is not a {kind} state", field="state", hint=f"known: {known}")
    if wanted.stop_reason is not None and wanted.stop_reason not in list(StopReason):
        known = ", ".join(each.value for each in StopReason)
        raise InvalidField(f"{wanted.stop_reason!r} is not a stop reason", field="stop_reason", hint=f"known: {known}")


def _group_list(rows: Sequence[GroupRow], limit: int) -> GroupList:
    after = rows[-1].id if len(rows) == limit else None
    return GroupList(groups=tuple(map(group_summary, rows)), after=after)


def _owner(asked: PauseSpec, caller: Principal) -> str | None:
    """Return the tenant whose sessions a pause affects. None stands for all tenants."""
    if caller.sees is not None and asked.tenant not in (None, caller.sees):
        raise NotFound(f"no tenant {asked.tenant!r}", field="tenant", hint="leave `tenant` out")
    return caller.sees or asked.tenant


def _changed(
    ids: Sequence[str],
    changed: int,
    skipped: Counter[str],
    *,
    groups: Sequence[str] = (),
    dry_run: bool = False,
    error: OutriderError | None = None,
) -> ChangedSessions:
    return ChangedSessions(
        matched=len(ids),
        changed=changed,
        skipped=dict(skipped),
        sessions=tuple(ids[:SHOWN]),
        groups=tuple(groups),
        dry_run=dry_run,
        error=None if error is None else record_of(error),
    )
