"""The messages of a row, and which of them train."""

from __future__ import annotations

import msgspec

from outrider.messages import Message, Role
from outrider.tokens.chat_rows import chat_rows
from outrider.tokens.samples import build_samples

from .renderers import family_renderer, small_tokenizer
from .rollout import RESULT, Rollout

FIRST = Message(role=Role.USER, content="Hello?")
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {}}},)


def ids(text: str) -> list[int]:
    return [*small_tokenizer().encode(text), 2]


def test_a_shared_reply_has_weight_in_one_row_only() -> None:
    rollout = Rollout(family_renderer("qwen3"))
    reply = rollout.answer(rollout.join([FIRST]), ids("Yes."))
    for question in ("And?", "Or?"):
        rollout.answer(rollout.join([FIRST, reply, Message(role=Role.USER, content=question)]), ids("No."))
    rows = chat_rows(build_samples(rollout.turns, RESULT), rollout.turns)
    assert [[(message["content"], message.get("weight")) for message in row.messages] for row in rows] == [
        [("Hello?", None), ("Yes.", 1), ("Or?", None), ("No.", 1)],
        [("Hello?", None), ("Yes.", 0), ("And?", None), ("No.", 1)],
    ]
    assert [row.tools for row in rows] == [[], []]


def test_tools_are_those_of_the_first_turn_and_unknown_where_they_were_not_stored() -> None:
    rollout = Rollout(family_renderer("qwen3"))
    rollout.answer(rollout.join([FIRST], TOOLS), ids("Yes."), tools=TOOLS)
    [turn] = rollout.turns
    assert turn.tools
    samples = build_samples([turn], RESULT)
    [row] = chat_rows(samples, [turn])
    assert row.tools == list(TOOLS)
    [old] = chat_rows(samples, [msgspec.structs.replace(turn, tool_specs=())])
    assert old.tools is None
