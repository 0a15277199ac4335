"""Runs chores: background work of a process that continues after every failure.

A chore calls a function again and again; one call is a turn. If a turn fails, for example because the disk is full, the
chore waits and then tries again. Only the first failure of a series is logged. Until a turn succeeds, the service's
status lists the chore with its number of failures. Invariants: a failure ends neither the other chores nor their owner,
unless the owner classifies the error as fatal. No chore ends silently while its owner runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from outrider.concurrency.retries import RetryPolicy
from outrider.errors import FailingChore, OutriderError, described, may_come_from_machine
from outrider.redaction import redacted

log = logging.getLogger("outrider.chores")

T = TypeVar("T")

PAUSES = RetryPolicy(first=0.5, longest=10.0)
"""The waits after failed turns of a chore. Leases of sessions are renewed by a chore, so the longest wait is only a
third of a lease."""
QUIET_SECONDS = 60.0
"""Minimum seconds between two log lines about failures of the same work. Without this limit, work that fails every
second time would fill the log."""
MOST_NAMES = 200
"""The maximum number of names under which failures are recorded. Without a limit, the record could grow forever: some
names contain the name of an engine, and engines can be added at any time."""
MOST_CHARACTERS = 500
"""The maximum length of the recorded text of an error, in characters."""


class Failures:
    """Records which work is failing now. The code that does the work calls `note` and `note_success`, both on the event
    loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._failing: OrderedDict[str, FailingChore] = OrderedDict()
        self._logged: OrderedDict[str, float] = OrderedDict()
        """Time of the last log line about a failure, by name."""
        self._quiet: set[str] = set()
        """The names of failing work for which no failure has been logged since the last success."""

    def failing(self) -> tuple[FailingChore, ...]:
        """Return the work that has failed and has not succeeded since the failure, in the order in which the failures
        began."""
        return tuple(self._failing.values())

    def note(self, name: str, error: BaseException) -> None:
        """Record a failure of the work `name`. Of all failures since the last success, at most one is logged: the first
        one, unless the previous log line about `name` is less than QUIET_SECONDS old. In that case, the first failure
        after QUIET_SECONDS is logged. The log line has a traceback if the error looks like a bug."""
        text, now = redacted(described(error))[:MOST_CHARACTERS], self._clock()
        known = self._failing.get(name)
        since, count = (now, 0) if known is None else (known.since, known.count)
        self._failing[name] = FailingChore(name=name, since=since, last=now, count=count + 1, error=text)
        if known is None:
            self._quiet.add(name)
        if name in self._quiet and abs(now - self._logged.get(name, -QUIET_SECONDS)) >= QUIET_SECONDS:
            self._quiet.discard(name)
            self._logged[name] = now
            bug = None if may_come_from_machine(error) or isinstance(error, OutriderError) else error
            log.error("%s: failed, and is tried again: %s", name, text, exc_info=bug)
        for book in (self._failing, self._logged):
            while len(book) > MOST_NAMES:
                book.popitem(last=False)
        self._quiet &= self._failing.keys()

    def drop(self, name: str) -> None:
        """Remove the record of `name`, because the work was given up."""
        self._failing.pop(name, None)

    def note_success(self, name: str) -> None:
        if (known := self._failing.pop(name, None)) is not None and name not in self._quiet:
            log.info("%s: works again, after %d failures in %.0f s", name, known.count, known.last - known.since)


