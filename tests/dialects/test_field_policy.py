"""Every field of the tables is sent, and is passed on, noted, refused or without effect on the reply, as its row
says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.constraint import ConstraintKind, ToolChoice
from outrider.dialects.base import ModelRequest, RequestedSampling, WireCall
from outrider.dialects.chat import CHAT_DIALECT
from outrider.dialects.field_policy import TABLES, FieldRule, Treatment
from outrider.dialects.gemini import GEMINI_DIALECT
from outrider.dialects.messages import MESSAGES_DIALECT
from outrider.dialects.responses import RESPONSES_DIALECT
from outrider.errors import RequestError
from support import gemini, responses, wire

HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"z":{"type":"string"},"a":{"type":"integer"}}}'
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}

VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "topP": 0.5,
    "top_k": 5,
    "topK": 5,
    "min_p": 0.1,
    "seed": 3,
    "min_tokens": 2,
    "stop_token_ids": [7],
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "presencePenalty": 0.5,
    "frequency_penalty": 0.5,
    "frequencyPenalty": 0.5,
    "logit_bias": {"5": -1},
    "max_tokens": 9,
    "max_completion_tokens": 9,
    "max_output_tokens": 9,
    "maxOutputTokens": 9,
    "stop": "x",
    "stop_sequences": ["x"],
    "stopSequences": ["x"],
    "structured_outputs": {"json": SCHEMA},
    "guided_json": SCHEMA,
    "guided_regex": "a|b",
    "regex": "a|b",
    "guided_choice": ["a.", "b"],
    "guided_grammar": 'root ::= "a"',
    "ebnf": 'root ::= "a"',
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    "text.format": {"type": "json_schema", "name": "x", "schema": SCHEMA},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "output_config.format": {"type": "json_schema", "schema": SCHEMA},
    "responseMimeType": "application/json",
    "responseSchema": {"type": "OBJECT"},
    "responseJsonSchema": SCHEMA,
    "chat_template_kwargs.enable_thinking": False,
    "chat_template_kwargs.thinking": False,
    "enable_thinking": False,
    "thinking.type": "disabled",
    "reasoning.enabled": False,
    "reasoning_effort": "none",
    "reasoning.effort": "none",
    "thinkingConfig.thinkingBudget": 0,
    "chat_template_kwargs": {"flavour": 1},
    "modalities": ["text", "audio"],
    "responseModalities": ["TEXT", "AUDIO"],
    "function_call": {"name": "f"},
    "truncation": "auto",
    "parallel_tool_calls": False,
    "include_reasoning": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "output_config.effort": "high",
    "text.verbosity": "low",
    "thinkingConfig.thinkingLevel": "HIGH",
    "thinking.budget_tokens": 99,
    "reasoning.max_tokens": 99,
    "add_generation_prompt": False,
    "n": 2,
    "best_of": 2,
    "candidateCount": 2,
    "functions": [{"name": "f"}],
    "metadata": {"user_id": "x"},
    "user": "x",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "tool_choice.disable_parallel_tool_use": True,
}
"""A non-neutral value for each field. A field without an entry gets 2."""

ELSEWHERE = {
    *("model", "messages", "input", "contents", "system", "systemInstruction", "instructions", "stream"),
    *("stream_options", "tools", "tool_choice", "toolConfig", "generationConfig", "logprobs", "return_token_ids"),
    *("previous_response_id", "store", "include", "reasoning.summary", "thinkingConfig.includeThoughts"),
}
"""Fields that are passed on and are not part of the sampling. Other tests cover them."""


def read(dialect: str, **fields: Any) -> ModelRequest:
    match dialect:
        case "chat":
            body, call = {"model": "m", "messages": [HI], **fields}, wire.CALL
            return CHAT_DIALECT.parse(call, json.dumps(body).encode(), {})
        case "responses":
            body, call = {"model": "m", "input": "hi", **fields}, responses.CALL
            return RESPONSES_DIALECT.parse(call, json.dumps(body).encode(), {})
        case "messages":
            body, call = {"model": "m", "messages": [HI], **fields}, WireCall("POST", "/v1/messages")
            return MESSAGES_DIALECT.parse(call, json.dumps(body).encode(), {})
        case _:
            body = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}], **fields}
            return GEMINI_DIALECT.parse(gemini.GENERATE, json.dumps(body).encode(), {})


def sent(row: FieldRule, value: Any) -> dict[str, Any]:
    """The fields of a body in which the row's field has this value."""
    whole: dict[str, Any] = value
    for name in reversed(row.name.split(".")):
        whole = {name: whole}
    if "tool_choice" in whole:
        whole["tool_choice"]["type"] = "auto"
    return whole


