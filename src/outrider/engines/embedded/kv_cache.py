"""The key-value cache: its tensors, attention over them, and the table of the slots' tokens.

A slot holds one sequence of at most `context` tokens. Invariant: the first `length` tokens recorded for a slot are
exactly those whose keys and values the tensors hold. Values computed by older weights are never reused for another
sequence.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor

from outrider.engines.embedded.model import Attend, ModelShape, attention, grouped_mask
from outrider.trajectory import Ids


class KeyValueCache:
    """Keys and values of all slots: two float32 tensors of shape (layers, slots, kv heads, context, head dim).

    Values beyond a sequence's end are left over from earlier sequences: finite, and hidden by the attention mask.
    """

    def __init__(self, shape: ModelShape, slots: int, context: int) -> None:
        size = (shape.layers, slots, shape.kv_heads, context, shape.head_dim)
        self.keys = torch.zeros(size)
        self.values = torch.zeros(size)
        self._group = shape.heads // shape.kv_heads

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot to another."""
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def prefill(self, slot: int, start: int, end: int) -> Attend:
        """Return the attention of the tokens at positions [start, end) of one slot (a batch of one). A call of it also
        stores the tokens' keys and values."""
        mask = torch.arange(end) <= torch.arange(start, end)[:, None]
        grouped = grouped_mask(mask[None], self._group)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.keys[layer, slot], self.values[layer, slot]
            keys[:, start:end] = key[0]
            values[:, start:end] = value[0]
            return attention(query, keys[None, :, :end], values[None, :, :end], grouped)

        return attend

    def decode(self, slots: list[int], positions: list[int]) -> Attend:
        """Return the attention of one token in each of several slots, at the slot's position. A call of it also stores
        the tokens' keys and values."""
        longest = max(positions) + 1
        at = torch.tensor(positions)
        rows = torch.tensor(slots)
        mask = torch.arange(longest) <= at[:, None, None]
        grouped = grouped_mask(mask, self._group)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[rows, :, at] = key[:, :, 0]
            values[rows, :, at] = value[:, :, 0]
            seen_keys = keys[:, :, :longest].index_select(0, rows)
            seen_values = values[:, :, :longest].index_select(0, rows)
            return attention(query, seen_keys, seen_values, grouped)

        return attend


class Lease(msgspec.Struct, frozen=True):
    """A slot taken for a prompt. The prompt's first `cached` tokens need no computing: they are copied from slot
    `donor`, or are in the slot already if `donor` is None."""

    slot: int
    cached: int
    donor: int | None


class SlotTable:
    """The tokens held by each of `count` slots of `context` tokens, and the choice of a slot for a new prompt."""

    def __init__(self, count: int, context: int) -> None:
        self.count = count
        self._tokens: Ids = np.zeros((count, context), dtype=np.int32)
        self._lengths = np.zeros(count, dtype=np.int64)
        self._busy = np.zeros(count, dtype=np.bool_)
        self._stale = np.zeros(count, dtype=np.bool_)
        self._last_used = np.zeros(count, dtype=np.int64)
        self._clock = 0

    @property
    def free(self) -> int:
        return int(self.count - self._busy.sum())

    def length(self, slot: int) -> int:
        return int(self._lengths[slot])

    def take(self, prompt: Ids) -> Lease | None:
        """Take the idle slot that saves `prompt` the most computing; None if all slots are busy.

        A slot whose whole content begins the prompt is taken as it is. Otherwise the longest common prefix in any slot
        is copied into the least recently used slot: cutting a slot's content short would lose a history that another
        session may continue. The prompt's last token never counts as prefix, because its state is needed to sample
        from.
        """
        if self._busy.all():
            return None
        # The last column stands for the prompt's last token, and counts as different in every slot. So argmax, which
        # finds the first difference, returns `limit` for a slot that holds all tokens before the last.
        limit = len(prompt) - 1
        differs = np.ones((self.count, limit + 1), dtype=np.bool_)
        np.not_equal(self._tokens[:, :limit], prompt[:limit], out=differs[:, :limit])
        common = np.where(self._stale, 0, np.minimum(differs.argmax(axis=1), self._lengths))
        best = int(common.max())
        extended = np.flatnonzero((common == best) & (self._lengths == best) & ~self._busy)
        if extended.size:
            slot = int(extended[0])
        else:
            idle = np.flatnonzero(~self._busy)
            slot = int(idle[self._last_used[idle].argmin()])
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
        """Discard a slot's content. The slot's owner computes the content again."""
        self._lengths[slot] = 0
        self._stale[slot] = False

    def release(self, slot: int) -> None:
        """Free a slot. Its tokens stay for reuse unless they are stale."""
        self._busy[slot] = False
        if self._stale[slot]:
            self.clear(slot)
        self._clock += 1
        self._last_used[slot] = self._clock

    def weights_changed(self) -> None:
        """Discard the content of idle slots, and mark busy slots as stale: only their present owner may use them."""
        self._lengths[~self._busy] = 0
        self._stale[self._busy] = True
