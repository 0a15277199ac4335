"""The form that a reply must have: what the clients call structured output, guided decoding or a response format.

Here in layer 0, because a dialect reads it, an engine enforces it and a turn records it. Invariant: `text` was
checked to be of its kind's size and syntax as far as JSON goes; whether a grammar compiles only its engine knows.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ConstraintKind(StrEnum):
    JSON_OBJECT = "json_object"  # any JSON object
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # in whatever syntax the engine's grammar library reads (Lark, GBNF)


class Constraint(msgspec.Struct, frozen=True):
    """`text` is the JSON of the schema, the regular expression or the grammar; "" for any JSON object."""

    kind: ConstraintKind
    text: str = ""
