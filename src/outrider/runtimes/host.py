"""What the sandboxes of one node share: the process that makes them, a daemon's client, a place for control groups.

It knows none of these parts, only when they begin and end. Invariant: a part is opened by the first sandbox that asks
for it, and closed, after the last sandbox has been stopped, in the reverse order of opening.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar, cast

P = TypeVar("P")

LOCK = "node.lock"
"""In a node's folder: held by its process for as long as that lives."""


class Host:
    """`folder` is the node's private one; its name is the node's own among all of this machine (see `lives`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = AsyncExitStack()
        self._parts: dict[object, Any] = {}
        self._opening = asyncio.Lock()

    @property
    def name(self) -> str:
        return self.folder.name

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stack.__aexit__(*error)

    async def part(self, kind: Callable[[Host], AbstractAsyncContextManager[P]]) -> P:
        """The one `kind(host)` of this node, entered. What entering raises is raised again at the next try."""
        if kind not in self._parts:
            async with self._opening:
                if kind not in self._parts:
                    self._parts[kind] = await self._stack.enter_async_context(kind(self))
        return cast(P, self._parts[kind])


def lives(name: str) -> bool:
    """Whether the node whose folder has this name still runs. Blocks, for as long as a system call."""
    try:
        lock = os.open(Path(tempfile.gettempdir(), name, LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
