"""A fake prefix cache. It stores cached ids with their salt and the version of the weights, but no attention keys and
values.

Invariant: a hit on ids that were computed with other weights is counted in `stale`.
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 4
"""Number of tokens in a block. Prefixes are cached and found in whole blocks."""


class PrefixCache:
    """The cache for `ServeSettings.prefix_cache`. The argument `weights` of its methods is the version of the weights.
    `hits` counts the tokens found. `stale` counts the found tokens that were computed with other weights. `salts` has
    the salt of every lookup."""

    def __init__(self) -> None:
        self.hits = 0
        self.stale = 0
        self.salts: list[str] = []
        self._blocks: dict[tuple[str, tuple[int, ...]], int] = {}

    def look(self, salt: str, prompt: Sequence[int], weights: int) -> int:
        """Return how many tokens at the beginning of a prompt are cached. The last token is never counted, because a
        server always computes it."""
        self.salts.append(salt)
        found = 0
        for end in range(BLOCK, len(prompt), BLOCK):
            cached_weights = self._blocks.get((salt, tuple(prompt[:end])))
            if cached_weights is None:
                break
            found = end
            self.stale += BLOCK * (cached_weights != weights)
        self.hits += found
        return found

    def keep(self, salt: str, ids: Sequence[int], weights: int) -> None:
        """Cache the ids of a sequence that was computed with these weights."""
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            self._blocks.setdefault((salt, tuple(ids[:end])), weights)

    def clear(self) -> None:
        self._blocks.clear()
