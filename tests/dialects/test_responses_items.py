"""Items of Responses requests: the messages that they become, and the field that a refusal names."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from outrider.dialects.responses.round_trip import seal, unseal
from outrider.errors import RequestError
from outrider.messages import Message, Role, Text, ToolCall, image_from_bytes, image_from_url
from support.responses import USER, parse, read

PNG = "data:image/png;base64," + base64.b64encode(b"png").decode()


def assistant(*items: dict[str, Any]) -> Message:
    """The message that these items of an assistant are read as."""
    first, message, last = read(USER, *items, USER)
    assert first == last
    return message


def text(said: str, kind: str = "output_text") -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": kind, "text": said, "annotations": []}]}


def call(name: str = "f", arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": arguments, **fields}


def test_the_items_of_a_reply_are_one_message() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    assert assistant(reasoning, text("Let me see."), call(), call("g", call_id="d")) == Message(
        role=Role.ASSISTANT,
        content="Let me see.",
        reasoning="Hm.",
        tool_calls=(ToolCall("c", "f", "{}"), ToolCall("d", "g", "{}")),
    )


def test_text_follows_text_unless_something_lies_between() -> None:
    assert assistant(text("one "), text("two")).content == "one two"
    output = {"type": "function_call_output", "call_id": "c", "output": "done"}
    roles = [(message.role, message.content) for message in read(USER, text("one"), call(), output, text("two"))]
    assert roles == [("user", "hi"), ("assistant", "one"), ("tool", "done"), ("assistant", "two")]


def test_a_message_says_the_same_as_text_and_as_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert read({"role": "user", "content": parts}) == read({"type": "message", "role": "user", "content": "ab"})
    assert assistant({"role": "assistant", "content": "a"}) == assistant(text("a"))
    assert assistant({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}).content == "No."


def test_a_message_of_another_agent_is_a_user_message() -> None:
    """Codex sends the text of a tool call's argument in the field for OpenAI's encrypted content."""
    content = [
        {"type": "input_text", "text": "Sender: /root\n"},
        {"type": "encrypted_content", "encrypted_content": "Go."},
    ]
    item = {"type": "agent_message", "id": "amsg_1", "author": "/root", "recipient": "/root/t", "content": content}
    assert read(item) == [Message(role=Role.USER, content="Sender: /root\nGo.")]


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({}, None),
        ({"encrypted_content": seal("sealed"), "summary": [{"type": "summary_text", "text": "s"}]}, "sealed"),
        ({"encrypted_content": "gAAAAB", "summary": []}, None),
        ({"encrypted_content": "gAAAAB", "summary": [{"type": "summary_text", "text": "s"}]}, "s"),
        ({"encrypted_content": "outrider1:?"}, None),
        ({"content": None, "summary": [{"text": "a"}, {"text": "b"}]}, "a\n\nb"),
        ({"content": [{"text": "a"}, {"text": "b"}], "summary": [{"text": "c"}]}, "ab"),
    ],
)
def test_reasoning(fields: dict[str, Any], reasoning: str | None) -> None:
    assert assistant({"type": "reasoning", "id": "rs_1", **fields}, text("x")).reasoning == reasoning


def test_a_seal_opens_to_what_was_sealed() -> None:
    assert unseal(seal("L\u00e9t me see.\n")) == "L\u00e9t me see.\n"
    assert unseal("outrider1:" + base64.b64encode(b"\xff").decode()) is None


@pytest.mark.parametrize(
    ("item", "made"),
    [
        (call(arguments='{"a": 1}'), ToolCall("c", "f", '{"a": 1}')),
        (call(arguments={"a": 1}), ToolCall("c", "f", '{"a":1}')),
        (call(arguments=None), ToolCall("c", "f", "{}")),
        (call(arguments="{oops"), ToolCall("c", "f", "{oops")),
        (call(namespace="ns"), ToolCall("c", "ns__f", "{}")),
        (call(namespace="mcp__files__"), ToolCall("c", "mcp__files__f", "{}")),
        (call(namespace=None), ToolCall("c", "f", "{}")),
        (
            {"type": "custom_tool_call", "call_id": "c", "namespace": "functions", "name": "exec", "input": 'say("x")'},
            ToolCall("c", "functions__exec", '{"input":"say(\\"x\\")"}'),
        ),
        (
            {"type": "custom_tool_call", "call_id": "c~json", "name": "exec", "input": '{"code": 1}'},
            ToolCall("c", "exec", '{"code": 1}'),
        ),
        (
            {
                "type": "local_shell_call",
                "id": "lsh",
                "call_id": "c",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "working_directory": "w"},
            },
            ToolCall("c", "local_shell", '{"command":["ls","-l"],"env":{},"working_directory":"w"}'),
        ),
    ],
)
def test_calls(item: dict[str, Any], made: ToolCall) -> None:
    assert assistant(item).tool_calls == (made,)


@pytest.mark.parametrize(
    ("item", "call_id"),
    [
        ({"type": "function_call_output", "id": "fco_1", "call_id": "c"}, "c"),
        ({"type": "custom_tool_call_output", "id": "ctco_1", "call_id": "c"}, "c"),
        ({"type": "custom_tool_call_output", "call_id": "c~json"}, "c"),
        ({"type": "local_shell_call_output", "id": "c"}, "c"),
        ({"type": "local_shell_call_output", "id": "other", "call_id": "c"}, "c"),
    ],
)
def test_outputs(item: dict[str, Any], call_id: str) -> None:
    whole = Message(role=Role.TOOL, content="done\n", tool_call_id=call_id)
    assert read({**item, "output": "done\n"}) == [whole]
    assert read({**item, "output": [{"type": "input_text", "text": "done\n"}]}) == [whole]


def test_images_are_parts_in_their_places() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "input_text", "text": "b"},
        {"type": "input_image", "image_url": PNG, "detail": "auto"},
        {"type": "input_image", "image_url": "https://a.example/b.png"},
    ]
    kept = (Text("ab"), image_from_bytes("image/png", b"png"), image_from_url("https://a.example/b.png"))
    assert read({"role": "user", "content": parts}) == [Message(role=Role.USER, content="ab", parts=kept)]
    output = {"type": "function_call_output", "call_id": "c", "output": parts}
    assert read(output) == [Message(role=Role.TOOL, content="ab", tool_call_id="c", parts=kept)]


def image(url: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_image", "image_url": url}]}


WRONG = [
    ("input[0].content", {"role": "user"}),
    ("input[0].content", {"role": "user", "content": 5}),
    ("input[0].content[0].type", {"role": "user", "content": [{"text": "a"}]}),
    ("input[0].content[0].type", {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}),
    ("input[0].content[0].text", {"role": "user", "content": [{"type": "input_text"}]}),
    ("input[0].content[0].image_url", {"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}),
    ("input[0].content[0].image_url", image("file:///etc/passwd")),
    ("input[0].content[0].image_url", image("data:text/plain;base64,aGk=")),
    ("input[0].content[0].image_url", image("data:image/png;base64,a")),
    ("input[0].content[0].image_url", image("data:image/png;base64,")),
    ("input[0].content", {"role": "assistant", "content": [{"type": "input_image", "image_url": PNG}]}),
    ("input[0].call_id", {"type": "function_call", "name": "f"}),
    ("input[0].name", {"type": "function_call", "call_id": "c"}),
    ("input[0].arguments", call(arguments=[1])),
    ("input[0].namespace", call(namespace=5)),
    ("input[0].input", {"type": "custom_tool_call", "call_id": "c", "name": "f"}),
    ("input[0].action", {"type": "local_shell_call", "call_id": "c"}),
    ("input[0].action.command", {"type": "local_shell_call", "call_id": "c", "action": {}}),
    ("input[0].output", {"type": "function_call_output", "call_id": "c"}),
    ("input[0].call_id", {"type": "function_call_output", "output": "x"}),
    ("input[0].id", {"type": "local_shell_call_output", "output": "x"}),
    ("input[0].summary", {"type": "reasoning", "summary": "x"}),
    ("input[0].encrypted_content", {"type": "reasoning", "encrypted_content": 5}),
]


@pytest.mark.parametrize(("field", "item"), WRONG, ids=[f"{n}-{field}" for n, (field, _) in enumerate(WRONG)])
def test_a_wrong_field_is_named(field: str, item: dict[str, Any]) -> None:
    request = parse(input=[item])
    with pytest.raises(RequestError) as caught:
        request.messages.parse(0)
    assert caught.value.field == field


def test_what_clients_and_servers_number_does_not_change_a_message() -> None:
    one = {**call(), "id": "fc_1", "status": "completed", "caller": {"type": "direct"}}
    assert parse(input=[one]).messages.raw(0) == parse(input=[call()]).messages.raw(0)


@pytest.mark.parametrize("change", [{"name": "g"}, {"namespace": "n"}, {"call_id": "d"}, {"arguments": "[]"}])
def test_what_a_model_would_see_does(change: dict[str, str]) -> None:
    assert parse(input=[call(**change)]).messages.raw(0) != parse(input=[call()]).messages.raw(0)


def test_a_whole_history_of_codex() -> None:
    """Items with the ids, the order and the tools of Codex."""
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are Codex."}]},
        {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal("Think.")},
        {**text("On it."), "phase": "commentary"},
        call(arguments='{"cmd":"ls"}'),
        {"type": "function_call_output", "id": "fco_1", "call_id": "c", "output": "a.txt"},
    ]
    assert read(*items) == [
        Message(role=Role.SYSTEM, content="You are Codex."),
        Message(role=Role.USER, content="Go."),
        Message(
            role=Role.ASSISTANT,
            content="On it.",
            reasoning="Think.",
            tool_calls=(ToolCall("c", "f", '{"cmd":"ls"}'),),
        ),
        Message(role=Role.TOOL, content="a.txt", tool_call_id="c"),
    ]