def value_of(row: FieldRule) -> Any:
    short = row.name.removeprefix("generationConfig.")
    return VALUES.get(short, VALUES.get(short.split(".")[-1], 2))


@pytest.mark.parametrize("dialect", TABLES)
def test_a_field_is_treated_as_its_row_says(dialect: str) -> None:
    for row in TABLES[dialect]:
        assert_treated(dialect, row)


def assert_treated(dialect: str, row: FieldRule) -> None:
    name = row.name.removeprefix("generationConfig.")
    usual = read(dialect)
    if row.treatment is Treatment.REFUSED:
        with pytest.raises(RequestError) as caught:
            read(dialect, **sent(row, value_of(row)))
        assert caught.value.field == row.name
        assert row.reason in caught.value.message
        return
    if name in ELSEWHERE:
        return
    request = read(dialect, **sent(row, value_of(row)))
    match row.treatment:
        case Treatment.PASSED:
            assert request.sampling != usual.sampling
            assert request.ignored == ()
        case Treatment.NOTED:
            assert request.sampling == usual.sampling
            [note] = request.ignored
            assert note.startswith(row.name)
        case Treatment.OTHER:
            assert (request.sampling, request.ignored) == (usual.sampling, ())


@pytest.mark.parametrize("dialect", TABLES)
def test_a_value_that_asks_for_nothing_is_nothing(dialect: str) -> None:
    for row in TABLES[dialect]:
        assert_nothing(dialect, row)


def assert_nothing(dialect: str, row: FieldRule) -> None:
    if "." in row.name or row.name in ELSEWHERE:
        return
    for value in (None, *row.neutral):
        request = read(dialect, **sent(row, value))
        assert request.ignored == ()
        assert request.sampling == read(dialect).sampling


@pytest.mark.parametrize(
    ("field", "raw"),
    [("verbosity", b'"\xff"'), ("n", b'"\xff"')],
)
def test_a_short_value_that_is_no_text_is_refused(field: str, raw: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"%s":%s}' % (field.encode(), raw)
    with pytest.raises(RequestError) as caught:
        CHAT_DIALECT.parse(wire.CALL, body, {})
    assert caught.value.field == field


@pytest.mark.parametrize("dialect", TABLES)
def test_an_unknown_field_is_noted(dialect: str) -> None:
    assert read(dialect, future={"x": 1}).ignored == ("unknown.future",)


@pytest.mark.parametrize(
    ("dialect", "above"),
    [
        ("chat", ("structured_outputs",)),
        ("chat", ("stream_options",)),
        ("chat", ("reasoning",)),
        ("responses", ("reasoning",)),
        ("responses", ("text",)),
        ("messages", ("thinking",)),
        ("messages", ("structured_outputs",)),
        ("gemini", ("generationConfig", "thinkingConfig")),
        ("gemini", ("toolConfig",)),
        ("gemini", ("toolConfig", "functionCallingConfig")),
    ],
)
def test_an_unknown_field_of_an_object_is_noted(dialect: str, above: tuple[str, ...]) -> None:
    path = ".".join((*above, "future"))
    assert read(dialect, **sent(FieldRule(path, Treatment.NOTED), 1)).ignored == (f"unknown.{path}",)


