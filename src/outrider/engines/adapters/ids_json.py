"""Writes token ids as JSON by table lookup. Each id takes 8 bytes: seven characters, padded with spaces, and a comma.

Every turn sends a long prompt, and table lookup takes half the time of converting each number to digits. Invariant: the
ids of a long prompt are written once, directly into the bytes that are sent.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from outrider.trajectory import Ids

DIGITS = 7
TABLED = 1 << 20
"""The lookup table has only ids below this. A prompt with any other id is written by the JSON encoder instead.
Vocabularies are smaller than this, and a larger table would take much time and memory."""
SHORT = 4096
"""The JSON encoder writes prompts of fewer ids than this, because table lookup is not faster for short prompts."""


def body_with_ids(body: Mapping[str, Any], name: str, ids: Ids) -> list[bytes | memoryview]:
    """Return `body` as JSON, in pieces to be sent one after another. The ids become its last field, with the key
    `name`. `body` must not be empty."""
    return [orjson.dumps(body)[:-1], b',"%s":' % name.encode(), ids_json(ids), b"}"]


def ids_json(ids: Ids) -> bytes | memoryview:
    """Return the ids as a JSON array. It may contain spaces."""
    if len(ids) < SHORT or int(ids.min()) < 0 or (largest := int(ids.max())) >= TABLED:
        return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)
    written = np.empty(len(ids) + 1, dtype=np.uint64)
    characters = written.view(np.uint8)
    characters[:8] = np.frombuffer(b"       [", dtype=np.uint8)
    np.take(_table(largest.bit_length()), ids, out=written[1:], mode="clip")
    characters[-1] = ord("]")
    return characters.data


@functools.cache
def _table(bits: int) -> npt.NDArray[np.uint64]:
    """Return the JSON text of every id below 2**bits, as uint64 of shape (2**bits,). The eight bytes of a text are
    spaces, the digits, and a comma."""
    numbers = np.arange(1 << bits)
    characters = np.full((len(numbers), DIGITS + 1), ord(" "), dtype=np.uint8)
    characters[:, DIGITS] = ord(",")
    for place in range(DIGITS):
        shown = numbers >= 10**place if place else slice(None)
        characters[shown, DIGITS - 1 - place] = numbers[shown] // 10**place % 10 + ord("0")
    return characters.view(np.uint64).reshape(-1)
