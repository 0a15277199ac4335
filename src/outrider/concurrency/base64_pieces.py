"""Base64 in pieces: the decoder holds the interpreter, so that a long text decoded at once would hold everything up."""

from __future__ import annotations

import base64
import binascii

PIECE = 1 << 20
"""Characters that are decoded at once, a multiple of four: 10 ms."""


def base64_bytes(text: str) -> bytes:
    """What `text` stands for. Raises ValueError saying why it stands for nothing."""
    try:
        pieces = [base64.b64decode(text[start : start + PIECE], validate=True) for start in range(0, len(text), PIECE)]
    except (binascii.Error, ValueError) as error:
        raise ValueError(str(error)) from error
    if any(len(piece) % 3 for piece in pieces[:-1]):
        raise ValueError("padding before the end")
    return b"".join(pieces)