UNREAD: list[tuple[str, str]] = [
    ("chat", "future"),
    ("chat", "structured_outputs.future"),
    ("chat", "stream_options.future"),
    ("chat", "reasoning.future"),
    ("chat", "reasoning.max_tokens"),
    ("chat", "reasoning.effort"),
    ("chat", "thinking.future"),
    ("chat", "thinking.budget_tokens"),
    ("chat", "chat_template_kwargs.future"),
    ("responses", "future"),
    ("responses", "reasoning.future"),
    ("responses", "text.future"),
    ("responses", "chat_template_kwargs.enable_thinking"),
    ("messages", "future"),
    ("messages", "output_config.future"),
    ("messages", "output_config.effort"),
    ("gemini", "future"),
    ("gemini", "generationConfig.future"),
    ("gemini", "generationConfig.thinkingConfig.future"),
    ("gemini", "toolConfig.functionCallingConfig.future"),
]
"""Fields of objects and unknown fields, all without effect. Any type of value is accepted."""


@pytest.mark.parametrize(("dialect", "path"), UNREAD)
def test_a_value_that_asks_for_nothing_is_not_noted_at_any_place(dialect: str, path: str) -> None:
    row = FieldRule(path, Treatment.NOTED)
    nothing: list[Any] = [None, "", [], {}]
    something: list[Any] = [0, " ", [0], {"x": None}]
    for value in nothing:
        assert read(dialect, **sent(row, value)).ignored == ()
    for value in something:
        (note,) = read(dialect, **sent(row, value)).ignored
        assert note.removeprefix("unknown.") == path


@pytest.mark.parametrize(
    ("dialect", "path"),
    [
        ("chat", "reasoning_effort"),
        ("responses", "reasoning.effort"),
        ("responses", "text.verbosity"),
        ("gemini", "generationConfig.thinkingConfig.thinkingLevel"),
    ],
)
def test_an_empty_text_is_not_noted(dialect: str, path: str) -> None:
    assert read(dialect, **sent(FieldRule(path, Treatment.NOTED), "")).ignored == ()


def test_an_unknown_field_that_is_no_text_is_noted() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"future":"\xff"}'
    assert CHAT_DIALECT.parse(wire.CALL, body, {}).ignored == ("unknown.future",)


def test_an_unknown_field_of_googles_configuration_is_noted() -> None:
    request = read("gemini", generation_config={"from_the_future": 1, "top_k": 3})
    assert request.ignored == ("unknown.generationConfig.fromTheFuture",)
    assert request.sampling.top_k == 3


def test_the_row_of_include_names_what_is_refused() -> None:
    (row,) = (row for row in TABLES["responses"] if row.name == "include")
    refused = "message.output_text.logprobs"
    assert f"`{refused}` is refused" in row.reason
    with pytest.raises(RequestError, match="served by Chat Completions only"):
        read("responses", include=[refused])
    assert read("responses", include=["reasoning.encrypted_content", "file_search_call.results"]).ignored == ()


FORMS: list[tuple[str, dict[str, Any], ConstraintKind, str]] = [
    ("chat", {"response_format": VALUES["response_format"]}, ConstraintKind.JSON_SCHEMA, TEXT),
    ("chat", {"response_format": {"type": "json_object"}}, ConstraintKind.JSON_OBJECT, ""),
    ("chat", {"guided_json": TEXT}, ConstraintKind.JSON_SCHEMA, TEXT),
    ("chat", {"structured_outputs": {"json_object": True}}, ConstraintKind.JSON_OBJECT, ""),
    ("chat", {"structured_outputs": {"choice": ["a.b", "(c)"]}}, ConstraintKind.REGEX, r"(a\.b|\(c\))"),
    ("chat", {"structured_outputs": {"grammar": "x"}}, ConstraintKind.GRAMMAR, "x"),
    ("chat", {"ebnf": "x"}, ConstraintKind.GRAMMAR, "x"),
    ("responses", {"text": {"format": VALUES["text.format"]}}, ConstraintKind.JSON_SCHEMA, TEXT),
    ("responses", {"text": {"format": {"type": "json_object"}}}, ConstraintKind.JSON_OBJECT, ""),
    ("responses", {"guided_regex": "x+"}, ConstraintKind.REGEX, "x+"),
    ("messages", {"output_format": VALUES["output_format"]}, ConstraintKind.JSON_SCHEMA, TEXT),
    ("messages", {"output_config": {"format": VALUES["output_format"]}}, ConstraintKind.JSON_SCHEMA, TEXT),
    ("gemini", {"generationConfig": {"responseMimeType": "application/json"}}, ConstraintKind.JSON_OBJECT, ""),
    ("gemini", {"generationConfig": {"responseJsonSchema": SCHEMA}}, ConstraintKind.JSON_SCHEMA, TEXT),
    (
        "gemini",
        {"generation_config": {"response_mime_type": "application/json", "response_schema": {"type": "OBJECT"}}},
        ConstraintKind.JSON_SCHEMA,
        '{"type":"object"}',
    ),
    (
        "gemini",
        {
            "generationConfig": {
                "responseMimeType": "text/x.enum",
                "responseSchema": {"type": "STRING", "enum": ["a", "b"]},
            }
        },
        ConstraintKind.REGEX,
        "(a|b)",
    ),
]


