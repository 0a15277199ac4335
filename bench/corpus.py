"""Texts to benchmark with, and a tokenizer for them: both made at run time from the standard library's source.

The module is independent of the engine. A real model's tokenizer would have to be downloaded. The tokenizer of this
module has Qwen's special tokens and splitting rule, and its tokens are about 3.5 characters long, like the tokens of a
real tokenizer on code. Invariant: no two texts are the same, so that no cache of whole texts can help.
"""

from __future__ import annotations

import random
import sysconfig
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from outrider.tokens.rendering.tokenizer import Tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's rule for splitting text before the tokens are formed, as a regular expression with a look-ahead."""

VOCABULARY = 8_000
TRAINED_ON = 20
"""Number of files that the tokenizer is trained on; texts are drawn from the others."""
MARKED = 8
"""Number of hexadecimal digits at the start of a text. They make the text unique."""


class Corpus:
    """Fresh texts of a given size. `folder` holds the tokenizer, as a model's folder would."""

    def __init__(self, folder: Path, *, seed: int = 1) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.load(folder)
        self._random = random.Random(seed)
        self._text = "\n".join(_sources()[TRAINED_ON:])
        self._characters_per_token = _density(self.tokenizer, self._text)

    @classmethod
    def make(cls, folder: Path) -> Corpus:
        """Train the tokenizer (a second) and write it into `folder`."""
        _trained().save(str(folder / "tokenizer.json"))
        return cls(folder)

    def text(self, *, characters: int) -> str:
        start = self._random.randrange(len(self._text) - characters)
        mark = f"{self._random.getrandbits(4 * MARKED):0{MARKED}x} "
        return mark + self._text[start : start + characters - len(mark)]

    def tokens(self, count: int) -> str:
        """Return a text of about `count` tokens."""
        return self.text(characters=int(count * self._characters_per_token))

    def reply(self, tokens: int) -> list[int]:
        """Return the ids of a reply of exactly `tokens` tokens. The last token ends the turn."""
        words = self.tokenizer.encode("The answer is in the file. " * tokens)[: tokens - 1]
        return [*words, *self.tokenizer.encode("<|im_end|>")]


@cache
def _sources() -> list[str]:
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths]


def _density(tokenizer: Tokenizer, text: str) -> float:
    sample = text[: 1 << 18]
    return len(sample) / len(tokenizer.encode(sample))


@cache
def _trained() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_sources()[:TRAINED_ON], trainer)
    return tokenizer
