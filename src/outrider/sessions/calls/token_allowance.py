"""The tokens that a session may still sample, shared by its calls, which may run side by side.

A call is promised some tokens before it begins, so that it ends as it would alone; while too few are free and others
run, it waits for what they leave. It knows no call and no engine. Invariant: the tokens sampled, promised and free add
up to the limit.
"""

from __future__ import annotations

import asyncio
from typing import Self

from outrider.errors import RequestError
from outrider.lifecycle import StopReason


class LimitReached(RequestError):
    """A call was refused because the session has used up its turns or tokens of `model`, or calls under way will have.
    None is the policy."""

    code = "limit_reached"
    http_status = 429

    def __init__(self, reason: StopReason, model: str | None = None) -> None:
        of = "" if model is None else f" of the frozen model {model!r}"
        super().__init__(f"this session has reached its limit{of}: {reason.value}")
        self.reason = reason


class Allowance:
    """`sampled` counts the tokens of all calls so far, those that are running included."""

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
        """How many tokens nobody has sampled yet, promised or not."""
        return self._limit - self.sampled

    def restore(self, sampled: int) -> None:
        """Before any call: so many tokens had been sampled by calls that are over."""
        self.sampled = self._take_free(sampled)

    async def share(self, promised: int) -> Share:
        """The share of one call, to be used in a `with` block: at least so many tokens, or all there are when nothing
        else runs. Calls get theirs in the order they came. Raises LimitReached when all are sampled."""
        async with self._queue:
            while self._free < promised and self._running:
                self._returned.clear()
                await self._returned.wait()
            if not self._free:
                raise LimitReached(StopReason.MAX_TOKENS, self._model)
            self._running += 1
            return Share(self, self._take_free(promised))

    def draw(self, share: Share, tokens: int) -> int:
        """For a share: how many of these tokens it may have."""
        if tokens <= share.promised:
            share.promised -= tokens
            self.sampled += tokens
            return tokens
        own = share.promised
        share.promised -= own
        taken = own + self._take_free(tokens - own)
        self.sampled += taken
        return taken

    def give_back(self, share: Share) -> None:
        """For a share whose call has ended."""
        self._running -= 1
        self._free += share.promised
        self._returned.set()

    def _take_free(self, tokens: int) -> int:
        taken = min(tokens, self._free)
        self._free -= taken
        return taken


class Share:
    """`promised` is what is left of the promise."""

    def __init__(self, allowance: Allowance, promised: int) -> None:
        self.promised = promised
        self._allowance = allowance

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._allowance.give_back(self)

    @property
    def unsampled(self) -> int:
        """How many of the session's tokens nobody has sampled yet, promised or not."""
        return self._allowance.unsampled

    def take(self, tokens: int) -> int:
        """So many more tokens were sampled: how many of them count. Beyond the promise it is what is free now."""
        return self._allowance.draw(self, tokens)
