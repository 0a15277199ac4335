"""The waits for an engine, the store or the service. `Pace` measures how long a wait for an engine usually takes.
`Overdue` adds up by how much the waits of a session are too long.

Each wait has an allowance: the length of a normal wait. The allowance of a wait for an engine depends on the engine's
pace, which is measured over the calls of recent minutes. Seconds within the allowance count towards the session's time
limits, like the session's own work. Seconds beyond the allowance are overdue, and count towards no limit. Invariants:

- Seconds in which several waits of a session are overdue count once.
- A session that waits behind its own earlier requests is not overdue.
- `Pace` reads no clock.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Annotated, NamedTuple

import msgspec

REMEMBERED_CALLS = 256
"""The medians of a pace (`PaceSummary`) are computed from at most this number of recent calls."""
KNOWN_CALLS = 8
"""The usual speed (pace) of an engine is known after this number of calls that were not overdue."""
LEARNING_SECONDS = 1.0
"""Once the pace is known, at most one call in this number of seconds is remembered. So the medians cover several
minutes even on a busy engine, and a minute of unusual calls hardly changes them."""
ESTABLISHED_CALLS = 128
"""When a pace becomes known or is taken over from elsewhere, each of its calls is remembered several times, until at
least this number of calls is remembered. So later calls change the medians only slowly."""
SLOW_CALLS = 8
SLOW_SECONDS = 120.0
"""If at least SLOW_CALLS calls in a row are overdue, during at least SLOW_SECONDS, the engine counts as slow and not as
silent. Its pace is then computed from these calls only."""
STEADY = 5.0
"""SLOW_SECONDS is multiplied by this factor if the engine's pace is known and this process has measured a call to the
engine that was not overdue."""
SUMMED_UP_EVERY = 16
"""The medians are computed again after this number of newly remembered calls."""
MUCH_SLOWER = 8.0
"""A wait is overdue if it takes more than this multiple of the usual seconds. The factor is large, because load can
make an engine a few times slower within a minute."""
PREFILL_TOKENS_PER_SECOND = 2000
"""Number of prompt tokens that any GPU computes in a second. The time for the whole prompt at this rate is added to the
seconds after which a wait is overdue. The usual seconds do not include this time, because they were measured on prompts
that were mostly cached."""
SLOW_PREFILL_TOKENS_PER_SECOND = 200
"""Number of prompt tokens that a slow engine, for example one without a GPU, computes in a second. Time limits allow
for this rate, so that such an engine is not taken for a failed one."""
FIXED_COST_TOKENS = 1024
"""A prompt of fewer tokens counts as a prompt of this number of tokens, because most of the time to the first chunk is
then a fixed cost."""
WHOLE_TOKENS = 32
"""If the first chunks of an engine usually have more tokens than this, the engine is assumed to send each reply in one
chunk."""
UNKNOWN_TOKEN_SECONDS = 1 / 64
"""Assumed seconds for each token after the first chunk while the pace of an engine is unknown."""


class SilenceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for silent engines and lost calls, in seconds.

    - `least`: an overdue wait has at least this length.
    - `unknown`: if the engine's pace is unknown, a call without a token has this additional time before the pool checks
      the engine. The engine may have to compile or load a model first.
    - `unknown_token`: like `unknown`, for each token that the call has received already.
    - `check`: a silent engine must send one token in this time to pass a check.
    - `first_check`: the same for an engine that has sent nothing yet.
    - `longest_check`: maximum time for a check that takes longer because of a long prompt.
    - `lost`: a call that is overdue by this time is considered lost if other calls receive chunks.
    - `slow`: a call that is overdue by this time in total moves to another engine.
    - `tick`: the time between two checks of all flights.
    """

    least: float = 3.0
    unknown: float = 60.0
    unknown_token: float = 1.0
    check: float = 15.0
    first_check: float = 180.0
    longest_check: float = 600.0
    lost: float = 30.0
    slow: float = 120.0
    tick: float = 0.25


LIMITS = SilenceLimits()

