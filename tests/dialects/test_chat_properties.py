"""Properties of the Chat dialect over generated requests and replies."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.dialects.base import Completion, Opening
from outrider.dialects.chat import CHAT_DIALECT
from outrider.dialects.chat.request import parse_message
from outrider.errors import RequestError
from outrider.messages import Delta, Message, Role, ToolCall
from outrider.trajectory import FinishReason
from support.later import openai
from support.wire import CALL

TEXT = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
FUNCTION = st.fixed_dictionaries({}, optional={"name": TEXT | JSON, "arguments": TEXT | JSON, "parameters": JSON})
WIRE_TOOL_CALL = st.fixed_dictionaries({}, optional={"id": TEXT | JSON, "type": JSON, "function": FUNCTION | JSON})
PART = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["text", "refusal", "image_url"]) | JSON, "text": JSON}
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]) | JSON,
        "content": TEXT | st.lists(PART, max_size=3) | JSON,
        "reasoning": TEXT | JSON,
        "reasoning_content": JSON,
        "tool_calls": st.lists(WIRE_TOOL_CALL, max_size=3) | JSON,
        "function_call": FUNCTION | JSON,
        "tool_call_id": TEXT | JSON,
        "name": JSON,
        "audio": JSON,
    },
)
SPEC = st.fixed_dictionaries(
    {}, optional={"type": st.just("function") | JSON, "function": FUNCTION | JSON, "name": JSON}
)

NAMES = [
    "model",
    "n",
    "stop",
    "seed",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "functions",
]
NAMES += ["max_tokens", "max_completion_tokens", "tool_choice", "logprobs", "return_token_ids", "messages", "tools"]
ALMOST = st.builds(
    lambda base, wrong: {**base, **wrong},
    st.fixed_dictionaries(
        {"model": TEXT, "messages": st.lists(MESSAGE, max_size=4)}, optional={"tools": st.lists(SPEC, max_size=2)}
    ),
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=2),
)


def read_whole(body: bytes) -> list[Message]:
    """Return all messages that can be read from a body. Checks that each part can be encoded as JSON."""
    request = CHAT_DIALECT.parse(CALL, body, {})
    msgspec.json.encode([request.model, request.tools, request.sampling])
    messages = []
    for index in range(len(request.messages)):
        with suppress(RequestError):
            messages.append(request.messages.parse(index))
    msgspec.json.encode(messages)
    return messages


def damaged(body: bytes, at: int, junk: bytes) -> bytes:
    at %= len(body)
    return body[:at] + junk + body[at + len(junk) :]


@given(ALMOST)
def test_an_almost_valid_body_is_read_or_refused(body: Any) -> None:
    with suppress(RequestError):
        read_whole(json.dumps(body).encode())


@given(
    ALMOST, st.integers(min_value=0), st.binary(min_size=1, max_size=4) | st.sampled_from([rb"\ud8", b"NaN", b"[{["])
)
def test_a_damaged_body_is_read_or_refused(body: Any, at: int, junk: bytes) -> None:
    with suppress(RequestError):
        read_whole(damaged(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"), at, junk))


@given(st.binary(max_size=64))
def test_bytes_are_refused(body: bytes) -> None:
    with suppress(RequestError):
        read_whole(body)
        raise AssertionError("64 random bytes are no request")


WELL_FORMED = st.one_of(
    st.builds(Message, role=st.sampled_from([Role.SYSTEM, Role.USER]), content=TEXT),
    st.builds(Message, role=st.just(Role.TOOL), content=TEXT, tool_call_id=TEXT),
    st.builds(
        Message,
        role=st.just(Role.ASSISTANT),
        content=TEXT,
        reasoning=st.none() | st.text(min_size=1, max_size=12),
        tool_calls=st.lists(st.builds(ToolCall, id=TEXT, name=TEXT, arguments=TEXT), max_size=3).map(tuple),
    ),
)


def as_sent(message: Message) -> dict[str, Any]:
    sent: dict[str, Any] = {"role": message.role, "content": message.content, "reasoning_content": message.reasoning}
    if message.tool_call_id is not None:
        sent["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        calls = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in message.tool_calls]
        sent["tool_calls"] = [{"id": id, "type": "function", "function": function} for id, function in calls]
    return sent


@given(st.lists(WELL_FORMED, min_size=1, max_size=5), st.sampled_from([None, 1]), st.booleans())
def test_raw_and_parse_agree_with_what_was_sent(messages: list[Message], indent: int | None, ascii_only: bool) -> None:
    body = json.dumps(
        {"messages": [as_sent(message) for message in messages], "model": "m"}, indent=indent, ensure_ascii=ascii_only
    )
    read = CHAT_DIALECT.parse(CALL, body.encode(), {}).messages
    assert [read.parse(index) for index in range(len(read))] == messages
    assert [parse_message(read.raw(index), "") for index in range(len(read))] == messages


class Accumulated:
    """The result of a client that adds up a stream's deltas."""

    def __init__(self, stream: bytes) -> None:
        *events, done, empty = stream.decode().split("\n\n")
        assert (done, empty) == ("data: [DONE]", "")
        self.message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.finish: list[str] = []
        self.usage: list[Any] = []
        self.prompt: list[Any] = []
        for event in events:
            self.add(json.loads(event.removeprefix("data: ")))

    def add(self, chunk: dict[str, Any]) -> None:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk, strict=True)
        if chunk.get("usage"):
            self.usage.append(chunk["usage"])
        if "prompt_token_ids" in chunk:
            self.prompt.append(chunk["prompt_token_ids"])
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                self.message[name] += delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                assert call.pop("index") == len(self.message["tool_calls"])
                self.message["tool_calls"].append(call)
            self.token_ids += choice.get("token_ids", ())
            self.logprobs += (choice["logprobs"] or {}).get("content", ())
            if choice["finish_reason"] is not None:
                self.finish.append(choice["finish_reason"])


