"""Golden transcripts of every dialect: the request, the steps of the reply, and the exact bytes of both replies.

A transcript (`tests/golden/DIALECT/*.txt`) is a sentence, then sections headed `--- name`:

    call         the request line, if it differs from the dialect's usual one: method, path and query
    request      the client's body, JSON
    messages     the messages as they are read, one JSON `Message` a line
    asked        the rest of the `ModelRequest`: model, flags, sampling, tools, and the fields without effect, if any
    steps        the input of the stream's writer, one JSON object a line: {"delta", "pieces"} | {"ping"} | {"error"}
    completion   the finished call, JSON of a `Completion` with ids and log-probabilities as lists
    reply        the exact one-piece body (absent if the stream ends in an error)
    stream       the exact stream
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from outrider.dialects.base import Completion, Dialect, ModelRequest, Opening, WireCall
from outrider.dialects.chat import CHAT_DIALECT
from outrider.dialects.gemini import GEMINI_DIALECT
from outrider.dialects.messages import MESSAGES_DIALECT
from outrider.dialects.responses import RESPONSES_DIALECT
from outrider.errors import EngineUnavailable
from outrider.messages import Delta, Message
from outrider.trajectory import FinishReason
from support import gemini, messages, responses, wire
from support.later import anthropic, genai, openai

FOLDER = Path(__file__).parents[1] / "golden"
FLAGS = ("stream", "include_usage", "logprobs", "return_token_ids")
Sections = dict[str, str]


def chat_client_accepts(case: Sections) -> None:
    if "reply" in case:
        openai.types.chat.ChatCompletion.model_validate_json(case["reply"], strict=True)
    events = [line.removeprefix("data: ") for line in case["stream"].splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    for chunk in events[:-1]:
        if not chunk.startswith('{"error"'):
            openai.types.chat.ChatCompletionChunk.model_validate_json(chunk, strict=True)


def responses_client_accepts(case: Sections) -> None:
    told = responses.events(case["stream"].encode())
    if "reply" in case:
        openai.types.responses.Response.model_validate_json(case["reply"], strict=True)
        assert json.loads(case["reply"]) == told[-1]["response"]
    else:
        assert told[-1]["type"] == "response.failed"


def messages_client_accepts(case: Sections) -> None:
    if "reply" in case:
        anthropic.types.Message.model_validate_json(case["reply"], strict=True)
    for event in case["stream"].removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        payload = data.removeprefix("data: ")
        match name:
            case "event: ping":
                assert payload == '{"type":"ping"}'
            case "event: error":
                anthropic.types.ErrorResponse.model_validate_json(payload, strict=True)
            case _:
                assert name == f"event: {messages.event().validate_json(payload, strict=True).type}"


def gemini_client_accepts(case: Sections) -> None:
    chunks = gemini.chunks(case["stream"].encode(), events="alt=sse" in case["call"])
    for chunk in [*chunks, *([json.loads(case["reply"])] if "reply" in case else [])]:
        if "error" not in chunk:
            genai.types.GenerateContentResponse.model_validate(chunk)


@dataclass(frozen=True)
class Golden:
    """A dialect, its usual call, and a check that the types of the official client accept its replies."""

    dialect: Dialect
    call: WireCall
    client_accepts: Callable[[Sections], None]


DIALECTS = {
    "chat": Golden(CHAT_DIALECT, wire.CALL, chat_client_accepts),
    "responses": Golden(RESPONSES_DIALECT, responses.CALL, responses_client_accepts),
    "messages": Golden(MESSAGES_DIALECT, WireCall("POST", "/v1/messages", b"beta=true"), messages_client_accepts),
    "gemini": Golden(GEMINI_DIALECT, gemini.GENERATE, gemini_client_accepts),
}
TRANSCRIPTS = [
    pytest.param(golden, path, id=f"{name}-{path.stem}")
    for name, golden in DIALECTS.items()
    for path in sorted((FOLDER / name).glob("*.txt"))
]


def sections(path: Path) -> Sections:
    _, *parts = ("\n" + path.read_text()).split("\n--- ")
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def call_of(line: str) -> WireCall:
    method, target = line.split()
    path, _, query = target.partition("?")
    return WireCall(method, path, query.encode())


def builtins(value: msgspec.Struct) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def asked(request: ModelRequest) -> dict[str, Any]:
    context = request.reply_context
    flags = [name for name in FLAGS if getattr(request, name)]
    flags += ["store"] * (getattr(context, "keep", None) is not None)
    flags += [name for name in ("summary", "encrypted") if getattr(context, name, False)]
    ignored = {"ignored": list(request.ignored)} if request.ignored else {}
    return ignored | {
        "model": request.model,
        "flags": flags,
        "sampling": {name: value for name, value in builtins(request.sampling).items() if value not in (None, [], {})},
        "tools": list(request.tools),
    }


def completion_of(text: str) -> Completion:
    fields = json.loads(text)
    for name, kind in (("prompt_ids", np.int32), ("output_ids", np.int32), ("logprobs", np.float64)):
        if name in fields:
            fields[name] = np.array(fields[name], dtype=kind)
    fields["pieces"] = tuple(piece.encode() for piece in fields.get("pieces", ()))
    fields["reply"] = msgspec.convert(fields["reply"], Message)
    return Completion(**fields | {"finish": FinishReason(fields["finish"])})


def streamed(dialect: Dialect, request: ModelRequest, completion: Completion, steps: str) -> bytes:
    writer = dialect.stream(request)
    opening = {name: getattr(completion, name) for name in Opening.__struct_fields__}
    written = writer.open(Opening(**opening))
    for step in map(json.loads, steps.splitlines()):
        if "delta" in step:
            pieces = tuple(piece.encode() for piece in step.get("pieces", ()))
            written += writer.delta(msgspec.convert(step["delta"], Delta), pieces)
        elif "ping" in step:
            written += writer.ping
        else:
            return written + writer.error(EngineUnavailable(step["error"]))
    return written + writer.close(completion)


@pytest.mark.parametrize(("golden", "path"), TRANSCRIPTS)
def test_transcript(golden: Golden, path: Path) -> None:
    case = sections(path)
    call = call_of(case["call"]) if "call" in case else golden.call
    request = golden.dialect.parse(call, case["request"].encode(), {})
    read = [request.messages.parse(index) for index in range(len(request.messages))]
    assert list(map(builtins, read)) == list(map(json.loads, case["messages"].splitlines()))
    assert asked(request) == json.loads(case["asked"])
    completion = completion_of(case["completion"])
    assert streamed(golden.dialect, request, completion, case["steps"]).decode().strip() == case["stream"].strip()
    if "reply" in case:
        assert golden.dialect.reply(request, completion).decode() == case["reply"].strip()


@pytest.mark.parametrize(("golden", "path"), TRANSCRIPTS)
def test_typed_models_of_the_official_client_accept_it(golden: Golden, path: Path) -> None:
    golden.client_accepts(sections(path))


@pytest.mark.parametrize("name", DIALECTS)
def test_there_are_transcripts(name: str) -> None:
    assert len(list((FOLDER / name).glob("*.txt"))) >= 6
