"""The fast encoder gives the same ids as `tokenizers`, or is not used."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from outrider.tokens.rendering.tokenizer import Tokenizer, fast_encoder
from support.tokenizer import SPECIAL_TOKENS, make_tokenizer

BACKEND = make_tokenizer()
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def changed(**fields: Any) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(json.loads(BACKEND.to_str()) | fields))


def splitting(*patterns: str) -> tokenizers.Tokenizer:
    """Byte-level BPE with the splitting rules of other families."""
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    steps = [*splits, {**BYTE_LEVEL, "use_regex": False}]
    return changed(pre_tokenizer={"type": "Sequence", "pretokenizers": steps})


def with_tokens(*tokens: str, **flags: Any) -> tokenizers.Tokenizer:
    backend = make_tokenizer()
    backend.add_special_tokens([tokenizers.AddedToken(token, **flags) for token in tokens])
    return backend


def with_merges_reversed() -> tokenizers.Tokenizer:
    model = json.loads(BACKEND.to_str())["model"]
    return changed(model=model | {"merges": model["merges"][::-1]})


def padded() -> tokenizers.Tokenizer:
    backend = make_tokenizer()
    backend.enable_padding(length=64)
    backend.enable_truncation(8)
    return backend


BACKENDS = {
    "plain": BACKEND,
    "NFC": changed(normalizer={"type": "NFC"}),
    "NFKC": changed(normalizer={"type": "NFKC"}),
    "lower case": changed(normalizer={"type": "Lowercase"}),
    "GPT-2's splitting": changed(pre_tokenizer=BYTE_LEVEL),
    "Llama's splitting": splitting(LLAMA),
    "GPT-4o's splitting": splitting(GPT_4O),
    "DeepSeek's splitting": splitting(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f]+", DEEPSEEK),
    "no splitting": changed(pre_tokenizer=None),
    "white space before a token": with_tokens("<|extra|>", lstrip=True),
    "white space behind a token": with_tokens("<|extra|>", rstrip=True),
    "single words": with_tokens("extra", single_word=True),
    "a token within another": with_tokens("<|im_end|>>", "<|im_end|"),
    "another order of merges": with_merges_reversed(),
    "padding and truncation": padded(),
}
PIECES = [
    *SPECIAL_TOKENS,
    "<|extra|>",
    "extra",
    "<|im_end|>>",
    "  ",
    " \t",
    "\n\n",
    "'S",
    "'s",
    "123",
    "don't",
    '{"a": 1}',
]
PARTS = st.text(max_size=20) | st.text(st.characters(max_codepoint=127), max_size=20) | st.sampled_from(PIECES)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer(BACKENDS[name], name_or_path="x", settings={})


@pytest.mark.parametrize("name", BACKENDS)
@given(st.lists(PARTS, max_size=12))
def test_it_agrees_on_any_text(name: str, parts: list[str]) -> None:
    backend = BACKENDS[name]
    text = "".join(parts).encode("utf-8", "replace").decode()
    wanted = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert tokenizer_of(name).encode(text) == wanted


def test_it_is_used_for_byte_level_bpe() -> None:
    assert fast_encoder(BACKEND) is not None


def test_it_is_not_used_for_other_models() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    assert fast_encoder(words) is None


def test_it_is_not_used_where_it_is_seen_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        ids = (0,)

        @classmethod
        def from_json_str(cls, text: str) -> Wrong:
            return cls()

        def encode(self, text: str) -> Wrong:
            return self

    monkeypatch.setattr("outrider.tokens.rendering.tokenizer.fastokens.Tokenizer", Wrong)
    another = tokenizers.Tokenizer.from_str(BACKEND.to_str())
    another.add_tokens(["of no tokenizer that has an encoder"])
    assert fast_encoder(another) is None


def test_it_is_made_once_for_all_that_load_the_same_file() -> None:
    encoder = fast_encoder(BACKEND)
    assert encoder is fast_encoder(tokenizers.Tokenizer.from_str(BACKEND.to_str()))


@pytest.mark.parametrize("character", [" ", "a", "\n", "1", "'"])
def test_long_runs_of_one_character(character: str) -> None:
    tokenizer = Tokenizer(BACKEND, name_or_path="x", settings={})
    for text in (character * 20_000, character * (1 << 19)):
        assert tokenizer.decode(tokenizer.encode(text)) == text
