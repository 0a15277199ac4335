"""Properties of the Anthropic Messages dialect over generated requests and replies."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outrider.dialects.base import Completion, ModelRequest, Opening, WireCall
from outrider.dialects.messages import MESSAGES_DIALECT
from outrider.errors import RequestError
from outrider.messages import Delta, Message, Role, ToolCall
from outrider.tokens.tree.canonical import message_key
from outrider.trajectory import FinishReason
from support import messages
from support.later import anthropic

DIALECT = MESSAGES_DIALECT
CALL = WireCall("POST", "/v1/messages")
HI = {"role": "user", "content": "hi"}
TEXT = st.text(max_size=12)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
KINDS = ["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document", "tool_reference"]
BLOCK = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(KINDS) | JSON,
        **dict.fromkeys(("text", "thinking", "id", "name", "tool_use_id", "tool_name"), TEXT | JSON),
        **dict.fromkeys(("input", "is_error", "title", "content", "cache_control"), JSON),
        "source": st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "base64"]), "data": JSON})
        | JSON,
    },
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("m") | JSON,
        "messages": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
                    "content": TEXT | st.lists(BLOCK, max_size=3) | JSON,
                },
            ),
            max_size=3,
        )
        | JSON,
        "system": TEXT | st.lists(BLOCK, max_size=2) | JSON,
        "tools": st.lists(st.dictionaries(st.sampled_from(["name", "type", "input_schema"]), JSON), max_size=2) | JSON,
        **dict.fromkeys(("tool_choice", "stop_sequences", "temperature", "top_p", "top_k", "max_tokens"), JSON),
        **dict.fromkeys(("stream", "thinking", "metadata", "mcp_servers"), JSON),
    },
)


def read(body: bytes) -> ModelRequest:
    request = DIALECT.parse(CALL, body, {})
    for index in range(len(request.messages)):
        request.messages.parse(index)
    return request


@given(BODY, st.none() | st.integers(0, 400))
def test_an_odd_request_raises_nothing_but_request_error(body: Any, cut: int | None) -> None:
    with suppress(RequestError):
        read(json.dumps(body).encode()[:cut])


@given(st.binary(max_size=40))
def test_bytes_raise_nothing_but_request_error(body: bytes) -> None:
    with suppress(RequestError):
        read(body)


OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
ARGUMENTS = (
    st.builds(json.dumps, OBJECT, indent=st.sampled_from([None, 1]), ensure_ascii=st.booleans())
    | st.sampled_from(
        ['{"a": 1, "a": 2}', '{"n": 1.0, "e": 1e3}', '{"INVALID_JSON": "x"}', "[1]", '{"a": NaN}', "null"]
    )
    | TEXT.filter(str.strip)
)
"""Arguments as models write them. Blank arguments are left out: they are sent as `{}` and come back as `{}`."""
CALLS = st.lists(st.builds(ToolCall, id=TEXT, name=TEXT, arguments=ARGUMENTS), max_size=3).map(tuple)
STEPS = st.lists(st.builds(Delta, text=TEXT, reasoning=TEXT), max_size=5)


def completion(
    steps: list[Delta], calls: tuple[ToolCall, ...], finish: FinishReason, stop_match: int | str | None = None
) -> Completion:
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
        stop_match=stop_match,
        prompt_tokens=9,
        completion_tokens=5,
        cached_tokens=4,
    )


class Accumulated:
    """The message of a client that adds up a stream. A kind of block may occur more than once."""

    def __init__(self, stream: bytes) -> None:
        *events, empty = stream.decode().split("\n\n")
        assert empty == ""
        self.message: dict[str, Any] = {}
        self.open: int | None = None
        self.partial = ""
        kinds = [self.add(*event.split("\n")) for event in events]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        assert not {"message_start", "message_delta", "message_stop"} & set(kinds[1:-2])

    def add(self, name: str, data: str) -> str:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        messages.event().validate_python(event, strict=True)
        match event["type"]:
            case "message_start":
                self.message = event["message"]
            case "content_block_start":
                assert (self.open, event["index"]) == (None, len(self.message["content"]))
                self.open = event["index"]
                self.message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == self.open
                self.add_to_block(event["delta"])
            case "content_block_stop":
                assert event["index"] == self.open
                if self.partial:
                    self.message["content"][-1]["input"] = json.loads(self.partial)
                self.open, self.partial = None, ""
            case "message_delta":
                assert self.open is None
                self.message.update(event["delta"], usage=event["usage"])
        return str(event["type"])

    def add_to_block(self, delta: dict[str, Any]) -> None:
        block = self.message["content"][-1]
        field = delta["type"].removesuffix("_delta")
        assert field in block or (field, block["type"]) == ("input_json", "tool_use")
        if field == "input_json":
            self.partial += delta["partial_json"]
        else:
            block[field] += delta[field]


def streamed(request: ModelRequest, steps: list[Delta], done: Completion) -> bytes:
    writer = DIALECT.stream(request)
    opening = Opening(id=done.id, created=done.created, model=done.model, prompt_tokens=done.prompt_tokens)
    return writer.open(opening) + b"".join(map(writer.delta, steps)) + writer.close(done)


def joined(blocks: list[dict[str, Any]], kind: str, field: str) -> str:
    return "".join(block[field] for block in blocks if block["type"] == kind)


@given(STEPS, CALLS, st.sampled_from(FinishReason), st.sampled_from([None, 7, "STOP", "é", "a"]))
def test_a_stream_says_what_the_one_piece_reply_says(
    steps: list[Delta], calls: tuple[ToolCall, ...], finish: FinishReason, stop_match: int | str | None
) -> None:
    asked = {"model": "m", "messages": [HI], "stop_sequences": ["STOP", "é"]}
    request = DIALECT.parse(CALL, json.dumps(asked).encode(), {})
    done = completion(steps, calls, finish, stop_match)
    body = DIALECT.reply(request, done)
    anthropic.types.Message.model_validate_json(body, strict=True)
    whole, added = json.loads(body), Accumulated(streamed(request, steps, done)).message
    one, many = whole.pop("content"), added.pop("content")
    assert added == whole
    for kind, field in (("text", "text"), ("thinking", "thinking")):
        assert joined(one, kind, field) == joined(many, kind, field)
    assert [block for block in one if block["type"] == "tool_use"] == [b for b in many if b["type"] == "tool_use"]
    if [block["type"] for block in one] == [block["type"] for block in many]:
        assert one == many


def like_javascript(value: Any) -> Any:
    """The value as a client with one type of number sends it, with the keys in another order."""
    if isinstance(value, dict):
        return {key: like_javascript(inner) for key, inner in reversed(value.items())}
    if isinstance(value, list):
        return [like_javascript(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


@st.composite
def echoes(draw: st.DrawFn, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with which a client may send a reply back."""
    keep_thinking = draw(st.booleans())
    blocks = []
    for block in content:
        if block["type"] == "thinking" and not keep_thinking:
            continue
        echo = dict(block)
        if echo["type"] == "tool_use" and draw(st.booleans()):
            echo["input"] = like_javascript(echo["input"])
        if draw(st.booleans()):
            echo["cache_control"] = {"type": "ephemeral"}
        blocks.append(echo)
    if len(blocks) == 1 and blocks[0]["type"] == "text" and draw(st.booleans()):
        return [{"role": "assistant", "content": blocks[0]["text"]}]
    at = draw(st.integers(0, len(blocks)))
    if draw(st.booleans()):
        return [{"role": "assistant", "content": part} for part in (blocks[:at], blocks[at:])]
    return [{"role": "assistant", "content": blocks}]


@given(st.data(), STEPS, CALLS, st.sampled_from([None, 1]), st.booleans(), st.booleans())
def test_a_reply_that_comes_back_is_recognised(
    data: st.DataObject, steps: list[Delta], calls: tuple[ToolCall, ...], indent: int | None, ascii: bool, stream: bool
) -> None:
    done = completion(steps, calls, FinishReason.STOP)
    request = DIALECT.parse(CALL, json.dumps({"model": "m", "messages": [HI]}).encode(), {})
    if stream:
        content = Accumulated(streamed(request, steps, done)).message["content"]
    else:
        content = json.loads(DIALECT.reply(request, done))["content"]
    sent = {"model": "m", "messages": [HI, *data.draw(echoes(content)), HI]}
    body = json.dumps(sent, indent=indent, ensure_ascii=ascii).encode()
    history = read(body).messages
    assert len(history) == 3
    echo = history.parse(1)
    known, got = message_key(done.reply), message_key(echo)
    assert (got.role, got.body) == (known.role, known.body)
    assert got.reasoning in (None, known.reasoning)
