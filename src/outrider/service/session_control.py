"""Opens and completes external sessions, whose agents run outside of Outrider.

A session is opened in a new group of one session, or taken from a group whose harness is `external`.
`sessions/external.py` hosts these sessions. Invariant: a completion is stored before the client gets the reply, and
never replaced.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from outrider.errors import InvalidField, renamed_fields
from outrider.lifecycle import SessionState
from outrider.schemas import GroupView, SessionView, reply_of
from outrider.service.admission import stored_group
from outrider.service.principals import LOCAL, Principal
from outrider.spec import GroupSpec, ReportSpec, SessionSpec, StoredGroupSpec
from outrider.store.rows import SessionRow
from outrider.store.store import Store

if TYPE_CHECKING:
    from outrider.sessions.external import ExternalSessions

OPEN_SECONDS = 5.0
"""A request to open a session waits at most this long until the session accepts model calls. A model call before that
gets the error `session_not_running`."""
FIELDS = (("task.harness.external.", ""), ("task.", ""))
"""Maps prefixes of field names in a group's spec to those in a `SessionSpec`. For example, `task.limits` becomes
`limits`, so that errors name the fields that the client has sent."""

Submit = Callable[[GroupSpec, Principal], Awaitable[GroupView]]
"""See `Service.submit`."""


class OpenedSession(NamedTuple):
    """A session, its credential, whether it accepts model calls now, and the instruction of its task."""

    session: SessionView
    credential: str
    running: bool
    instruction: str


class SessionControl:
    """The operations of the control API on external sessions. Every method raises NotFound for an unknown session.
    Unless the `caller` is an admin, a session of another tenant counts as unknown."""

    def __init__(self, store: Store, host: ExternalSessions, submit: Submit) -> None:
        self._store = store
        self._host = host
        self._submit = submit

    async def open(self, spec: SessionSpec, caller: Principal = LOCAL) -> OpenedSession:
        """Open a session, or return the session that was opened with the same idempotency key. Raises the errors of
        `Service.submit`, and InvalidField if the session's agent is not external."""
        if spec.group_id is None:
            with renamed_fields(FIELDS):
                group = await self._submit(spec.group(), caller)
            session, instruction = await self._store.session(group.sessions[0].id), spec.instruction
        else:
            session, instruction = await self._of_group(spec.group_id, spec.sample_index, caller)
        running = session.state is not SessionState.DONE and await self._host.running(session.id, OPEN_SECONDS)
        session = await self._store.session(session.id)
        credential = self._store.credential_of(session.id)
        return OpenedSession(reply_of(SessionView, session), credential, running, instruction)

    async def _of_group(self, group_id: str, sample_index: int, caller: Principal) -> tuple[SessionRow, str]:
        """Return the session with index `sample_index` of a group, and the task's instruction."""
        group = await self._store.group(group_id, tenant=caller.sees)
        if (spec := await self._external_spec(group_id)) is None:
            raise InvalidField(
                f"the agents of group {group_id} do not run elsewhere: its harness is {group.harness!r}",
                field="group_id",
                hint='submit a group with task.harness = {"external": {}}',
            )
        if sample_index >= group.n:
            raise InvalidField(f"group {group_id} has {group.n} sessions, from 0", field="sample_index")
        return (await self._store.sessions(group_id))[sample_index], spec.task.instruction

    async def _external_spec(self, group_id: str) -> StoredGroupSpec | None:
        """Return the spec of a group whose agents run elsewhere, or None for any other group."""
        spec = await stored_group(self._store, group_id)
        return None if spec.task.harness.external is None or spec.regrades else spec

    async def complete(self, session_id: str, report: ReportSpec, caller: Principal = LOCAL) -> SessionView:
        """End the session's run, and have the session graded. A repeated call with the same report changes nothing.

        Raises Conflict for a different report and for a session that has ended, and InvalidField if the report does not
        fit the session."""
        session = await self._store.session(session_id, tenant=caller.sees)
        spec = await self._external_spec(session.group_id)
        if spec is None:
            raise _not_external(session_id)
        await self._host.check(session_id, report, spec.task)
        await self._store.add_report(session_id, report.model_dump_json().encode(), tenant=caller.sees)
        self._host.note_report(session_id)
        return reply_of(SessionView, await self._store.session(session_id))

    async def reset(self, session_id: str, caller: Principal = LOCAL) -> SessionView:
        """Delete the session's turns, so that the agent can start over with the same credential. The session's clocks
        continue. Raises Conflict if the session does not run."""
        session = await self._store.session(session_id, tenant=caller.sees)
        if await self._external_spec(session.group_id) is None:
            raise _not_external(session_id)
        await self._host.reset(session_id)
        return reply_of(SessionView, await self._store.session(session_id))


def _not_external(session_id: str) -> InvalidField:
    return InvalidField(
        f"the agent of session {session_id} does not run elsewhere: Outrider ends and grades the session itself",
        field="session_id",
    )
