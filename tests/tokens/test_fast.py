"""The fast encoder gives the ids of `tokenizers`, or is not used."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from outrider.tokens.fast import fast_encoder
from outrider.tokens.tokenizer import Tokenizer
from support.tokenizer import SPECIAL_TOKENS, make_tokenizer

BACKEND = make_tokenizer()
PARTS = st.text(max_size=20) | st.sampled_from([*SPECIAL_TOKENS, "  ", "\n\n", "'S", "123", "don't", '{"a": 1}'])


@given(st.lists(PARTS, max_size=12))
def test_it_agrees_on_any_text(parts: list[str]) -> None:
    text = "".join(parts).encode("utf-8", "replace").decode()
    found = Tokenizer(BACKEND, name_or_path="x", settings={}).encode(text)
    assert found == BACKEND.encode(text, add_special_tokens=False).ids


def test_it_is_used_for_byte_level_bpe() -> None:
    assert fast_encoder(BACKEND) is not None


def test_a_text_that_its_regexes_give_up_on_is_encoded_all_the_same() -> None:
    text = "x" + " " * 1_000_000
    fast = fast_encoder(BACKEND)
    assert fast is not None
    with pytest.raises(ValueError, match="regex"):
        fast(text)
    tokenizer = Tokenizer(BACKEND, name_or_path="x", settings={})
    assert tokenizer.decode(tokenizer.encode(text)) == text


def changed(**settings: Any) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(json.loads(BACKEND.to_str()) | settings))


def with_token(**flags: Any) -> tokenizers.Tokenizer:
    backend = make_tokenizer()
    backend.add_special_tokens([tokenizers.AddedToken("<|extra|>", **flags)])
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        changed(normalizer={"type": "NFKC"}),
        changed(normalizer={"type": "Lowercase"}),
        changed(
            pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        ),
        changed(pre_tokenizer=None),
        with_token(lstrip=True),
        with_token(rstrip=True),
    ],
)
def test_it_is_not_used_where_it_could_differ(backend: tokenizers.Tokenizer) -> None:
    assert fast_encoder(backend) is None


def test_it_is_not_used_when_one_special_token_contains_another() -> None:
    backend = make_tokenizer()
    backend.add_special_tokens(["<|im_end|>>"])
    assert fast_encoder(backend) is None


def test_it_is_not_used_when_ids_do_not_follow_the_merges() -> None:
    settings = json.loads(BACKEND.to_str())
    settings["model"]["merges"].reverse()
    assert fast_encoder(tokenizers.Tokenizer.from_str(json.dumps(settings))) is None
