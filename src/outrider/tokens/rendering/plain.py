"""Messages in the dictionary form that the `renderers` package and chat templates take.

It knows no family, only whether system messages are taken behind others. Invariant: a message that is not at the
beginning becomes the same dictionary whether it is given as part of a conversation or as new.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outrider.errors import RequestError
from outrider.messages import Message, Role
from outrider.tokens.tree.canonical import worth_reading

Plain = dict[str, Any]


def plain_conversation(messages: Sequence[Message], *, late_system: bool) -> list[Plain]:
    """A whole conversation. Where system messages are taken only at the beginning, those there are one, and later ones
    are a user's. Raises RequestError for an image."""
    if late_system:
        return [plain_message(message) for message in messages]
    leading = next((at for at, message in enumerate(messages) if message.role is not Role.SYSTEM), len(messages))
    later = plain_new(messages[leading:], late_system=False)
    if leading == 0:
        return later
    first, *others = [plain_message(message) for message in messages[:leading]]
    first["content"] = "\n\n".join(system["content"] for system in (first, *others) if system["content"])
    return [first, *later]


def plain_new(messages: Sequence[Message], *, late_system: bool) -> list[Plain]:
    """What follows other messages. Raises RequestError for an image."""
    plain = [plain_message(message) for message in messages]
    for message in plain if not late_system else ():
        if message["role"] == Role.SYSTEM.value:
            message["role"] = Role.USER.value
    return plain


def plain_message(message: Message) -> Plain:
    """One message; its calls' arguments as objects where they parse. Raises RequestError for an image."""
    if message.parts:
        raise RequestError(
            "this model is given text only: its engine takes token ids, and images have none",
            field="messages",
            hint="leave the image out, or serve the model through an engine of kind 'openai'",
        )
    plain: Plain = {"role": message.role.value, "content": message.content}
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _object_or_text(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _object_or_text(arguments: str) -> Any:
    if not worth_reading(arguments):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and _encodable(value) else arguments


def _encodable(value: Any) -> bool:
    """Whether it is free of lone surrogates, which JSON escapes can spell and no template can print."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True
