"""Binds runs of Harbor's run API to sessions of verl's session proxy (`verl.py`). The record of a session then has the
turns of its run.

Invariant: a session has at most one current run, also after a restart.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from outrider.api.compat.harbor_request import SYSTEM
from outrider.errors import Conflict
from outrider.lifecycle import GroupState
from outrider.service.principals import Principal
from outrider.store.rows import GroupRow, SessionRow
from outrider.trajectory import Turn

if TYPE_CHECKING:
    from outrider.service.service import Service

SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}")
"""Matches the session ids that clients of verl's session proxy may choose."""
RESET_SECONDS = 2 * 86_400.0
"""Seconds for which a reset is remembered, longer than any session of verl's session proxy can last."""


class BoundRuns:
    """The runs of the sessions of verl's session proxy.

    The runs of a session are numbered 1, 2, ... in their idempotency keys. A reset takes the next number, so no run can
    have it. Only a run with a higher number than the last reset belongs to the session. This holds after a restart,
    too.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def current(self, session: SessionRow, caller: Principal) -> GroupRow | None:
        """Return the run of a session, or None if the session has had no run since the last reset."""
        run, _ = await self._look(session, caller)
        return run

    async def next_idempotency_key(self, session: SessionRow, caller: Principal) -> str:
        """Return the idempotency key for a request to run the session. If there is a current run, its key is returned,
        so that a repeated request gives the same run. Otherwise the key is new."""
        run, free = await self._look(session, caller)
        return _idempotency_key(session, free if run is None else free - 1)

    async def _look(self, session: SessionRow, caller: Principal) -> tuple[GroupRow | None, int]:
        """Return the session's current run or None, and the lowest number that no run and no reset of the session has
        used."""
        store, run, number = self._service.store, None, 1
        while True:
            idempotency_key = _idempotency_key(session, number)
            found = await store.keyed_group(caller.tenant, idempotency_key)
            if found is None and not await store.is_refused(caller.tenant, idempotency_key):
                return run, number
            run, number = found, number + 1

    async def turns(self, session: SessionRow, caller: Principal) -> list[Turn]:
        """Return the turns of the session's current run, or the session's own turns if there is no run."""
        run = await self.current(session, caller)
        if run is not None:
            [session] = await self._service.store.sessions(run.id)
        return await self._service.store.turns(session.id)

    async def check_free(self, session: SessionRow, caller: Principal) -> None:
        """Raise Conflict if the session has a current run, because then only the run may make the session's calls."""
        run = await self.current(session, caller)
        if run is not None:
            raise Conflict(
                f"the calls of this session are those of run {run.id}",
                hint="reset the session before another agent uses it",
            )

    async def end(self, session: SessionRow, caller: Principal) -> None:
        """Cancel the session's run, if the run has not ended."""
        run = await self.current(session, caller)
        if run is not None and run.state is GroupState.ACTIVE:
            await self._service.cancel(run.id, caller)

    async def drop(self, session: SessionRow, caller: Principal) -> None:
        """Cancel the session's current run, and use up the next number, so that the run no longer belongs to the
        session."""
        until = time.time() + RESET_SECONDS
        while True:
            run, free = await self._look(session, caller)
            if run is None:
                return
            later = await self._service.store.refuse_key(caller.tenant, _idempotency_key(session, free), until=until)
            if run.state is GroupState.ACTIVE:
                await self._service.cancel(run.id, caller)
            if later is None:  # otherwise a run has taken the number meanwhile
                return


def _idempotency_key(session: SessionRow, number: int) -> str:
    return f"{SYSTEM}-run:{session.id}:{number}"
