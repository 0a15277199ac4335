"""The form that a reply must have. Clients call it structured output, guided decoding or a response format.

A dialect parses the constraint, an engine enforces the constraint, and the store keeps the constraint with the turn.
Only the engine can determine whether an expression or a grammar compiles. Invariant: the size of `text` is bounded, and
the text of a JSON schema is valid JSON.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ConstraintKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    # A grammar has the syntax of the engine's grammar library: Lark or GBNF.
    GRAMMAR = "grammar"


class Constraint(msgspec.Struct, frozen=True):
    """The form of a reply. `text` is the JSON of the schema, the regular expression or the grammar. `text` is "" if any
    JSON object is accepted."""

    kind: ConstraintKind
    text: str = ""
