"""The tokens left for a session to sample, shared by its calls, which may run side by side.

A call is promised some tokens before it begins. Up to the promise, other calls cannot cut the call short. While too few
tokens are free and other calls run, a new call waits for tokens that the others leave unused. Invariant: the tokens
sampled, promised and free add up to the limit.
"""

from __future__ import annotations

import asyncio
from typing import Self

from outrider.errors import RequestError
from outrider.lifecycle import StopReason


class LimitReached(RequestError):
    """A call was refused because the session has used up its turns or tokens of `model` (None: the policy), or will use
    them up with the calls under way."""

    code = "limit_reached"
    http_status = 429

    def __init__(self, reason: StopReason, model: str | None = None) -> None:
        of = "" if model is None else f" of the frozen model {model!r}"
        super().__init__(f"this session has reached its limit{of}: {reason.value}")
        self.reason = reason


class Allowance:
    """The tokens of one session and model. `sampled` counts the tokens of all calls so far, running calls included."""

    def __init__(self, tokens: int, model: str | None = None) -> None:
        self.sampled = 0
        self._model = model
        self._limit = tokens
        self._free = tokens
        self._running = 0
        self._queue = asyncio.Lock()
        self._returned = asyncio.Event()

    @property
    def unsampled(self) -> int:
        """Number of tokens that are not yet sampled, promised or not."""
        return self._limit - self.sampled

    async def share(self, promised: int) -> TokenShare:
        """Return the share of one call, for a `with` block: `promised` tokens, or fewer if no other call runs and fewer
        are free. Calls are served in the order in which they came. Raises LimitReached if all tokens are sampled."""
        async with self._queue:
            while self._free < promised and self._running:
                self._returned.clear()
                await self._returned.wait()
            if not self._free:
                raise LimitReached(StopReason.MAX_TOKENS, self._model)
            self._running += 1
            return TokenShare(self, self._take_free(promised))

    def draw(self, share: TokenShare, tokens: int) -> int:
        """Charge up to `tokens` sampled tokens to a share: first its promised tokens, then free tokens. Returns the
        number of tokens charged."""
        if tokens <= share.promised:
            share.promised -= tokens
            self.sampled += tokens
            return tokens
        own = share.promised
        share.promised -= own
        taken = own + self._take_free(tokens - own)
        self.sampled += taken
        return taken

    def give_back(self, share: TokenShare) -> None:
        """Return a share's unused tokens after the end of its call."""
        self._running -= 1
        self._free += share.promised
        self._returned.set()

    def _take_free(self, tokens: int) -> int:
        taken = min(tokens, self._free)
        self._free -= taken
        return taken


class TokenShare:
    """One call's share of the allowance. `promised` is the number of promised tokens that are left."""

    def __init__(self, allowance: Allowance, promised: int) -> None:
        self.promised = promised
        self._allowance = allowance

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._allowance.give_back(self)

    @property
    def unsampled(self) -> int:
        """Number of the session's tokens that are not yet sampled, promised or not."""
        return self._allowance.unsampled

    def take(self, tokens: int) -> int:
        """Count `tokens` more sampled tokens. Returns the number of them that the session has: the promised tokens that
        are left, and the tokens that are free now."""
        return self._allowance.draw(self, tokens)
