"""When a generation ends: stop ids, stop strings in the decoded output, or its token limit.

It knows no probabilities. Invariant: the token that completes a match is part of the output.
"""

from __future__ import annotations

import msgspec

from outrider.engines.base import SamplingParams
from outrider.tokens.rendering.tokenizer import TextStream
from outrider.trajectory import FinishReason


class Stop(msgspec.Struct, frozen=True):
    """How a generation ended; `match` is the stop id or string, None at the limit."""

    reason: FinishReason
    match: int | str | None = None


class StopWatch:
    """Follows one output. `text` decodes it, and is needed only where there are stop strings; `limit` is the
    number of tokens at which it ends in any case."""

    def __init__(self, params: SamplingParams, *, limit: int, text: TextStream | None) -> None:
        self._ids = frozenset(params.stop_token_ids)
        self._strings = params.stop
        self._left = limit
        self._text = text
        self._tail = ""
        self._keep = max((len(string) for string in params.stop), default=1) - 1

    def push(self, token: int) -> Stop | None:
        """The end, if this token is the last one."""
        self._left -= 1
        if token in self._ids:
            return Stop(FinishReason.STOP, token)
        if self._text is not None and (match := self._match(self._text.push([token]))):
            return Stop(FinishReason.STOP, match)
        return Stop(FinishReason.LENGTH) if self._left == 0 else None

    def _match(self, piece: str) -> str | None:
        """The stop string that begins first in what is decoded so far; a match may span several tokens."""
        seen = self._tail + piece
        found = [(at, string) for string in self._strings if (at := seen.find(string)) >= 0]
        self._tail = seen[-self._keep :] if self._keep else ""
        return min(found, key=lambda match: match[0])[1] if found else None
