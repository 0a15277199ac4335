"""A server's prefix cache, as far as a test needs one: which ids are known, under which salt, from which weights.

It holds no keys and values. Invariant: a hit whose keys and values are of other weights is counted in `stale`.
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 4
"""Tokens that are kept and found together."""


class PrefixCache:
    """For `ServeSettings.prefix_cache`. `hits` are tokens that were found, `stale` those of them whose keys and values
    other weights had computed."""

    def __init__(self) -> None:
        self.hits = 0
        self.stale = 0
        self.salts: list[str] = []
        self._blocks: dict[tuple[str, tuple[int, ...]], int] = {}

    def look(self, salt: str, prompt: Sequence[int], weights: int) -> int:
        """How many tokens of a prompt are there. The last one is always computed."""
        self.salts.append(salt)
        found = 0
        for end in range(BLOCK, len(prompt), BLOCK):
            of = self._blocks.get((salt, tuple(prompt[:end])))
            if of is None:
                break
            found = end
            self.stale += BLOCK * (of != weights)
        self.hits += found
        return found

    def keep(self, salt: str, ids: Sequence[int], weights: int) -> None:
        """Keep the ids of a sequence that these weights have computed."""
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            self._blocks.setdefault((salt, tuple(ids[:end])), weights)

    def clear(self) -> None:
        self._blocks.clear()
