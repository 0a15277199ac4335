"""Keys and values of all slots, and attention over them for prefill and for decoding.

It knows no tokens and no requests. Invariant: attention at a position reads positions up to it, of its own
slot, only; what lies beyond is finite rubbish that the mask hides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engines.embedded.model import Attend, ModelShape, attention, grouped_mask


class Cache:
    """float32 tensors of shape (layers, slots, kv heads, context, head dim)."""

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
        """Attention of the tokens at positions [start, end) of one slot (batch of one)."""
        mask = torch.arange(end) <= torch.arange(start, end)[:, None]
        grouped = grouped_mask(mask[None], self._group)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.keys[layer, slot], self.values[layer, slot]
            keys[:, start:end] = key[0]
            values[:, start:end] = value[0]
            return attention(query, keys[None, :, :end], values[None, :, :end], grouped)

        return attend

    def decode(self, slots: list[int], positions: list[int]) -> Attend:
        """Attention of one token in each of several slots, at its slot's position."""
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
