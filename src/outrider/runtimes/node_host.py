"""What the sandboxes and evaluators of one node share: the zygote, a daemon's client, the folder of control groups.

It knows none of these parts, only when they begin and end. Invariant: a part is opened by the first who asks for it,
and closed after the last sandbox has been stopped, in the reverse order of opening.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from outrider.concurrency.chores import Failures
from outrider.runtimes.kernel.process_marks import RUN_FILE, started

P = TypeVar("P")

PREFIX = "outrider-"
"""How the name of a node begins, and so the names of its folders, control groups and labels."""


SWEEP_SECONDS = 60.0
"""Time limit for the sweep of one part."""


class Host:
    """`folder` is the node's private folder. `name` is unique to this node for all time, and tells whether the node
    still runs (see `lives`). The next node of the same folder has another name, with the same end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        end = folder.name.removeprefix(PREFIX) if folder.name.startswith(PREFIX) else secrets.token_hex(4)
        self.name = f"{PREFIX}{_pid_namespace()}-{os.getpid()}-{started(os.getpid())}-{end}"
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

    async def sweep(self, failures: Failures, *, seconds: float = SWEEP_SECONDS) -> dict[str, int]:
        """Call `sweep()` of every part that has one, to end what dead nodes left behind; `seconds` bounds each. Returns
        how many things were ended, by the part's class. What fails is noted; the next sweep tries again."""
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
                failures.note(f"sweep of {name}", error)
            else:
                failures.note_success(f"sweep of {name}")
        return ended


def lives(name: str) -> bool:
    """Whether the process of the node with this name still runs, or its folder is kept for the next one.

    True where that cannot be known: for a name that is no node's, and for a node in another pid namespace, such as a
    container's, whose process numbers mean nothing here."""
    try:
        namespace, pid, since, end = map(str, name.removeprefix(PREFIX).split("-"))
        return namespace != _pid_namespace() or started(int(pid)) == since or f"{PREFIX}{end}" in signs()
    except ValueError:
        return True


def same_folder(one: str, other: str) -> bool:
    """Whether the nodes of these names have the same folder, one after the other."""
    return one.rpartition("-")[2] == other.rpartition("-")[2]


def sign_of_life(folder: Path) -> socket.socket:
    """Show everybody on this machine that the node's folder of this name is in use, wherever it is, for as long as any
    process has this socket. Raises OSError if the name is in use."""
    sign = socket.socket(socket.AF_UNIX)
    try:
        sign.bind(f"\0{folder.name}")
    except OSError:
        sign.close()
        raise
    return sign


def signs() -> set[str]:
    """The names of the nodes' folders that are in use. Blocks for a look at /proc."""
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    return {name.removeprefix("@") for line in lines if (name := line.rpartition(" ")[2]).startswith(f"@{PREFIX}")}


def survives(directory: Path) -> bool:
    """Whether the sandbox with this folder may outlive its node, and nobody has gone on with it."""
    return (directory / RUN_FILE).exists()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")
