"""A small byte-level BPE tokenizer with Qwen's special tokens, trained at run time."""

from __future__ import annotations

from collections.abc import Sequence
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
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = (
    "system user assistant tool",
    "You are a helpful assistant. You may call one or more functions to help with the query.",
    'Where is "maple"? Please find "maple". In which zone is "maple"? It is in "jade".',
    '{"name": "locate", "arguments": {"item": "maple"}} {"zone": "jade"}',
    '{"type": "function", "function": {"name": "bash", "description": "Run a command", "parameters": '
    '{"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}',
    "First the file is written, then the test is run; the answer is hello, world.",
)


def make_tokenizer(
    special_tokens: Sequence[str] = SPECIAL_TOKENS, text: Sequence[str] = TEXT, vocab_size: int = 512
) -> tokenizers.Tokenizer:
    """Make a tokenizer in which every byte is a token, so that any text can be encoded. The special tokens have the ids
    from 0, in order."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


@cache
def _written() -> tuple[str, Tokenizer]:
    """Return the text of tokenizer.json, and a loaded tokenizer. The loaded one is kept, because later loads reuse its
    encoder."""
    backend = make_tokenizer()
    return backend.to_str(pretty=True), Tokenizer(backend, name_or_path="kept", settings={})


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json into `folder`, which is created if missing. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_written()[0], encoding="utf-8")
    return folder


def write_other_tokenizer(folder: Path) -> Path:
    """Write a tokenizer like that of another model: the same special tokens with other ids, and other text tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    made = make_tokenizer(SPECIAL_TOKENS[::-1], ("a judge's verdict: the argument is good, the score is high",), 320)
    (folder / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
    return folder
