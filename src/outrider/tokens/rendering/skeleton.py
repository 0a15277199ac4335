"""Rendering in two steps: the family lays a prompt out around placeholders, then each one becomes its text's ids.

The `renderers` package handles a prompt's ids one by one, several times over; most of them come from a few long texts.
Here each such text is one (negative) id until the layout is done. That is right only for families that put together
what the tokenizer gives them without looking into it: `renderer.WINDOW_FAMILIES`, checked in tests/tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from outrider.tokens.rendering.tokenizer import SHORT_TEXT, Tokenizer


class _Texts(threading.local):
    """The texts behind the placeholders of the layout that a thread is making."""

    def __init__(self) -> None:
        self.texts: list[str] = []


class Skeleton:
    """The tokenizer that a family is given for laying out. Each thread has layouts of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name_or_path = tokenizer.name_or_path
        self.unk_token_id = tokenizer.unk_token_id
        self.eos_token_id = tokenizer.eos_token_id
        self.decode = tokenizer.decode
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids
        self._tokenizer = tokenizer
        self._own = _Texts()

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """The ids of a short text; a placeholder for a longer one."""
        if len(text) <= SHORT_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self._own.texts.append(text)
        return [-len(self._own.texts)]

    def fill(self, laid_out: Sequence[int]) -> list[int]:
        """The ids with every placeholder replaced; the texts are then forgotten."""
        return self.fill_parts([laid_out])[0]

    def fill_parts(self, parts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The same for several parts of one layout."""
        texts, self._own.texts = self._own.texts, []
        return [self._filled(part, texts) for part in parts]

    def _filled(self, laid_out: Sequence[int], texts: Sequence[str]) -> list[int]:
        filled: list[int] = []
        for token_id in laid_out:
            if token_id >= 0:
                filled.append(token_id)
            else:
                filled += self._tokenizer.encode(texts[-token_id - 1])
        return filled
