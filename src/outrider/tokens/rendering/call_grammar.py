"""Makes the grammar that forces a reply to consist of tool calls, in the model family's own format.

The grammar is a structural tag of XGrammar, which vLLM and SGLang accept. The texts around each call are constant, and
the arguments follow the tool's JSON schema. Invariant: `Renderer.parse` reads every reply that the grammar allows as
calls of the chosen tools (tests/tokens/test_call_grammar.py compares each format with the family's own rendering).
Parts of a schema that XGrammar ignores are not enforced.

Source: XGrammar documentation, "Structural Tag"; formats of XGrammar 0.2.0 to 0.2.9.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from outrider.constraint import MAX_CONSTRAINT, Constraint, ConstraintKind, ToolChoice
from outrider.errors import RequestError
from outrider.messages import ToolSpec
from outrider.tokens.rendering.renderer import MARKUP


class CallForm(msgspec.Struct, frozen=True):
    """The constant texts around the tool calls of one model family.

    begin, end: the texts around one call; NAME in `begin` stands for the tool's name.
    before, after: the texts around all calls of a reply.
    between: the text between two calls.
    style: the format of the arguments, as XGrammar names it.
    number: if not empty, `begin` is followed by the number of the call and then by this text.
    """

    begin: str
    end: str
    before: str = ""
    between: str = ""
    after: str = ""
    style: str = "json"
    number: str = ""


_HERMES = CallForm('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n")
_QWEN_XML = CallForm(
    "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", between="\n", style="qwen_xml_parameter"
)
_GLM = CallForm("<tool_call>NAME", "</tool_call>", style="glm_xml")
_MINIMAX = CallForm(
    '<invoke name="NAME">\n',
    "</invoke>",
    before="<minimax:tool_call>\n",
    between="\n",
    after="\n</minimax:tool_call>",
    style="minimax_xml",
)
_KIMI = CallForm(
    "<|tool_call_begin|>functions.NAME:",
    "<|tool_call_end|>",
    before="<|tool_calls_section_begin|>",
    after="<|tool_calls_section_end|>",
    number="<|tool_call_argument_begin|>",
)
_DEEPSEEK = CallForm(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",  # noqa: RUF001 - the model's own characters
    "\n```<｜tool▁call▁end｜>",  # noqa: RUF001
    before="<｜tool▁calls▁begin｜>",  # noqa: RUF001
    after="<｜tool▁calls▁end｜>",  # noqa: RUF001
)

FORMS: dict[str, CallForm] = {
    "qwen3": _HERMES,
    "qwen3-vl": _HERMES,
    "prime-qwen3": _QWEN_XML,
    "qwen3.5": _QWEN_XML,
    "qwen3.6": _QWEN_XML,
    "qwen3.8": _QWEN_XML,
    "nemotron-3": _QWEN_XML,
    "glm-4.5": msgspec.structs.replace(_GLM, begin="<tool_call>NAME\n", between="\n"),
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.3": _GLM,
    "minimax-m2": _MINIMAX,
    "kimi-k2": _KIMI,
    "kimi-k2.5": _KIMI,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
}
"""The format in which each family writes its tool calls. A family is listed only if tests show that its parser can read
the format."""

# Tool names that can be forced. Other characters could end the constant text around the name, or split the name in two
# (Kimi writes `functions.NAME:0`).
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_ANNOTATIONS = frozenset({"title", "description", "examples", "default", "$comment", "$schema"})
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else"})
_NOT_OBJECTS = frozenset({"$ref", "anyOf", "oneOf", "allOf", "enum", "const"})


def call_constraint(family: str, tools: Sequence[ToolSpec], choice: ToolChoice) -> Constraint:
    """Return the constraint that makes a reply follow `choice`. `tools` are in OpenAI's format and include the tools of
    the choice.

    Raises RequestError, with the choice's request field, in these cases:

    - The family is not in FORMS.
    - The family's format cannot express a tool's name or schema.
    - The grammar has more than MAX_CONSTRAINT characters.
    """
    form = FORMS.get(family)
    if form is None:
        raise RequestError(
            f"{choice.field}: the form of tool calls of the family {family!r} is not known as a grammar, so no tool can"
            " be forced",
            field=choice.field,
            hint=f"send the choice 'auto'; families whose tools can be forced: {', '.join(sorted(FORMS))}",
        )
    functions = {spec["function"]["name"]: spec["function"] for spec in tools}
    tags = [_tag(form, name, functions[name], choice.field) for name in choice.names]
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.between,
        "at_least_one": True,
        "stop_after_first": choice.single,
    }
    if choice.required:
        grammar = _sequence(_constant(form.before), calls, _constant(form.after))
    else:
        grammar = {
            "type": "triggered_tags",
            # The model may write any text before the marker that opens a tool call. After the marker, the model can
            # only write a call of a chosen tool.
            "triggers": [MARKUP[family].call_open],
            "tags": [{"type": "tag", "begin": form.before, "content": calls, "end": form.after}]
            if form.before
            else tags,
            "at_least_one": False,
            "stop_after_first": choice.single,
        }
    text = msgspec.json.encode({"type": "structural_tag", "format": grammar}).decode()
    if len(text) > MAX_CONSTRAINT:
        raise RequestError(
            f"{choice.field}: the grammar of the tools that may be called has {len(text)} characters, more than the"
            f" {MAX_CONSTRAINT} that a grammar may have",
            field=choice.field,
            hint="force a tool by its name, or send fewer tools",
        )
    return Constraint(ConstraintKind.TOOL_CALLS, text)


def openai_choice(choice: ToolChoice, tools: Sequence[ToolSpec]) -> Constraint:
    """Return the constraint for an engine that takes messages instead of ids: a value of the field `tool_choice` of
    Chat Completions. Raises RequestError if this field cannot express the choice."""
    every = {spec["function"]["name"] for spec in tools} <= set(choice.names)
    value: Any
    if choice.required and every and not choice.single:
        value = "required"
    elif choice.required and len(choice.names) == 1:
        value = {"type": "function", "function": {"name": choice.names[0]}}
    elif choice.single:
        raise RequestError(
            f"{choice.field}: the session's engine takes messages, and cannot be held to one call of several tools",
            field=choice.field,
            hint="allow parallel calls, or force one tool by its name",
        )
    else:
        allowed = [{"type": "function", "function": {"name": name}} for name in choice.names]
        mode = "required" if choice.required else "auto"
        value = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    return Constraint(ConstraintKind.TOOL_CALLS, msgspec.json.encode(value).decode())


def _tag(form: CallForm, name: str, function: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return the structural tag (XGrammar) that matches one call of the tool `name`."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{field}: the tool {name[:128]!r} cannot be forced: its name has other characters than letters, digits,"
            " '_' and '-', or more than 128",
            field=field,
            hint="rename the tool, or send the choice 'auto'",
        )
    schema = _arguments_schema(name, function.get("parameters"), field)
    if form.style == "qwen_xml_parameter":
        content: dict[str, Any] = {"type": form.style, "json_schema": schema}
    elif form.style == "json":
        content = {"type": "json_schema", "json_schema": schema}
    else:
        content = {"type": "json_schema", "style": form.style, "json_schema": schema}
    if form.number:
        content = _sequence({"type": "regex", "pattern": "[0-9]{1,3}"}, _constant(form.number), content)
    return {"type": "tag", "begin": form.begin.replace("NAME", name), "content": content, "end": form.end}


def _arguments_schema(name: str, parameters: Any, field: str) -> dict[str, Any]:
    """Return the schema of a tool's arguments, with the schema's annotations removed. For a tool without parameters,
    return the schema of an empty object. Arguments are always an object, so a schema that may allow other values raises
    RequestError."""
    schema = parameters or {"type": "object", "properties": {}}
    if isinstance(schema, dict) and "type" not in schema and not _NOT_OBJECTS & schema.keys():
        schema = {"type": "object", **schema}
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise RequestError(
            f"{field}: the tool {name!r} cannot be forced: its parameters are no schema of the type 'object'",
            field=field,
            hint="give the tool's parameters the type 'object', or send the choice 'auto'",
        )
    plain: dict[str, Any] = _without_annotations(schema)
    return plain


def _without_annotations(schema: Any) -> Any:
    """Return a JSON schema without the keys that only describe a value, such as `title`. Values of `enum` and `const`,
    and names of properties, are not changed."""
    if not isinstance(schema, dict):
        return schema
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            plain[key] = {name: _without_annotations(inner) for name, inner in value.items()}
        elif (key in _SCHEMA_LISTS or key in _SCHEMAS) and isinstance(value, list):
            plain[key] = [_without_annotations(inner) for inner in value]
        elif key in _SCHEMAS:
            plain[key] = _without_annotations(value)
        else:
            plain[key] = value
    return plain


def _constant(text: str) -> dict[str, Any] | None:
    return {"type": "const_string", "value": text} if text else None


def _sequence(*parts: dict[str, Any] | None) -> dict[str, Any]:
    """Return the XGrammar format for several formats in a row. Parts that are None are left out."""
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else {"type": "sequence", "elements": present}
