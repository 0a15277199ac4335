"""Hypothesis strategies for replies of models: texts with broken calls, and ids that no tokenizer would choose for a
text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

from hypothesis import strategies as st

from outrider.messages import ToolSpec
from outrider.tokens.rendering.tokenizer import Tokenizer

TOOLS: tuple[ToolSpec, ...] = (
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
            },
        },
    },
)

WORDS = ("Hello", " world", "the file", " maple", ".", "\n", "\n\n", "  ", " ", "é", "数学", "🙂", "x")
FRAGMENTS = ("<", "</", "tool", "<too", "<tool", "call>", "think", "<th", "ink>", "{", '"', "STOP", "ST", "Obs:")

plain = st.lists(st.sampled_from(WORDS + FRAGMENTS), max_size=8).map("".join)
solid = plain.filter(lambda text: bool(text.strip()))

values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.sampled_from([1.5, 0.25, 1e-7]) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=5,
)
arguments = st.dictionaries(st.sampled_from(["path", "limit", "a", "ключ"]), values, max_size=3)


def hermes_call(name: str, given: Mapping[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(given)}, ensure_ascii=False)}\n</tool_call>"


def xml_call(name: str, given: Mapping[str, object]) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in given.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


good_calls = st.builds(hermes_call, st.sampled_from(["read_file", "unheard_of"]), arguments)
bad_calls = st.sampled_from(
    [
        "<tool_call>\nnot json\n</tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "read_file", "arg',
        "<tool_call></tool_call>",
        "</tool_call>",
        "<tool_call>" * 2,
    ]
)
thoughts = st.sampled_from(["", "<think>\n", "<think>", "\n<think>hm"]).flatmap(
    lambda opener: plain.map(lambda text: f"{opener}{text}\n</think>\n\n" if opener else "")
)


@st.composite
def replies(draw: st.DrawFn) -> str:
    """A reply's text: thinking, then prose and calls, some of them malformed."""
    parts = [draw(thoughts)]
    parts += draw(st.lists(plain | good_calls | bad_calls, max_size=4))
    return "".join(parts)


@st.composite
def spellings(draw: st.DrawFn, tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids that spell `text`, cut where no tokenizer would cut; markers stay whole."""
    ids: list[int] = []
    for piece in split_markers(text):
        if piece in MARKERS:
            ids += tokenizer.encode(piece)
            continue
        data = piece.encode()
        cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3))) if data else []
        ids += _spell(tokenizer, piece, cuts)
    return ids


MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def split_markers(text: str) -> list[str]:
    pieces = [text]
    for marker in MARKERS:
        split: list[str] = []
        for piece in pieces:
            if piece in MARKERS:
                split.append(piece)
                continue
            between = piece.split(marker)
            for index, part in enumerate(between):
                split += ([marker] if index else []) + ([part] if part else [])
        pieces = split
    return pieces


def _spell(tokenizer: Tokenizer, piece: str, cuts: Sequence[int]) -> list[int]:
    """`piece` encoded in parts; a cut inside a character makes byte tokens of that character."""
    data = piece.encode()
    ids: list[int] = []
    bounds = [0, *cuts, len(data)]
    for start, end in pairwise(bounds):
        part = data[start:end]
        try:
            ids += tokenizer.encode(part.decode())
        except UnicodeDecodeError:
            ids += [byte_id(tokenizer, byte) for byte in part]
    return ids


@cache
def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    return next(index for index in range(len(tokenizer)) if tokenizer.token_bytes(index) == bytes([byte]))
