"""Tools of Responses requests: their form for the model, the choice of tools, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.dialects.reading import MAX_DEPTH
from outrider.errors import RequestError
from support.responses import CUSTOM, FUNCTION, NAMESPACE, USER, completion, parse, replied

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}


def told(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    return [tool["function"] for tool in parse(tools=list(tools)).tools]


def nested(depth: int) -> dict[str, Any]:
    """An object that nests `depth` deep."""
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def test_a_function_is_nested_with_its_keys_in_order_but_those_for_servers() -> None:
    spec = {"strict": False, "name": "f", "type": "function", "parameters": {"z": 1, "a": 2}, "description": "d"}
    (tool,) = parse(tools=[spec]).tools
    wanted = '{"name": "f", "parameters": {"z": 1, "a": 2}, "description": "d"}'
    assert json.dumps(tool) == f'{{"type": "function", "function": {wanted}}}'


def test_a_custom_tool_is_a_function_of_one_string() -> None:
    (free,) = told(CUSTOM)
    assert (free["name"], free["description"]) == ("patch", "Apply a patch.")
    assert free["parameters"]["properties"] == {"input": {"type": "string"}}
    assert free["parameters"]["required"] == ["input"]
    assert told({**CUSTOM, "format": {"type": "text"}}) == [free]
    (bound,) = told({**CUSTOM, "format": GRAMMAR})
    said = bound["parameters"]["properties"]["input"]["description"]
    assert said == "Text that this lark grammar accepts:\nstart: /x+/"


def test_the_tools_of_a_namespace_carry_its_name_and_the_first_what_it_says() -> None:
    read, write = told(NAMESPACE)
    assert (read["name"], read["description"]) == ("fs__read", "Files.")
    assert (write["name"], write["description"]) == ("fs__write", "")
    (whole,) = told({**NAMESPACE, "tools": [{"type": "function", "name": "f", "description": "Own."}]})
    assert whole["description"] == "Files.\n\nOwn."


def test_additional_tools_follow_the_requests_own() -> None:
    riding = {"type": "additional_tools", "role": "developer", "tools": [NAMESPACE]}
    request = parse(tools=[FUNCTION], input=[riding, USER])
    assert [tool["function"]["name"] for tool in request.tools] == ["bash", "fs__read", "fs__write"]
    assert len(request.messages) == 1
    assert request.tools_raw != parse(tools=[FUNCTION], input=[USER]).tools_raw


def test_a_tool_that_is_told_again_counts_the_last_time() -> None:
    (tool,) = told(FUNCTION, {**FUNCTION, "description": "Better."})
    assert tool["description"] == "Better."


@pytest.mark.parametrize("kind", ["web_search", "mcp", "code_interpreter", "local_shell", "new"])
def test_a_tool_that_openai_would_run_is_not_told_and_not_in_force(kind: str) -> None:
    request = parse(tools=[FUNCTION, {"type": kind}])
    assert request.tools == parse(tools=[FUNCTION]).tools
    assert replied(request, completion("x"))["tools"] == [FUNCTION]
    assert request.ignored == (f"tools.{kind}",)


def test_tools_of_which_none_is_left_are_none() -> None:
    request = parse(tools=[{"type": "web_search"}])
    assert (request.tools, request.tools_raw) == ((), b"")


@pytest.mark.parametrize("choice", ["auto", "required", None, {"type": "function", "name": "bash"}])
def test_tool_choice_keeps_the_tools(choice: Any) -> None:
    assert len(parse(tools=[FUNCTION], tool_choice=choice).tools) == 1


@pytest.mark.parametrize("name", ["write", "fs__write"])
def test_a_tool_in_a_namespace_can_be_chosen_by_either_name(name: str) -> None:
    assert len(parse(tools=[NAMESPACE], tool_choice={"type": "custom", "name": name}).tools) == 2


def test_allowed_tools_are_all_told() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "bash"}]}
    assert len(parse(tools=[FUNCTION, CUSTOM], tool_choice=choice).tools) == 2


def test_tool_choice_none_takes_the_tools_away_but_not_from_the_response() -> None:
    request = parse(tools=[FUNCTION], tool_choice="none")
    assert (request.tools, request.tools_raw) == ((), b"")
    assert replied(request, completion("x"))["tools"] == [FUNCTION]


@pytest.mark.parametrize("fields", [{"tools": None}, {"tools": []}, {}])
def test_no_tools(fields: dict[str, Any]) -> None:
    assert parse(**fields).tools == ()


WRONG = [
    ("tools", {}),
    ("tools[0]", 5),
    ("tools[0].type", {"name": "f"}),
    ("tools[0].type", {"type": ["function"]}),
    ("tools[0].name", {"type": "function"}),
    ("tools[0].name", {"type": "function", "function": {"name": "f"}}),
    ("tools[0].name", {"type": "custom", "name": ""}),
    ("tools[0].description", {"type": "function", "name": "f", "description": 1}),
    ("tools[0].parameters", {"type": "function", "name": "f", "parameters": []}),
    ("tools[0].format.type", {"type": "custom", "name": "f", "format": {"type": "regex"}}),
    ("tools[0].format.definition", {"type": "custom", "name": "f", "format": {**GRAMMAR, "definition": 5}}),
    ("tools[0].tools", {"type": "namespace", "name": "n"}),
    ("tools[0].name", {"type": "namespace", "tools": []}),
    ("tools[0].tools[0]", {"type": "namespace", "name": "n", "tools": [5]}),
    ("tools[0].tools[0].type", {"type": "namespace", "name": "n", "tools": [NAMESPACE]}),
    ("tools[0].display_width", {"type": "computer_use_preview", "display_width": "9"}),
    ("tools[0]", {"type": "function", "name": "f", "parameters": nested(MAX_DEPTH)}),
]


@pytest.mark.parametrize(("field", "tool"), WRONG, ids=[f"{n}-{field}" for n, (field, _) in enumerate(WRONG)])
def test_a_wrong_tool_is_named(field: str, tool: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse(tools=tool if field == "tools" else [tool])
    assert caught.value.field == field


def test_two_tools_of_one_name_are_refused() -> None:
    flat = {"type": "function", "name": "fs__read"}
    with pytest.raises(RequestError) as caught:
        parse(tools=[flat, NAMESPACE])
    assert caught.value.field == "tools[1]"


def test_a_wrong_tool_among_the_items_is_named_there() -> None:
    with pytest.raises(RequestError) as caught:
        parse(input=[USER, {"type": "additional_tools", "tools": [{"type": "function"}]}])
    assert caught.value.field == "input[1].tools[0].name"
