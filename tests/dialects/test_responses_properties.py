"""Properties of the Responses dialect over generated requests and replies."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from outrider.dialects.base import Completion, Memory, ModelRequest
from outrider.errors import RequestError
from outrider.messages import Delta, Message, ToolCall
from outrider.tokens.tree.canonical import message_key
from outrider.trajectory import FinishReason
from support.responses import (
    CALL,
    DIALECT,
    TOOLS,
    USER,
    builtins,
    completion,
    echo,
    messages_of,
    parse,
    replied,
    streamed,
)

TEXT = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
SEALED = st.sampled_from(["outrider1:", "outrider1:aGk=", "outrider1:aGk", "outrider1:/w==", "gAAAA"])
PART = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["input_text", "output_text", "refusal", "input_image", "input_file"]) | JSON,
        "text": TEXT | JSON,
        "image_url": st.sampled_from(["data:image/png;base64,aGk=", "https://a/b.png", "data:,x"]) | JSON,
    },
)
ITEM_TYPES = ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call"]
ITEM_TYPES += ["custom_tool_call_output", "local_shell_call", "local_shell_call_output", "item_reference"]
ITEM_TYPES += ["additional_tools", "agent_message", "web_search_call"]
SPEC = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["function", "custom", "namespace", "web_search", "local_shell"]) | JSON,
        "name": TEXT | JSON,
        "description": JSON,
        "parameters": JSON,
        "format": JSON | st.fixed_dictionaries({"type": st.just("grammar"), "definition": TEXT | JSON}),
        "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "name": TEXT}), max_size=2) | JSON,
    },
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(ITEM_TYPES) | JSON,
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | JSON,
        "id": TEXT | JSON,
        "content": TEXT | st.lists(PART, max_size=3) | JSON,
        "summary": st.lists(PART, max_size=2) | JSON,
        "encrypted_content": SEALED | JSON,
        "call_id": TEXT | JSON,
        "namespace": TEXT | JSON,
        "name": TEXT | JSON,
        "arguments": TEXT | JSON,
        "input": TEXT | JSON,
        "output": TEXT | st.lists(PART, max_size=3) | JSON,
        "action": JSON | st.fixed_dictionaries({"command": st.lists(TEXT, max_size=2)}),
        "tools": st.lists(SPEC, max_size=2) | JSON,
    },
)
NAMES = ["model", "input", "instructions", "previous_response_id", "store", "stream", "background", "conversation"]
NAMES += ["prompt", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "text", "include", "metadata", "user"]
NAMES += ["max_output_tokens", "temperature", "top_p", "truncation", "prompt_cache_key", "service_tier"]
ALMOST = st.builds(
    lambda base, wrong: {**base, **wrong},
    st.fixed_dictionaries(
        {"model": TEXT, "input": TEXT | st.lists(ITEM, max_size=4)}, optional={"tools": st.lists(SPEC, max_size=2)}
    ),
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=2),
)


def answer_whole(body: bytes) -> None:
    """Read all parts of a body, and answer it. Each part that is read can be encoded as JSON."""
    request = DIALECT.parse(CALL, body, {})
    msgspec.json.encode([request.model, request.tools, request.sampling])
    for index in range(len(request.messages)):
        with suppress(RequestError):
            msgspec.json.encode(request.messages.parse(index))
    done = completion("text", ToolCall("c", "f", "{}"), reasoning="r")
    json.loads(DIALECT.reply(request, done))


def damaged(body: bytes, at: int, junk: bytes) -> bytes:
    at %= len(body)
    return body[:at] + junk + body[at + len(junk) :]


@given(ALMOST)
def test_an_almost_valid_body_is_answered_or_refused(body: Any) -> None:
    with suppress(RequestError):
        answer_whole(json.dumps(body).encode())


@given(
    ALMOST, st.integers(min_value=0), st.binary(min_size=1, max_size=4) | st.sampled_from([rb"\ud8", b"NaN", b"[{["])
)
def test_a_damaged_body_is_answered_or_refused(body: Any, at: int, junk: bytes) -> None:
    with suppress(RequestError):
        answer_whole(damaged(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"), at, junk))


@given(st.binary(max_size=64))
def test_bytes_are_refused(body: bytes) -> None:
    with suppress(RequestError):
        answer_whole(body)
        raise AssertionError("64 random bytes are no request")


@given(st.lists(ITEM, max_size=3), st.lists(ITEM, max_size=3))
def test_equal_bytes_are_equal_messages(one: list[Any], other: list[Any]) -> None:
    known: dict[bytes, Any] = {}
    for items in (one, other):
        with suppress(RequestError):
            request = parse(input=items)
            for index in range(len(request.messages)):
                message = reading(request, index)
                assert known.setdefault(request.messages.raw(index), message) == message


def reading(request: ModelRequest, index: int) -> Message | None:
    try:
        return request.messages.parse(index)
    except RequestError:
        return None


TOOL_NAMES = ["bash", "patch", "fs__read", "fs__write", "unknown", ""]
INPUT = st.builds(lambda text: json.dumps({"input": text}), TEXT | JSON)
CALLS = st.lists(
    st.builds(
        ToolCall,
        id=TEXT | st.sampled_from(["call_a", "call_b~json", "call_c~text", "~json"]),
        name=st.sampled_from(TOOL_NAMES),
        arguments=TEXT | INPUT | JSON.map(json.dumps) | st.sampled_from([r'{"input": "\ud800"}', '{"input":1e999}']),
    ),
    max_size=3,
).map(tuple)
STEPS = st.lists(st.builds(Delta, text=TEXT, reasoning=TEXT), max_size=5)
ORDERLY = st.builds(
    lambda thoughts, texts: [*[Delta(reasoning=said) for said in thoughts], *[Delta(text=said) for said in texts]],
    st.lists(TEXT, max_size=3),
    st.lists(TEXT, max_size=3),
)
REASONING = st.sampled_from([{}, {"reasoning": {"summary": "auto"}}])
INCLUDE = st.sampled_from([{}, {"include": ["reasoning.encrypted_content"]}])
ASKED = st.builds(lambda reasoning, include: {"tools": TOOLS, **reasoning, **include}, REASONING, INCLUDE)


def done_with(steps: list[Delta], calls: tuple[ToolCall, ...], finish: FinishReason) -> Completion:
    text = "".join(step.text for step in steps)
    return completion(text, *calls, reasoning="".join(step.reasoning for step in steps) or None, finish=finish)


@given(ORDERLY, CALLS, st.sampled_from(FinishReason), ASKED)
def test_a_stream_is_the_response_that_the_one_piece_reply_is(
    steps: list[Delta], calls: tuple[ToolCall, ...], finish: FinishReason, asked: dict[str, Any]
) -> None:
    done = done_with(steps, calls, finish)
    told = streamed(parse(**asked), done, steps)
    whole = replied(parse(**asked), done)
    assert told[-1]["response"] == whole
    assert [event["item"] for event in told if event["type"] == "response.output_item.done"] == whole["output"]
    assert added_up(told) == whole["output"]


def added_up(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output of a client that adds up deltas. Fields without deltas are taken from the finished items."""
    items: list[dict[str, Any]] = []
    for event in told:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind == "content_part.added":
            items[event["output_index"]].setdefault("content", []).append(event["part"])
        elif kind == "reasoning_summary_part.added":
            items[event["output_index"]]["summary"].append(event["part"])
        elif kind.endswith(".delta"):
            item = items[event["output_index"]]
            assert event["item_id"] == item["id"]
            key = {"function_call_arguments.delta": "arguments", "custom_tool_call_input.delta": "input"}.get(kind)
            if key is not None:
                item[key] += event["delta"]
            else:
                (item["summary"] if "summary" in kind else item["content"])[0]["text"] += event["delta"]
        elif kind == "output_item.done":
            for untold in ("status", "encrypted_content"):
                if untold in event["item"]:
                    items[event["output_index"]][untold] = event["item"][untold]
    return items