class Chores:
    """Runs chores and single tasks: `async with Chores(failures) as chores`.

    At the end of the block, the chores started with `begin` are cancelled. Then the block waits for them and for the
    tasks started with `create_task`. If the block raises, these tasks are cancelled, too. `fatal` returns True for
    errors that end the whole block, as any error does in an asyncio.TaskGroup.
    """

    def __init__(
        self, failures: Failures, *, fatal: Callable[[Exception], bool] = lambda _: False, pauses: RetryPolicy = PAUSES
    ) -> None:
        self.failures = failures
        self._fatal = fatal
        self._pauses = pauses
        self._group = asyncio.TaskGroup()
        self._begun: set[asyncio.Task[None]] = set()
        self._once: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._begun:
            task.cancel()
        # Pass a cancellation of the block to the task group, which then cancels its tasks itself. If a task has failed
        # as well, the group may raise the task's error instead of the cancellation.
        if isinstance(error, asyncio.CancelledError):
            await self._group.__aexit__(kind, error, trace)
            return
        if error is not None:
            self.cancel()
        # Hide the block's own error from the task group, which would wrap it in an ExceptionGroup.
        await self._group.__aexit__(None, None, None)

    def cancel(self) -> None:
        """Cancel all chores and tasks."""
        for task in (*self._begun, *self._once):
            task.cancel()

    def begin(
        self, name: str, turn: Callable[[], Awaitable[object]], *, every: float = 0.0, at_once: bool = True
    ) -> asyncio.Task[None]:
        """Start a chore: await `turn()` again and again until cancelled. The chore waits `every` seconds between two
        turns. If `at_once` is False, it also waits before the first turn. `every` can be 0 if `turn` itself waits for
        work. `turn` must be safe to repeat after a failure."""
        task = self._group.create_task(self._repeat(name, turn, every, at_once), name=name)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return task

    def until_done(self, name: str, work: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
        """Await `work()`, and repeat it after each failure, until it succeeds or is cancelled."""
        return self.create_task(self._until_done(name, work), name=name)

    def create_task(self, work: Coroutine[Any, Any, T], *, name: str, chore: str | None = None) -> asyncio.Task[T]:
        """Run `work` once, in a task. An error that is not fatal is recorded in `failures`, and the task returns None.
        The error is not raised, because possibly no code awaits the task. The record has the name `chore`, by default
        `name`. Use a name that later tasks for the same work also have, so that their success clears the record."""
        task = self._group.create_task(self._noted(work, chore or name), name=name)
        self._once.add(task)
        task.add_done_callback(self._once.discard)
        task.add_done_callback(lambda _: work.close())  # a task cancelled before its start never awaits `work`
        return task  # type: ignore[return-value]  # None only after a failure, and callers allow for None

    async def _repeat(self, name: str, turn: Callable[[], Awaitable[object]], every: float, at_once: bool) -> None:
        if not at_once:
            await asyncio.sleep(every)
        while True:
            await self._until_done(name, turn)
            await asyncio.sleep(every)

    async def _until_done(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        failures = 0
        try:
            while not await self._succeeds(work, name):
                await asyncio.sleep(self._pauses.wait(failures))
                failures += 1
        except asyncio.CancelledError:
            self.failures.drop(name)
            raise

    async def _succeeds(self, work: Callable[[], Awaitable[object]], name: str) -> bool:
        task = asyncio.current_task()
        assert task is not None
        try:
            await work()
        except asyncio.CancelledError as error:
            # If this task is not being cancelled, something that the work awaited was cancelled. Record a failure
            # instead of raising the CancelledError, which would end the chore silently.
            if task.cancelling():
                raise
            self.failures.note(name, error)
            return False
        except Exception as error:  # every error that is not fatal is recorded, and the work is tried again
            if self._fatal(error):
                raise
            self.failures.note(name, error)
            return False
        self.failures.note_success(name)
        return True

    async def _noted(self, work: Coroutine[Any, Any, T], name: str) -> T | None:
        task = asyncio.current_task()
        assert task is not None
        try:
            found = await work
        except asyncio.CancelledError as error:
            # As in `_succeeds`: if this task is not being cancelled, something that the work awaited was cancelled.
            if not task.cancelling():
                self.failures.note(name, error)
            raise
        except Exception as error:  # every error that is not fatal is recorded, because nothing may await the task
            if self._fatal(error):
                raise
            self.failures.note(name, error)
            return None
        self.failures.note_success(name)
        return found
