"""Which numbers are token ids of a model: those that its tokenizer has a token for.

It knows no tokenizer and no engine. Invariant: `end` is one more than the largest id, and below it only the `holes` are
no ids.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Vocabulary(msgspec.Struct, frozen=True):
    """A model may be larger than its vocabulary, padded to a round number: what it has beyond `end` is no token."""

    end: int
    holes: frozenset[int] = frozenset()

    @classmethod
    def of(cls, ids: Iterable[int]) -> Vocabulary:
        known = frozenset(ids)
        end = max(known, default=-1) + 1
        return cls(end, frozenset() if len(known) == end else frozenset(range(end)) - known)

    def holds(self, ids: list[int]) -> bool:
        """Whether all of these are ids; there is at least one. For long lists: no step of it is one of Python's."""
        return min(ids) >= 0 and max(ids) < self.end and (not self.holes or self.holes.isdisjoint(ids))


ANY_IDS = Vocabulary(1 << 31)
"""Every id that can be recorded, for where no tokenizer is known."""
