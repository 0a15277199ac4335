"""Waits until a group that a client's call submitted is done.

Invariant: when a wait ends, the group continues.
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
"""Maximum length of one wait, in seconds. A longer wait consists of several."""


async def done_group(
    service: Service, request: Request, group_id: str, caller: Principal, *, seconds: float | None = None
) -> GroupView | None:
    """Wait until the group is done, and return it. Returns None after `seconds`, or if the client disconnects."""
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
