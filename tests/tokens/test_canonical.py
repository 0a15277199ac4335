"""Which differences between messages, and between tools, change their keys."""

from __future__ import annotations

import pytest

from outrider.messages import Message, Role, ToolCall
from outrider.tokens.tree.canonical import message_key, tools_key


def called(arguments: str, call: str = "c1", name: str = "f") -> Message:
    return Message(role=Role.ASSISTANT, tool_calls=(ToolCall(call, name, arguments),))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": [2, {"c": null}]}', '{"b":[2,{"c":null}],"a":1}'),
        ('{"a": 1.0}', '{"a": 1}'),
        ('{"a": 1e3}', '{"a": 1000}'),
        ('{"a": -0.0}', '{"a": 0}'),
        ('{"a": "\\u00e9"}', '{"a": "é"}'),
        ('{"a": "\\ud800"}', '{"a":"\\uD800"}'),
        ("{}", " \n"),
    ],
)
def test_spellings_of_the_same_arguments(one: str, other: str) -> None:
    assert message_key(called(one)).body == message_key(called(other)).body


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1.5}', '{"a": 1}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": null}', "{}"),
        ('"text"', "text"),
        ("[false, 1]", "1"),
        ("not  json", "not json"),
        ('{"a": 9007199254740993}', '{"a": 9007199254740993.0}'),
        ("{}", "null"),
    ],
)
def test_different_arguments(one: str, other: str) -> None:
    assert message_key(called(one)).body != message_key(called(other)).body


def test_every_visible_field_counts() -> None:
    messages = [
        Message(role=Role.USER, content="x"),
        Message(role=Role.USER, content="x "),
        Message(role=Role.USER, content="x", name="bob"),
        Message(role=Role.SYSTEM, content="x"),
        Message(role=Role.TOOL, content="x", tool_call_id="a"),
        Message(role=Role.TOOL, content="x", tool_call_id="b"),
        Message(role=Role.TOOL, content=" x", tool_call_id="b"),
        Message(role=Role.ASSISTANT, content="x"),
        Message(role=Role.ASSISTANT, content="x y"),
        Message(role=Role.ASSISTANT, content="x  y"),
        called("{}"),
        called("{}", call="c2"),
        called("{}", name="g"),
        Message(role=Role.ASSISTANT, tool_calls=called("{}").tool_calls * 2),
    ]
    assert len({message_key(message).body for message in messages}) == len(messages)


def test_reasoning_is_apart_and_trimmed() -> None:
    plain = message_key(Message(role=Role.ASSISTANT, content="x"))
    thinking = message_key(Message(role=Role.ASSISTANT, content=" x\n", reasoning="\nhm "))
    assert plain.body == thinking.body
    assert plain.reasoning is None
    assert thinking.reasoning == message_key(Message(role=Role.ASSISTANT, reasoning="hm")).reasoning
    assert thinking.reasoning != message_key(Message(role=Role.ASSISTANT, reasoning="ha")).reasoning
    assert message_key(Message(role=Role.ASSISTANT, reasoning=" \n")).reasoning is None


def test_the_order_of_tools_counts() -> None:
    one, two = {"function": {"name": "a"}}, {"function": {"name": "b"}}
    assert tools_key([one, two]) != tools_key([two, one])
    assert tools_key([{"a": 1, "b": 2}]) != tools_key([{"b": 2, "a": 1}])
