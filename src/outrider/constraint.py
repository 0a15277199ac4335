"""The form that a reply must have. Clients call it structured output, guided decoding or a response format.

A dialect parses the constraint, an engine enforces it and a turn records it. Only the engine can determine whether an
expression or a grammar compiles. Invariant: the size of `text` is bounded, and the text of a JSON schema is valid JSON.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ConstraintKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    # In the syntax of the engine's grammar library: Lark or GBNF.
    GRAMMAR = "grammar"


class Constraint(msgspec.Struct, frozen=True):
    """`text` is the JSON of the schema, the regular expression or the grammar; "" for any JSON object."""

    kind: ConstraintKind
    text: str = ""