Measure = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class PaceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The pace of an engine: how fast it usually replies. The first four fields are medians over the remembered calls.

    - `first`: seconds to the first chunk.
    - `first_per_prompt_token`: seconds to the first chunk, divided by the number of prompt tokens.
    - `per_token`: seconds for each later token.
    - `first_tokens`: tokens in the first chunk. Short replies of a single chunk are left out, because they do not show
      whether the engine streams. None if there are no other replies.
    - `longest`: tokens of the longest reply.
    - `calls`: number of calls measured.
    """

    first: Measure
    first_per_prompt_token: Measure
    per_token: Measure
    first_tokens: Measure | None
    longest: Measure
    calls: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]

    def resembles(self, other: PaceSummary) -> bool:
        """Return True if `first`, `per_token` and `longest` differ by at most 25 %. A stored summary then needs no
        update."""
        pairs = ((self.first, other.first), (self.per_token, other.per_token), (self.longest, other.longest))
        return all(max(pair) <= 1.25 * min(pair) for pair in pairs)


class RememberedPace(msgspec.Struct, frozen=True, kw_only=True):
    """A stored pace of an engine. A later run of the service uses it for an engine of the same name, kind and URL."""

    kind: str
    url: str | None
    pace: PaceSummary


class _Call(NamedTuple):
    """The measurements of one call. `tokens` is the length of the reply; `PaceSummary` explains the other fields."""

    first: float
    first_per_prompt_token: float
    per_token: float
    first_tokens: float | None
    tokens: float


class Pace:
    """The pace of an engine, measured over the calls of recent minutes. `known` is None or a pace to start with, which
    was measured earlier or by another process."""

    def __init__(self, known: PaceSummary | None = None) -> None:
        self.summary: PaceSummary | None = None
        """The current pace, None until it is known."""
        self._calls: deque[_Call] = deque(maxlen=REMEMBERED_CALLS)
        self._count = 0
        self._new = 0
        self._good: list[_Call] = []
        """Calls that were not overdue. Used only until the pace is known."""
        self._slow: list[_Call] = []
        """The latest consecutive overdue calls, at most one per `LEARNING_SECONDS`."""
        self._slow_since = self._slow_last = self._learned = float("-inf")
        """`_slow_since` and `_slow_last` are the end times of the first and the last of the consecutive overdue calls.
        `_learned` is the end time of the last remembered call."""
        self._seen = False
        """True once this process has measured a call that was not overdue."""
        if known is not None:
            self.take_over(known)

    @property
    def known(self) -> bool:
        return self.summary is not None

    def take_over(self, known: PaceSummary) -> None:
        """Start with a pace that was measured earlier or by another process. Must be called only while the pace is
        unknown."""
        call = _Call(known.first, known.first_per_prompt_token, known.per_token, known.first_tokens, known.longest)
        self._count = known.calls
        self._establish([call])

    def note(
        self,
        now: float,
        *,
        overdue: bool,
        first: float,
        prompt_tokens: int,
        first_tokens: int,
        rest: float,
        rest_tokens: int,
    ) -> None:
        """Record a call that has received tokens.

        `now`: when the call ended, in seconds of any monotonic clock.
        `overdue`: True if any of its chunks was overdue.
        `first`: seconds to the first chunk.
        `rest`: seconds from the first chunk to the end.
        `prompt_tokens`, `first_tokens`, `rest_tokens`: number of tokens of the prompt, the first chunk and the later
            chunks.
        """
        self._count += 1
        tokens = first_tokens + rest_tokens
        call = _Call(
            first=first,
            first_per_prompt_token=first / max(FIXED_COST_TOKENS, prompt_tokens),
            per_token=rest / rest_tokens if rest_tokens else first / max(1, first_tokens),
            first_tokens=first_tokens if rest_tokens or tokens > WHOLE_TOKENS else None,
            tokens=tokens,
        )
        if not overdue:
            self._seen = True
            self._slow.clear()
        elif now >= self._slow_last + LEARNING_SECONDS:
            self._slow_since = self._slow_since if self._slow else now
            self._slow_last = now
            self._slow = [*self._slow, call][-ESTABLISHED_CALLS:]
            steady = STEADY if self.known and self._seen else 1.0
            if len(self._slow) >= SLOW_CALLS and now >= self._slow_since + steady * SLOW_SECONDS:
                self._establish(self._slow)
                return
        if self.known:
            if now >= self._learned + LEARNING_SECONDS:
                self._learned = now
                self._new += 1
                self._calls.append(call)
                if self._new >= SUMMED_UP_EVERY:
                    self._sum_up()
        elif not overdue:
            self._good.append(call)
            if len(self._good) == KNOWN_CALLS:
                self._establish(self._good)

    def _establish(self, calls: list[_Call]) -> None:
        """Replace the remembered calls by `calls`, repeated until there are at least ESTABLISHED_CALLS. Then compute
        the pace."""
        self._calls.clear()
        self._calls.extend(calls * -(-ESTABLISHED_CALLS // len(calls)))
        self._good, self._slow = [], []
        self._sum_up()

    def _sum_up(self) -> None:
        self._new = 0
        first, first_per_prompt_token, per_token, first_tokens, tokens = zip(*self._calls, strict=True)
        of_long = [count for count in first_tokens if count is not None]
        self.summary = PaceSummary(
            first=median(first),
            first_per_prompt_token=median(first_per_prompt_token),
            per_token=median(per_token),
            first_tokens=median(of_long) if of_long else None,
            longest=max(tokens),
            calls=self._count,
        )

    def first_due(self, limits: SilenceLimits, prompt_tokens: int, max_tokens: int) -> float:
        """Return the number of seconds after which a wait for the first chunk of a call is overdue."""
        return limits.least + MUCH_SLOWER * self.usual_first(prompt_tokens, max_tokens)

    def usual_first(self, prompt_tokens: int, max_tokens: int) -> float:
        """Return the usual seconds to the first chunk of a call whose prompt is not cached. While the pace is unknown,
        only the time to read the prompt is counted."""
        new = prompt_tokens / PREFILL_TOKENS_PER_SECOND / MUCH_SLOWER
        if (known := self.summary) is None:
            return new
        usual = max(known.first, known.first_per_prompt_token * prompt_tokens)
        if known.first_tokens is not None and known.first_tokens > WHOLE_TOKENS:
            # Assume no more tokens than in the longest recent reply: clients often request as many as the context
            # allows.
            usual = max(usual, known.per_token * min(max_tokens, known.longest))
        return usual + new

    def whole_reply(self, max_tokens: int) -> float:
        """Return the usual seconds for a reply of `max_tokens` tokens if the engine sends each reply in one chunk.
        Returns 0 if the engine streams or its pace is unknown."""
        streams = self.summary is None or (self.summary.first_tokens or math.inf) <= WHOLE_TOKENS
        return 0.0 if streams else self.usual_token * max_tokens

    def token_due(self) -> float:
        """Return the number of seconds after which a wait for one more token is overdue, after the first chunk."""
        return MUCH_SLOWER * self.usual_token

    @property
    def usual_token(self) -> float:
        """The usual seconds for each token after the first chunk."""
        return UNKNOWN_TOKEN_SECONDS if self.summary is None else self.summary.per_token


def loop_time() -> float:
    """Return the time in seconds of the event loop's clock. All waits are measured by this clock."""
    return asyncio.get_running_loop().time()


