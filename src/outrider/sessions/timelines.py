"""The timelines of a node's attempts. This module adds the commands, processes and network connections of sandboxes to
the timelines, and stores them.

A background task of the node stores the entries once a second, so that no attempt waits for the store. Invariant: a
failure in this module may lose timeline entries, but never ends an attempt.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from outrider.errors import OutriderError
from outrider.sandbox.network.door import ServerUse
from outrider.sandbox.runtimes.base import ListsProcesses, ReportsCommands, Runtime, SandboxProcess
from outrider.sandbox.runtimes.command_feed import CommandRun
from outrider.sandbox.sandbox import Sandbox
from outrider.sessions.attempt import AttemptStore
from outrider.timeline import MOST_PARTS, EntryKind, Timeline, TimelinePart
from outrider.trajectory import Turn

STORE_EVERY_SECONDS = 1.0
LAST_STORE_SECONDS = 5.0
BATCH_BYTES = 1 << 20
"""Maximum size in bytes of the entries that are stored in one call."""
MOST_UNSTORED = 64 << 20
"""Maximum size in bytes of the entries that are kept while the store fails. If there are more, the oldest entries are
dropped."""
PROCESSES_EVERY_SECONDS = 10.0
PROCESSES_SECONDS = 2.0
"""Time limit for listing the processes of a sandbox. A listing that takes longer, because the tool server is busy, is
skipped."""


class Timelines:
    """The timelines of a node. While the store fails, at most `most_unstored` bytes of entries are kept."""

    def __init__(self, store: AttemptStore, *, most_unstored: int = MOST_UNSTORED) -> None:
        self._store = store
        self._most_unstored = most_unstored
        self._running: set[Timeline] = set()
        self._ended: list[Timeline] = []
        """Timelines of attempts that have ended, with entries that are not stored yet."""
        self._unstored: deque[TimelinePart] = deque()
        """Parts of timelines that are not stored yet."""
        self._storing = asyncio.Lock()
        """Held while entries are stored, so that only one caller stores them at a time."""
        self._sandboxes: dict[Runtime, SandboxTimeline] = {}
        """The timelines of the sandboxes whose runtime can list processes."""

    @contextmanager
    def keeping(self, timeline: Timeline) -> Iterator[None]:
        """While the block runs, store the entries of a timeline periodically. The last entries are stored after the
        block."""
        self._running.add(timeline)
        try:
            yield
        finally:
            self._running.discard(timeline)
            self._ended.append(timeline)

    async def store(self) -> None:
        """Store all new entries. If the store fails, its error is raised, and the next call stores the entries. If the
        entries exceed `most_unstored`, the oldest are dropped."""
        async with self._storing:
            self._take_all()
            while batch := self._next_batch():
                await self._store.add_timeline(batch)
                for _ in batch:
                    self._unstored.popleft()

    async def store_rest(self) -> None:
        """Store the last entries when the node or service ends. If the store fails, these entries are lost."""
        with suppress(OutriderError, TimeoutError):
            async with asyncio.timeout(LAST_STORE_SECONDS):
                await self.store()

    def _take_all(self) -> None:
        ended, self._ended = self._ended, []
        taken = [timeline.take() for timeline in (*self._running, *ended)]
        self._unstored += [part for part in taken if part is not None]
        size = sum(len(part.entries) for part in self._unstored)
        while size > self._most_unstored:
            size -= len(self._unstored.popleft().entries)

    def _next_batch(self) -> list[TimelinePart]:
        """Return the oldest parts that have at most BATCH_BYTES together, or only the oldest part if that part alone is
        larger. The size is limited because a node on another machine sends all returned parts in one message."""
        batch: list[TimelinePart] = []
        size = 0
        for part in islice(self._unstored, MOST_PARTS):
            size += len(part.entries)
            if batch and size > BATCH_BYTES:
                break
            batch.append(part)
        return batch

    @contextmanager
    def sandbox(self, timeline: Timeline, sandbox: Sandbox, use: str) -> Iterator[SandboxTimeline]:
        """While the block runs, add the commands, processes and network connections of a sandbox to a timeline. `use`
        is the purpose of the sandbox, "agent" or "grading"."""
        runtime = sandbox.runtime
        noted = SandboxTimeline(timeline, runtime, use)
        unsubscribe = None
        unfollow = None if sandbox.door is None else sandbox.door.follow(noted.note_network)
        if isinstance(runtime, ReportsCommands):
            unsubscribe = runtime.commands.subscribe(noted.note_command)
        if isinstance(runtime, ListsProcesses):
            self._sandboxes[runtime] = noted
        try:
            yield noted
        finally:
            self._sandboxes.pop(runtime, None)
            if unsubscribe is not None:
                unsubscribe()
            if unfollow is not None:
                unfollow()
                noted.end_network()

    async def list_processes_of(self, runtime: Runtime) -> None:
        """Add the newest processes of a sandbox to its timeline."""
        if (noted := self._sandboxes.get(runtime)) is not None:
            await noted.list_processes()

    async def list_processes(self) -> None:
        """Add the newest processes of all sandboxes to their timelines."""
        await asyncio.gather(*[noted.list_processes() for noted in self._sandboxes.values()])


class SandboxTimeline:
    """Adds the commands, the processes and the network of one sandbox to a timeline."""

    def __init__(self, timeline: Timeline, runtime: Runtime, use: str) -> None:
        self._timeline = timeline
        self._runtime = runtime
        self._use = use
        self._commands: dict[int, int] = {}
        """Maps the number of a running command to the number that identifies its timeline entry."""
        self._processes: dict[int, int] = {}
        """Maps the process id of a living process to the number that identifies its timeline entry."""
        self._network: dict[tuple[str, str], tuple[int, ServerUse]] = {}
        """By phase and server: the number of the timeline entry, and the newest statistics of the sandbox's
        requests."""

    def note_command(self, command: CommandRun) -> None:
        if command.end is None:
            entry = self._timeline.add(EntryKind.COMMAND, command.text, command.start, None, sandbox=self._use)
            self._commands[command.number] = entry
        elif (entry := self._commands.pop(command.number, -1)) >= 0:
            self._timeline.end(entry, at=command.end, exit_code=command.exit_code)

    def note_network(self, use: ServerUse) -> None:
        key = use.phase.value, use.server
        about: dict[str, Any] = {"phase": use.phase.value, "requests": use.requests, "sent": use.sent}
        about |= {"received": use.received, "refused": use.refused, "failed": use.failed}
        about |= {name: text for name, text in (("refusal", use.refusal), ("failure", use.failure)) if text}
        if key not in self._network:
            number = self._timeline.add(EntryKind.NETWORK, use.server, use.start, None, sandbox=self._use, **about)
        else:
            number, _ = self._network[key]
            self._timeline.update(number, **about)
        self._network[key] = number, use

    def end_network(self) -> None:
        for number, use in self._network.values():
            self._timeline.end(number, at=use.end)

    async def list_processes(self) -> None:
        """Add the newest processes to the timeline. They are missing if the sandbox fails or is slow."""
        if not isinstance(self._runtime, ListsProcesses):
            return
        with suppress(OutriderError, TimeoutError):
            async with asyncio.timeout(PROCESSES_SECONDS):
                for process in await self._runtime.processes():
                    self._note_process(process)

    def _note_process(self, process: SandboxProcess) -> None:
        entry = self._processes.get(process.pid)
        if entry is None:
            about = {"sandbox": self._use, "pid": process.pid, "parent": process.parent}
            entry = self._timeline.add(EntryKind.PROCESS, process.command, process.start, None, **about)
            self._processes[process.pid] = entry
        else:
            self._timeline.rename(entry, process.command)
        if process.end is not None:
            del self._processes[process.pid]
            self._timeline.end(entry, at=process.end, exit_code=process.exit_code)


def noting_stored(timeline: Timeline, record: Callable[..., Awaitable[None]], model: str | None = None) -> Any:
    """Return a function that stores a turn by calling `record`, and then notes in the timeline that the turn was
    stored."""

    async def store(turn: Turn) -> None:
        await record(turn)
        timeline.note_stored(turn.index, model)

    return store
