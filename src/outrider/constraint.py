"""The form that a reply must have: structured output, guided decoding or a response format, as clients call it.

A dialect reads it, an engine enforces it and a turn records it. It does not know whether an expression or a grammar
compiles: only the engine does. Invariant: the size of `text` is bounded, and the text of a JSON schema is valid JSON.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ConstraintKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    # In the syntax that the engine's grammar library reads: Lark or GBNF.
    GRAMMAR = "grammar"


class Constraint(msgspec.Struct, frozen=True):
    """`text` is the JSON of the schema, the regular expression or the grammar; "" for any JSON object."""

    kind: ConstraintKind
    text: str = ""
