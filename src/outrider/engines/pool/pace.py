"""Measures the time that an engine takes for a call, over recent minutes, and computes when a wait for the engine is
overdue.

The module is pure: it reads no clock and waits for nothing.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Annotated, NamedTuple

import msgspec

REMEMBERED_CALLS = 256
"""Number of recent calls that the medians are computed from."""
KNOWN_CALLS = 8
"""An engine's pace is known after this many calls that were not overdue."""
LEARNING_SECONDS = 1.0
"""Minimum seconds between two remembered calls, once the pace is known. The medians then follow the engine over
minutes, and hardly move while the engine misbehaves for a minute, however many calls the engine serves."""
ESTABLISHED_CALLS = 128
"""When a pace becomes known or is taken over, its calls are repeated until at least this many calls are remembered. So
later calls change the medians only slowly."""
SLOW_CALLS = 8
SLOW_SECONDS = 120.0
"""The engine counts as slow, not silent, after `SLOW_CALLS` overdue calls in a row over at least `SLOW_SECONDS`."""
STEADY = 5.0
"""Factor on `SLOW_SECONDS` for an engine of known pace that has served a call of this process in time."""
SUMMED_UP_EVERY = 16
"""Number of remembered calls between two computations of the medians."""
MUCH_SLOWER = 8.0
"""Multiple of its usual seconds that an engine may take before a wait is overdue. Load makes engines a few times slower
than they were a minute ago."""
PREFILL_TOKENS_PER_SECOND = 2000
"""Prompt tokens that any GPU reads in a second. The usual seconds are measured on prompts that were mostly cached. So
the time to read the whole prompt at this rate is allowed in addition."""
SLOW_PREFILL_TOKENS_PER_SECOND = 200
"""Prompt tokens that a slow engine, such as an engine without a GPU, reads in a second. Slowness is no failure."""
FIXED_COST_TOKENS = 1024
"""Shorter prompts count as this long: the time to their first chunk is fixed cost, not time for each token."""
WHOLE_TOKENS = 32
"""An engine whose first chunk usually has more tokens does not stream: its first chunk takes as long as the reply."""


UNKNOWN_TOKEN_SECONDS = 1 / 64
"""Assumed seconds for each later token of an engine whose pace is not known yet."""


class SilenceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits in seconds.

    `least`: no shorter wait is overdue. `unknown`: additional seconds for the first token of an engine of unknown pace
    before the engine is probed, because such an engine may have to compile or load first. `unknown_token`: additional
    seconds for each later token of such an engine. `check`: seconds in which a silent engine must give one token.
    `first_check`: the same for an engine that has sent nothing yet. `longest_check`: maximum for an engine with a long
    prompt to read. `lost`: overdue seconds after which a call counts as lost, if only other calls receive chunks.
    `slow`: overdue seconds of a whole call after which the call moves to another engine. `tick`: seconds between two
    checks of all flights.
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
    """An engine's pace: medians over its calls, except `longest` and `calls`. `first`: seconds to the first chunk.
    `first_per_prompt_token`: `first` divided by the tokens of the prompt. `per_token`: seconds for each later token.
    `first_tokens`: tokens of the first chunk, without short replies in one piece, which do not show whether the engine
    streams. `longest`: tokens of the longest reply. `calls`: number of calls measured."""

    first: Measure
    first_per_prompt_token: Measure
    per_token: Measure
    first_tokens: Measure | None
    longest: Measure
    calls: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]

    def resembles(self, other: PaceSummary) -> bool:
        """Return True if the two summaries are so similar that one of them need not be kept."""
        pairs = ((self.first, other.first), (self.per_token, other.per_token), (self.longest, other.longest))
        return all(max(pair) <= 1.25 * min(pair) for pair in pairs)


class RememberedPace(msgspec.Struct, frozen=True, kw_only=True):
    """A stored pace of an engine, which a later service applies to the engine of the same name, kind and URL."""

    kind: str
    url: str | None
    pace: PaceSummary


class _Call(NamedTuple):
    """One call; the fields are those of `PaceSummary`."""

    first: float
    first_per_prompt_token: float
    per_token: float
    first_tokens: float | None
    tokens: float


class Pace:
    """An engine's pace, measured over the calls of recent minutes. `known`: a pace measured earlier or in another
    process."""

    def __init__(self, known: PaceSummary | None = None) -> None:
        self.summary: PaceSummary | None = None
        """None until the pace is known."""
        self._calls: deque[_Call] = deque(maxlen=REMEMBERED_CALLS)
        self._count = 0
        self._new = 0
        self._good: list[_Call] = []
        """Calls that were not overdue, until the pace is known."""
        self._slow: list[_Call] = []
        """The latest consecutive overdue calls, at most one per `LEARNING_SECONDS`."""
        self._slow_since = self._slow_last = self._learned = float("-inf")
        """End times of the first and of the last call in `_slow`, and of the last remembered call."""
        self._seen = False
        """True once this process has measured a call that was not overdue."""
        if known is not None:
            self.take_over(known)

    @property
    def known(self) -> bool:
        return self.summary is not None

    def take_over(self, known: PaceSummary) -> None:
        """Start from a pace measured elsewhere. Call this only while no pace is known here."""
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
        """Record a call that got tokens and ended at `now` (seconds of any monotonic clock). `overdue`: whether any
        chunk came later than due. `first`, `rest`: seconds to the first chunk, and after it. The token counts are for
        the prompt, the first chunk and the later chunks."""
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
        """Set the pace to the pace of these calls."""
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
        """Return the seconds in which the first chunk of a call is due."""
        return limits.least + MUCH_SLOWER * self.usual_first(prompt_tokens, max_tokens)

    def usual_first(self, prompt_tokens: int, max_tokens: int) -> float:
        """Return the usual seconds to the first chunk of a call, if none of its prompt is cached."""
        new = prompt_tokens / PREFILL_TOKENS_PER_SECOND / MUCH_SLOWER
        if (known := self.summary) is None:
            return new
        usual = max(known.first, known.first_per_prompt_token * prompt_tokens)
        if known.first_tokens is not None and known.first_tokens > WHOLE_TOKENS:
            # Clients often request as many tokens as the context holds. The longest reply so far is a better bound.
            usual = max(usual, known.per_token * min(max_tokens, known.longest))
        return usual + new

    def whole_reply(self, max_tokens: int) -> float:
        """Return the seconds that a reply of `max_tokens` takes, for an engine that sends each reply in one piece; 0
        for an engine that streams."""
        streams = self.summary is None or (self.summary.first_tokens or math.inf) <= WHOLE_TOKENS
        return 0.0 if streams else self.usual_token * max_tokens

    def token_due(self) -> float:
        """Return the seconds in which each later token is due."""
        return MUCH_SLOWER * self.usual_token

    @property
    def usual_token(self) -> float:
        """Usual seconds for each later token."""
        return UNKNOWN_TOKEN_SECONDS if self.summary is None else self.summary.per_token
