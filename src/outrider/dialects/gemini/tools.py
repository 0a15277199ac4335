"""Converts Google's tool declarations to OpenAI's form.

Invariant: the model sees the tools as the client declared them. `parametersJsonSchema` is passed on unchanged.
`parameters` is written in Google's dialect of OpenAPI and is converted to JSON schema: types become lower case,
`nullable` becomes the type `null`, and counts written as strings become numbers. What only Google's servers use is
dropped: the key `propertyOrdering`, the format `enum`, and unspecified types.

Tools that Google's servers would run (search, code execution, URL context) are not passed to the model; their names are
added to the request's notes. The tool `computerUse` becomes the functions that Google documents, because clients run
their calls.

`functionCallingConfig.mode` has these effects: NONE hides all tools. ANY, or a list of allowed functions, restricts the
reply. VALIDATED without a list has no effect and is added to the notes.

Source: Google AI API reference, "Tool", "FunctionDeclaration", "Schema", "FunctionCallingConfig".
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from outrider.computer_tools import google_tools
from outrider.constraint import ToolChoice
from outrider.dialects.base import Memory
from outrider.dialects.field_policy import camel_case
from outrider.dialects.gemini.proto_json import Fields, decode_object, fields, items
from outrider.dialects.reading import (
    TOOL,
    DeclaredTools,
    apply_rules,
    cached_tools,
    check_depth,
    is_absent,
    quoted,
    refuse,
    tool_choice,
)
from outrider.messages import ToolSpec

_DECLARATIONS = "functionDeclarations"
_COMPUTER = "computerUse"
_MODES = frozenset({"MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"})

_GOOGLE_ONLY = frozenset({"propertyOrdering", "nullable"})
_SCHEMAS_BY_NAME = frozenset({"properties", "$defs", "defs", "definitions", "patternProperties"})
_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalProperties", "not"})
_COUNTS = frozenset({"minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"})
_TWO_SPELLINGS = _GOOGLE_ONLY | _SCHEMA_LISTS | _SCHEMAS | _COUNTS


class _Declaration(msgspec.Struct, rename="camel"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: Any = None


class _Calling(msgspec.Struct, rename="camel"):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class _ComputerUse(msgspec.Struct, rename="camel"):
    """The declaration of the tool `computerUse`. The field `environment` is not read, because the tool's functions are
    the same in all environments."""

    excluded_predefined_functions: list[str] | None = None


_DECLARATION = msgspec.json.Decoder(_Declaration)
_COMPUTER_USE = msgspec.json.Decoder(_ComputerUse)
_CALLING_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(_Calling))
_CALLING = msgspec.json.Decoder(_Calling)


class ChosenTools(msgspec.Struct, frozen=True):
    """The tools that the model sees, and `choice`, which restricts the reply's tool calls. `choice` is None for no
    restriction."""

    tools: DeclaredTools
    choice: ToolChoice | None = None


def read_tools(body: Fields, memory: Memory, notes: list[str]) -> ChosenTools:
    """Return the declared tools and the choice of tools. There are no tools if the mode is NONE. Tools and choices
    without effect are added to `notes`. Raises RequestError for an invalid tool, mode or allowed function."""
    raw = bytes(body.get("tools", b""))
    tools = cached_tools(memory, raw, lambda: _read_tools(raw))
    notes += [TOOL + name for name in tools.hosted]
    config = body.get("toolConfig", Raw())
    configs = {} if is_absent(config) else fields(config, "toolConfig")
    apply_rules(configs, {}, ("functionCallingConfig",), "toolConfig.", notes)
    calling, at = _Calling(), "toolConfig.functionCallingConfig"
    if (sent := configs.get("functionCallingConfig")) is not None:
        calling = decode_object(_CALLING, sent, at)
        apply_rules(fields(sent, at), {}, _CALLING_FIELDS, f"{at}.", notes)
    if calling.mode is not None and calling.mode.upper() not in _MODES:
        refuse(f"{at}.mode", f"unknown mode {quoted(calling.mode)}; known: {', '.join(sorted(_MODES))}")
    mode = (calling.mode or "AUTO").upper()
    if mode == "NONE":
        return ChosenTools(DeclaredTools())
    allowed = calling.allowed_function_names or None
    known = {spec["function"]["name"] for spec in tools.specs}
    for index, name in enumerate(allowed or []):
        if name not in known:
            refuse(f"{at}.allowedFunctionNames[{index}]", "must be the name of one of the declared functions")
    choice = None
    if mode == "ANY" or allowed:
        choice = tool_choice(allowed, tools.specs, required=mode == "ANY", field=at)
    elif mode == "VALIDATED":
        notes.append("toolConfig")
    return ChosenTools(tools if tools.specs else DeclaredTools(), choice)


def _read_tools(raw: bytes) -> DeclaredTools:
    specs: list[ToolSpec] = []
    hosted: list[str] = []
    for index, item in enumerate(items(raw, "tools")):
        entry, at = fields(item, f"tools[{index}]"), f"tools[{index}].{_DECLARATIONS}"
        hosted += [name for name in entry if name not in (_DECLARATIONS, _COMPUTER)]
        if not is_absent(computer := entry.get(_COMPUTER, Raw())):
            wire_computer = decode_object(_COMPUTER_USE, computer, f"tools[{index}].{_COMPUTER}")
            specs += google_tools(wire_computer.excluded_predefined_functions or ())
        for number, declaration in enumerate(items(entry.get(_DECLARATIONS, Raw()), at)):
            where = f"{at}[{number}]"
            wire = decode_object(_DECLARATION, declaration, where)
            if not wire.name:
                refuse(f"{where}.name", "must not be empty")
            key, parameters = "parametersJsonSchema", wire.parameters_json_schema
            if parameters is None:
                key, parameters = "parameters", wire.parameters or {"type": "object", "properties": {}}
            if not isinstance(parameters, dict):
                refuse(f"{where}.{key}", "must be an object")
            check_depth(parameters, f"{where}.{key}")
            described = {} if wire.description is None else {"description": wire.description}
            schema = from_google_schema(parameters) if key == "parameters" else parameters
            function = {"name": wire.name, **described, "parameters": schema}
            specs.append({"type": "function", "function": function})
    return DeclaredTools(tuple(specs), raw, tuple(hosted))


def from_google_schema(schema: Any) -> Any:
    """Convert a schema in Google's form to JSON schema. JSON schema is returned unchanged."""
    if not isinstance(schema, dict):
        return schema
    named: dict[str, Any] = {}
    for key, value in schema.items():
        spelled = camel_case(key)
        named[spelled if spelled in _TWO_SPELLINGS else key] = value  # keys of JSON schema keep their underscores
    converted = {key: _converted(key, value) for key, value in named.items() if key not in _GOOGLE_ONLY}
    if str(named.get("type")).upper() == "TYPE_UNSPECIFIED":
        del converted["type"]
    if named.get("format") == "enum":
        del converted["format"]
    if named.get("nullable") is True:
        kind, choices, values = converted.get("type"), converted.get("anyOf"), converted.get("enum")
        if isinstance(kind, str) and kind != "null":
            converted["type"] = [kind, "null"]
        elif isinstance(choices, list) and {"type": "null"} not in choices:
            converted["anyOf"] = [*choices, {"type": "null"}]
        if isinstance(values, list) and None not in values:
            converted["enum"] = [*values, None]
    return converted


def _converted(key: str, value: Any) -> Any:
    """Convert the value of `key` in Google's form of a schema to JSON schema."""
    if key == "type":
        return _lower(value)
    if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: from_google_schema(inner) for name, inner in value.items()}
    if key in _SCHEMA_LISTS and isinstance(value, list):
        return [from_google_schema(inner) for inner in value]
    if key in _SCHEMAS:
        return [from_google_schema(inner) for inner in value] if isinstance(value, list) else from_google_schema(value)
    if key in _COUNTS and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)  # ProtoJSON writes 64-bit integers as strings
    return value


def _lower(kind: Any) -> Any:
    if isinstance(kind, list):
        return [_lower(inner) for inner in kind]
    return kind.lower() if isinstance(kind, str) else kind
