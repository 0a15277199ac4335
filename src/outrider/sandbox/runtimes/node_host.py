"""`Host` manages parts: objects that all sandboxes and evaluators of one node share, such as a daemon's client or the
folder of control groups.

This module only opens and closes the parts. Invariant: a part is opened when it is first used. After the last sandbox
has been stopped, all parts are closed, in the reverse order of opening.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from outrider.concurrency.chores import Failures
from outrider.concurrency.events import Feed
from outrider.config import PodsConfig
from outrider.sandbox.runtimes.kernel.process_marks import started

P = TypeVar("P")

PREFIX = "outrider-"
"""Prefix of the name of every node, and of the names of the node's folders, control groups and labels."""

ID_FILES = {"uid": Path("/etc/subuid"), "gid": Path("/etc/subgid")}
"""Two files of a machine. For each user, they list the ranges of user ids and of group ids that are set aside."""

SWEEP_SECONDS = 60.0
"""Seconds that the sweep of one part may take (see `Host.sweep`)."""


class Host:
    """The identity of a node, and the objects that its sandboxes share (parts).

    - `folder` is the node's private folder.
    - `name` is unique to this node for all time. It contains the process id and the start time of the node, which
        `lives` checks.
    - `starts_per_second` is the setting `sandboxes.starts_per_second`.
    - `pods` are the settings `sandboxes.kubernetes`.
    - `failures` records the failures of the parts' background work.
    - `id_files` are the files with the ids that are set aside for each user, as in ID_FILES."""

    def __init__(
        self,
        folder: Path,
        *,
        starts_per_second: float = 5.0,
        pods: PodsConfig | None = None,
        failures: Failures | None = None,
        id_files: Mapping[str, Path] = ID_FILES,
    ) -> None:
        self.folder = folder
        self.failures = failures or Failures()
        self.id_files = id_files
        self.pods = pods or PodsConfig()
        self.starts_per_second = starts_per_second
        end = folder.name.removeprefix(PREFIX) if folder.name.startswith(PREFIX) else secrets.token_hex(4)
        self.name = f"{PREFIX}{_pid_namespace()}-{os.getpid()}-{started(os.getpid())}-{end}"
        self.no_room = Feed[str]()
        """Publishes a kind of sandbox, such as `kubernetes`, each time the external service of this kind has no room
        for a session's sandbox."""
        self._stack = AsyncExitStack()
        self._parts: dict[object, Any] = {}
        self._opening: defaultdict[object, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One lock per kind, so that a part that hangs while it is opened blocks no other part."""

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stack.__aexit__(*error)

    async def part(self, kind: Callable[[Host], AbstractAsyncContextManager[P]]) -> P:
        """Return the node's only part of this kind. The first call makes the part and enters its context. If this
        raises an error, the next call tries again."""
        if kind not in self._parts:
            async with self._opening[kind]:
                if kind not in self._parts:
                    self._parts[kind] = await self._stack.enter_async_context(kind(self))
        return cast(P, self._parts[kind])

    async def sweep(self, *, seconds: float = SWEEP_SECONDS) -> dict[str, int]:
        """Remove what dead nodes left behind: call `sweep()` of every part that has this method. Each call may take
        `seconds`. Returns how many things were removed, by the name of the part's class."""
        parts = [(type(part).__name__, part.sweep) for part in self._parts.values() if hasattr(part, "sweep")]
        return await swept(parts, self.failures, seconds=seconds)


async def swept(
    sweeps: Iterable[tuple[str, Callable[[], Awaitable[int]]]], failures: Failures, *, seconds: float | None = None
) -> dict[str, int]:
    """Call functions one after another, each for at most `seconds`. `sweeps` are pairs (name, function). Returns how
    many things each function removed, by name. If a function fails, the failure is recorded, and the other functions
    still run."""
    ended = Counter[str]()
    for name, sweep in sweeps:
        try:
            async with asyncio.timeout(seconds):
                ended[name] += await sweep()
        except Exception as error:
            failures.note(f"sweep of {name}", error)
        else:
            failures.note_success(f"sweep of {name}")
    return dict(+ended)  # `+` removes counts of zero


async def remove_all(remove: Callable[[str], Awaitable[object]], names: Iterable[str]) -> None:
    """Call `remove` with the name of each thing that dead nodes have left. All calls run at the same time, because one
    that fails or gets no reply must not hold up the others. Then the first failure is raised."""
    ended = await asyncio.gather(*map(remove, names), return_exceptions=True)
    if failures := [each for each in ended if isinstance(each, BaseException)]:
        raise failures[0]


def lives(name: str) -> bool:
    """Return whether the process of the node with this name still runs.

    Also returns True in two cases in which this cannot be determined: the name is not a node's, or the node is in
    another pid namespace, such as that of a container. The process ids of another namespace have no meaning here."""
    try:
        namespace, pid, since, _ = name.removeprefix(PREFIX).split("-")
        return namespace != _pid_namespace() or started(int(pid)) == since
    except ValueError:
        return True


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")
