"""Golden transcripts of the Chat dialect: what was asked, what happened, and the exact bytes of both replies.

A transcript (`tests/golden/chat/*.txt`) is a sentence, then sections headed `--- name`:

    request      the client's body, JSON
    messages     what each message is read as, one JSON `Message` a line
    asked        the rest of the `ModelRequest`: model, flags, sampling, tools
    steps        what the stream is told, one JSON object a line: {"delta", "pieces"} | {"ping"} | {"error"}
    completion   the finished call, JSON of a `Completion` with ids and log-probabilities as lists
    reply        the one-piece body, exactly          (absent when the stream ends in an error)
    stream       the server-sent events, exactly
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from outrider.dialects.base import Completion, ModelRequest, Opening
from outrider.dialects.chat import ChatDialect
from outrider.errors import EngineUnavailable
from outrider.messages import Delta, Message
from outrider.trajectory import FinishReason
from support.wire import CALL

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "chat").glob("*.txt"))


def sections(path: Path) -> dict[str, str]:
    _, *parts = ("\n" + path.read_text()).split("\n--- ")
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def builtins(value: msgspec.Struct) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def asked(request: ModelRequest) -> dict[str, Any]:
    return {
        "model": request.model,
        "flags": [f for f in ("stream", "include_usage", "logprobs", "return_token_ids") if getattr(request, f)],
        "sampling": {name: value for name, value in builtins(request.sampling).items() if value not in (None, [])},
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


def streamed(case: dict[str, str], request: ModelRequest, completion: Completion) -> bytes:
    writer = ChatDialect().stream(request)
    written = writer.open(
        Opening(id=completion.id, created=completion.created, model=completion.model, prompt_ids=completion.prompt_ids)
    )
    for step in map(json.loads, case["steps"].splitlines()):
        if "delta" in step:
            pieces = tuple(piece.encode() for piece in step.get("pieces", ()))
            written += writer.delta(msgspec.convert(step["delta"], Delta), pieces)
        elif "ping" in step:
            written += writer.ping()
        else:
            written += writer.error(EngineUnavailable(step["error"]))
    return written + writer.close(completion)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    case = sections(path)
    request = ChatDialect().parse(CALL, case["request"].encode(), {})
    read = [request.messages.parse(index) for index in range(len(request.messages))]
    assert list(map(builtins, read)) == list(map(json.loads, case["messages"].splitlines()))
    assert asked(request) == json.loads(case["asked"])
    completion = completion_of(case["completion"])
    assert streamed(case, request, completion).decode() == case["stream"]
    if "reply" in case:
        assert ChatDialect().reply(request, completion).decode() == case["reply"].strip()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_typed_models_of_the_official_client_accept_it(path: Path) -> None:
    case = sections(path)
    if "reply" in case:
        ChatCompletion.model_validate_json(case["reply"], strict=True)
    events = [line.removeprefix("data: ") for line in case["stream"].splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [event for event in events[:-1] if not event.startswith('{"error"')]
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(chunk, strict=True)


def test_there_are_transcripts() -> None:
    assert len(GOLDEN) >= 6
