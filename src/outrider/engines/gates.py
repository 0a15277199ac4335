"""Gates that hold back generations: a `PauseGate` while its engine is paused, a `PolicyGate` while the policy is
paused.

Invariant: `in_flight` is the number of generations that have entered the gate and not left it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Literal

import msgspec

from outrider.concurrency.events import wait_for_event
from outrider.spec import PolicyPause

ANSWER_SECONDS = 30.0
"""A follower is another process with engines of this policy. In a pause, each follower has this number of seconds to
report that its gate is closed."""
SETTLE_SECONDS = 1800.0
"""If a pause lets generations of a follower run to their end, they have this number of seconds. The value is the
default time limit of an agent."""


class PauseGate:
    """Admits generations to one engine. A closed gate holds back new generations; those in flight continue."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.closings = 0
        """The number of times that the open gate was closed."""
        self._cuts: set[Callable[[], None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def passage(self, cut: Callable[[], None] = lambda: None) -> AsyncGenerator[None, None]:
        """Run the block as one generation: wait until the gate is open, and count the generation as in flight until the
        block ends. `cut_off` calls `cut`, which must end the generation."""
        while not self._open.is_set():  # a loop, because the gate may close again before this task runs
            await self._open.wait()
        self.in_flight += 1
        self._idle.clear()
        self._cuts.add(cut)
        try:
            yield
        finally:
            self._cuts.discard(cut)
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.closings += self._open.is_set()
        self._open.clear()

    async def drained(self, seconds: float | None = None) -> None:
        """Wait until no generation is in flight, for at most `seconds` seconds. With None, there is no maximum."""
        await wait_for_event(self._idle, seconds)

    def cut_off(self) -> None:
        """Call the `cut` function of every generation in flight. A generation that entered the gate without a `cut`
        function continues."""
        for cut in tuple(self._cuts):
            cut()


class GateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a follower's gate, as the follower reports it to the leader (the process whose gate it follows).

    `mode_changes`: the value of the leader's `mode_changes` that the follower has applied last.
    `in_flight`: how many of its generations are in flight.
    `whole`: how many of these run to their end in every pause, because no engine could continue them."""

    mode_changes: Annotated[int, msgspec.Meta(ge=0)]
    in_flight: Annotated[int, msgspec.Meta(ge=0)]
    whole: Annotated[int, msgspec.Meta(ge=0)]


class _Follower:
    """Another process, whose gate follows this gate. `since` is the later of two times on the event loop's clock: the
    latest closing of this gate, and the follower's arrival. `report` is the follower's latest report, or None before
    the first one."""

    def __init__(self, since: float, lost: Callable[[str], None]) -> None:
        self.since = since
        self.lost = lost
        self.report: GateReport | None = None

    def unsettled(self, mode_changes: int, which: Literal["in_flight", "whole"]) -> bool:
        report = self.report
        return report is None or report.mode_changes != mode_changes or bool(getattr(report, which))


class PolicyGate:
    """Holds back generations while the policy is paused, and counts the generations in flight.

    - `mode`: the mode of the pause, or None while the gate is open.
    - `mode_changes`: the number of changes of `mode`.
    - `cuts`: the number of pauses with mode "abort", which cut generations off.
    - `whole`: the number of generations in flight that run to their end in any mode, because no engine could continue
      them.
    - `changed`: called after each change of `mode`, and when a generation ends while the gate is closed.

    Other processes may have gates that follow this one (followers). `settled` waits for their generations, too.
    `report` records the state of a follower's gate. A follower has `answer_seconds` to report that its gate is closed,
    and `settle_seconds` for its generations to end. A follower that takes longer is removed, and its `lost` function is
    called (see `expect`).
    """

    answer_seconds = ANSWER_SECONDS
    settle_seconds = SETTLE_SECONDS

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.mode: PolicyPause | None = None
        self.cuts = 0
        self.in_flight = 0
        self.whole = 0
        self.mode_changes = 0
        self._announce = changed
        self._followers: dict[str, _Follower] = {}
        self._changed = asyncio.Event()
        self._closed_at = 0.0
        self._closed_for = 0.0
        self._clocks: set[asyncio.Timeout] = set()

    def enter(self, *, whole: bool) -> None:
        """Count a generation that begins. Must be called only while the gate is open."""
        self.in_flight += 1
        self.whole += whole

    def leave(self, *, whole: bool) -> None:
        """Count the end of a generation, successful or not."""
        self.in_flight -= 1
        self.whole -= whole
        if self.mode is not None:
            self._notify()

    @contextmanager
    def ended_by_closing(self, clock: asyncio.Timeout) -> Iterator[None]:
        """While the block runs, make the timeout `clock` expire when the gate closes. So a pause does not wait for the
        block."""
        self._clocks.add(clock)
        try:
            yield
        finally:
            self._clocks.discard(clock)

    async def opened(self) -> None:
        while self.mode is not None:
            await self._changed.wait()

    def close(self, mode: PolicyPause) -> None:
        """Admit no more generations. The mode of a closed gate can change from "finish" to "abort", but not back."""
        if self.mode is None:
            self._closed_at = asyncio.get_running_loop().time()
            for clock in self._clocks:
                if not clock.expired():
                    clock.reschedule(self._closed_at)
        if self.mode not in (mode, "abort"):
            self.mode = mode
            self.mode_changes += 1
            for follower in self._followers.values():
                follower.since = asyncio.get_running_loop().time()
        self._notify()

    def open(self) -> None:
        if self.mode is not None:
            self._closed_for = self.paused_seconds()
            self.mode = None
            self.mode_changes += 1
            self._notify()

    async def settled(self) -> None:
        """Wait until all generations that this pause does not cut off have ended, in all processes, or until the gate
        opens. Followers that take too long are removed."""
        while (self.mode == "finish" and self._flying("in_flight")) or (self.mode == "abort" and self._flying("whole")):
            await wait_for_event(self._changed, self._lose_overdue("in_flight" if self.mode == "finish" else "whole"))

    def expect(self, follower: str, lost: Callable[[str], None] = lambda why: None) -> None:
        """Add a follower. A pause waits for the follower's first report. If the follower takes too long, it is removed
        and `lost` is called with the reason. `lost` must disconnect the follower, because the follower's generations
        may go on during the pause."""
        self._followers[follower] = _Follower(asyncio.get_running_loop().time(), lost)

    def expects(self, follower: str) -> bool:
        return follower in self._followers

    def report(self, follower: str, report: GateReport) -> None:
        """Record the state of a follower's gate. Ignores a report of an unknown follower. Raises ValueError for an
        impossible report: its `mode_changes` exceed those of this gate, `whole` exceeds `in_flight`, or generations
        have begun while the gate is closed."""
        if (known := self._followers.get(follower)) is None:
            return
        before = known.report
        if report.mode_changes > self.mode_changes or report.whole > report.in_flight:
            raise ValueError(f"a gate after {report.mode_changes} changes of mode, with {report.in_flight} in flight")
        settling = (
            self.mode is not None
            and before is not None
            and before.mode_changes == report.mode_changes == self.mode_changes
        )
        if settling and before and (report.in_flight > before.in_flight or report.whole > before.whole):
            raise ValueError("generations that begin behind a closed gate")
        known.report = report
        self._wake()

    def forget(self, follower: str) -> None:
        """Remove a follower whose process has ended or disconnected. Its generations no longer count."""
        self._followers.pop(follower, None)
        self._wake()

    def _flying(self, which: Literal["in_flight", "whole"]) -> bool:
        """Return True while a pause must wait: for generations in flight, here or in a follower, or for a follower that
        has not reported the gate's latest closing. `which` names the count of generations that must be 0."""
        return bool(getattr(self, which)) or any(
            follower.unsettled(self.mode_changes, which) for follower in self._followers.values()
        )

    def _lose_overdue(self, which: Literal["in_flight", "whole"]) -> float | None:
        """Remove the followers that take too long. Returns the seconds until the next removal is due, or None if the
        pause waits for no follower."""
        now, waits = asyncio.get_running_loop().time(), []
        for name, follower in list(self._followers.items()):
            if not follower.unsettled(self.mode_changes, which):
                continue
            answered = follower.report is not None and follower.report.mode_changes == self.mode_changes
            seconds = self.settle_seconds if answered else self.answer_seconds
            if (left := follower.since + seconds - now) > 0:
                waits.append(left)
                continue
            what = "its generations have not ended" if answered else "it has not answered"
            self.forget(name)
            follower.lost(f"{what} within {seconds:g} s of a pause of the policy")
        return min(waits, default=None)

    def paused_seconds(self) -> float:
        """Return for how many seconds the gate has been closed in total, including a closing that still lasts."""
        if self.mode is None:
            return self._closed_for
        return self._closed_for + asyncio.get_running_loop().time() - self._closed_at

    def _notify(self) -> None:
        self._wake()
        self._announce()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
