"""How long an engine takes for what it is asked, by its calls of the last minutes, and when a wait for it is overdue.

The module is pure: it reads no clock and waits for nothing.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Annotated, NamedTuple

import msgspec

REMEMBERED_CALLS = 256
"""Calls whose pace is remembered."""
KNOWN_CALLS = 8
"""Calls that were not overdue, after which an engine's pace is known."""
LEARNING_SECONDS = 1.0
"""Minimum seconds between two remembered calls, once the pace is known. The medians then follow the engine over
minutes. They hardly move while the engine misbehaves for one minute, however many calls it serves."""
ESTABLISHED_CALLS = 128
"""The weight, in calls, of a pace that has just become known or was known earlier."""
SLOW_CALLS = 8
SLOW_SECONDS = 120.0
"""The engine is slow, and not silent, after `SLOW_CALLS` overdue calls in a row over at least `SLOW_SECONDS`."""
STEADY = 5.0
"""Factor on `SLOW_SECONDS` for an engine that this process has seen to be faster."""
SUMMED_UP_EVERY = 16
"""Calls after which the medians are computed again."""
MUCH_SLOWER = 8.0
"""How many times its usual seconds an engine may take before a wait is overdue. Load makes engines a few times slower
than they were a minute ago."""
PREFILL_TOKENS_PER_SECOND = 2000
"""Prompt tokens that any GPU reads in a second. The usual seconds are those of prompts that were cached for the most
part; a new prompt is not."""
SLOW_PREFILL_TOKENS_PER_SECOND = 200
"""Prompt tokens that a slow engine, such as one without a GPU, reads in a second. It is not failed for that."""
FIXED_COST_TOKENS = 1024
"""Prompts that are shorter count as this long. Their first chunk takes fixed costs, and not time for each token."""
WHOLE_TOKENS = 32
"""An engine whose first chunk usually brings more tokens does not stream: that chunk takes as long as the reply."""


UNKNOWN_TOKEN_SECONDS = 1 / 64
"""Seconds that a later token is taken to need from an engine whose pace is not known yet."""


class SilenceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds. `least`: no wait below it is overdue. `unknown`: further seconds that an engine of unknown pace has
    for a first token before it is asked for one: it may have to compile or to load something first. `unknown_token`:
    further seconds that it has for each later token. `check`: in which a silent engine must
    give one token; `first_check` for one that has given nothing yet; `longest_check` for one that has a long prompt to
    read. `lost`: overdue seconds after which a call is taken for lost that an engine gives nothing, while it
    gives others something. `slow`: overdue seconds, over a whole call, after which the call goes elsewhere. `tick`:
    between two looks."""

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
    """How long an engine takes: medians over its calls. `first`: seconds to the first chunk. `first_per_prompt_token`:
    the same, divided by the tokens of the prompt. `per_token`: seconds for each later token. `first_tokens`: tokens of
    the first chunk, but for short replies in one piece, which do not show whether the engine streams. `longest`: tokens
    of the longest reply. `calls`: calls that were looked at."""

    first: Measure
    first_per_prompt_token: Measure
    per_token: Measure
    first_tokens: Measure | None
    longest: Measure
    calls: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]

    def resembles(self, other: PaceSummary) -> bool:
        """Whether both say nearly the same, so that nothing is lost if only one of them is kept."""
        pairs = ((self.first, other.first), (self.per_token, other.per_token), (self.longest, other.longest))
        return all(max(pair) <= 1.25 * min(pair) for pair in pairs)


class RememberedPace(msgspec.Struct, frozen=True, kw_only=True):
    """The pace of an engine, for a later service that has the engine of that kind and URL under the same name."""

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
    """How long an engine takes for what it is asked, by its calls of the last minutes. `known`: the pace as it was
    known earlier, or in another process."""

    def __init__(self, known: PaceSummary | None = None) -> None:
        self.summary: PaceSummary | None = None
        """None until it is known."""
        self._calls: deque[_Call] = deque(maxlen=REMEMBERED_CALLS)
        self._count = 0
        self._new = 0
        self._good: list[_Call] = []
        """Calls that were not overdue, until the pace is known."""
        self._slow: list[_Call] = []
        """The last overdue calls in a row, one in `LEARNING_SECONDS`."""
        self._slow_since = self._slow_last = self._learned = float("-inf")
        """When the first of `_slow` ended, and the last; and when the last call ended that is remembered."""
        self._seen = False
        """Whether a call was seen here that was not overdue."""
        if known is not None:
            self.take_over(known)

    @property
    def known(self) -> bool:
        return self.summary is not None

    def take_over(self, known: PaceSummary) -> None:
        """Start from a pace that is known elsewhere. Only while none is known here."""
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
        """A call got tokens and has ended at `now` (seconds of any clock that only moves on). `overdue`: whether any of
        them came later than is due. `first`, `rest`: seconds to the first chunk, and after it. The tokens are those of
        the prompt, of the first chunk and of the others."""
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
        """The pace is that of these calls."""
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
        """Seconds in which the first chunk of a call is due."""
        return limits.least + MUCH_SLOWER * self.usual_first(prompt_tokens, max_tokens)

    def usual_first(self, prompt_tokens: int, max_tokens: int) -> float:
        """Seconds that the first chunk of such a call usually takes, if none of its prompt is cached."""
        new = prompt_tokens / PREFILL_TOKENS_PER_SECOND / MUCH_SLOWER
        if (known := self.summary) is None:
            return new
        usual = max(known.first, known.first_per_prompt_token * prompt_tokens)
        if known.first_tokens is not None and known.first_tokens > WHOLE_TOKENS:
            # Clients ask for as many tokens as the context holds, and get few of them.
            usual = max(usual, known.per_token * min(max_tokens, known.longest))
        return usual + new

    def whole_reply(self, max_tokens: int) -> float:
        """Seconds that a reply of `max_tokens` takes if the engine may send it whole; 0 if the engine streams."""
        streams = self.summary is None or (self.summary.first_tokens or math.inf) <= WHOLE_TOKENS
        return 0.0 if streams else self.usual_token * max_tokens

    def token_due(self) -> float:
        """Seconds in which each later token is due."""
        return MUCH_SLOWER * self.usual_token

    @property
    def usual_token(self) -> float:
        """Seconds that each later token usually takes."""
        return UNKNOWN_TOKEN_SECONDS if self.summary is None else self.summary.per_token
