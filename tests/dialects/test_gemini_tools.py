"""Google's declarations in OpenAI form."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.dialects.gemini.tools import from_google_schema
from support.gemini import read, text, user

HI = user(text("hi"))


def test_every_entry_s_functions_in_order() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}, "$schema": "x"}
    request = read(
        HI,
        tools=[
            {"functionDeclarations": [{"name": "one", "description": "First.", "parametersJsonSchema": schema}]},
            {
                "functionDeclarations": [
                    {"name": "two", "parameters": {"type": "OBJECT"}, "response": {"type": "STRING"}}
                ]
            },
            {"functionDeclarations": [{"name": "three", "behavior": "BLOCKING"}], "googleSearch": None},
        ],
    )
    assert list(request.tools) == [
        {"type": "function", "function": {"name": "one", "description": "First.", "parameters": schema}},
        {"type": "function", "function": {"name": "two", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "three", "parameters": {"type": "object", "properties": {}}}},
    ]
    assert list(request.tools[0]["function"]["parameters"]["properties"]) == ["b", "a"]
    assert request.tools_raw


@pytest.mark.parametrize("mode", ["NONE", "none"])
def test_no_tools_when_the_model_is_to_call_none(mode: str) -> None:
    config = {"functionCallingConfig": {"mode": mode}}
    request = read(HI, tools=[{"functionDeclarations": [{"name": "one"}]}], toolConfig=config)
    assert (request.tools, request.tools_raw) == ((), b"")


@pytest.mark.parametrize(
    ("google", "expected"),
    [
        ({"type": "STRING", "format": "enum", "enum": ["a"]}, {"type": "string", "enum": ["a"]}),
        ({"type": "INTEGER", "format": "int32"}, {"type": "integer", "format": "int32"}),
        ({"type": "NUMBER", "nullable": True}, {"type": ["number", "null"]}),
        ({"type": "STRING", "nullable": False}, {"type": "string"}),
        ({"type": "STRING", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"any_of": [{"type": "STRING"}], "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"type": "TYPE_UNSPECIFIED", "title": "T"}, {"title": "T"}),
        (
            {"type": "ARRAY", "items": {"type": "STRING"}, "min_items": "1"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
        ),
        (
            {
                "type": "OBJECT",
                "properties": {"type": {"type": "STRING"}, "max_items": {"type": "BOOLEAN"}},
                "propertyOrdering": ["type"],
            },
            {"type": "object", "properties": {"type": {"type": "string"}, "max_items": {"type": "boolean"}}},
        ),
        (
            {"type": "OBJECT", "additionalProperties": False, "x_own": 1},
            {"type": "object", "additionalProperties": False, "x_own": 1},
        ),
        ({"type": ["string", "null"], "default": "A"}, {"type": ["string", "null"], "default": "A"}),
    ],
)
def test_a_google_schema_as_from_google_schema(google: Any, expected: Any) -> None:
    converted = from_google_schema(google)
    assert converted == expected
    assert from_google_schema(converted) == expected
