"""A server's prefix cache, reduced to the needs of tests: the cached ids with their salt and the version of their
weights.

The cache does not store keys and values. Invariant: a hit on ids that were computed with other weights is counted in
`stale`.
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 4
"""Number of tokens of a block, the unit in which prefixes are cached and found."""


class PrefixCache:
    """The cache for `ServeSettings.prefix_cache`. In the methods, `weights` is the version of the weights. `hits` is
    the number of found tokens, `stale` the number of found tokens computed with other weights, and `salts` has the salt
    of every lookup."""

    def __init__(self) -> None:
        self.hits = 0
        self.stale = 0
        self.salts: list[str] = []
        self._blocks: dict[tuple[str, tuple[int, ...]], int] = {}

    def look(self, salt: str, prompt: Sequence[int], weights: int) -> int:
        """Return the number of cached tokens at the beginning of a prompt. The last token never counts as cached,
        because a server always computes it."""
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
        """Cache the ids of a sequence computed by these weights."""
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            self._blocks.setdefault((salt, tuple(ids[:end])), weights)

    def clear(self) -> None:
        self._blocks.clear()
