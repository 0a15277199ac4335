"""Gives slots to owners in turn, so that an owner with many requests does not delay other owners.

Invariants: every waiting owner is served once before any owner is served twice. An owner may divide its requests into
parts; its waiting parts take turns in the same way. Requests of one part are served in order of arrival.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A number of slots that owners take in turn: `async with turns.take(owner, part):` waits for one of the `size`
    slots, and holds it while the block runs."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._lines: OrderedDict[str, OrderedDict[str, deque[asyncio.Future[None]]]] = OrderedDict()
        """Waiting requests by owner and part, in the order of service. Owners and parts without a request are removed.
        The table is empty while a slot is free."""

    @asynccontextmanager
    async def take(self, owner: str, part: str = "") -> AsyncIterator[None]:
        """Hold a slot while the block runs. A caller that is cancelled while it waits takes no slot."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._lines.setdefault(owner, OrderedDict()).setdefault(part, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                # if this request got a slot just before the cancellation, the slot is passed on
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give a free slot to the next waiting request."""
        while self._lines:
            owner, parts = self._lines.popitem(last=False)
            part, line = parts.popitem(last=False)
            turn = line.popleft()
            served = not turn.cancelled()
            # The owner that got the slot moves behind all other owners. The part that got the slot moves behind the
            # owner's other parts. If the request had been cancelled, the slot is still free, so owner and part stay in
            # front.
            if line:
                parts[part] = line
                parts.move_to_end(part, last=served)
            if parts:
                self._lines[owner] = parts
                self._lines.move_to_end(owner, last=served)
            if served:
                turn.set_result(None)
                return
        self._free += 1
