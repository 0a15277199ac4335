"""The Responses dialect in tests: short forms of requests, readers of streams, and replies as clients send them
back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import msgspec
from pydantic import BaseModel

from outrider.dialects.base import Completion, Memory, ModelRequest, Opening, WireCall
from outrider.dialects.responses import RESPONSES_DIALECT
from outrider.messages import Delta, Message, Role, ToolCall
from outrider.trajectory import FinishReason
from support.later import openai

DIALECT = RESPONSES_DIALECT
CALL = WireCall("POST", "/v1/responses")
USER: dict[str, Any] = {"role": "user", "content": "hi"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Apply a patch."}
NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "fs",
    "description": "Files.",
    "tools": [{"type": "function", "name": "read"}, {"type": "custom", "name": "write"}],
}
TOOLS = [FUNCTION, CUSTOM, NAMESPACE]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "input": [USER], **fields}).encode()


def parse(memory: Memory | None = None, **fields: Any) -> ModelRequest:
    return DIALECT.parse(CALL, body(**fields), {} if memory is None else memory)


def read(*items: Any, **fields: Any) -> list[Message]:
    """Return the messages that the dialect parses from these items."""
    return messages_of(parse(input=list(items), **fields))


def messages_of(request: ModelRequest) -> list[Message]:
    return [request.messages.parse(index) for index in range(len(request.messages))]


def completion(
    content: str = "",
    *calls: ToolCall,
    reasoning: str | None = None,
    finish: FinishReason = FinishReason.STOP,
    id: str = "0123",
) -> Completion:
    return Completion(
        id=id,
        created=1_700_000_000,
        model="m",
        reply=Message(role=Role.ASSISTANT, content=content, reasoning=reasoning, tool_calls=calls),
        finish=finish,
        prompt_tokens=7,
        completion_tokens=5,
        cached_tokens=3,
    )


def replied(request: ModelRequest, done: Completion) -> dict[str, Any]:
    """Return the non-streamed reply, and check it strictly against the official client's types."""
    whole: dict[str, Any] = json.loads(DIALECT.reply(request, done))
    openai.types.responses.Response.model_validate(whole, strict=True)
    return whole


def streamed(request: ModelRequest, done: Completion, steps: Sequence[Delta] | None = None) -> list[dict[str, Any]]:
    """Return the events of the streamed reply. The reply is streamed in one step unless `steps` are given."""
    if steps is None:
        steps = [Delta(text=done.reply.content, reasoning=done.reply.reasoning or "")]
    writer = DIALECT.stream(request)
    written = writer.open(Opening(id=done.id, created=done.created, model=done.model))
    written += b"".join([writer.delta(step) for step in steps])
    return events(written + writer.close(done))


def events(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream. Checks that each event is named by its type, numbered in order, and valid for the
    official client."""
    *blocks, rest = stream.decode().split("\n\n")
    assert rest == ""
    found: list[Any] = []
    for block in blocks:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        _event_kinds()[event["type"]].model_validate(event, strict=True)
        found.append(event)
    return found


@cache
def _event_kinds() -> dict[str, type[BaseModel]]:
    """Return the official client's event classes by event type."""
    kinds = get_args(get_args(openai.types.responses.ResponseStreamEvent)[0])
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in kinds}


def echo(output: Sequence[dict[str, Any]], reasoning: str = "keep", *, ids: bool = True) -> list[dict[str, Any]]:
    """Return the items of a reply as clients send them back. Arguments are serialised again. Reasoning is kept
    ("keep"), dropped ("drop"), or kept only as its sealed text ("sealed"). Without `ids`, the items have no ids and
    states."""
    echoed = []
    for item in output:
        sent = dict(item) if ids else {key: value for key, value in item.items() if key not in ("id", "status")}
        if item["type"] == "reasoning":
            if reasoning == "drop":
                continue
            if reasoning == "sealed":
                sent.pop("content", None)
                sent["summary"] = []
        if item["type"] == "function_call":
            sent["arguments"] = _reserialised(item["arguments"])
        echoed.append(sent)
    return echoed


def _reserialised(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=1)
    except (ValueError, RecursionError):
        return arguments


def builtins(value: msgspec.Struct) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))
