"""When two messages are the same to the model: canonical digests, so that histories compare by 16 bytes each.

What is compared: role; text (an assistant's without white space at its ends, since clients trim it); tool calls
by id, name and parsed arguments (clients re-serialise JSON); the call a tool result answers. What is not: field
order, spacing of JSON, null against absent, string against parts (parsed alike), unknown fields, the name of a
tool result's tool. Reasoning is a digest of its own, because clients may drop it: absent equals anything.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import xxhash

from outrider.messages import Message, Role


class MessageKey(msgspec.Struct, frozen=True):
    """`body` and `reasoning` are 16-byte digests; `reasoning` is None when the message carries none."""

    body: bytes
    reasoning: bytes | None
    system: bool


def digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def message_key(message: Message) -> MessageKey:
    text = message.content.strip() if message.role is Role.ASSISTANT else message.content
    calls = [[call.id, call.name, _parsed(call.arguments)] for call in message.tool_calls]
    user_name = message.name if message.role is Role.USER else None
    body = _dump([message.role.value, text, calls, message.tool_call_id, user_name])
    reasoning = (message.reasoning or "").strip()
    return MessageKey(
        body=digest(body),
        reasoning=digest(reasoning.encode()) if reasoning else None,
        system=message.role is Role.SYSTEM,
    )


def tools_key(tools: Any) -> bytes:
    """The digest of a request's tools: their order and key order count, because templates print them."""
    return digest(json.dumps(tools, ensure_ascii=False, separators=(",", ":")).encode())


def extend(path: bytes, body: bytes) -> bytes:
    """The digest of a conversation one message longer."""
    return digest(path + body)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")
