"""The required form of a reply, and the tools that a reply may or must call. In clients, the required form has names
such as "structured output", "guided decoding" or "response format".

Only the engine can tell whether a regular expression or a grammar compiles. Invariants: a constraint's `text` has at
most MAX_CONSTRAINT characters; the text of a JSON schema is valid JSON.
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
    # A grammar in the syntax of the engine's grammar library: Lark or GBNF.
    GRAMMAR = "grammar"
    # The reply calls tools. Clients do not request this kind directly; it is made from a `ToolChoice`.
    TOOL_CALLS = "tool_calls"


class Constraint(msgspec.Struct, frozen=True):
    """The required form of a reply. The meaning of `text` depends on the kind:

    - JSON_OBJECT: "", because any JSON object is accepted.
    - JSON_SCHEMA: the schema as JSON.
    - REGEX, GRAMMAR: the regular expression or the grammar.
    - TOOL_CALLS: JSON. An engine that takes token ids gets a structural tag of XGrammar. An engine that takes messages
      gets the value of OpenAI's field `tool_choice`.
    """

    kind: ConstraintKind
    text: str = ""


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that a reply may or must call, as chosen by the client.

    - `names`: the names of these tools, as the model sees them; at least one.
    - `required`: if True, the reply consists of one or more calls and nothing else. If False, the reply may contain
      text, and may have no call.
    - `single`: if True, the reply has at most one call.
    - `field`: the path of the choice in the client's request, for errors.
    """

    names: tuple[str, ...]
    required: bool
    single: bool
    field: str
