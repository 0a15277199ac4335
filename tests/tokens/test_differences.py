"""Cases for each row of the table of differences: a client's JSON, joined to a recorded turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from re import findall
from typing import Any

import pytest
import renderers as library

from outrider.dialects.chat import CHAT_DIALECT
from outrider.messages import Image, Message, Role, ToolCall, WireMessages, image_from_bytes
from outrider.tokens.rendering.renderer import Renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.tokens.tree.canonical import ALL_PRINTED, DIFFERENCES, PRINTED_FIELDS, Effect, message_key
from outrider.tokens.tree.tree import TokenTree
from outrider.trajectory import ForkCause, JoinKind
from support.steps import run_inline
from support.tokenizer import make_tokenizer
from support.wire import CALL

from .renderers import small_tokenizer
from .strategies import TOOLS

Wire = dict[str, Any]
Change = Callable[[list[Wire]], list[Wire]]

ARGUMENTS = '{"path": "né.txt", "limit": 2.0, "deep": [1, {"a": true}]}'
BROKEN = '{"path": "a'
CALLS = (ToolCall("c1", "read_file", ARGUMENTS), ToolCall("c2", "read_file", BROKEN))
REPLY = Message(role=Role.ASSISTANT, content="I read both.", reasoning="I must read.", tool_calls=CALLS)
SYSTEM, USER, SAID, FIRST, SECOND, MORE = range(6)
THOUGHT_AND_SAID = [*small_tokenizer().encode("</think>x"), 2]
PICTURE, OTHER_PICTURE = (image_from_bytes("image/png", data) for data in (b"1", b"2"))


def wire_history() -> list[Wire]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in CALLS
    ]
    said = {"role": "assistant", "content": REPLY.content, "reasoning_content": REPLY.reasoning, "tool_calls": calls}
    return [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Read the files."},
        said,
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "user", "content": "And now?"},
    ]


def setting(at: int, **fields: Any) -> Change:
    return lambda messages: [*messages[:at], messages[at] | fields, *messages[at + 1 :]]


def call(number: int, **function: str) -> Change:
    def change(messages: list[Wire]) -> list[Wire]:
        messages[SAID]["tool_calls"][number]["function"] |= function
        return messages

    return change


def recoded(**style: Any) -> Change:
    return call(0, arguments=json.dumps(json.loads(ARGUMENTS), **style))


def renamed_calls(messages: list[Wire]) -> list[Wire]:
    for number, made in enumerate(messages[SAID]["tool_calls"]):
        made["id"] = messages[FIRST + number]["tool_call_id"] = f"toolu_{number}"
    return messages


def without_content(messages: list[Wire]) -> list[Wire]:
    del messages[SAID]["content"]
    return messages


def flattened(messages: list[Wire]) -> list[Wire]:
    said = {"role": "assistant", "content": f"Calling tools:\n{messages[SAID]['tool_calls']}"}
    seen = [{"role": "user", "content": f"Observation: {messages[at]['content']}"} for at in (FIRST, SECOND)]
    return [*messages[:SAID], said, *seen, *messages[MORE:]]


CASES: dict[str, list[Change]] = {
    "arguments re-serialised": [recoded(separators=(",", ":")), recoded(indent=2), recoded()],
    "no arguments written as {}": [call(0, arguments="{}"), call(0, arguments="\n{ }")],
    "arguments' keys in another order": [recoded(sort_keys=True)],
    "1.0 written as 1": [call(0, arguments=ARGUMENTS.replace("2.0", "2"))],
    "argument changed": [call(0, arguments=ARGUMENTS.replace("2.0", "3")), call(0, arguments="{}")],
    "argument's type changed": [
        call(0, arguments=ARGUMENTS.replace("true", "1")),
        call(0, arguments=ARGUMENTS.replace("2.0", '"2"')),
    ],
    "arguments that are no JSON changed": [call(1, arguments=BROKEN.replace(" ", ""))],
    "call renamed": [call(0, name="cat")],
    "call ids replaced": [renamed_calls],
    "result's call id replaced": [setting(FIRST, tool_call_id="c9")],
    "user or tool result named": [setting(USER, name="bob"), setting(FIRST, name="read_file")],
    "white space around the assistant's text": [setting(SAID, content="\n I read both.\n\n")],
    "white space around other text": [setting(at, content=" x\n") for at in (SYSTEM, USER, FIRST)],
    "white space within a text": [setting(SAID, content="I read  both."), setting(FIRST, content="o ne")],
    "text changed": [setting(at, content="Changed.") for at in (SYSTEM, USER, SAID, FIRST)],
    "reasoning dropped": [setting(SAID, reasoning_content=None), setting(SAID, reasoning_content="")],
    "reasoning sent twice over": [
        setting(SAID, reasoning_content="I must read." * 2),
        setting(SAID, reasoning_content="I must read.\n\nI must read.\n"),
    ],
    "reasoning changed": [
        setting(SAID, reasoning_content="I must not."),
        setting(SAID, reasoning_content="I must read." * 3),
    ],
    "reasoning added": [setting(SAID, reasoning_content="I must read.")],
    "string content as a list of texts": [
        setting(SAID, content=[{"type": "text", "text": "I read "}, {"type": "text", "text": "both."}]),
        setting(FIRST, content=[{"type": "text", "text": "one"}]),
    ],
    "null, empty or absent content": [setting(SAID, content=None), setting(SAID, content=[]), without_content],
    "cache markers and unknown fields": [
        setting(
            USER,
            content=[{"type": "text", "text": "Read the files.", "cache_control": {"type": "ephemeral"}}],
            provider_specific_fields={"x": 1},
        )
    ],
    "a call flattened into text": [flattened],
    "role changed": [setting(SYSTEM, role="user"), setting(SECOND, role="user")],
    "message dropped": [lambda messages: messages[:FIRST] + messages[SECOND:], lambda messages: messages[1:]],
    "message inserted": [lambda messages: [*messages[:SAID], messages[USER], *messages[SAID:]]],
}
RECORDED: dict[str, Change] = {
    "white space around other text": lambda messages: [message | {"content": "x"} for message in messages],
    "no arguments written as {}": call(0, arguments=" "),
    "null, empty or absent content": setting(SAID, content=""),
    "reasoning added": setting(SAID, reasoning_content=None),
}
"""By row, a change of `wire_history` that both the recorded and the sent messages start from."""


def read(messages: list[Wire]) -> WireMessages:
    return CHAT_DIALECT.parse(CALL, json.dumps({"model": "m", "messages": messages}).encode(), {}).messages


def keeps(renderer: Renderer, recorded: list[Wire], sent: list[Wire]) -> bool:
    """Whether a request with `sent` appends to all ids that were recorded for `recorded`."""
    tree = TokenTree(renderer, "recorded")
    old = read(recorded)
    first = run_inline(tree.join(read(recorded[:SAID]), TOOLS, b"1"))
    tree.commit(first.prompt, THOUGHT_AND_SAID, old.parse(SAID))
    results = run_inline(tree.join(read(recorded[:MORE]), TOOLS, b"1"))
    tree.commit(results.prompt, THOUGHT_AND_SAID, Message(role=Role.ASSISTANT, content="Both."))
    both = {"role": "assistant", "content": "Both."}
    joined = run_inline(tree.join(read([*sent[:-1], both, sent[-1]]), TOOLS, b"1"))
    return joined.kind is JoinKind.APPEND


@cache
def renderer_showing(*, everything: bool, family: str = "qwen3") -> Renderer:
    renderer = Renderer(small_tokenizer(), family)
    if everything:
        renderer.printed = ALL_PRINTED
    return renderer


def test_every_row_has_its_cases() -> None:
    assert [*CASES, "image replaced", "tools changed or reordered"] == [row.change for row in DIFFERENCES]


@pytest.mark.parametrize("row", [row for row in DIFFERENCES if row.change in CASES], ids=lambda row: row.change)
def test_a_row_has_its_effect(row: Any) -> None:
    family = "qwen3.5" if row.change == "white space around other text" else "qwen3"
    for change in CASES[row.change]:
        record: Callable[[Any], Any] = RECORDED.get(row.change, lambda messages: messages)
        recorded, sent = record(wire_history()), change(record(wire_history()))
        assert sent != recorded
        assert keeps(renderer_showing(everything=False, family=family), recorded, sent) is (
            row.effect is not Effect.FORK
        )
        assert keeps(renderer_showing(everything=True, family=family), recorded, sent) is (row.effect is Effect.SAME)


def test_another_image_is_a_difference() -> None:
    def showing(image: Image) -> bytes:
        return message_key(Message(role=Role.USER, content="x", parts=(image,))).body

    assert showing(PICTURE) == showing(image_from_bytes("image/png", b"1"))
    assert showing(PICTURE) != showing(OTHER_PICTURE)


def test_other_tools_are_a_difference() -> None:
    for tools in ((), TOOLS * 2, ({"type": "function", "function": {"name": "read_file"}},)):
        tree = TokenTree(renderer_showing(everything=False), "recorded")
        recorded = read(wire_history())
        first = run_inline(tree.join(read(wire_history()[:SAID]), TOOLS, b"1"))
        tree.commit(first.prompt, [300, 2], recorded.parse(SAID))
        assert run_inline(tree.join(recorded, tools, b"2")).cause is ForkCause.TOOLS_CHANGED


SPECIAL = r'"(<[|｜/]?[\w/| :｜|-]+?>|\[gMASK\]|\]~!b\[|\]~b\]|\[e~\[)"'  # noqa: RUF001 - the models' own characters


@cache
def tokenizer_of_all() -> Tokenizer:
    """A tokenizer with the special tokens of all families."""
    sources = Path(library.__file__).parent.glob("*.py")
    backend = make_tokenizer()
    backend.add_special_tokens(sorted({token for source in sources for token in findall(SPECIAL, source.read_text())}))
    return Tokenizer(backend, name_or_path="all", settings={"eos_token": "<|im_end|>"})


@pytest.mark.parametrize("family", PRINTED_FIELDS)
def test_what_a_family_does_not_show_changes_no_id(family: str) -> None:
    renderer = Renderer(tokenizer_of_all(), family)
    shown = PRINTED_FIELDS[family]
    changes = [
        (shown.call_ids, renamed_calls),
        (shown.call_ids, setting(FIRST, tool_call_id="c2")),
        (shown.names, setting(USER, name="bob")),
        (shown.names, setting(FIRST, name="read_file")),
        *(
            (shown.outer_space, setting(at, content=f" {wire_history()[at]['content']}\n"))
            for at in (SYSTEM, USER, FIRST)
        ),
    ]
    whole = rendered(renderer, wire_history())
    for is_shown, change in changes:
        if not is_shown:
            assert rendered(renderer, change(wire_history())) == whole


def rendered(renderer: Renderer, messages: list[Wire]) -> list[int]:
    wire = read(messages)
    return renderer.render([wire.parse(index) for index in range(len(wire))], TOOLS)


def test_outer_white_space_is_printed_where_the_table_says_so() -> None:
    """The families differ in whether their prompts keep outer white space."""
    for family in ("qwen3", "qwen3.5"):
        renderer = Renderer(tokenizer_of_all(), family)
        spaced = rendered(renderer, setting(USER, content=" Read the files.\n")(wire_history()))
        assert (spaced != rendered(renderer, wire_history())) is PRINTED_FIELDS[family].outer_space
