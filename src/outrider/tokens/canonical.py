"""When two messages are the same to the model: canonical digests, so that histories compare by 16 bytes each.

What is compared: role; text (an assistant's without white space at its ends, since clients trim it); tool calls
by id, name and parsed arguments (clients re-serialise JSON, and JavaScript ones write 1.0 as 1); the call a tool
result answers; images by their digests and places. What is not: field order, spacing of JSON, null against absent,
string against parts (parsed alike), unknown fields, the name of a tool result's tool. Reasoning is a digest of its
own, because clients may drop it: absent equals anything.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import xxhash

from outrider.messages import Image, Message, Role

EXACT_INTEGER = 2**53
"""Up to here a float and an integer are the same JSON number to every client."""


class MessageKey(msgspec.Struct, frozen=True):
    """`body` and `reasoning` are 16-byte digests; `reasoning` is None when the message carries none."""

    body: bytes
    reasoning: bytes | None
    role: Role


digest = xxhash.xxh3_128_digest
"""16 bytes that stand for any number of bytes."""


def message_key(message: Message) -> MessageKey:
    text = message.content.strip() if message.role is Role.ASSISTANT else message.content
    calls = [[call.id, call.name, *_arguments(call.arguments)] for call in message.tool_calls]
    user_name = message.name if message.role is Role.USER else None
    body = _dump([message.role.value, text, calls, message.tool_call_id, user_name])
    for part in message.parts:
        body += (part.digest if isinstance(part, Image) else part.text).encode("utf-8", "surrogatepass") + b"\0"
    reasoning = (message.reasoning or "").strip()
    return MessageKey(
        body=digest(body),
        reasoning=digest(reasoning.encode("utf-8", "surrogatepass")) if reasoning else None,
        role=message.role,
    )


def tools_key(tools: Any) -> bytes:
    """The digest of a request's tools: their order and key order count, because templates print them."""
    return digest(json.dumps(tools, ensure_ascii=False, separators=(",", ":")).encode())


def extend(path: bytes, body: bytes) -> bytes:
    """The digest of a conversation one message longer."""
    return digest(path + body)


def _arguments(arguments: str) -> tuple[bool, str]:
    """Whether they are JSON, and their one spelling; text that is no JSON (or nests too deep) is its own."""
    try:
        value = _DECODER.decode(arguments)
        return True, json.dumps(value, ensure_ascii=False, sort_keys=True)
    except (ValueError, RecursionError):
        return False, arguments


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= EXACT_INTEGER else value


_DECODER = json.JSONDecoder(parse_float=_number)


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")
