"""Joins the messages of a row into one text, because the instruction of a task is a text.

The messages have the form of a chat (`role`, `content`). verl's rows have them in the column `prompt`, and NeMo Gym's
rows in `responses_create_params.input`. The module is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST = ("system", "developer")
"""Roles of messages that introduce a conversation."""
TEXT_PARTS = ("text", "input_text", "output_text")


def is_conversation(value: Any) -> bool:
    """Return True for a list of messages with roles."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) and "role" in one for one in value)


def text_of(messages: list[Any]) -> str:
    """Return the text of a conversation. Empty lines separate its messages. If the conversation has several messages
    whose role is not in FIRST, each of these messages begins with its role (`User: …`). Raises ValueError for content
    that a text cannot show, such as images and tool calls."""
    texts = [(message.get("role"), content_of(message, number)) for number, message in enumerate(messages)]
    texts = [(role, text) for role, text in texts if text]
    if not texts:
        raise ValueError("has no text")
    spoken = [role for role, _ in texts if role not in FIRST]
    if len(spoken) <= 1:
        return "\n\n".join(text for _, text in texts)
    return "\n\n".join(text if role in FIRST else f"{str(role).capitalize()}: {text}" for role, text in texts)


def content_of(message: Mapping[str, Any], number: int) -> str:
    """Return the text of message number `number`. Its content is a text or a list of parts."""
    for key in ("tool_calls", "function_call"):
        if message.get(key):
            raise ValueError(f"has a tool call in message {number}")
    content = message.get("content")
    if isinstance(content, str):
        return content.strip()
    if not isinstance(content, list):
        raise ValueError(f"has no text in message {number}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f"has a part of type {kind!r} in message {number}, and an instruction is a text")
        texts.append(part["text"])
    return "".join(texts).strip()