@pytest.mark.parametrize(("dialect", "fields", "kind", "text"), FORMS)
def test_every_word_for_structured_output(
    dialect: str, fields: dict[str, Any], kind: ConstraintKind, text: str
) -> None:
    constraint = read(dialect, **fields).sampling.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.text) == (kind, text)


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("chat", {"response_format": {"type": "text"}}),
        ("responses", {"text": {"format": {"type": "text"}}}),
        ("responses", {"text": {"format": None}}),
        ("messages", {"output_config": {"format": None}}),
        ("gemini", {"generationConfig": {"responseMimeType": "text/plain"}}),
    ],
)
def test_text_is_no_form(dialect: str, fields: dict[str, Any]) -> None:
    assert read(dialect, **fields).sampling == RequestedSampling()


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("dialect", "field", "fields"),
    [
        ("chat", "response_format.type", {"response_format": {"type": "xml"}}),
        ("chat", "response_format.schema", {"response_format": {"type": "json_schema"}}),
        ("chat", "response_format.schema", {"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}}),
        ("chat", "guided_json", {"guided_json": "{"}),
        ("chat", "guided_json", {"guided_json": DEEP}),
        ("chat", "guided_json", {"guided_json": {"title": "x" * 70_000}}),
        ("chat", "structured_outputs", {"regex": "a", "ebnf": "b"}),
        ("chat", "structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "{}"}}),
        ("chat", "logit_bias", {"logit_bias": {"the": 1}}),
        ("chat", "presence_penalty", {"presence_penalty": 3}),
        ("messages", "output_format.schema", {"output_format": {"type": "json_schema"}}),
        ("gemini", "generationConfig.responseMimeType", {"generationConfig": {"responseMimeType": "audio/wav"}}),
        (
            "gemini",
            "generationConfig.responseSchema.enum",
            {"generationConfig": {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING"}}},
        ),
    ],
)
def test_a_wrong_setting_is_named(dialect: str, field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        read(dialect, **fields)
    assert (caught.value.field or "").startswith(field)


@pytest.mark.parametrize(
    ("dialect", "fields", "on", "notes"),
    [
        ("chat", {"reasoning_effort": "high"}, None, ("reasoning_effort",)),
        ("chat", {"reasoning": {"effort": "low", "max_tokens": 5}}, None, ("reasoning.effort", "reasoning.max_tokens")),
        ("chat", {"reasoning": {"enabled": True, "exclude": True, "new": 1}}, True, ("unknown.reasoning.new",)),
        ("chat", {"thinking": {"type": "auto", "new": 1}}, None, ("unknown.thinking.new",)),
        ("chat", {"thinking": {"type": "enabled", "budget_tokens": 5}}, True, ("thinking.budget_tokens",)),
        ("chat", {"chat_template_kwargs": {"enable_thinking": True}}, True, ()),
        ("responses", {"reasoning": {"effort": "medium", "summary": "auto"}}, None, ("reasoning.effort",)),
        ("responses", {"reasoning": {"effort": "none"}}, False, ()),
        ("messages", {"thinking": {"type": "adaptive"}}, None, ()),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, ("thinking.budget_tokens",)),
        (
            "messages",
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            False,
            ("output_config.effort",),
        ),
        ("messages", {"output_config": {"task_budget": {"x": 1}}}, None, ("unknown.output_config.task_budget",)),
        ("gemini", {"generationConfig": {"thinkingConfig": {"thinkingBudget": -1}}}, None, ()),
        (
            "gemini",
            {"generation_config": {"thinking_config": {"thinking_budget": 8192, "thinking_level": "LOW"}}},
            None,
            ("generationConfig.thinkingConfig.thinkingLevel", "generationConfig.thinkingConfig.thinkingBudget"),
        ),
    ],
)
def test_every_word_for_thinking(dialect: str, fields: dict[str, Any], on: bool | None, notes: tuple[str, ...]) -> None:
    request = read(dialect, **fields)
    assert (request.sampling.thinking, request.ignored) == (on, notes)


HOSTED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("chat", {"tools": [FUNCTION, {"type": "web_search"}]}, ("tools.web_search",)),
    ("chat", {"tools": [FUNCTION], "web_search_options": {"search_context_size": "low"}}, ("web_search_options",)),
    (
        "responses",
        {"tools": [FLAT, {"type": "mcp", "server_label": "x"}, {"type": "local_shell"}]},
        ("tools.mcp", "tools.local_shell"),
    ),
    (
        "messages",
        {
            "tools": [
                {"name": "f", "input_schema": {"type": "object"}},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
                {"type": "code_execution_20250825", "name": "code_execution"},
                {"type": "mcp_toolset", "mcp_server_name": "x"},
            ],
            "mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}],
        },
        ("mcp_servers", "tools.web_search_20250305", "tools.code_execution_20250825", "tools.mcp_toolset"),
    ),
    (
        "gemini",
        {
            "tools": [
                {"functionDeclarations": [{"name": "f"}]},
                {"googleSearch": {}},
                {"url_context": {}, "codeExecution": {}},
            ]
        },
        ("tools.googleSearch", "tools.urlContext", "tools.codeExecution"),
    ),
]


@pytest.mark.parametrize(("dialect", "fields", "notes"), HOSTED)
def test_hosted_tools_are_not_shown_and_noted(dialect: str, fields: dict[str, Any], notes: tuple[str, ...]) -> None:
    request = read(dialect, **fields)
    assert [tool["function"]["name"] for tool in request.tools] == ["f"]
    assert request.ignored == notes


@pytest.mark.parametrize(
    ("dialect", "tools"),
    [
        ("chat", [{"type": "web_search"}]),
        ("responses", [{"type": "web_search"}]),
        ("messages", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("gemini", [{"googleSearch": {}}]),
    ],
)
def test_hosted_tools_alone_are_no_tools(dialect: str, tools: list[Any]) -> None:
    request = read(dialect, tools=tools)
    assert (request.tools, request.tools_raw, len(request.ignored)) == ((), b"", 1)


@pytest.mark.parametrize(
    ("dialect", "tools", "choice"),
    [
        ("chat", [FUNCTION, {"type": "web_search"}], {"type": "web_search"}),
        ("chat", [FUNCTION], {"type": "function", "function": {"name": "g"}}),
        ("responses", [FLAT, {"type": "web_search"}], {"type": "web_search"}),
        (
            "messages",
            [{"type": "web_search_20250305", "name": "web_search"}],
            {"type": "tool", "name": "web_search"},
        ),
    ],
)
def test_a_choice_of_a_hosted_tool_cannot_be_met(dialect: str, tools: list[Any], choice: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read(dialect, tools=tools, tool_choice=choice)
    assert (caught.value.field or "").startswith("tool_choice")


TWO: dict[str, dict[str, Any]] = {
    "chat": {"tools": [FUNCTION, {"type": "function", "function": {"name": "g"}}]},
    "responses": {"tools": [FLAT, {"type": "custom", "name": "g"}, {"type": "web_search"}]},
    "messages": {"tools": [{"name": "f", "input_schema": {}}, {"name": "g", "input_schema": {}}]},
    "gemini": {"tools": [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]},
}
"""Two tools called f and g in each dialect."""
CALLING = "toolConfig.functionCallingConfig"


def calling(mode: str, *names: str) -> dict[str, Any]:
    return {"toolConfig": {"functionCallingConfig": {"mode": mode, "allowedFunctionNames": list(names)}}}


def allowed(mode: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "g"}}]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


def listed(mode: str) -> dict[str, Any]:
    tools = [{"type": "custom", "name": "g"}, {"type": "web_search"}]
    return {"tool_choice": {"type": "allowed_tools", "mode": mode, "tools": tools}}


NAMED = {"tool_choice": {"type": "function", "function": {"name": "g"}}}
FORCED: list[tuple[str, dict[str, Any], tuple[str, ...], bool, bool, str]] = [
    ("chat", {"tool_choice": "required"}, ("f", "g"), True, False, "tool_choice"),
    ("chat", {"tool_choice": "required", "parallel_tool_calls": False}, ("f", "g"), True, True, "tool_choice"),
    ("chat", NAMED, ("g",), True, True, "tool_choice"),
    ("chat", allowed("required"), ("g",), True, False, "tool_choice.allowed_tools"),
    ("chat", allowed("auto"), ("g",), False, False, "tool_choice.allowed_tools"),
    ("responses", {"tool_choice": "required"}, ("f", "g"), True, False, "tool_choice"),
    ("responses", {"tool_choice": "required", "parallel_tool_calls": False}, ("f", "g"), True, True, "tool_choice"),
    ("responses", {"tool_choice": {"type": "function", "name": "f"}}, ("f",), True, True, "tool_choice"),
    ("responses", {"tool_choice": {"type": "custom", "name": "g"}}, ("g",), True, True, "tool_choice"),
    ("responses", listed("required"), ("g",), True, False, "tool_choice"),
    ("responses", listed("auto"), ("g",), False, False, "tool_choice"),
    ("messages", {"tool_choice": {"type": "any"}}, ("f", "g"), True, False, "tool_choice"),
    (
        "messages",
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        ("f", "g"),
        True,
        True,
        "tool_choice",
    ),
    ("messages", {"tool_choice": {"type": "tool", "name": "g"}}, ("g",), True, True, "tool_choice"),
    ("gemini", calling("ANY"), ("f", "g"), True, False, CALLING),
    ("gemini", calling("any", "g"), ("g",), True, False, CALLING),
    ("gemini", calling("VALIDATED", "g"), ("g",), False, False, CALLING),
    ("gemini", calling("AUTO", "g"), ("g",), False, False, CALLING),
]


@pytest.mark.parametrize(("dialect", "fields", "names", "required", "single", "field"), FORCED)
def test_a_choice_of_tools_is_kept(
    dialect: str, fields: dict[str, Any], names: tuple[str, ...], required: bool, single: bool, field: str
) -> None:
    request = read(dialect, **TWO[dialect], **fields)
    assert request.tool_choice == ToolChoice(names=names, required=required, single=single, field=field)
    assert len(request.tools) == 2
    assert set(request.ignored) <= {"tools.web_search"}


@pytest.mark.parametrize(("dialect", "fields"), [("chat", allowed("auto")), ("responses", listed("auto"))])
def test_a_list_of_tools_is_kept_to_one_call(dialect: str, fields: dict[str, Any]) -> None:
    request = read(dialect, **TWO[dialect], **fields, parallel_tool_calls=False)
    assert request.tool_choice is not None
    assert (request.tool_choice.required, request.tool_choice.single) == (False, True)
    assert "parallel_tool_calls" not in request.ignored


@pytest.mark.parametrize(
    ("dialect", "fields", "notes"),
    [
        ("chat", {"tool_choice": "auto"}, []),
        ("chat", {"tool_choice": "none"}, []),
        ("chat", {"parallel_tool_calls": False}, ["parallel_tool_calls"]),
        ("responses", {"tool_choice": "none", "parallel_tool_calls": False}, ["parallel_tool_calls"]),
        ("messages", {"tool_choice": {"type": "auto"}}, []),
        (
            "messages",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ["tool_choice.disable_parallel_tool_use"],
        ),
        ("gemini", calling("AUTO"), []),
        ("gemini", calling("NONE", "x"), []),
        ("gemini", calling("AUTO", "f", "g"), []),
        ("gemini", calling("VALIDATED"), ["toolConfig"]),
    ],
)
def test_what_forces_nothing(dialect: str, fields: dict[str, Any], notes: list[str]) -> None:
    request = read(dialect, **TWO[dialect], **fields)
    assert request.tool_choice is None
    assert [note for note in request.ignored if note != "tools.web_search"] == notes


@pytest.mark.parametrize(
    ("dialect", "fields", "field"),
    [
        ("chat", {"tool_choice": "required", "tools": None}, "tool_choice"),
        ("chat", {"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ("chat", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            "chat",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "some", "tools": []}}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            "chat",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"function": {"name": "x"}}]}}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            "chat",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}},
            "tool_choice.allowed_tools",
        ),
        ("responses", {"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ("responses", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ("responses", {"tool_choice": {"type": "allowed_tools", "mode": 1, "tools": []}}, "tool_choice.mode"),
        ("responses", {"tool_choice": {"type": "allowed_tools", "tools": [1]}}, "tool_choice.tools[0]"),
        (
            "responses",
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]}},
            "tool_choice.tools[0].type",
        ),
        (
            "responses",
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]}},
            "tool_choice.tools[0].name",
        ),
        ("responses", {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "web_search"}]}}, "tool_choice"),
        ("messages", {"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
        ("gemini", {**calling("ANY"), "tools": []}, CALLING),
        ("gemini", calling("ANY", "f", "x"), f"{CALLING}.allowedFunctionNames[1]"),
    ],
)
def test_a_choice_of_tools_that_cannot_be_read_is_refused(dialect: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(dialect, **TWO[dialect] | fields)
    assert caught.value.field == field


def test_anthropics_own_client_tools_are_told_by_what_is_documented_of_them() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "computer_20251124", "name": "computer", "display_width_px": 9, "display_height_px": 8},
        {"type": "memory_20250818", "name": "memory"},
    ]
    request = read("messages", tools=tools)
    told = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in request.tools}
    assert told.keys() == {"bash", "str_replace_based_edit_tool", "computer"}
    assert {"action", "coordinate", "text", "scroll_direction"} < told["computer"].keys()
    assert request.tools[2]["function"]["description"].endswith("The screen has 9x8 pixels.")
    assert told["bash"].keys() == {"command", "restart"}
    assert {"command", "path", "old_str", "new_str"} < told["str_replace_based_edit_tool"].keys()
    assert request.ignored == ("tools.memory_20250818",)


