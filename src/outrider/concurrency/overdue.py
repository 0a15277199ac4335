"""How much longer than is due one session has waited for its engine, the store or the service.

Each wait has an allowance: what it would have taken if all were well. Those seconds are charged to the session's clocks
like its own work; seconds beyond the allowance are overdue and are charged to no clock. The module knows neither
engines nor stores. Invariants: seconds in which several waits of a session are overdue count once; a session that waits
behind its own earlier requests is not overdue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager


def loop_time() -> float:
    """The running event loop's clock, in seconds. All waits are measured by it."""
    return asyncio.get_running_loop().time()


class Wait:
    """One thing that a session waits for, perhaps in several stretches, such as the chunks of a reply.

    `allowance` is how many seconds all stretches together may take; it may grow while they do. `since` is the time
    (`loop_time`) at which the stretch under way began; None between two stretches. `queued`: what is waited for serves
    its requests in their order, so that this wait is behind the earlier ones for the same.
    """

    __slots__ = ("allowance", "behind", "last", "overdue", "queued", "since", "waited", "what")

    def __init__(self, what: str, allowance: float, *, queued: bool = False) -> None:
        self.what = what
        self.allowance = allowance
        self.queued = queued
        self.since: float | None = None
        self.last = 0.0
        """When something came last."""
        self.behind = 0.0
        """When an earlier wait for the same, which is over, was given something last."""
        self.waited = 0.0
        """Seconds of the stretches that have ended."""
        self.overdue = 0.0
        """Seconds beyond the allowance, of the stretches that have ended."""

    def begin(self, now: float) -> None:
        self.since = now

    def end(self, now: float) -> float:
        """End the stretch; returns its seconds."""
        assert self.since is not None
        seconds, self.since = now - self.since, None
        self.overdue += max(0.0, min(seconds, self.waited + seconds - self.allowance))
        self.waited += seconds
        return seconds

    def due(self, behind: float = 0.0) -> float:
        """When the stretch under way is overdue; infinity between two stretches. `behind`: when an earlier wait was
        given something last."""
        if self.since is None:
            return float("inf")
        return max(self.since, behind) + max(0.0, self.allowance - self.waited)

    def overdue_by(self, now: float) -> float:
        """Seconds beyond the allowance until now."""
        return self.overdue + max(0.0, now - self.due())


class Overdue:
    """The overdue seconds of one session.

    `doubts` are checks to make before the session's run is judged. Each raises an OutriderError if something that the
    session has waited for in vain is at fault.
    """

    def __init__(self, clock: Callable[[], float] = loop_time) -> None:
        self.doubts: list[Callable[[], Awaitable[None]]] = []
        self.in_vain = 0.0
        """Seconds of the calls that the session has given up since an engine gave it something last."""
        self._clock = clock
        self._open: dict[Wait, None] = {}  # in the order in which they began
        self._seconds = 0.0
        self._before_run = 0.0
        self._longest = 0.0
        self._what = ""
        self._counted = clock()
        self._holds = 0
        self._held = self._held_since = 0.0

    @property
    def what(self) -> str:
        """What the session waited for when it was overdue for longest."""
        return self._what

    def seconds(self) -> float:
        """Overdue seconds until now."""
        self._count(self._clock())
        return self._seconds

    def begin_run(self) -> None:
        """Another run of the agent begins, which is judged by itself."""
        self._before_run = self.seconds()
        self._longest, self._what = 0.0, ""
        self.doubts.clear()
        self.in_vain = 0.0

    def in_run(self) -> float:
        """Overdue seconds since the agent's run began."""
        return self.seconds() - self._before_run

    def add(self, wait: Wait) -> None:
        """Count this wait from now on."""
        self._count(self._clock())
        self._open[wait] = None

    def before_end(self, wait: Wait, now: float) -> None:
        """Call before a stretch that may be overdue ends."""
        self._count(now)
        if (overdue := wait.overdue_by(now)) > self._longest:
            self._longest, self._what = overdue, wait.what

    def remove(self, wait: Wait) -> None:
        """The wait is over. Idempotent."""
        if wait in self._open:
            self.before_end(wait, self._clock())
            later = False
            for other in self._open:
                if later and other.queued and other.what == wait.what:
                    other.behind = max(other.behind, wait.last)
                later = later or other is wait
            del self._open[wait]

    def behind(self, wait: Wait) -> float:
        """When a request that the session had made before this one, to the same engine, was given something last.
        Until then this one may have waited for its turn."""
        latest = wait.behind
        for other in self._open:
            if other is wait:
                break
            if other.queued and other.what == wait.what:
                latest = max(latest, other.last)
        return latest

    @contextmanager
    def held(self) -> Iterator[None]:
        """A wait whose seconds another clock leaves out already, such as a pause of the policy."""
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
        """Seconds in all, until now, in which the session was held."""
        return self._held + self._held_until_now()

    def _held_until_now(self) -> float:
        return self._clock() - self._held_since if self._holds else 0.0

    @contextmanager
    def waiting(self, what: str, allowance: float = 0.0, *, queued: bool = False) -> Iterator[None]:
        """A wait of one stretch."""
        wait = Wait(what, allowance, queued=queued)
        wait.begin(self._clock())
        self.add(wait)
        try:
            yield
        finally:
            wait.last = self._clock()
            self.remove(wait)

    def _count(self, now: float) -> None:
        """Between two calls the same waits are open: what is overdue of them is one stretch up to now."""
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
