"""How long an engine takes for what it is asked, by its last calls, and when a wait for it is overdue.

The module is pure: it reads no clock and waits for nothing.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec

REMEMBERED_CALLS = 256
"""Calls whose pace is remembered. The median of so many hardly moves while an engine misbehaves for a minute."""
KNOWN_CALLS = 8
"""Calls after which an engine's pace is known."""
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
WHOLE_TOKENS = 32
"""An engine whose first chunk usually brings more tokens does not stream: that chunk takes as long as the reply."""


class SilenceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds. `least`: no wait below it is overdue. `unknown`: allowance for the first token of an engine whose
    pace is not known yet, which may have to compile or to load something first. `check`: in which a silent engine must
    give one token; `first_check` for one that has given nothing yet; `longest_check` for one that has a long prompt to
    read. `lost`: overdue seconds after which a call is taken for lost that an engine gives nothing, while it
    gives others something. `slow`: overdue seconds, over a whole call, after which the call goes elsewhere. `tick`:
    between two looks."""

    least: float = 3.0
    unknown: float = 60.0
    check: float = 15.0
    first_check: float = 180.0
    longest_check: float = 600.0
    lost: float = 30.0
    slow: float = 120.0
    tick: float = 0.25


LIMITS = SilenceLimits()


class Pace:
    """How long an engine took for its last calls: medians of the seconds to the first chunk, of the same for each token
    of prompt, of the seconds for each later token, and of the tokens and seconds of first chunks."""

    def __init__(self) -> None:
        self._calls: deque[tuple[float, float, float, int, int]] = deque(maxlen=REMEMBERED_CALLS)
        self._new = 0
        self._longest = 0
        self._first = self._first_per_prompt_token = self._per_token = 0.0
        self._first_tokens = 0.0

    @property
    def known(self) -> bool:
        return len(self._calls) >= KNOWN_CALLS

    def note(self, *, first: float, prompt_tokens: int, first_tokens: int, rest: float, rest_tokens: int) -> None:
        """A call that got tokens: seconds to the first chunk and after it, and the tokens of prompt and reply."""
        per_token = rest / rest_tokens if rest_tokens else first / max(1, first_tokens)
        self._calls.append((first, first / max(1, prompt_tokens), per_token, first_tokens, first_tokens + rest_tokens))
        self._new += 1
        if self._new >= SUMMED_UP_EVERY or len(self._calls) <= SUMMED_UP_EVERY:
            self._new = 0
            firsts, per_prompt, per_token_all, first_tokens_all, all_tokens = zip(*self._calls, strict=True)
            self._first, self._first_per_prompt_token = median(firsts), median(per_prompt)
            self._per_token, self._first_tokens = median(per_token_all), median(first_tokens_all)
            self._longest = max(all_tokens)

    def first_due(self, limits: SilenceLimits, prompt_tokens: int, max_tokens: int) -> float:
        """Seconds in which the first chunk of a call is due."""
        if not self.known:
            return limits.unknown + 10 * prompt_tokens / PREFILL_TOKENS_PER_SECOND
        return limits.least + MUCH_SLOWER * self.usual_first(prompt_tokens, max_tokens)

    def usual_first(self, prompt_tokens: int, max_tokens: int) -> float:
        """Seconds that the first chunk of such a call usually takes, if none of its prompt is cached."""
        usual = max(self._first, self._first_per_prompt_token * prompt_tokens)
        if self._first_tokens > WHOLE_TOKENS:
            # Clients ask for as many tokens as the context holds, and get few of them.
            usual = max(usual, self._per_token * min(max_tokens, self._longest))
        return usual + prompt_tokens / PREFILL_TOKENS_PER_SECOND / MUCH_SLOWER

    def whole_reply(self, max_tokens: int) -> float:
        """Seconds that a reply of so many tokens takes, if it comes in one piece; 0 from an engine that streams."""
        return self._per_token * max_tokens if self._first_tokens > WHOLE_TOKENS else 0.0

    def token_due(self) -> float:
        """Seconds in which each later token is due."""
        return MUCH_SLOWER * self._per_token if self.known else 1.0

    @property
    def usual_token(self) -> float:
        """Seconds that each later token usually takes."""
        return self._per_token