STEP = st.builds(
    lambda text, reasoning, tokens: Delta(
        text=text, reasoning=reasoning, ids=[number for number, _ in tokens], logprobs=[value for _, value in tokens]
    ),
    TEXT,
    TEXT,
    st.lists(st.tuples(st.integers(0, 200_000), st.floats(max_value=0, allow_infinity=False)), max_size=3),
)
CALLS = st.lists(st.builds(ToolCall, id=TEXT, name=TEXT, arguments=TEXT), max_size=3).map(tuple)


@given(
    st.lists(STEP, max_size=5),
    CALLS,
    st.sampled_from(FinishReason),
    st.fixed_dictionaries({"logprobs": st.booleans(), "return_token_ids": st.booleans(), "usage": st.booleans()}),
)
def test_a_stream_says_what_the_one_piece_reply_says(
    steps: list[Delta], calls: tuple[ToolCall, ...], finish: FinishReason, flags: dict[str, bool]
) -> None:
    asked = {"model": "m", "messages": [{}], "stream_options": {"include_usage": flags.pop("usage")}, **flags}
    request = CHAT_DIALECT.parse(CALL, json.dumps(asked).encode(), {})
    done = completion(steps, calls, finish)
    whole = json.loads(CHAT_DIALECT.reply(request, done))
    openai.types.chat.ChatCompletion.model_validate(whole, strict=True)
    added = Accumulated(streamed(request, steps, done))
    choice = whole["choices"][0]
    assert added.finish == [choice["finish_reason"]]
    assert added.message["content"] == (choice["message"]["content"] or "")
    assert added.message["reasoning_content"] == choice["message"].get("reasoning_content", "")
    assert added.message["tool_calls"] == choice["message"].get("tool_calls", [])
    assert added.token_ids == choice.get("token_ids", [])
    assert added.logprobs == (choice["logprobs"] or {"content": []})["content"]
    assert added.usage == ([whole["usage"]] if request.include_usage else [])
    assert added.prompt == ([whole["prompt_token_ids"]] if request.return_token_ids else [])


def completion(steps: list[Delta], calls: tuple[ToolCall, ...], finish: FinishReason) -> Completion:
    ids = [number for step in steps for number in step.ids]
    return Completion(
        id="1",
        created=1,
        model="m",
        reply=Message(
            role=Role.ASSISTANT,
            content="".join(step.text for step in steps),
            reasoning="".join(step.reasoning for step in steps) or None,
            tool_calls=calls,
        ),
        finish=finish,
        prompt_tokens=2,
        completion_tokens=len(ids),
        prompt_ids=np.array([1, 2], dtype=np.int32),
        output_ids=np.array(ids, dtype=np.int32),
        logprobs=np.array([value for step in steps for value in step.logprobs], dtype=np.float64),
        pieces=tuple(b"%x" % number for number in ids),
    )


def streamed(request: Any, steps: list[Delta], done: Completion) -> bytes:
    writer = CHAT_DIALECT.stream(request)
    written = writer.open(Opening(id=done.id, created=done.created, model=done.model, prompt_ids=done.prompt_ids))
    for step in steps:
        written += writer.delta(step, tuple(b"%x" % number for number in step.ids))
    return written + writer.close(done)
