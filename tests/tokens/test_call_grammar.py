"""Grammars of forced tool calls: each family's own parser reads the calls, and the family renders calls in the same
form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.constraint import MAX_CONSTRAINT, ConstraintKind, ToolChoice
from outrider.errors import RequestError
from outrider.messages import Message
from outrider.tokens.rendering.call_grammar import FORMS, call_constraint, openai_choice
from outrider.tokens.rendering.renderer import MARKUP
from outrider.tokens.rendering.reply_stream import ReplyStream
from support.call_grammar import Call, marked_renderer, rendering, written

PARAMETERS = {
    "type": "object",
    "description": "dropped",
    "properties": {"command": {"type": "string", "title": "dropped"}, "count": {"type": "integer"}},
    "required": ["command"],
}


def tool(name: str, parameters: Any = PARAMETERS) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


TOOLS = (tool("bash"), tool("look_up"), tool("other"))
ONE: list[Call] = [("bash", {"command": 'echo "<a>" & é', "count": 3})]
TWO: list[Call] = [*ONE, ("look_up", {"command": "x\ny"})]


def choice(*names: str, required: bool = True, single: bool = False) -> ToolChoice:
    return ToolChoice(names=names, required=required, single=single, field="tool_choice")


def read(family: str, text: str, *, respelled: bool = False) -> Message:
    """Return the reply with this sampled text, after a prompt in which reasoning is closed."""
    renderer = marked_renderer(family)
    tokenizer = renderer.tokenizer
    prompt = tokenizer.encode("<think>\n\n</think>\n\n")
    stream = ReplyStream(renderer, prompt_tail=prompt, tools=TOOLS, stop=(), call_id="x", held_to_calls=True)
    ids = [token for letter in text for token in tokenizer.encode(letter)] if respelled else tokenizer.encode(text)
    shown = "".join(stream.push([token]).text for token in (*ids, renderer.stop_ids[0]))
    done = stream.finish()
    assert (done.malformed, shown, done.rest.text) == (0, "", "")
    return done.message


def calls_of(message: Message) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def test_every_streamed_family_has_a_form() -> None:
    assert FORMS.keys() == MARKUP.keys()


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("calls", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("family", FORMS)
def test_a_familys_parser_reads_the_grammars_calls(family: str, calls: list[Call], required: bool) -> None:
    constraint = call_constraint(family, TOOLS, choice("bash", "look_up", required=required))
    assert constraint.kind is ConstraintKind.TOOL_CALLS
    message = read(family, written(constraint.text, calls))
    assert (calls_of(message), message.content, message.reasoning) == (calls, "", None)


@pytest.mark.parametrize("family", FORMS)
def test_markers_in_several_tokens_are_read_too(family: str) -> None:
    text = written(call_constraint(family, TOOLS, choice("bash")).text, ONE)
    assert calls_of(read(family, text, respelled=True)) == ONE


@pytest.mark.parametrize("family", FORMS)
def test_the_form_is_the_familys_own(family: str) -> None:
    """The texts around the arguments equal those in the family's rendering of the same calls."""
    rendered = rendering(family, TWO, TOOLS)
    form = FORMS[family]
    for name, _ in TWO:
        assert form.begin.replace("NAME", name).rstrip("\n") in rendered
    ends = rendered.split(form.end.lstrip("\n"))
    assert len(ends) == 3
    assert form.before in rendered
    assert form.after in rendered
    assert ends[1].lstrip("\n").startswith(form.begin.partition("NAME")[0])
    assert ends[1].startswith(form.between or form.begin[:1])


def test_only_chosen_tools_are_in_the_grammar() -> None:
    text = call_constraint("qwen3", TOOLS, choice("look_up", single=True)).text
    assert ("look_up" in text, "bash" in text, "other" in text) == (True, False, False)
    [tag] = json.loads(text)["format"]["tags"]
    schema = {"type": "object", "properties": {"command": {"type": "string"}, "count": {"type": "integer"}}}
    assert tag["content"]["json_schema"] == {**schema, "required": ["command"]}
    assert json.loads(text)["format"]["stop_after_first"] is True


def test_names_of_properties_and_values_are_no_annotations() -> None:
    inner = {"type": "object", "properties": {"title": {"const": {"title": 1}}, "description": {"enum": ["default"]}}}
    listed = {"type": "object", "properties": {"x": {"anyOf": [{"type": "null", "title": "y"}, inner]}}}
    text = call_constraint("qwen3", [tool("f", listed)], choice("f")).text
    [tag] = json.loads(text)["format"]["tags"]
    found = tag["content"]["json_schema"]["properties"]["x"]["anyOf"]
    assert found == [{"type": "null"}, inner]


def test_without_a_forced_call_the_marker_alone_begins_a_call() -> None:
    for family in ("qwen3", "kimi-k2", "minimax-m2"):
        form = json.loads(call_constraint(family, TOOLS, choice("bash", required=False)).text)["format"]
        assert form["triggers"] == [MARKUP[family].call_open]
        assert form["at_least_one"] is False


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {}}])
def test_a_tool_without_parameters_gets_an_object(parameters: Any) -> None:
    text = call_constraint("qwen3", [tool("f", parameters)], choice("f")).text
    [tag] = json.loads(text)["format"]["tags"]
    assert tag["content"]["json_schema"] == {"type": "object", "properties": {}}
    assert calls_of(read("qwen3", written(text, [("f", {})]))) == [("f", {})]


@pytest.mark.parametrize(
    ("family", "tools", "message"),
    [
        ("gpt-oss", TOOLS, "family 'gpt-oss' is not known"),
        ("qwen3", [tool('a"b')], "cannot be forced: its name"),
        ("kimi-k2", [tool("a:b")], "cannot be forced: its name"),
        ("qwen3", [tool("f", {"type": "string"})], "no schema of the type 'object'"),
        ("qwen3", [tool("f", {"anyOf": [{"type": "object"}, {"type": "string"}]})], "no schema of the type 'object'"),
        ("qwen3", [tool("f", {"type": "object", "enum": ["x" * MAX_CONSTRAINT]})], "more than the 65536"),
    ],
)
def test_what_cannot_be_held_is_refused_by_the_fields_name(family: str, tools: Any, message: str) -> None:
    names = [spec["function"]["name"] for spec in tools]
    with pytest.raises(RequestError, match=message) as caught:
        call_constraint(family, tools, choice(*names))
    assert (caught.value.field, bool(caught.value.hint)) == ("tool_choice", True)
    assert caught.value.message.startswith("tool_choice: ")


@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        (choice("bash", "look_up", "other"), "required"),
        (choice("bash", single=True), {"type": "function", "function": {"name": "bash"}}),
        (
            choice("bash", "other", required=False),
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": name}} for name in ("bash", "other")],
                },
            },
        ),
    ],
)
def test_engines_that_take_messages_get_openais_field(chosen: ToolChoice, field: Any) -> None:
    constraint = openai_choice(chosen, TOOLS)
    assert (constraint.kind, json.loads(constraint.text)) == (ConstraintKind.TOOL_CALLS, field)


def test_openais_field_cannot_limit_several_tools_to_one_call() -> None:
    with pytest.raises(RequestError, match="one call of several tools") as caught:
        openai_choice(choice("bash", "other", single=True), TOOLS)
    assert caught.value.field == "tool_choice"
