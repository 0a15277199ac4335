"""What clients do to a history when they send it back, and whether it is a difference to the model: a table.

The digests of `canonical.py` follow it, `docs/branches.md` prints it, and tests/tokens/test_differences.py has one case
for each row. A difference forks; what is none leaves the recorded ids as they are.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Effect(StrEnum):
    SAME = "same"
    FORK = "fork"
    FAMILY = "family"  # a fork for the families whose templates show it (`canonical.SHOWN`)


class Difference(msgspec.Struct, frozen=True):
    """`reason` says why it has this effect."""

    change: str
    effect: Effect
    reason: str


DIFFERENCES: tuple[Difference, ...] = (
    Difference("arguments re-serialised", Effect.SAME, "clients parse a call's JSON and write it their own way"),
    Difference("no arguments written as {}", Effect.SAME, "clients read nothing as an empty object"),
    Difference("arguments' keys in another order", Effect.SAME, "a JSON object has no order to the clients"),
    Difference("1.0 written as 1", Effect.SAME, "JavaScript has one kind of number"),
    Difference("argument changed", Effect.FORK, "the model would read another call than the one it made"),
    Difference("argument's type changed", Effect.FORK, "true, 1 and the text 1 are printed differently"),
    Difference("arguments that are no JSON changed", Effect.FORK, "they are text, and compared as text"),
    Difference("call renamed", Effect.FORK, "a call's name is printed by every template"),
    Difference("call ids replaced", Effect.FAMILY, "most templates print none; clients and dialects make up their own"),
    Difference("result's call id replaced", Effect.FAMILY, "most templates put results in the order they are sent"),
    Difference("user or tool result named", Effect.FAMILY, "most templates print roles, not names"),
    Difference("white space around the assistant's text", Effect.SAME, "clients trim it, the model knows what it said"),
    Difference("white space around other text", Effect.FAMILY, "Qwen 3.5 and later trim it before they print it"),
    Difference("white space within a text", Effect.FORK, "it is printed"),
    Difference("text changed", Effect.FORK, "it is printed"),
    Difference("reasoning dropped", Effect.SAME, "clients that keep none send none; the model thought it all the same"),
    Difference("reasoning sent twice over", Effect.SAME, "a fault of a client library: no model thinks in echoes"),
    Difference("reasoning changed", Effect.FORK, "the client tells of thoughts that the model did not have"),
    Difference("reasoning added", Effect.FORK, "the client tells of thoughts where the model had none"),
    Difference("string content as a list of texts", Effect.SAME, "dialects read both as one text"),
    Difference("null, empty or absent content", Effect.SAME, "dialects read all three as no text"),
    Difference("cache markers and unknown fields", Effect.SAME, "they are for servers; templates print none"),
    Difference("a call flattened into text", Effect.FORK, "the text is no call, and was never sampled"),
    Difference("role changed", Effect.FORK, "roles are printed"),
    Difference("message dropped", Effect.FORK, "the model would read a conversation without it"),
    Difference("message inserted", Effect.FORK, "the model would read a conversation with it"),
    Difference("image replaced", Effect.FORK, "images are known by the digests of their bytes"),
    Difference("tools changed or reordered", Effect.FORK, "templates print them, in order, at the very beginning"),
)
