"""Waits for the group that a client's call has submitted.

Invariant: the end of the wait does not end the group.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.requests import Request

from outrider.lifecycle import GroupState
from outrider.schemas import GroupView
from outrider.service.principals import Principal
from outrider.wire.http_server import while_connected

if TYPE_CHECKING:
    from outrider.service.service import Service

LOOK_SECONDS = 3600.0
"""Maximum seconds of one wait in the service. Longer waits are repeated."""


async def done_group(
    service: Service, request: Request, group_id: str, caller: Principal, *, seconds: float | None = None
) -> GroupView | None:
    """Return the group once it is done. Returns None if it is not done after `seconds`, or if the client
    disconnects."""
    done: GroupView | None = None

    async def wait() -> None:
        nonlocal done
        deadline = None if seconds is None else time.monotonic() + seconds
        while done is None:
            left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            look = max(0.0, min(left, LOOK_SECONDS))
            view = await service.group(group_id, wait=look, samples=False, caller=caller)
            if view.state is GroupState.DONE:
                done = view
            elif left <= 0:
                return

    await while_connected(request.scope, wait())
    return done
