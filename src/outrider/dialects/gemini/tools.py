"""Google's tool declarations in OpenAI form.

It knows no message. Invariant: what the model is told of a tool is what the client declared. `parametersJsonSchema` is
handed on as it is; `parameters`, Google's own dialect of OpenAPI, becomes JSON schema: types in lower case, `nullable`
as a type of its own, counts as numbers, and without what only Google's servers read (`propertyOrdering`, the format
`enum`, unspecified types).

Tools that Google would run itself (search, code execution, URL context) are not shown to the model, and noted: nothing
here can run them. A choice of functions is a wish, but for NONE, which hides them.

Source: Google AI API reference, "Tool", "FunctionDeclaration", "Schema", "FunctionCallingConfig".
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from outrider.dialects.field_policy import TOOL
from outrider.dialects.gemini.fields import Fields, absent, camel, decode_object, fields, items
from outrider.dialects.json import depth_exceeds, refuse, shown
from outrider.messages import ToolSpec

MAX_TOOL_DEPTH = 64
"""How deep a tool's schema may nest: chat templates print it recursively."""

_DECLARATIONS = "functionDeclarations"
_MODES = frozenset({"MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"})
_WISHES = frozenset({"ANY", "VALIDATED"})

_GOOGLE_ONLY = frozenset({"propertyOrdering", "nullable"})
_SCHEMAS_BY_NAME = frozenset({"properties", "$defs", "defs", "definitions", "patternProperties"})
_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalProperties", "not"})
_COUNTS = frozenset({"minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"})
_SPELLED_TWICE = _GOOGLE_ONLY | _SCHEMA_LISTS | _SCHEMAS | _COUNTS


class _Declaration(msgspec.Struct, rename="camel"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: Any = None


class _Calling(msgspec.Struct, rename="camel"):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


_DECLARATION = msgspec.json.Decoder(_Declaration)
_CALLING = msgspec.json.Decoder(_Calling)


class Tools(msgspec.Struct, frozen=True):
    """The tools the model is told of, the bytes that determine them, and what of tools and choice has no effect."""

    specs: tuple[ToolSpec, ...] = ()
    raw: bytes = b""
    notes: tuple[str, ...] = ()


def asked_tools(body: Fields) -> Tools:
    """Raises RequestError."""
    raw = bytes(body.get("tools", b""))
    entries = [fields(item, f"tools[{index}]") for index, item in enumerate(items(raw, "tools"))]
    specs = [spec for index, entry in enumerate(entries) for spec in _declared(entry, f"tools[{index}]")]
    notes = [TOOL + name for entry in entries for name in entry if name != _DECLARATIONS]
    calling = _calling(body.get("toolConfig", Raw()))
    mode = (calling.mode or "AUTO").upper()
    if mode in _WISHES or calling.allowed_function_names:
        notes.append("toolConfig")
    return Tools((), b"", tuple(notes)) if mode == "NONE" or not specs else Tools(tuple(specs), raw, tuple(notes))


def json_schema(schema: Any) -> Any:
    """Google's Schema as JSON schema; what is already JSON schema stays as it is."""
    if not isinstance(schema, dict):
        return schema
    named = {_schema_key(key): value for key, value in schema.items()}
    converted = {key: _converted(key, value) for key, value in named.items() if key not in _GOOGLE_ONLY}
    if str(named.get("type")).upper() == "TYPE_UNSPECIFIED":
        del converted["type"]
    if named.get("format") == "enum":
        del converted["format"]
    return _with_null(converted) if named.get("nullable") is True else converted


def _declared(tool: Fields, where: str) -> list[ToolSpec]:
    """The functions of one entry of `tools`."""
    at = f"{where}.{_DECLARATIONS}"
    return [_spec(one, f"{at}[{index}]") for index, one in enumerate(items(tool.get(_DECLARATIONS, Raw()), at))]


def _spec(raw: Raw, where: str) -> ToolSpec:
    wire = decode_object(_DECLARATION, raw, where)
    if not wire.name:
        refuse(f"{where}.name", "must not be empty")
    parameters = wire.parameters_json_schema
    name = "parametersJsonSchema"
    if parameters is None:
        name, parameters = "parameters", wire.parameters or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        refuse(f"{where}.{name}", "must be an object")
    if depth_exceeds(parameters, MAX_TOOL_DEPTH):
        refuse(f"{where}.{name}", f"nests more than {MAX_TOOL_DEPTH} levels deep")
    function: dict[str, Any] = {"name": wire.name}
    if wire.description is not None:
        function["description"] = wire.description
    function["parameters"] = parameters if name == "parametersJsonSchema" else json_schema(parameters)
    return {"type": "function", "function": function}


def _converted(key: str, value: Any) -> Any:
    if key == "type":
        return _lower(value)
    if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: json_schema(inner) for name, inner in value.items()}
    if key in _SCHEMA_LISTS and isinstance(value, list):
        return [json_schema(inner) for inner in value]
    if key in _SCHEMAS:
        return [json_schema(inner) for inner in value] if isinstance(value, list) else json_schema(value)
    if key in _COUNTS and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)  # ProtoJSON writes 64-bit integers as strings
    return value


def _schema_key(key: str) -> str:
    """Google's own words in camelCase; any other key as it is."""
    spelled = camel(key)
    return spelled if spelled in _SPELLED_TWICE else key


def _lower(kind: Any) -> Any:
    if isinstance(kind, list):
        return [_lower(inner) for inner in kind]
    return kind.lower() if isinstance(kind, str) else kind


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, or null."""
    kind, choices = schema.get("type"), schema.get("anyOf")
    if isinstance(kind, str) and kind != "null":
        schema["type"] = [kind, "null"]
    elif isinstance(choices, list) and {"type": "null"} not in choices:
        schema["anyOf"] = [*choices, {"type": "null"}]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema


def _calling(tool_config: Raw) -> _Calling:
    calling = Raw() if absent(tool_config) else fields(tool_config, "toolConfig").get("functionCallingConfig", Raw())
    if absent(calling):
        return _Calling()
    at = "toolConfig.functionCallingConfig"
    read = decode_object(_CALLING, calling, at)
    if read.mode is not None and read.mode.upper() not in _MODES:
        refuse(f"{at}.mode", f"unknown mode {shown(read.mode)}; known: {', '.join(sorted(_MODES))}")
    return read