class SessionWait:
    """One wait of a session. It may consist of several stretches, such as one for each chunk of a reply.

    `what`: names the resource for which the session waits.
    `allowance`: the allowed seconds for all stretches together. It may grow during the wait.
    `since`: when the current stretch began (`loop_time`), or None between two stretches.
    `queued`: True if the resource serves requests in order, so that this wait is behind earlier waits for the same
        resource.
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
        """End the current stretch and return its length in seconds."""
        assert self.since is not None
        seconds, self.since = now - self.since, None
        self.overdue += max(0.0, min(seconds, self.waited + seconds - self.allowance))
        self.waited += seconds
        return seconds

    def due(self, behind: float = 0.0) -> float:
        """Return the time at which the current stretch becomes overdue, or infinity between two stretches. `behind` is
        the time of the last delivery to an earlier wait for the same resource."""
        since, left = self.since, self.allowance - self.waited
        if since is None:
            return math.inf
        return (behind if behind > since else since) + (left if left > 0.0 else 0.0)

    def overdue_by(self, now: float, behind: float = 0.0) -> float:
        """Return the seconds by which this wait exceeds its allowance until `now`. For `behind` see `due`."""
        return self.overdue + max(0.0, now - self.due(behind))


class Overdue:
    """The overdue seconds of one session.

    `pending_checks` are awaited before the outcome of the agent's run is decided. A check raises an OutriderError if
    the session got no reply because of a fault of an engine or of the service.
    """

    def __init__(self, clock: Callable[[], float] = loop_time) -> None:
        self.pending_checks: list[Callable[[], Awaitable[None]]] = []
        self.given_up_seconds = 0.0
        """Total seconds of the calls that the session has given up since an engine last finished a reply (see
        `silence.py`)."""
        self._clock = clock
        self._open: dict[SessionWait, None] = {}  # waits that are not over, in the order in which they began
        self._seconds = 0.0
        self._before_run = 0.0
        self._longest = 0.0
        self._what = ""
        self._counted = clock()
        self._holds = 0
        self._held = self._held_since = 0.0

    @property
    def what(self) -> str:
        """The resource for which a wait of this run exceeded its allowance most, or "" if none did."""
        return self._what

    def seconds(self) -> float:
        """Return the overdue seconds until now."""
        self._count(self._clock())
        return self._seconds

    def begin_run(self) -> None:
        """Start another run of the agent. Overdue waits of earlier runs do not count in this run."""
        self._before_run = self.seconds()
        self._longest, self._what = 0.0, ""
        self.pending_checks.clear()
        self.given_up_seconds = 0.0

    def in_run(self) -> float:
        """Return the overdue seconds since the current run of the agent began."""
        return self.seconds() - self._before_run

    def add(self, wait: SessionWait) -> None:
        self._count(self._clock())
        self._open[wait] = None

    def before_end(self, wait: SessionWait, now: float) -> None:
        """Count the overdue seconds up to now. Must be called before an overdue wait ends or begins another stretch;
        otherwise its overdue seconds would be lost."""
        self._count(now)
        if (overdue := wait.overdue_by(now, self.behind(wait))) > self._longest:
            self._longest, self._what = overdue, wait.what

    def remove(self, wait: SessionWait) -> None:
        """Stop counting a wait that is over. A second call has no effect."""
        if wait in self._open:
            self.before_end(wait, self._clock())
            if len(self._open) > 1:
                self._note_delivery(wait)
            del self._open[wait]

    def _note_delivery(self, wait: SessionWait) -> None:
        """Record the time of the last delivery to `wait`, which is over. The time is recorded as `behind` in the later
        waits for the same resource."""
        later = False
        for other in self._open:
            if later and other.queued and other.what == wait.what:
                other.behind = max(other.behind, wait.last)
            later = later or other is wait

    def behind(self, wait: SessionWait) -> float:
        """Return the time when an earlier wait of the session for the same engine last got a chunk. Until then, the
        engine may have worked on the earlier request, while the request of `wait` was queued."""
        latest = wait.behind
        for other in self._open:
            if other is wait:
                break
            if other.queued and other.what == wait.what:
                latest = max(latest, other.last)
        return latest

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count the time of the block as held. In this time the session waits for something that its time limits
        exclude anyway, such as a pause of the policy."""
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
        """Return the total seconds of all `held` blocks until now. Overlapping blocks count once."""
        return self._held + self._held_until_now()

    def _held_until_now(self) -> float:
        return self._clock() - self._held_since if self._holds else 0.0

    @contextmanager
    def waiting(self, what: str, allowance: float = 0.0, *, queued: bool = False) -> Iterator[None]:
        """Count the time of the block as one wait. `SessionWait` explains the arguments."""
        wait = SessionWait(what, allowance, queued=queued)
        wait.begin(self._clock())
        self.add(wait)
        try:
            yield
        finally:
            wait.last = self._clock()
            self.remove(wait)

    def _count(self, now: float) -> None:
        """Add the overdue seconds since the last call of this method. No overdue wait has ended since then, so the
        seconds to add are one stretch that lasts until now."""
        due = math.inf
        if len(self._open) == 1:  # fast path for the usual case of one wait
            (wait,) = self._open
            due = wait.due(wait.behind)
        else:
            latest: dict[str, float] = {}
            for wait in self._open:
                before = latest.get(wait.what, 0.0) if wait.queued else 0.0
                due = min(due, wait.due(max(wait.behind, before)))
                if wait.queued:
                    latest[wait.what] = max(before, wait.last)
        if due < now:
            self._seconds += now - max(due, self._counted)
        self._counted = now
