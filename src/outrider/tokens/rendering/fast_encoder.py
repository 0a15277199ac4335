"""A faster encoder for the commonest kind of tokenizer: byte-level BPE, through `fastokens`, for ASCII text.

Encoding new text was the largest part of what a turn costs, and `fastokens` does it twenty times faster than
`tokenizers`, whose files it reads. It is young, so it is believed only where it is seen to agree: on a few thousand
texts when a tokenizer is loaded. Text that is not ASCII is left to `tokenizers`, whose Unicode tables may be of another
version. Invariant: the ids are those that `tokenizers` gives.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any
from weakref import WeakValueDictionary

import fastokens
import tokenizers

from outrider.tokens.rendering.byte_level import BYTE_OF_CHAR

PROBES = 200
PROBE_PARTS = 12
MAX_WORDS = 4096
MAX_TEXT = 5 << 20
"""Characters: a million tokens of ordinary text. The worst text of that length takes 4 s and 150 MB; at three times
that the library panics."""
ASCII = [chr(code) for code in range(128)]


class Encoder:
    """Text to ids, from any thread."""

    __slots__ = ("__weakref__", "_encode")

    def __init__(self, settings: dict[str, Any]) -> None:
        self._encode = fastokens.Tokenizer.from_json_str(json.dumps(settings)).encode

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text).ids
        return ids


AGREEING: WeakValueDictionary[bytes, Encoder] = WeakValueDictionary()
"""Those in use, by the digest of the tokenizer that they agree with: a service and the engines in its process load the
same file, and an encoder takes seconds and much memory to make for a large vocabulary."""


def fast_encoder(backend: tokenizers.Tokenizer) -> Encoder | None:
    """An encoder of ASCII texts of up to MAX_TEXT characters that agrees with `backend` (special tokens in the text
    included), or None where that cannot be shown."""
    written = backend.to_str()
    digest = hashlib.sha256(written.encode()).digest()
    encoder = AGREEING.get(digest)
    if encoder is None and (encoder := _made(backend, json.loads(written))) is not None:
        AGREEING[digest] = encoder
    return encoder


def _made(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> Encoder | None:
    if settings["model"].get("type") != "BPE" or settings["model"].get("dropout"):
        return None
    settings |= {"truncation": None, "padding": None}
    try:
        encode = Encoder(settings)
        probes = _probes(settings)
        given = [encode(probe) for probe in probes]
    except Exception:  # the library raises what it likes for what it does not read
        return None
    wanted = [found.ids for found in backend.encode_batch_fast(probes, add_special_tokens=False)]
    return encode if given == wanted else None


def _probes(settings: dict[str, Any]) -> list[str]:
    """Texts of tokens, single characters and special tokens in random order, the same at every load."""
    chance = random.Random(0)
    added = [token["content"] for token in settings.get("added_tokens", [])]
    spelled = {shown: chr(byte) for shown, byte in BYTE_OF_CHAR.items()}
    vocabulary = [token for token in settings["model"]["vocab"] if token not in added]
    sample = chance.sample(vocabulary, min(MAX_WORDS, len(vocabulary)))
    words = [word for token in sample if (word := "".join(spelled.get(char, char) for char in token)).isascii()]
    parts = [*words, *ASCII, *added]
    return ["".join(chance.choices(parts, k=PROBE_PARTS)) for _ in range(PROBES)] + words
