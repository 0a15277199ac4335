"""A model's tokenizer, loaded from its folder: text to ids, ids to text, one token to its bytes.

It knows no chat template. It is the object the `renderers` package asks for (encode, decode,
convert_tokens_to_ids, name_or_path, unk_token_id, eos_token_id), over the `tokenizers` library alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from outrider.errors import InvalidField
from outrider.tokens.rendering.byte_level import BYTE_OF_CHAR
from outrider.tokens.rendering.fast_encoder import MAX_TEXT, fast_encoder
from outrider.tokens.rendering.vocabulary import Vocabulary

SHORT_TEXT = 24
"""Texts up to this many characters (role names, separators) are encoded once and remembered."""

MAX_REMEMBERED = 4096

MAX_SLOW_TEXT = 2 << 20
"""Characters of a text that is not for `fast.py`: 400 MB while it is encoded."""


class Tokenizer:
    """Raises InvalidField from `load` when the folder holds no readable tokenizer.json."""

    def __init__(self, backend: tokenizers.Tokenizer, *, name_or_path: str, settings: dict[str, Any]) -> None:
        self.backend = backend
        self.name_or_path = name_or_path
        self._remembered: dict[str, list[int]] = {}
        self._fast = fast_encoder(backend)
        self.unk_token_id = self._special(settings, "unk_token")
        self.eos_token_id = self._special(settings, "eos_token")

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        path = Path(folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception for a missing or broken file
            raise InvalidField(
                f"cannot load a tokenizer from {folder}: {error}",
                field="model.tokenizer",
                hint="give the model's folder, the one that holds tokenizer.json",
            ) from error
        return cls(backend, name_or_path=str(folder), settings=read_settings(path))

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if len(text) > SHORT_TEXT or add_special_tokens:
            return self._encoded(text, add_special_tokens)
        ids = self._remembered.get(text)
        if ids is None:
            ids = self._encoded(text, False)
            if len(self._remembered) < MAX_REMEMBERED:
                self._remembered[text] = ids
        return list(ids)

    def takes(self, text: str) -> bool:
        """Whether it can be encoded within a bound of memory: the slower way takes 180 bytes for each character."""
        return len(text) <= MAX_SLOW_TEXT or self._is_fast(text)

    def _is_fast(self, text: str) -> bool:
        return self._fast is not None and len(text) <= MAX_TEXT and text.isascii()

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._fast is not None and not add_special_tokens and self._is_fast(text):
            return self._fast(text)
        # The fast way gives the same ids without their character offsets, a third of the time; it is for batches.
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

    def piece(self, token_id: int) -> bytes:
        """The bytes one token stands for; a token inside a multi-byte character gives part of it."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._byte_level and BYTE_OF_CHAR.keys() >= set(token):
            return bytes([BYTE_OF_CHAR[char] for char in token])
        return self.decode([token_id]).encode()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The ids that have a token, added ones included. The first look takes a quarter of a second for 150,000."""
        return Vocabulary.of(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in str(self.backend.decoder)

    def _special(self, settings: dict[str, Any], name: str) -> int | None:
        value = settings.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        return self.backend.token_to_id(token) if isinstance(token, str) else None


class TextStream:
    """Turns ids into text as they come; bytes of an unfinished character wait for the rest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._seen: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        texts = []
        for token_id in ids:
            self._seen.append(token_id)
            text = self._stream.step(self._backend, token_id)
            if text is not None:
                texts.append(text)
                self._seen.clear()
        return "".join(texts)

    def finish(self) -> str:
        """What is left when no more ids come: an unfinished character becomes U+FFFD."""
        left, self._seen = self._seen, []
        return self._tokenizer.decode(left) if left else ""


def read_settings(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json says, {} where there is none. Raises InvalidField when it cannot be read."""
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
