"""Random changes that clients make to a conversation, and random replies of models, from a seeded generator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

import msgspec

from outrider.messages import Message, Role, ToolCall

from .renderers import small_tokenizer
from .strategies import hermes_call, split_markers

TOKENIZER = small_tokenizer()
ENDOFTEXT, IM_START, IM_END = 0, 1, 2
UNKNOWN = 9999

WORDS = ("Hello", " maple", "the file", "\n", "  ", "é", "数学", "🙂", "<", "</", " tool_call>", "{", '"', "x")
BROKEN = (
    "<tool_call>\nnot json\n</tool_call>",
    '<tool_call>\n{"name": "read_file", "arg',
    "</tool_call>",
    "</think>",
)
ENDINGS: tuple[list[int], ...] = ([IM_END],) * 6 + (
    [],
    [ENDOFTEXT],
    [IM_END, 300],
    [UNKNOWN, IM_END],
    [IM_END, 300, IM_END],
)


def prose(rng: Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randrange(1, 5)))


def call_text(rng: Random) -> str:
    given: dict[str, object] = {"path": prose(rng), "deep": {"b": [1, 2.5, None, True], "a": {}}, "n": rng.randrange(9)}
    return hermes_call(rng.choice(["read_file", "other"]), dict(rng.sample(sorted(given.items()), rng.randrange(4))))


def sampled(rng: Random) -> list[int]:
    """Return a reply of thinking, prose and calls, some of them broken, in ids that no tokenizer would choose."""
    thought = rng.choice(["", "", f"<think>\n{prose(rng)}\n</think>\n\n", f"\n<think>{prose(rng)}"])
    parts = [rng.choice([prose, call_text, call_text])(rng) for _ in range(rng.randrange(3))]
    if rng.random() < 0.15:
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(BROKEN))
    return [*respelled(rng, thought + "".join(parts)), *rng.choice(ENDINGS)]


def respelled(rng: Random, text: str) -> list[int]:
    ids: list[int] = []
    for piece in split_markers(text):
        while piece:
            cut = rng.randrange(1, 8) if rng.random() < 0.7 else len(piece)
            ids += TOKENIZER.encode(piece) if piece.startswith("<") else TOKENIZER.encode(piece[:cut])
            piece = "" if piece.startswith("<") else piece[cut:]
    return ids


def news(rng: Random, last: Message) -> tuple[Message, ...]:
    """Messages that may follow a reply: results of its tool calls, user messages, or both."""
    results = [
        Message(role=Role.TOOL, content=prose(rng), tool_call_id=call.id, name=rng.choice([None, call.name]))
        for call in last.tool_calls
    ]
    users = [Message(role=Role.USER, content=prose(rng)) for _ in range(rng.choice([0, 0, 1, 2]))]
    return (*results, *users) or (Message(role=Role.USER, content=prose(rng)),)


def echoed(rng: Random, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The history as a client may send it back, with changes that do not count as edits."""
    return tuple(echo(rng, message) if rng.random() < 0.4 else message for message in messages)


def echo(rng: Random, message: Message) -> Message:
    if message.role is Role.TOOL:
        return msgspec.structs.replace(message, name=rng.choice([None, "read_file"]))
    if message.role is not Role.ASSISTANT:
        return message
    reasoning = rng.choice([None, message.reasoning, f" {message.reasoning}\n" if message.reasoning else None])
    return msgspec.structs.replace(
        message,
        content=message.content.strip() + rng.choice(["", "\n", " "]),
        reasoning=reasoning,
        tool_calls=tuple(reserialised(rng, call) for call in message.tool_calls),
    )


def reserialised(rng: Random, call: ToolCall) -> ToolCall:
    try:
        value = json.loads(call.arguments)
    except ValueError:
        return call
    if isinstance(value, dict) and rng.random() < 0.5:
        value = dict(reversed(value.items()))
    compact = rng.choice([None, (",", ":")])
    return ToolCall(call.id, call.name, json.dumps(value, separators=compact, ensure_ascii=rng.random() < 0.5))


def rewritten(rng: Random, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The history with a visible change to one message, or with a message added or removed."""
    at = rng.randrange(len(messages))
    before, message, after = messages[:at], messages[at], messages[at + 1 :]
    change = rng.choice(["edit", "change", "change", "drop", "insert"])
    if change == "drop" and len(messages) > 1:
        return (*before, *after)
    if change == "insert":
        return (*before, message, Message(role=rng.choice([Role.USER, Role.ASSISTANT]), content="In between."), *after)
    if change == "change":
        return (*before, changed(rng, message), *after)
    return (*before, msgspec.structs.replace(message, content=f"{message.content} indeed"), *after)


def changed(rng: Random, message: Message) -> Message:
    """The message with a field other than `content` changed. User and system messages have no such field; a line break
    is added to their content."""
    replace = msgspec.structs.replace
    if message.role is Role.TOOL:
        return replace(message, tool_call_id="another")
    if message.role is not Role.ASSISTANT:
        return replace(message, content=f"{message.content}\n")
    if not message.tool_calls or rng.random() < 0.5:
        return replace(message, reasoning=f"{message.reasoning or ''} or not")
    first, *others = message.tool_calls
    other = rng.choice([replace(first, arguments='{"n":true}'), replace(first, id="c9"), replace(first, name="f")])
    return replace(message, tool_calls=(other, *others))
