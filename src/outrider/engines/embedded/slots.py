"""Which slot of the key-value cache holds which tokens, and which slot a new prompt should take.

It knows no tensor of the model and no request. Invariant: the first `length` tokens of a slot are exactly
those whose keys and values the cache holds; a stale slot (computed under older weights) is never reused.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from outrider.trajectory import Ids


class Lease(msgspec.Struct, frozen=True):
    """A slot taken. Its first `cached` tokens equal the prompt's, once copied from slot `donor` (None: they
    are there already)."""

    slot: int
    cached: int
    donor: int | None


class Slots:
    """Bookkeeping of a fixed number of slots of `context` tokens each."""

    def __init__(self, count: int, context: int) -> None:
        self.count = count
        self.context = context
        self._tokens: Ids = np.zeros((count, context), dtype=np.int32)
        self._lengths = np.zeros(count, dtype=np.int64)
        self._busy = np.zeros(count, dtype=np.bool_)
        self._stale = np.zeros(count, dtype=np.bool_)
        self._used = np.zeros(count, dtype=np.int64)
        self._clock = 0

    @property
    def free(self) -> int:
        return int(self.count - self._busy.sum())

    def length(self, slot: int) -> int:
        return int(self._lengths[slot])

    def take(self, prompt: Ids) -> Lease | None:
        """An idle slot for `prompt` with the longest prefix any slot has of it; None when all are busy.

        At most all but the prompt's last token count as prefix, so that one position is always computed. A
        slot whose whole history the prompt extends is taken as it is; else the least recently used one, and
        the prefix is to be copied: no history that another session may come back to is cut short.
        """
        if self._busy.all():
            return None
        common = self._common(prompt)
        best = int(common.max())
        extended = np.flatnonzero((common == best) & (self._lengths == best) & ~self._busy)
        slot = int(extended[0]) if extended.size else self._least_recently_used()
        donor = None if common[slot] == best else int(common.argmax())
        self._busy[slot] = True
        self._tokens[slot, :best] = prompt[:best]
        self._lengths[slot] = best
        return Lease(slot, best, donor)

    def extend(self, slot: int, ids: Ids | int) -> None:
        """Record tokens whose keys and values were just computed."""
        start = self._lengths[slot]
        count = 1 if isinstance(ids, int) else len(ids)
        self._tokens[slot, start : start + count] = ids
        self._lengths[slot] = start + count

    def clear(self, slot: int) -> None:
        """Forget what a busy slot holds: it will be computed again."""
        self._lengths[slot] = 0
        self._stale[slot] = False

    def release(self, slot: int) -> None:
        """Give a slot back; its tokens stay for reuse unless they are stale."""
        self._busy[slot] = False
        if self._stale[slot]:
            self.clear(slot)
        self._clock += 1
        self._used[slot] = self._clock

    def weights_changed(self) -> None:
        """Drop what idle slots hold; what busy ones hold stays in use by its owner alone."""
        self._lengths[~self._busy] = 0
        self._stale[self._busy] = True

    def _common(self, prompt: Ids) -> npt.NDArray[np.int64]:
        limit = len(prompt) - 1
        if limit == 0:
            return np.zeros(self.count, dtype=np.int64)
        same = self._tokens[:, :limit] == prompt[:limit]
        agreed = np.where(same.all(axis=1), limit, same.argmin(axis=1))
        common: npt.NDArray[np.int64] = np.where(self._stale, 0, np.minimum(agreed, self._lengths))
        return common

    def _least_recently_used(self) -> int:
        idle = np.flatnonzero(~self._busy)
        return int(idle[self._used[idle].argmin()])
