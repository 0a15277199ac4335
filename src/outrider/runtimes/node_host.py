"""What the sandboxes and evaluators of one node share: the zygote, a daemon's client, the folder of control groups.

It knows none of these parts, only when they begin and end. Invariant: a part is opened by the first who asks for it,
and closed after the last sandbox has been stopped, in the reverse order of opening.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar, cast

log = logging.getLogger("outrider.node")

P = TypeVar("P")

PREFIX = "outrider-"
"""How the name of a node begins, and so the names of its folders, control groups and labels."""

SWEEP_SECONDS = 60.0
"""Time limit for the sweep of one part."""


class Host:
    """`folder` is the node's private folder. `name` is unique to this node for all time, and tells whether the node
    still runs (see `lives`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"{PREFIX}{_pid_namespace()}-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(4)}"
        self._stack = AsyncExitStack()
        self._parts: dict[object, Any] = {}
        self._opening: defaultdict[object, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By kind, so that a part that hangs while it is opened holds up no other."""

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stack.__aexit__(*error)

    async def part(self, kind: Callable[[Host], AbstractAsyncContextManager[P]]) -> P:
        """The one `kind(host)` of this node, entered. Raises what entering raises; the next call tries again."""
        if kind not in self._parts:
            async with self._opening[kind]:
                if kind not in self._parts:
                    self._parts[kind] = await self._stack.enter_async_context(kind(self))
        return cast(P, self._parts[kind])

    async def sweep(self, *, seconds: float = SWEEP_SECONDS) -> dict[str, int]:
        """Call `sweep()` of every part that has one, to end what dead nodes left behind; `seconds` bounds each. Returns
        how many things were ended, by the part's class. A failure is logged; the next sweep tries again."""
        ended: dict[str, int] = {}
        for part in tuple(self._parts.values()):
            if (sweep := getattr(part, "sweep", None)) is None:
                continue
            name = type(part).__name__
            try:
                async with asyncio.timeout(seconds):
                    if number := await sweep():
                        ended[name] = ended.get(name, 0) + number
            except Exception as error:  # of whatever kind: the other parts are swept too
                log.warning("%s cannot sweep: %s", name, str(error) or type(error).__name__)
        return ended


def lives(name: str) -> bool:
    """Whether the process of the node with this name still runs.

    True where that cannot be known: for a name that is no node's, and for a node in another pid namespace, such as a
    container's, whose process numbers mean nothing here."""
    try:
        namespace, pid, started, _ = map(str, name.removeprefix(PREFIX).split("-"))
        return namespace != _pid_namespace() or _started(int(pid)) == started
    except ValueError:
        return True


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; "" when it is dead. With the number it names one process for
    all time, because numbers are used again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