HANDED_BACK = st.sampled_from(["keep", "drop", "sealed"])


@given(STEPS, CALLS, st.sampled_from(FinishReason), ASKED, HANDED_BACK, st.booleans(), st.booleans())
def test_what_was_said_is_recognised_when_it_comes_back(
    steps: list[Delta],
    calls: tuple[ToolCall, ...],
    finish: FinishReason,
    asked: dict[str, Any],
    reasoning: str,
    ids: bool,
    stream: bool,
) -> None:
    done = done_with(steps, calls, finish)
    request = parse(**asked)
    output = streamed(request, done, steps)[-1]["response"]["output"] if stream else replied(request, done)["output"]
    again = messages_of(parse(input=[USER, *echo(output, reasoning, ids=ids), USER]))
    assert len(again) == 3
    said, read = message_key(done.reply), message_key(again[1])
    assert read.body == said.body
    kept = reasoning == "keep" or (reasoning == "sealed" and "include" in asked)
    assert read.reasoning == (said.reasoning if kept else None)
    if kept:
        assert again[1].reasoning == done.reply.reasoning


@given(STEPS, CALLS, st.sampled_from(FinishReason), ASKED, st.booleans())
def test_a_stored_response_stands_for_what_was_said(
    steps: list[Delta], calls: tuple[ToolCall, ...], finish: FinishReason, asked: dict[str, Any], stream: bool
) -> None:
    memory: Memory = {}
    done = done_with(steps, calls, finish)
    request = parse(memory, **asked)
    whole = streamed(request, done, steps)[-1]["response"] if stream else replied(request, done)
    again = messages_of(parse(memory, previous_response_id=whole["id"]))
    assert len(again) == 3
    assert message_key(again[1]) == message_key(done.reply)
    referring = [{"type": "item_reference", "id": item["id"]} for item in whole["output"]]
    assert messages_of(parse(memory, input=[USER, *referring, USER])) == again


WORDS = st.text(min_size=1, max_size=12)
PLAIN = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system"]), TEXT),
    st.builds(lambda text: {"type": "message", "role": "assistant", "content": text}, TEXT),
    st.builds(lambda text: {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}, WORDS),
    st.builds(lambda id, text: {"type": "function_call_output", "call_id": id, "output": text}, TEXT, TEXT),
    st.builds(lambda id, a: {"type": "function_call", "call_id": id, "name": "f", "arguments": a}, TEXT, WORDS),
)


@given(st.lists(PLAIN, min_size=1, max_size=6), st.sampled_from([None, 1]), st.booleans())
def test_every_word_that_was_sent_is_read(items: list[Any], indent: int | None, ascii_only: bool) -> None:
    sent = json.dumps({"model": "m", "input": items}, indent=indent, ensure_ascii=ascii_only).encode()
    read = json.dumps([builtins(message) for message in messages_of(DIALECT.parse(CALL, sent, {}))])
    for item in items:
        words = item.get("content") or item.get("output") or item.get("arguments") or ""
        if "summary" in item:
            words = item["summary"][0]["text"]
        assert json.dumps(words)[1:-1] in read
