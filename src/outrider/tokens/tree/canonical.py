"""Decides whether a client's message equals a recorded message. To compare histories quickly, each message is reduced
to digests.

Two messages are equal if the recorded ids of one can be used for the other. `DIFFERENCES` lists the changes that
clients make to a history when they send it back. For each change, `DIFFERENCES` states whether the recorded ids are
still used or the request gets a new prompt (a fork). After a change of call ids, names or outer white space, the effect
depends on the model family's template (`PRINTED_FIELDS`).

Invariant: equal messages have equal `MessageKey.body` digests. Reasoning has a digest of its own, because the recorded
ids are still used when a client drops or repeats the reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
import xxhash

from outrider.messages import Image, Message, Role


class Effect(StrEnum):
    SAME = "same"
    FORK = "fork"
    FAMILY = "family"  # a fork only for model families whose templates print the changed field (PRINTED_FIELDS)


class Difference(msgspec.Struct, frozen=True):
    """A change that a client makes to a message, and its effect on the message's recorded ids."""

    change: str
    effect: Effect
    reason: str


DIFFERENCES: tuple[Difference, ...] = (
    Difference("arguments re-serialised", Effect.SAME, "clients parse a call's JSON and write it their own way"),
    Difference("no arguments written as {}", Effect.SAME, "clients read empty arguments as an empty object"),
    Difference("arguments' keys in another order", Effect.SAME, "clients do not keep the order of an object's keys"),
    Difference("1.0 written as 1", Effect.SAME, "JavaScript has one kind of number"),
    Difference("argument changed", Effect.FORK, "the model would read another call than the one it made"),
    Difference("argument's type changed", Effect.FORK, "true, 1 and the text 1 are printed differently"),
    Difference("arguments that are no JSON changed", Effect.FORK, "they are text, and compared as text"),
    Difference("call renamed", Effect.FORK, "a call's name is printed by every template"),
    Difference("call ids replaced", Effect.FAMILY, "most templates print none; clients and dialects make up ids"),
    Difference("result's call id replaced", Effect.FAMILY, "most templates put results in the order they are sent"),
    Difference("user or tool result named", Effect.FAMILY, "most templates print roles, not names"),
    Difference("white space around the assistant's text", Effect.SAME, "clients trim it; the recorded ids have it"),
    Difference("white space around other text", Effect.FAMILY, "Qwen 3.5 and later trim it before they print it"),
    Difference("white space within a text", Effect.FORK, "it is printed"),
    Difference("text changed", Effect.FORK, "it is printed"),
    Difference("reasoning dropped", Effect.SAME, "many clients do not keep it; the recorded ids have it"),
    Difference("reasoning sent twice over", Effect.SAME, "a fault of a client library; the recorded ids have it once"),
    Difference("reasoning changed", Effect.FORK, "the client reports thoughts that the model did not have"),
    Difference("reasoning added", Effect.FORK, "the client reports thoughts where the model had none"),
    Difference("string content as a list of texts", Effect.SAME, "dialects read both as one text"),
    Difference("null, empty or absent content", Effect.SAME, "dialects read all three as no text"),
    Difference("cache markers and unknown fields", Effect.SAME, "they are for servers; templates print none"),
    Difference("a call flattened into text", Effect.FORK, "the text is no call, and was never sampled"),
    Difference("role changed", Effect.FORK, "roles are printed"),
    Difference("message dropped", Effect.FORK, "the model would read a conversation without it"),
    Difference("message inserted", Effect.FORK, "the model would read a conversation with it"),
    Difference("image replaced", Effect.FORK, "images are compared by the digests of their bytes"),
    Difference("tools changed or reordered", Effect.FORK, "templates print them, in order, at the very beginning"),
)
"""All known changes. docs/branches.md shows this table, and tests/tokens/test_differences.py has a test case for each
row."""


class PrintedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Which optional parts of a message affect the output of a family's template.

    call_ids: the ids of tool calls.
    names: the names of users and tool results.
    outer_space: white space around texts that the model did not write."""

    call_ids: bool = True
    names: bool = True
    outer_space: bool = True


ALL_PRINTED = PrintedFields()
_NO_IDS_OR_NAMES = PrintedFields(call_ids=False, names=False)
_NO_IDS_NAMES_OR_SPACE = PrintedFields(call_ids=False, names=False, outer_space=False)

PRINTED_FIELDS: Mapping[str, PrintedFields] = {
    "qwen3": _NO_IDS_OR_NAMES,
    "prime-qwen3": _NO_IDS_OR_NAMES,
    "qwen3-vl": _NO_IDS_OR_NAMES,
    "qwen3.5": _NO_IDS_NAMES_OR_SPACE,
    "qwen3.6": _NO_IDS_NAMES_OR_SPACE,
    "qwen3.8": _NO_IDS_NAMES_OR_SPACE,
    "glm-4.5": _NO_IDS_OR_NAMES,
    "glm-5": _NO_IDS_OR_NAMES,
    "glm-5.1": _NO_IDS_OR_NAMES,
    "nemotron-3": _NO_IDS_OR_NAMES,
    "minimax-m2": _NO_IDS_OR_NAMES,
}
"""The fields that affect a family's rendering. A field is False only if tests show that it has no effect
(tests/tokens/test_differences.py). For families that are not listed, all fields are compared. This is always safe: at
worst, it causes an unnecessary fork."""

MAX_EXACT_INTEGER = 2**53
"""Up to this size, a float without a fraction is compared as an integer. JavaScript has only one type of number, so a
client may send 3.0 back as 3. Larger floats cannot represent all integers exactly."""

MAX_PARSED_SEPARATORS = 1 << 16
"""Maximum number of lists, objects and commas in tool arguments that are compared as JSON. The JSON decoder blocks
every thread while it runs. For this number, it runs for 10 ms. Larger arguments are compared as text."""


class MessageKey(msgspec.Struct, frozen=True, gc=False):
    """The digests of a message, 16 bytes each.

    body: covers everything in the message that affects the model's input, except the reasoning.
    reasoning: the digest of the reasoning, or None.
    reasoning_once: if the reasoning is the same text twice in a row, the digest of that text; otherwise None.
    call_ids: the digest of the ids of the message's tool calls, or None.
    """

    body: bytes
    reasoning: bytes | None
    role: Role
    reasoning_once: bytes | None = None
    call_ids: bytes | None = None

    def may_echo_reasoning(self, recorded: bytes | None) -> bool:
        """Return True if this message has no reasoning, or if its reasoning is the recorded text, once or twice in a
        row. The message may then be a copy of the recorded message."""
        return (
            self.reasoning is None
            or self.reasoning == recorded
            or (self.reasoning_once is not None and self.reasoning_once == recorded)
        )


# 128 bits are enough to avoid collisions within a session. A cryptographic hash would be slower.
digest = xxhash.xxh3_128_digest


def extend(prefix: bytes, body: bytes) -> bytes:
    """Return the digest of a conversation after a message is added. `prefix` is the digest of the earlier conversation,
    and `body` is the digest of the new message."""
    return digest(prefix + body)


def tools_key(tools: Any) -> bytes:
    """Return the digest of a request's tools. The digest depends on the order of the tools and of the keys in each
    tool, because templates print tools and keys in this order."""
    return digest(msgspec.json.encode(tools))


def message_key(message: Message, printed: PrintedFields = ALL_PRINTED) -> MessageKey:
    is_assistant = message.role is Role.ASSISTANT
    text = message.content.strip() if is_assistant or not printed.outer_space else message.content
    calls = [
        [call.id if printed.call_ids else None, call.name, *_canonical_arguments(call.arguments)]
        for call in message.tool_calls
    ]
    answered = message.tool_call_id if printed.call_ids else None
    # Ignore the name of an assistant message. Recorded replies have no names, so a client must have added the name.
    name = message.name if printed.names and not is_assistant else None
    body = _pack([message.role.value, text, calls, answered, name])
    for part in message.parts:
        kind, content = (b"i", part.digest) if isinstance(part, Image) else (b"t", part.text)
        body += kind + _utf8(content) + b"\0"
    reasoning = (message.reasoning or "").strip()
    half = len(reasoning) // 2
    first, second = reasoning[:half].rstrip(), reasoning[len(reasoning) - half :].lstrip()
    return MessageKey(
        body=digest(body),
        reasoning=digest(_utf8(reasoning)) if reasoning else None,
        role=message.role,
        reasoning_once=digest(_utf8(first)) if first and first == second else None,
        call_ids=digest(_pack([call.id for call in message.tool_calls])) if message.tool_calls else None,
    )


def is_parsed_as_json(arguments: str) -> bool:
    """Return True if a call's arguments are small enough to be parsed as JSON (MAX_PARSED_SEPARATORS)."""
    if len(arguments) <= MAX_PARSED_SEPARATORS:
        return True
    return sum(map(arguments.count, "[{,")) <= MAX_PARSED_SEPARATORS


def _canonical_arguments(arguments: str) -> tuple[bool, str]:
    """Return True and the arguments as canonical JSON. If they are not JSON or are too large to parse, return False and
    the unchanged arguments."""
    if not arguments.strip():
        return True, "{}"
    if not is_parsed_as_json(arguments):
        return False, arguments
    try:
        return True, json.dumps(_DECODER.decode(arguments), ensure_ascii=False, sort_keys=True)
    except (ValueError, RecursionError):
        return False, arguments


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= MAX_EXACT_INTEGER else value


_DECODER = json.JSONDecoder(parse_float=_number)


def _pack(value: Any) -> bytes:
    """Encode nested lists of texts. Different values have different encodings."""
    try:
        return msgspec.msgpack.encode(value)
    except UnicodeEncodeError:  # the text has an unpaired surrogate, which JSON can escape and msgpack cannot encode
        return json.dumps(value).encode()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
