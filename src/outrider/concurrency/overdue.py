"""Counts the overdue seconds of one session: the time by which waits for its engine, the store or the service are too
long.

Each wait has an allowance: the length of a normal wait. Seconds within the allowance count on the session's clocks, as
the session's own work does. Seconds beyond the allowance are overdue, and count on no clock. Invariants: seconds in
which several waits of a session are overdue count once; a session that waits behind its own earlier requests is not
overdue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager


def loop_time() -> float:
    """Return the time of the running event loop's clock in seconds. All waits are measured by this clock."""
    return asyncio.get_running_loop().time()


class SessionWait:
    """One wait of a session, possibly in several stretches, such as the chunks of a reply.

    `what` names the resource for which the session waits. `allowance` is the allowed number of seconds for all
    stretches together, and may grow during the wait. `since` is the start (`loop_time`) of the current stretch; None
    between two stretches. `queued`: the resource serves requests in order, so this wait is behind earlier waits for the
    same resource.
    """

    __slots__ = ("allowance", "behind", "last", "overdue", "queued", "since", "waited", "what")

    def __init__(self, what: str, allowance: float, *, queued: bool = False) -> None:
        self.what = what
        self.allowance = allowance
        self.queued = queued
        self.since: float | None = None
        self.last = 0.0
        """Time of the last delivery to this wait, such as a chunk."""
        self.behind = 0.0
        """Time of the last delivery to an earlier, finished wait for the same resource."""
        self.waited = 0.0
        """Seconds of the finished stretches."""
        self.overdue = 0.0
        """Seconds beyond the allowance in the finished stretches."""

    def begin(self, now: float) -> None:
        self.since = now

    def end(self, now: float) -> float:
        """End the stretch and return its seconds."""
        assert self.since is not None
        seconds, self.since = now - self.since, None
        self.overdue += max(0.0, min(seconds, self.waited + seconds - self.allowance))
        self.waited += seconds
        return seconds

    def due(self, behind: float = 0.0) -> float:
        """Return the time at which the current stretch becomes overdue; infinity between two stretches. `behind` is the
        time of the last delivery to an earlier wait."""
        if self.since is None:
            return float("inf")
        return max(self.since, behind) + max(0.0, self.allowance - self.waited)

    def overdue_by(self, now: float) -> float:
        """Return the seconds beyond the allowance until `now`."""
        return self.overdue + max(0.0, now - self.due())


class Overdue:
    """The overdue seconds of one session.

    `pending_checks` are awaited before the session's run is judged. A check raises an OutriderError if the session got
    no reply because of a fault of an engine or the service.
    """

    def __init__(self, clock: Callable[[], float] = loop_time) -> None:
        self.pending_checks: list[Callable[[], Awaitable[None]]] = []
        self.given_up_seconds = 0.0
        """Total seconds of the calls that the session has given up since an engine last finished a reply (see
        `engines/pool/silence.py`)."""
        self._clock = clock
        self._open: dict[SessionWait, None] = {}  # in order of their start
        self._seconds = 0.0
        self._before_run = 0.0
        self._longest = 0.0
        self._what = ""
        self._counted = clock()
        self._holds = 0
        self._held = self._held_since = 0.0

    @property
    def what(self) -> str:
        """The resource of the longest overdue wait in this run; "" if no wait was overdue."""
        return self._what

    def seconds(self) -> float:
        """Return the overdue seconds until now."""
        self._count(self._clock())
        return self._seconds

    def begin_run(self) -> None:
        """Start another run of the agent. Overdue waits of earlier runs do not count for this run."""
        self._before_run = self.seconds()
        self._longest, self._what = 0.0, ""
        self.pending_checks.clear()
        self.given_up_seconds = 0.0

    def in_run(self) -> float:
        """Return the overdue seconds since the agent's run began."""
        return self.seconds() - self._before_run

    def add(self, wait: SessionWait) -> None:
        self._count(self._clock())
        self._open[wait] = None

    def before_end(self, wait: SessionWait, now: float) -> None:
        """Count the overdue seconds until now. Must be called before the end of a stretch that may be overdue."""
        self._count(now)
        if (overdue := wait.overdue_by(now)) > self._longest:
            self._longest, self._what = overdue, wait.what

    def remove(self, wait: SessionWait) -> None:
        """Stop counting a wait that is over. Idempotent."""
        if wait in self._open:
            self.before_end(wait, self._clock())
            later = False
            for other in self._open:
                if later and other.queued and other.what == wait.what:
                    other.behind = max(other.behind, wait.last)
                later = later or other is wait
            del self._open[wait]

    def behind(self, wait: SessionWait) -> float:
        """Return the time of the last delivery to an earlier request of the session to the same engine. Until this time
        the engine may have worked on the earlier request while the request of this wait was in the engine's queue."""
        latest = wait.behind
        for other in self._open:
            if other is wait:
                break
            if other.queued and other.what == wait.what:
                latest = max(latest, other.last)
        return latest

    @contextmanager
    def held(self) -> Iterator[None]:
        """Mark the time of the block as held: the session waits for a reason that its clocks already exclude, such as a
        pause of the policy."""
        self._holds += 1
        if self._holds == 1:
            self._held_since = self._clock()
        try:
            yield
        finally:
            self._held += self._held_until_now()
            self._holds -= 1
            self._held_since = self._clock()

    def held_seconds(self) -> float:
        """Return the total seconds of the `held` blocks until now. Blocks that overlap count once."""
        return self._held + self._held_until_now()

    def _held_until_now(self) -> float:
        return self._clock() - self._held_since if self._holds else 0.0

    @contextmanager
    def waiting(self, what: str, allowance: float = 0.0, *, queued: bool = False) -> Iterator[None]:
        """Count the time of the block as a wait of one stretch."""
        wait = SessionWait(what, allowance, queued=queued)
        wait.begin(self._clock())
        self.add(wait)
        try:
            yield
        finally:
            wait.last = self._clock()
            self.remove(wait)

    def _count(self, now: float) -> None:
        """Add the overdue seconds since the last call. Between two calls the same waits are open, so the overdue time
        is one stretch up to now."""
        due, latest = float("inf"), dict[str, float]()
        for wait in self._open:
            if wait.queued:
                before = latest.get(wait.what, 0.0)
                due = min(due, wait.due(max(wait.behind, before)))
                latest[wait.what] = max(before, wait.last)
            else:
                due = min(due, wait.due())
        if due < now:
            self._seconds += now - max(due, self._counted)
        self._counted = now
