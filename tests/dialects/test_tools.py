"""Rules about tools that hold in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.dialects import DIALECTS
from outrider.dialects.base import Memory, ModelRequest, WireCall

HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object"}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "m", "messages": [HI]}),
    "messages": ("/v1/messages", {"model": "m", "messages": [HI]}),
    "responses": ("/v1/responses", {"model": "m", "input": [HI]}),
    "gemini": ("/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "hi"}]}]}),
}


def tools(dialect: str, name: str) -> list[dict[str, Any]]:
    match dialect:
        case "chat":
            return [{"type": "function", "function": {"name": name, "parameters": SCHEMA}}]
        case "messages":
            return [{"name": name, "input_schema": SCHEMA}]
        case "responses":
            return [{"type": "function", "name": name, "parameters": SCHEMA}]
        case _:
            return [{"functionDeclarations": [{"name": name, "parametersJsonSchema": SCHEMA}]}]


def parse(name: str, memory: Memory, **fields: Any) -> ModelRequest:
    path, body = BODIES[name]
    dialect = next(one for one in DIALECTS if one.name == name)
    return dialect.parse(WireCall("POST", path), json.dumps({**body, **fields}).encode(), memory)


@pytest.mark.parametrize("dialect", BODIES)
def test_tools_are_read_again_only_when_they_change(dialect: str) -> None:
    memory: Memory = {}
    first = parse(dialect, memory, tools=tools(dialect, "f"))
    same = parse(dialect, memory, tools=tools(dialect, "f"), unknown=1)
    other = parse(dialect, memory, tools=tools(dialect, "g"))
    assert same.tools[0] is first.tools[0]
    assert [spec["function"] for spec in other.tools] == [{"name": "g", "parameters": SCHEMA}]


@pytest.mark.parametrize("dialect", BODIES)
def test_tools_that_are_not_sent_any_more_are_gone(dialect: str) -> None:
    memory: Memory = {}
    parse(dialect, memory, tools=tools(dialect, "f"))
    request = parse(dialect, memory)
    assert (request.tools, request.tools_raw) == ((), b"")


@pytest.mark.parametrize("dialect", BODIES)
def test_every_dialect_tells_the_same_function(dialect: str) -> None:
    request = parse(dialect, {}, tools=tools(dialect, "f"))
    assert request.tools == ({"type": "function", "function": {"name": "f", "parameters": SCHEMA}},)
