"""Slots for which whoever has work takes turns, so that one with much of it does not keep the others waiting.

It knows nothing of what is done in a slot. Invariants: of those that wait, each owner is served once before any is
served twice, and of what one owner waits for, each part; those of one part are served in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """`async with turns.take(owner, part):` waits for one of `size` slots, and holds it while the block runs."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._lines: OrderedDict[str, OrderedDict[str, deque[asyncio.Future[None]]]] = OrderedDict()
        """By owner and part, those first that are served next. None is empty, and there are none while a slot is free.
        """

    @asynccontextmanager
    async def take(self, owner: str, part: str = "") -> AsyncIterator[None]:
        """A cancelled wait takes no slot."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._lines.setdefault(owner, OrderedDict()).setdefault(part, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # its turn had come just before
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give a slot to the next in line."""
        while self._lines:
            owner, parts = self._lines.popitem(last=False)
            part, line = parts.popitem(last=False)
            turn = line.popleft()
            if line:
                parts[part] = line  # behind all others of the owner
            if parts:
                self._lines[owner] = parts  # behind all other owners
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1
