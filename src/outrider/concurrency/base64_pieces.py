"""Base64 decoded in pieces, between which other threads can run.

Invariant: the pieces decode to what the whole text would decode to.
"""

from __future__ import annotations

import base64
import binascii

PIECE = 1 << 20
"""Characters that are decoded at once, a multiple of four. The decoder holds the interpreter lock for as long as it
runs, 10 ms for this many: a long text decoded at once would stop every other thread."""


def decode_base64(text: str) -> bytes:
    """The bytes that `text` encodes. Raises ValueError where it is not base64 or has padding before its end."""
    try:
        pieces = [base64.b64decode(text[start : start + PIECE], validate=True) for start in range(0, len(text), PIECE)]
    except (binascii.Error, ValueError) as error:
        raise ValueError(str(error)) from error
    if any(len(piece) % 3 for piece in pieces[:-1]):
        raise ValueError("padding before the end")
    return b"".join(pieces)
