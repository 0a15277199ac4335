"""The vendors' computer tools in their dialects: the model gets functions, and the client gets calls in its own
form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.dialects.base import WireCall
from outrider.dialects.gemini import GEMINI_DIALECT
from outrider.errors import RequestError
from outrider.messages import Image, ToolCall
from outrider.tokens.tree.canonical import message_key
from support.responses import FUNCTION, USER, completion, messages_of, parse, read, replied, streamed

PREVIEW = {"type": "computer_use_preview", "display_width": 800, "display_height": 600, "environment": "linux"}
NEWEST = {"type": "computer"}
CLICK = '{"type": "click", "button": "left", "x": 3, "y": 4}'
PNG = "data:image/png;base64,iVBORw0KGgo="
GEMINI = WireCall("POST", "/v1beta/models/m:generateContent")


@pytest.mark.parametrize(("tool", "field"), [(PREVIEW, "action"), (NEWEST, "actions")])
def test_an_action_of_openais_computer_is_the_same_streamed_and_whole_and_comes_back_as_written(
    tool: dict[str, Any], field: str
) -> None:
    request = parse(tools=[tool])
    [function] = [spec["function"] for spec in request.tools]
    assert (function["name"], request.ignored) == ("computer", ())
    assert function["description"].endswith(" The screen has 800x600 pixels.") is (tool is PREVIEW)

    done = completion("", ToolCall("call_1", "computer", CLICK))
    whole = replied(request, done)
    [item] = whole["output"]
    action = json.loads(CLICK)
    assert (item["type"], item["call_id"], item["pending_safety_checks"]) == ("computer_call", "call_1", [])
    assert item[field] == (action if field == "action" else [action])
    assert whole["tools"] == [tool]
    events = streamed(request, done)
    assert [event["type"] for event in events[2:-1]] == ["response.output_item.added", "response.output_item.done"]
    assert events[-1]["response"]["output"] == [item]

    # Clients that validate the item send it back with null for every field that it lacks.
    other = {"action": "actions", "actions": "action"}[field]
    filled = {**item, other: None, field: json.loads(json.dumps(item[field]))}
    for each in [filled[field]] if field == "action" else filled[field]:
        each["keys"] = None
    screen = {"type": "computer_call_output", "call_id": "call_1", "output": {"type": "input_image", "image_url": PNG}}
    _, reply, result = messages_of(parse(tools=[tool], input=[USER, filled, screen]))
    assert message_key(reply) == message_key(done.reply)
    assert (result.tool_call_id, [type(part) for part in result.parts]) == ("call_1", [Image])


@pytest.mark.parametrize(
    "arguments",
    [
        '{"type": "click", "x": 3',
        '{"type": "click", "button": "left", "x": 3.5, "y": 4}',
        '{"type": "move", "x": 3, "y": 4, "keys": null}',
        '{"type": "hack"}',
        "[]",
        "",
        "[" * 100_000,
    ],
)
def test_arguments_that_are_no_action_reach_the_client_as_a_function_call(arguments: str) -> None:
    request = parse(tools=[PREVIEW])
    [item] = replied(request, completion("", ToolCall("call_1", "computer", arguments)))["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "computer", arguments)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "computer_use_preview"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "computer_use_preview"}]},
    ],
)
def test_openais_computer_can_be_chosen(choice: dict[str, Any]) -> None:
    chosen = parse(tools=[PREVIEW, FUNCTION], tool_choice=choice).tool_choice
    assert chosen is not None
    assert (list(chosen.names or ()), chosen.required) == (["computer"], True)
    with pytest.raises(RequestError):
        parse(tools=[FUNCTION], tool_choice=choice)


@pytest.mark.parametrize(
    ("field", "item"),
    [
        ("call_id", {"type": "computer_call"}),
        ("action", {"type": "computer_call", "call_id": "c"}),
        ("actions", {"type": "computer_call", "call_id": "c", "actions": [{}, {}]}),
        ("output", {"type": "computer_call_output", "call_id": "c"}),
        ("output.image_url", {"type": "computer_call_output", "call_id": "c", "output": {"file_id": "f"}}),
    ],
)
def test_a_wrong_item_of_a_computer_is_named(field: str, item: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        read(USER, item)
    assert caught.value.field == f"input[1].{field}"


def test_a_function_named_computer_beside_openais_computer_is_refused() -> None:
    with pytest.raises(RequestError):
        parse(tools=[PREVIEW, {"type": "function", "name": "computer"}])


def test_googles_computer_is_its_functions_but_the_excluded_ones() -> None:
    computer = {"environment": "ENVIRONMENT_BROWSER", "excludedPredefinedFunctions": ["navigate", "search"]}
    body = {"contents": [{"role": "user", "parts": [{"text": "x"}]}], "tools": [{"computerUse": computer}]}
    request = GEMINI_DIALECT.parse(GEMINI, json.dumps(body).encode(), {})
    names = [spec["function"]["name"] for spec in request.tools]
    assert {"click_at", "type_text_at", "scroll_at", "drag_and_drop"} < set(names)
    assert not {"navigate", "search"} & set(names)
    assert request.ignored == ()
