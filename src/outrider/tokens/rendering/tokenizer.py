"""A model's tokenizer, loaded from the model's folder. Converts text to ids and ids to text, and returns the bytes of
single tokens.

`Tokenizer` has the tokenizer interface that the `renderers` package requires. It uses the libraries `tokenizers` and
`fastokens`. Invariant: both produce the same ids.

`fastokens` encodes byte-level BPE twenty times faster than `tokenizers`. With `tokenizers`, encoding new text would be
the largest part of a turn's cost. But `fastokens` is a young library, so it is tested whenever a tokenizer is loaded.
`fastokens` is used only if it returns the same ids as `tokenizers` for a few thousand texts. Even then it is used only
for ASCII, because the two libraries may contain different versions of the Unicode tables.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import fastokens
import msgspec
import tokenizers
from tokenizers.decoders import DecodeStream

from outrider.errors import InvalidField

SHORT_TEXT = 24
"""Maximum number of characters of a text whose ids are cached. Such short texts are mostly role names and separators,
which every prompt repeats."""
MAX_REMEMBERED = 4096
"""Maximum number of texts whose ids are cached."""

MAX_SLOW_TEXT = 2 << 20
"""Maximum number of characters that `tokenizers` encodes at once. For a text of this length, `tokenizers` needs 400 MB
of memory."""
MAX_FAST_TEXT = 5 << 20
"""Maximum number of characters that `fastokens` encodes at once. An ordinary text of this length has about a million
tokens. The worst text of this length takes 4 s and 150 MB. `fastokens` panics on a text that is three times as long."""

PROBES = 200
PROBE_PARTS = 12
MAX_PROBE_WORDS = 4096
"""The size of the test for `fastokens`: PROBES texts of PROBE_PARTS random parts each, and up to MAX_PROBE_WORDS single
words of the vocabulary."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The valid ids of a tokenizer: all numbers from 0 to `end` (exclusive), except those in `holes`. A model may also
    sample a number from `end` on, because its number of outputs is rounded up."""

    end: int
    holes: frozenset[int] = frozenset()

    @classmethod
    def of(cls, ids: Iterable[int]) -> Vocabulary:
        known = frozenset(ids)
        end = max(known, default=-1) + 1
        return cls(end, frozenset() if len(known) == end else frozenset(range(end)) - known)

    def contains(self, token_id: int) -> bool:
        return 0 <= token_id < self.end and token_id not in self.holes

    def contains_all(self, ids: list[int]) -> bool:
        """Return True if all `ids` are valid. `ids` must not be empty. A Python loop would be too slow for prompts with
        hundreds of thousands of ids."""
        return min(ids) >= 0 and max(ids) < self.end and (not self.holes or self.holes.isdisjoint(ids))


ANY_IDS = Vocabulary(1 << 31)
"""Accepts every id that fits into int32, the type of stored ids. Used if the tokenizer is not known."""


FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The files that are read from a model's folder."""


