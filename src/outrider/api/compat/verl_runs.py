"""Assigns runs of Harbor's run API to sessions of verl's session proxy (`verl.py`). A session's record then shows the
turns of its run.

Invariant: a session has at most one current run, even after a restart.
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
"""Pattern of the session ids that clients of verl's session proxy may choose."""
RESET_SECONDS = 2 * 86_400.0
"""How many seconds a reset is remembered. No session of verl's session proxy lasts this long."""


class BoundRuns:
    """The runs that belong to sessions of verl's session proxy.

    The idempotency keys of a session's runs contain the numbers 1, 2 and so on. A reset uses up the next number, so
    that no run can get it. A run belongs to the session only if its number is higher than the last reset's, even after
    a restart.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def current(self, session: SessionRow, caller: Principal) -> GroupRow | None:
        """Return the session's run, or None if no run was started since the last reset."""
        run, _ = await self._look(session, caller)
        return run

    async def next_idempotency_key(self, session: SessionRow, caller: Principal) -> str:
        """Return the idempotency key for a request to run the session. If the session has a run, the run's key is
        returned, so that the request finds this run. Otherwise the key is new."""
        run, free = await self._look(session, caller)
        return _idempotency_key(session, free if run is None else free - 1)

    async def _look(self, session: SessionRow, caller: Principal) -> tuple[GroupRow | None, int]:
        """Return the session's run (or None), and the lowest number that no run or reset of the session has used."""
        store, run, number = self._service.store, None, 1
        while True:
            idempotency_key = _idempotency_key(session, number)
            found = await store.keyed_group(caller.tenant, idempotency_key)
            if found is None and not await store.is_refused(caller.tenant, idempotency_key):
                return run, number
            run, number = found, number + 1

    async def turns(self, session: SessionRow, caller: Principal) -> list[Turn]:
        """Return the turns of the session's run. If it has no run, return the session's own turns."""
        run = await self.current(session, caller)
        if run is not None:
            [session] = await self._service.store.sessions(run.id)
        return await self._service.store.turns(session.id)

    async def check_free(self, session: SessionRow, caller: Principal) -> None:
        """Raise Conflict if the session has a run, because only this run may make model calls for the session."""
        run = await self.current(session, caller)
        if run is not None:
            raise Conflict(
                f"the calls of this session are those of run {run.id}",
                hint="reset the session before another agent uses it",
            )

    async def end(self, session: SessionRow, caller: Principal) -> None:
        """Cancel the session's run if it has not ended."""
        run = await self.current(session, caller)
        if run is not None and run.state is GroupState.ACTIVE:
            await self._service.cancel(run.id, caller)

    async def drop(self, session: SessionRow, caller: Principal) -> None:
        """Cancel the session's run, and use up the next number. The run then no longer belongs to the session."""
        until = time.time() + RESET_SECONDS
        while True:
            run, free = await self._look(session, caller)
            if run is None:
                return
            later = await self._service.store.refuse_key(caller.tenant, _idempotency_key(session, free), until=until)
            if run.state is GroupState.ACTIVE:
                await self._service.cancel(run.id, caller)
            if later is None:  # otherwise another run has just used this number
                return


def _idempotency_key(session: SessionRow, number: int) -> str:
    return f"{SYSTEM}-run:{session.id}:{number}"
