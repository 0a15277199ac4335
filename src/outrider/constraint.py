"""The form that a reply must have. Clients call it structured output, guided decoding or a response format. The module
also has the choice of tools that a client forces.

A dialect parses the constraint, an engine enforces the constraint, and the store keeps the constraint with the turn.
Only the engine can determine whether an expression or a grammar compiles. Invariant: the size of `text` is bounded, and
the text of a JSON schema is valid JSON.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

MAX_CONSTRAINT = 1 << 16
"""Maximum number of characters of a schema, regular expression or grammar. The text is stored with the turn."""


class ConstraintKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    # A grammar has the syntax of the engine's grammar library: Lark or GBNF.
    GRAMMAR = "grammar"
    # Calls of tools. No client requests this kind directly: it is made from a `ToolChoice`.
    TOOL_CALLS = "tool_calls"


class Constraint(msgspec.Struct, frozen=True):
    """The form of a reply. `text` is the JSON of the schema, the regular expression or the grammar. `text` is "" if any
    JSON object is accepted.

    For TOOL_CALLS, `text` is the JSON of a structural tag of XGrammar for an engine that takes token ids, and the JSON
    of OpenAI's field `tool_choice` for an engine that takes messages.
    """

    kind: ConstraintKind
    text: str = ""


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that a reply must call, or may call, by the client's choice.

    With `required`, the reply consists of one or more calls, and nothing else. Without `required`, the reply may have
    text, and may have no call. Every call is of a tool in `names`, which has at least one tool, by its name for the
    model. With `single`, the reply has at most one call. `field` is the path of the choice in the client's request, for
    errors.
    """

    names: tuple[str, ...]
    required: bool
    single: bool
    field: str
