"""When two messages are the same to the model: canonical digests, so that histories compare by 16 bytes each.

What counts is what the model saw. `differences.py` lists what clients do and which of it counts; docs/branches.md shows
the list. A family's template decides about call ids, names and outer white space (`SHOWN`); for a family that is not
in the table all of them count. Reasoning is a digest of its own, because clients may drop it or send it twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from outrider.messages import Image, Message, Role, Text

EXACT_INTEGER = 2**53
"""Up to here a float and an integer are the same JSON number to every client."""


MAX_SEPARATORS = 1 << 16
"""A call's arguments with more lists, objects and commas are a text like any other."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's template prints, or lets decide what it prints: the ids of tool calls, the names of users and of
    tool results, white space at the ends of what the model did not say."""

    call_ids: bool = True
    names: bool = True
    outer_space: bool = True


EVERYTHING = Shown()
_NEITHER_IDS_NOR_NAMES = Shown(call_ids=False, names=False)
_TRIMMED = Shown(call_ids=False, names=False, outer_space=False)

SHOWN: Mapping[str, Shown] = {
    "qwen3": _NEITHER_IDS_NOR_NAMES,
    "prime-qwen3": _NEITHER_IDS_NOR_NAMES,
    "qwen3-vl": _NEITHER_IDS_NOR_NAMES,
    "qwen3.5": _TRIMMED,
    "qwen3.6": _TRIMMED,
    "qwen3.8": _TRIMMED,
    "glm-4.5": _NEITHER_IDS_NOR_NAMES,
    "glm-5": _NEITHER_IDS_NOR_NAMES,
    "glm-5.1": _NEITHER_IDS_NOR_NAMES,
    "nemotron-3": _NEITHER_IDS_NOR_NAMES,
    "minimax-m2": _NEITHER_IDS_NOR_NAMES,
}
"""Families whose rendering was checked (tests/tokens/test_differences.py) not to depend on what is False here."""


class MessageKey(msgspec.Struct, frozen=True, gc=False):
    """`body` and the others are 16-byte digests. `reasoning` is None when the message carries none, `once` when its
    reasoning is not one text written twice; `call_ids` is None without calls."""

    body: bytes
    reasoning: bytes | None
    role: Role
    once: bytes | None = None
    call_ids: bytes | None = None

    def thinks(self, recorded: bytes | None) -> bool:
        """Whether this message's reasoning may be the recorded one as a client sends it back."""
        return self.reasoning is None or self.reasoning == recorded or (self.once is not None and self.once == recorded)


digest = xxhash.xxh3_128_digest
"""16 bytes that stand for any number of bytes."""


def message_key(message: Message, shown: Shown = EVERYTHING) -> MessageKey:
    trimmed = message.role is Role.ASSISTANT or not shown.outer_space
    text = message.content.strip() if trimmed else message.content
    ids = [call.id for call in message.tool_calls]
    calls = [
        [call.id if shown.call_ids else None, call.name, *_arguments(call.arguments)] for call in message.tool_calls
    ]
    answered = message.tool_call_id if shown.call_ids else None
    named = message.name if shown.names and message.role is not Role.ASSISTANT else None
    body = _dump([message.role.value, text, calls, answered, named])
    for part in message.parts:
        body += _part(part)
    reasoning = (message.reasoning or "").strip()
    once = _once(reasoning)
    return MessageKey(
        body=digest(body),
        reasoning=digest(_bytes(reasoning)) if reasoning else None,
        role=message.role,
        once=digest(_bytes(once)) if once else None,
        call_ids=digest(_dump(ids)) if ids else None,
    )


def tools_key(tools: Any) -> bytes:
    """The digest of a request's tools: their order and key order count, because templates print them."""
    return digest(msgspec.json.encode(tools))


def extend(path: bytes, body: bytes) -> bytes:
    """The digest of a conversation one message longer."""
    return digest(path + body)


def _once(text: str) -> str | None:
    """The text that `text` is twice, white space between the two aside; None when it is no such text."""
    half = len(text) // 2
    first, second = text[:half].rstrip(), text[len(text) - half :].lstrip()
    return first if first and first == second else None


def _part(part: Text | Image) -> bytes:
    kind, content = (b"i", part.digest) if isinstance(part, Image) else (b"t", part.text)
    return kind + _bytes(content) + b"\0"


def _arguments(arguments: str) -> tuple[bool, str]:
    """Whether they are JSON, and their one spelling; text that is no JSON (or not worth reading) is its own. None at
    all are an empty object: so clients read them, and send them back."""
    if not arguments.strip():
        return True, "{}"
    if not worth_reading(arguments):
        return False, arguments
    try:
        value = _DECODER.decode(arguments)
        return True, json.dumps(value, ensure_ascii=False, sort_keys=True)
    except (ValueError, RecursionError):
        return False, arguments


def worth_reading(arguments: str) -> bool:
    """Whether a call's arguments are read as JSON. The reader cannot be interrupted, and nothing else is done while it
    reads: 10 ms for MAX_SEPARATORS."""
    if len(arguments) <= MAX_SEPARATORS:
        return True
    return sum(map(arguments.count, "[{,")) <= MAX_SEPARATORS


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= EXACT_INTEGER else value


_DECODER = json.JSONDecoder(parse_float=_number)


def _dump(value: Any) -> bytes:
    """Bytes of their own for every list of texts, whatever Unicode they hold."""
    try:
        return msgspec.msgpack.encode(value)
    except UnicodeEncodeError:  # half a surrogate pair: JSON can say that, too
        return json.dumps(value).encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