class Tokenizer:
    def __init__(self, backend: tokenizers.Tokenizer, *, name_or_path: str, settings: dict[str, Any]) -> None:
        self.backend = backend
        self.name_or_path = name_or_path
        self._remembered: dict[str, list[int]] = {}
        self._fast = fast_encoder(backend)
        self.unk_token_id = self._special_id(settings, "unk_token")
        self.eos_token_id = self._special_id(settings, "eos_token")

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Load the tokenizer from a model's folder. Raises InvalidField if tokenizer.json is missing or cannot be
        read."""
        path = Path(folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception for a missing or broken file
            raise InvalidField(
                f"cannot load a tokenizer from {folder}: {error}",
                field="model.tokenizer",
                hint="give the model's folder with tokenizer.json",
            ) from error
        return cls(backend, name_or_path=str(folder), settings=read_settings(path))

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if len(text) > SHORT_TEXT or add_special_tokens:
            return self._encode_anew(text, add_special_tokens)
        ids = self._remembered.get(text)
        if ids is None:
            ids = self._encode_anew(text, False)
            if len(self._remembered) < MAX_REMEMBERED:
                self._remembered[text] = ids
        return list(ids)

    def can_encode(self, text: str) -> bool:
        """Return True if the text is short enough to be encoded. A limit is needed, because encoding a long text takes
        much memory (MAX_SLOW_TEXT, MAX_FAST_TEXT)."""
        return len(text) <= MAX_SLOW_TEXT or self._is_fast(text)

    def _is_fast(self, text: str) -> bool:
        return self._fast is not None and len(text) <= MAX_FAST_TEXT and text.isascii()

    def _encode_anew(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._fast is not None and not add_special_tokens and self._is_fast(text):
            return self._fast(text)
        # Use the batch method even for a single text: only this method skips character offsets, which take a third of
        # the time.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int] | int, *, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            found = self.backend.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.backend.token_to_id(token) for token in tokens]

    def stream(self) -> TextStream:
        return TextStream(self)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, or b"" for an unknown id. A token may have only some of the bytes of a
        character."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._byte_level and BYTE_OF_CHAR.keys() >= set(token):
            return bytes([BYTE_OF_CHAR[char] for char in token])
        return self.decode([token_id]).encode()

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token. If several tokens share the bytes of a character, the last of them gets the
        character, and the others get "". Invalid bytes become U+FFFD."""
        known: dict[int, bytes] = {}
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = []
        for token_id in token_ids:
            data = known.get(token_id)
            if data is None:
                data = known[token_id] = self.token_bytes(token_id)
            pieces.append(decoder.decode(data))
        if pieces:
            pieces[-1] += decoder.decode(b"", True)
        return pieces

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The valid ids, including added tokens. The first access takes 250 ms for 150,000 tokens."""
        return Vocabulary.of(self.backend.get_vocab(with_added_tokens=True).values())

    def without_special(self, text: str) -> str:
        """Insert a zero-width space into each special token of the text, so that the token is encoded as plain text."""
        for token in self._special:
            # One call of `replace` skips occurrences that overlap with each other, so `replace` is called again.
            while token in text:
                text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text

    @cached_property
    def _special(self) -> tuple[str, ...]:
        added = self.backend.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special and len(token.content) > 1)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in str(self.backend.decoder)

    def _special_id(self, settings: dict[str, Any], name: str) -> int | None:
        value = settings.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        return self.backend.token_to_id(token) if isinstance(token, str) else None


class TextStream:
    """Converts ids to text as they arrive. A character is returned when all of its bytes have arrived."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._undecoded: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        texts = []
        for token_id in ids:
            self._undecoded.append(token_id)
            text = self._stream.step(self._backend, token_id)
            if text is not None:
                texts.append(text)
                self._undecoded.clear()
        return "".join(texts)

    def finish(self) -> str:
        """Return the remaining text. If the last character is incomplete, it becomes U+FFFD."""
        left, self._undecoded = self._undecoded, []
        return self._tokenizer.decode(left) if left else ""


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json in the folder, or {} if there is no such file. Raises InvalidField
    if the file cannot be parsed."""
    file = folder / "tokenizer_config.json"
    if not file.exists():
        return {}
    try:
        settings = json.loads(file.read_text())
    except ValueError as error:
        raise InvalidField(f"cannot read {file}: {error}", field="model.tokenizer") from error
    if not isinstance(settings, dict):
        raise InvalidField(f"{file} is not a JSON object", field="model.tokenizer")
    return settings


class FastEncoder:
    """Converts text to ids with `fastokens`. Can be called from any thread."""

    __slots__ = ("__weakref__", "_encode")

    def __init__(self, settings: dict[str, Any]) -> None:
        self._encode = fastokens.Tokenizer.from_json_str(json.dumps(settings)).encode

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text).ids
        return ids


_VERIFIED: WeakValueDictionary[bytes, FastEncoder] = WeakValueDictionary()
"""Encoders that have passed the test and are in use, by the digest of their tokenizer. A service and the engines in its
process load the same tokenizer. They share one encoder, because making an encoder for a large vocabulary takes seconds
and much memory."""


def fast_encoder(backend: tokenizers.Tokenizer) -> FastEncoder | None:
    """Return an encoder for ASCII texts of up to MAX_FAST_TEXT characters. It returns the same ids as `backend`, even
    if the text contains special tokens. Returns None if `fastokens` does not support the tokenizer, or if the ids of
    any test text differ."""
    written = backend.to_str()
    digest = hashlib.sha256(written.encode()).digest()
    if (verified := _VERIFIED.get(digest)) is not None:
        return verified
    settings = json.loads(written)
    if settings["model"].get("type") != "BPE" or settings["model"].get("dropout"):
        return None
    settings |= {"truncation": None, "padding": None}
    try:
        encoder = FastEncoder(settings)
        probes = _probes(settings)
        given = [encoder(probe) for probe in probes]
    except Exception:  # the library has no specific error type for unsupported tokenizers
        return None
    if given != [found.ids for found in backend.encode_batch_fast(probes, add_special_tokens=False)]:
        return None
    _VERIFIED[digest] = encoder
    return encoder


def _probes(settings: dict[str, Any]) -> list[str]:
    """Return the test texts on which the two libraries must agree: single words of the vocabulary, and random sequences
    of words, ASCII characters and special tokens. The random seed is fixed, so every load tests the same texts."""
    chance = random.Random(0)
    added = [token["content"] for token in settings.get("added_tokens", [])]
    spelled = {shown: chr(byte) for shown, byte in BYTE_OF_CHAR.items()}
    vocabulary = [token for token in settings["model"]["vocab"] if token not in added]
    sample = chance.sample(vocabulary, min(MAX_PROBE_WORDS, len(vocabulary)))
    words = [word for token in sample if (word := "".join(spelled.get(char, char) for char in token)).isascii()]
    parts = [*words, *map(chr, range(128)), *added]
    return ["".join(chance.choices(parts, k=PROBE_PARTS)) for _ in range(PROBES)] + words


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
"""Byte-level BPE vocabularies represent each byte by a printable character. This dictionary maps the characters to the
bytes. It is the inverse of GPT-2's `bytes_to_unicode`."""
