"""Anthropic Messages requests: how each field is read, and which field a refusal names."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from outrider.dialects.base import Action, Caller, ModelRequest, RequestedSampling, WireCall
from outrider.dialects.messages import MESSAGES_DIALECT
from outrider.dialects.reading import MAX_TOKENS
from outrider.errors import RequestError
from outrider.messages import Message, Role, Text, ToolCall, image_from_bytes, image_from_url
from support.wire import action_of

DIALECT = MESSAGES_DIALECT
CALL = WireCall("POST", "/v1/messages", b"beta=true")
HI = {"role": "user", "content": "hi"}
MARKER = {"cache_control": {"type": "ephemeral"}}
PNG = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"png").decode()}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 9, "messages": [HI], **fields}).encode()


def read(call: WireCall = CALL, **fields: Any) -> ModelRequest:
    return DIALECT.parse(call, body(**fields), {})


def messages(*wire: Any, **fields: Any) -> list[Message]:
    """The messages as they are read. If the last one is a reply, a user message is sent after it, because a request
    must not end with a reply."""
    sent = [*wire, HI] if wire and wire[-1].get("role") == "assistant" else list(wire) or [HI]
    read_as = read(messages=sent, **fields).messages
    parsed = [read_as.parse(index) for index in range(len(read_as))]
    return parsed[: len(parsed) - (len(sent) - len(wire))]


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def result(id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, **fields}


def use(id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "f", **fields}


@pytest.mark.parametrize(
    ("method", "path", "headers", "action"),
    [
        ("POST", "/v1/messages", [], Action.GENERATE),
        ("POST", "/v1/messages/count_tokens", [], Action.COUNT_TOKENS),
        ("GET", "/v1/models", [(b"anthropic-version", b"2023-06-01")], Action.MODELS),
        ("GET", "/v1/models/m", [(b"anthropic-version", b"2023-06-01")], Action.MODEL),
        ("GET", "/v1/models", [], None),
        ("POST", "/v1/models", [(b"anthropic-version", b"2023-06-01")], None),
        ("POST", "/v1/messagesx", [], None),
        ("POST", "/v1/chat/completions", [(b"anthropic-version", b"2023-06-01")], None),
    ],
)
def test_routes(method: str, path: str, headers: Any, action: Action | None) -> None:
    assert action_of(DIALECT, WireCall(method, path, b"", headers)) is action


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/messages"),
        ("HEAD", "/v1/messages/count_tokens"),
        ("POST", "/v1/messages/"),
        ("POST", "/v1/messages/batches"),
        ("DELETE", "/v1/messages/batches/b"),
    ],
)
def test_routes_of_the_api_that_are_not_served(method: str, path: str) -> None:
    assert action_of(DIALECT, WireCall(method, path)) == "not served"


@pytest.mark.parametrize(
    ("system", "told"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be brief.", **MARKER)], "Be brief."),
        ([text("Be brief."), text("Be kind.", **MARKER)], "Be brief.\nBe kind."),
        ([text("x-anthropic-billing-header: cc_version=1;"), text("Be brief.")], "Be brief."),
        ([text("x-anthropic-billing-header: cc_version=2;\n"), text("Be brief.")], "Be brief."),
        ("x-anthropic-billing-header: cc_version=3;\nBe brief.", "Be brief."),
        (
            [text("Be brief."), text("Not x-anthropic-billing-header: 1")],
            "Be brief.\nNot x-anthropic-billing-header: 1",
        ),
        ([text("x-anthropic-billing-header: cc_version=1;")], None),
        ([], None),
        ("", None),
        (None, None),
    ],
)
def test_the_system_prompt(system: Any, told: str | None) -> None:
    expected = [] if told is None else [Message(role=Role.SYSTEM, content=told)]
    assert messages(HI, system=system)[:-1] == expected


def test_system_messages_are_read_at_their_place() -> None:
    read_as = messages(HI, assistant(text("yes")), {"role": "system", "content": [text("a"), text("b")]}, HI)
    assert [message.role for message in read_as] == [Role.USER, Role.ASSISTANT, Role.SYSTEM, Role.USER]
    assert read_as[2].content == "a\nb"


def test_a_reply_that_comes_back() -> None:
    (got,) = messages(
        assistant(
            {"type": "thinking", "thinking": "Hm. ", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            text("I ", citations=None),
            {"type": "thinking", "thinking": "So."},
            text("look.", **MARKER),
            use("c1", input={"b": [1.0, "é"], "a": {}}, **MARKER),
            use("c2", input={}),
            use("c3"),
        )
    )
    assert got == Message(
        role=Role.ASSISTANT,
        content="I look.",
        reasoning="Hm. So.",
        tool_calls=(
            ToolCall("c1", "f", '{"b":[1.0,"\\u00e9"],"a":{}}'),
            ToolCall("c2", "f", "{}"),
            ToolCall("c3", "f", "{}"),
        ),
    )


def test_replies_that_follow_each_other_are_one() -> None:
    split = messages(assistant(text("I look.")), assistant(use("c", input={"a": 1})), {**assistant(), "content": "ok"})
    assert split == messages(assistant(text("I look."), use("c", input={"a": 1}), text("ok")))


def test_results_and_text_of_one_message_are_messages_in_their_order() -> None:
    got = messages(
        user(
            text("before"),
            result("c1", content="one", is_error=False, **MARKER),
            result("c2", content=[text("t"), text("wo", **MARKER)]),
            text("after "),
            text("all"),
            result("c3"),
        )
    )
    assert got == [
        Message(role=Role.USER, content="before"),
        Message(role=Role.TOOL, content="one", tool_call_id="c1"),
        Message(role=Role.TOOL, content="two", tool_call_id="c2"),
        Message(role=Role.USER, content="after all"),
        Message(role=Role.TOOL, content="", tool_call_id="c3"),
    ]


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("exit 1", "exit 1\n[tool error]"),
        ("exit 1\n", "exit 1\n[tool error]"),
        ([text("exit 1")], "exit 1\n[tool error]"),
        (None, "[tool error]"),
        ([], "[tool error]"),
    ],
)
def test_the_model_is_told_that_a_result_is_an_error(content: Any, shown: str) -> None:
    (got,) = messages(user(result("c", content=content, is_error=True)))
    assert got.content == shown


def test_images_keep_their_places() -> None:
    png, there = image_from_bytes("image/png", b"png"), image_from_url("https://x/a.png")
    spoken, found = messages(
        user(
            text("a"),
            text("b"),
            {"type": "image", "source": PNG, **MARKER},
            text(""),
            {"type": "image", "source": {"type": "url", "url": "https://x/a.png"}},
            result("c", content=[{"type": "image", "source": PNG}], is_error=True),
        )
    )
    assert spoken == Message(role=Role.USER, content="ab", parts=(Text("ab"), png, there))
    assert found == Message(role=Role.TOOL, content="[tool error]", tool_call_id="c", parts=(png, Text("[tool error]")))


def test_documents_of_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "body"}
    listed = {"type": "content", "content": [text("bo"), text("dy")]}
    (got,) = messages(
        user(
            {"type": "document", "source": plain, "title": "T", "context": "C", "citations": {"enabled": True}},
            {"type": "document", "source": listed, "title": None},
            {"type": "document", "source": {"type": "content", "content": "body"}},
            text("Read them."),
        )
    )
    bare = "<document>\nbody\n</document>\n"
    assert got.content == f"<document>\nT\nC\nbody\n</document>\n{bare}{bare}Read them."


def test_a_found_tool_is_named() -> None:
    (got,) = messages(user(result("c", content=[{"type": "tool_reference", "tool_name": "mail"}])))
    assert got.content == "mail"


def test_markers_signatures_and_lists_of_one_text_do_not_change_the_bytes() -> None:
    def raws(*wire: Any, system: Any) -> list[bytes]:
        got = read(messages=list(wire), system=system).messages
        return [got.raw(index) for index in range(len(got))]

    plain = raws(
        HI,
        assistant({"type": "thinking", "thinking": "Hm.", "signature": "a"}, use("c", input={})),
        user(result("c", content="x"), text("so")),
        {"role": "system", "content": "y"},
        system="s",
    )
    marked = raws(
        user(text("hi", **MARKER)),
        assistant({"type": "thinking", "thinking": "Hm.", "signature": "b"}, use("c", input={}, **MARKER)),
        user(result("c", content="x", **MARKER), text("so", **MARKER)),
        {"role": "system", "content": [text("y", **MARKER)]},
        system=[text("s", **MARKER)],
    )
    assert plain == marked
    assert len(set(plain)) == len(plain) == 6


def test_a_message_is_read_when_it_is_parsed() -> None:
    got = read(messages=[{"role": "user", "content": [{"type": "text", "text": 7}]}, HI]).messages
    assert got.parse(1).content == "hi"
    assert got.raw(0) != got.raw(1)
    with pytest.raises(RequestError):
        got.parse(0)


def test_sampling() -> None:
    asked = read(temperature=0, top_p=0.5, top_k=0, max_tokens=1 << 40, stop_sequences=["A"])
    assert asked.sampling == RequestedSampling(temperature=0.0, top_p=0.5, top_k=-1, max_tokens=MAX_TOKENS, stop=("A",))
    assert read(max_tokens=None).sampling == RequestedSampling()


def test_tolerated_fields() -> None:
    asked = read(
        thinking={"type": "adaptive", "display": "summarized"},
        metadata={"user_id": "{}"},
        betas=["x"],
        context_management={"edits": []},
        output_config={"effort": "high"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        mcp_servers=[],
        stream=True,
    )
    assert (asked.model, asked.stream, len(asked.messages)) == ("m", True, 1)


def test_tools_keep_the_order_of_their_schemas() -> None:
    schema = {"type": "object", "required": ["b"], "properties": {"b": {}, "a": {}}}
    asked = read(
        tools=[{"input_schema": schema, "name": "f", "description": "d", **MARKER}, {**TOOL, "type": "custom"}]
    )
    assert json.dumps(asked.tools) == json.dumps(
        [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}},
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
        ]
    )
    assert json.loads(asked.tools_raw)[1]["type"] == "custom"


@pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}])
def test_tool_choices_that_leave_the_tools(choice: Any) -> None:
    assert len(read(tools=[TOOL], tool_choice=choice).tools) == 1


@pytest.mark.parametrize("fields", [{"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tools": []}, {"tools": None}])
def test_no_tools(fields: Any) -> None:
    asked = read(**fields)
    assert (asked.tools, asked.tools_raw) == ((), b"")


def test_callers() -> None:
    def caller(*headers: tuple[bytes, bytes]) -> Caller:
        return read(WireCall("POST", "/v1/messages", b"", headers)).caller

    assert caller() == caller((b"x-session-id", b"s")) == Caller()
    assert caller((b"x-claude-code-agent-id", b"a")) == Caller(agent_id="a")
    assert caller((b"x-session-id", b"s"), (b"x-parent-session-id", b"p")) == Caller(agent_id="s", parent_id="p")


def test_only_a_count_may_end_with_a_reply() -> None:
    ending: dict[str, Any] = {"messages": [HI, assistant(text("The answer is"))]}
    assert len(read(WireCall("POST", "/v1/messages/count_tokens"), **ending).messages) == 2
    with pytest.raises(RequestError) as caught:
        read(**ending)
    assert caught.value.field == "messages"
