"""The Gemini dialect in tests: short forms for requests and messages, and readers of streams."""

from __future__ import annotations

import json
from typing import Any

from outrider.dialects.base import Completion, Memory, ModelRequest, Opening, WireCall
from outrider.dialects.gemini import GEMINI_DIALECT
from outrider.messages import Delta, Message, Role
from outrider.trajectory import FinishReason

MODEL = "/v1beta/models/m"
GENERATE = WireCall("POST", f"{MODEL}:generateContent")
EVENTS = WireCall("POST", f"{MODEL}:streamGenerateContent", b"alt=sse")
ARRAY = WireCall("POST", f"{MODEL}:streamGenerateContent")
COUNT = WireCall("POST", f"{MODEL}:countTokens")
DIALECT = GEMINI_DIALECT


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def text(said: str) -> dict[str, Any]:
    return {"text": said}


def called(name: str, id: str | None = None, **args: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args} | ({"id": id} if id is not None else {})}


def answered(name: str, output: Any, id: str | None = None) -> dict[str, Any]:
    response = {"name": name, "response": {"output": output}}
    return {"functionResponse": response | ({"id": id} if id is not None else {})}


def read(*contents: Any, call: WireCall = GENERATE, memory: Memory | None = None, **body: Any) -> ModelRequest:
    encoded = json.dumps({"contents": list(contents), **body}).encode()
    return DIALECT.parse(call, encoded, {} if memory is None else memory)


def messages(request: ModelRequest) -> list[Message]:
    return [request.messages.parse(index) for index in range(len(request.messages))]


def completed(reply: Message, finish: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(
        id="r1", created=1, model="m", reply=reply, finish=finish, prompt_tokens=7, completion_tokens=3, cached_tokens=2
    )


def said(content: str = "", **fields: Any) -> Message:
    return Message(role=Role.ASSISTANT, content=content, **fields)


def stream(request: ModelRequest, steps: list[Delta], done: Completion) -> bytes:
    writer = DIALECT.stream(request)
    written = writer.ping + writer.open(Opening(id=done.id, created=done.created, model=done.model))
    for step in steps:
        written += writer.ping + writer.delta(step)
    return written + writer.close(done)


def chunks(written: bytes, *, events: bool) -> list[Any]:
    """Return the chunks of a stream, as a client reads them: server-sent events, or one JSON array."""
    if not events:
        return list(json.loads(written))
    lines = [line for line in written.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines]


def parts_in(chunks: list[Any]) -> list[dict[str, Any]]:
    return [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
