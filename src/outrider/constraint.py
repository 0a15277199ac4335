"""The required form of a reply, which clients call structured output, guided decoding or a response format. Also the
choice of tools that a client forces.

A dialect parses the constraint, an engine enforces it, and the store keeps it with the turn. Only the engine can tell
whether a regular expression or a grammar compiles. Invariant: the size of `text` is bounded, and the text of a JSON
schema is valid JSON.
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
    # The syntax of a grammar is that of the engine's grammar library: Lark or GBNF.
    GRAMMAR = "grammar"
    # Calls of tools. Clients do not request this kind directly; it is made from a `ToolChoice`.
    TOOL_CALLS = "tool_calls"


class Constraint(msgspec.Struct, frozen=True):
    """The required form of a reply. `text` is the JSON of the schema, the regular expression or the grammar. For
    JSON_OBJECT, `text` is "", because any JSON object is accepted.

    For TOOL_CALLS, `text` is JSON. For an engine that takes token ids it is a structural tag of XGrammar, and for an
    engine that takes messages it is OpenAI's field `tool_choice`.
    """

    kind: ConstraintKind
    text: str = ""


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The client's choice of tools that a reply may call, or must call.

    - `names`: the names of the tools that can be called, as the model sees them; at least one.
    - `required`: if True, the reply consists of one or more calls and nothing else. If False, it may contain text, and
      need not contain a call.
    - `single`: if True, the reply has at most one call.
    - `field`: the path of the choice in the client's request, for errors.
    """

    names: tuple[str, ...]
    required: bool
    single: bool
    field: str
