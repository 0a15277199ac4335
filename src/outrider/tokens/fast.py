"""A faster encoder for the commonest kind of tokenizer: byte-level BPE, through `tiktoken`, for ASCII text.

Encoding new text is the largest part of what a turn costs, and `tiktoken` does it several times faster than
`tokenizers`. The two agree exactly only under conditions, so they are checked when a tokenizer is loaded: first its
settings, then its ids on some hundred texts. Text that is not ASCII is left to `tokenizers`, whose Unicode tables may
be of another version. Invariant: the ids are those that `tokenizers` gives.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import tiktoken
import tokenizers

from outrider.tokens.bytelevel import BYTE_OF_CHAR

Encoder = Callable[[str], list[int]]

PROBES = 200
PROBE_PARTS = 12
ASCII = [chr(code) for code in range(128)]
SPLIT_SETTINGS = {"type": "Split", "behavior": "Isolated", "invert": False}
BYTES_SETTINGS = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def fast_encoder(backend: tokenizers.Tokenizer) -> Encoder | None:
    """An encoder of ASCII text that agrees with `backend` (special tokens in the text included), or None where
    that cannot be shown. It raises ValueError for a text that its regex engine gives up on."""
    settings = json.loads(backend.to_str())
    pattern, added = _pattern(settings), _added(settings)
    ranks = _ranks(settings["model"], added or {})
    if pattern is None or added is None or ranks is None:
        return None
    try:
        encoding = tiktoken.Encoding("fast", pat_str=pattern, mergeable_ranks=ranks, special_tokens=added)
        probes = _probes(list(ranks), list(added))
        given = [encoding.encode(probe, allowed_special="all") for probe in probes]
    except ValueError:  # a pattern or a vocabulary that it does not take
        return None
    wanted = [found.ids for found in backend.encode_batch_fast(probes, add_special_tokens=False)]
    return (lambda text: encoding.encode(text, allowed_special="all")) if given == wanted else None


def _pattern(settings: dict[str, Any]) -> str | None:
    """The splitting rule of a tokenizer that splits by one regex and then goes to bytes."""
    normalizer, splitter = settings.get("normalizer"), settings.get("pre_tokenizer") or {}
    if normalizer is not None and normalizer.get("type") != "NFC":  # which leaves ASCII as it is
        return None
    steps = splitter.get("pretokenizers", [])
    if len(steps) != 2 or not (_has(steps[0], SPLIT_SETTINGS) and _has(steps[1], BYTES_SETTINGS)):
        return None
    found = steps[0].get("pattern", {}).get("Regex")
    return found if isinstance(found, str) else None


def _has(settings: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(settings.get(name) == value for name, value in wanted.items())


def _added(settings: dict[str, Any]) -> dict[str, int] | None:
    """The added tokens; None when one takes in white space around it, or contains another."""
    tokens = settings.get("added_tokens", [])
    names = [token["content"] for token in tokens]
    if any(token[flag] for token in tokens for flag in ("lstrip", "rstrip", "single_word")):
        return None
    if any(one != other and one in other for one in names for other in names):
        return None
    return {token["content"]: token["id"] for token in tokens}


def _ranks(model: dict[str, Any], added: dict[str, int]) -> dict[bytes, int] | None:
    """Each token's bytes to its id, where ids rise in the order of the merges; None where they do not."""
    unusual = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model.get("type") != "BPE" or any(model.get(name) for name in unusual):
        return None
    vocabulary: dict[str, int] = {token: at for token, at in model["vocab"].items() if token not in added}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    made = [vocabulary.get("".join(pair), -1) for pair in pairs]
    if any(later <= earlier for earlier, later in zip([-1, *made], made, strict=False)):
        return None
    try:
        ranks = {bytes(BYTE_OF_CHAR[char] for char in token): at for token, at in vocabulary.items()}
    except KeyError:
        return None
    return ranks if all(bytes([byte]) in ranks for byte in range(256)) else None


def _probes(vocabulary: list[bytes], added: list[str]) -> list[str]:
    """Texts of tokens, single characters and special tokens in random order, the same at every load."""
    chance = random.Random(0)
    words = [token.decode() for token in chance.sample(vocabulary, min(4096, len(vocabulary))) if token.isascii()]
    parts = [*words, *ASCII, *added]
    return ["".join(chance.choices(parts, k=PROBE_PARTS)) for _ in range(PROBES)] + words
