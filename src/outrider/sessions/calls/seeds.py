"""Seeds of single model calls, derived from the one that a task or a client names.

One seed for all would make the samples of a group copies of each other. It knows no call. Invariant: the same numbers
give the same seed, on any machine and in any version.
"""

from __future__ import annotations

from hashlib import blake2b

MASK = (1 << 31) - 1
"""Every engine takes 31 bits: llama.cpp's seeds have 32, those of vLLM 64 with a sign."""


def derived_seed(seed: int, *numbers: int) -> int:
    """A seed from 0 to 2^31 - 1 that `seed` and the numbers tell from others."""
    text = "/".join(map(str, (seed, *numbers)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") & MASK