def said(request: ModelRequest) -> list[tuple[str, str]]:
    read_as = [request.messages.parse(index) for index in range(len(request.messages))]
    return [(message.role.value, message.content) for message in read_as]


CALLED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    (
        "responses",
        {
            "input": [
                HI,
                {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}},
                {"type": "mcp_list_tools", "server_label": "x", "tools": []},
                {"role": "assistant", "content": "found"},
                {"role": "user", "content": "so"},
            ]
        },
        ("history.web_search_call", "history.mcp_list_tools"),
    ),
    (
        "messages",
        {
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                        {"type": "text", "text": "found"},
                    ],
                },
                {"role": "user", "content": "so"},
            ]
        },
        ("history.server_tool_use", "history.web_search_tool_result"),
    ),
    (
        "gemini",
        {
            "contents": [
                {"role": "user", "parts": [{"text": "hi"}]},
                {
                    "role": "model",
                    "parts": [
                        {"executableCode": {"language": "PYTHON", "code": "1"}},
                        {"code_execution_result": {"outcome": "OUTCOME_OK", "output": "1"}},
                        {"text": "found"},
                    ],
                },
                {"role": "user", "parts": [{"text": "so"}]},
            ]
        },
        ("history.codeExecutionResult", "history.executableCode"),
    ),
]


@pytest.mark.parametrize(("dialect", "fields", "notes"), CALLED)
def test_what_hosted_tools_did_is_not_shown_and_noted(
    dialect: str, fields: dict[str, Any], notes: tuple[str, ...]
) -> None:
    request = read(dialect, **fields)
    assert said(request) == [("user", "hi"), ("assistant", "found"), ("user", "so")]
    assert request.ignored == notes


def test_what_hosted_tools_did_is_noted_of_a_history_that_was_read_before() -> None:
    memory: dict[str, Any] = {}
    _, fields, notes = CALLED[2]
    for _ in range(2):
        request = GEMINI_DIALECT.parse(gemini.GENERATE, json.dumps(fields).encode(), memory)
        assert request.ignored == notes
