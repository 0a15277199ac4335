"""Golden transcripts of the Anthropic Messages dialect: what was asked, what happened, and both replies to the byte.

A transcript (`tests/golden/messages/*.txt`) is a sentence, then sections headed `--- name`:

    request      the client's body, JSON
    messages     what each message is read as, one JSON `Message` a line
    asked        the rest of the `ModelRequest`: model, flags, sampling, tools
    steps        what the stream is told, one JSON object a line: {"delta"} | {"ping"} | {"error"}
    completion   the finished call, JSON of a `Completion`
    reply        the one-piece body, exactly          (absent when the stream ends in an error)
    stream       the server-sent events, exactly
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.types import ErrorResponse, RawMessageStreamEvent
from anthropic.types import Message as WireMessage
from pydantic import TypeAdapter

from outrider.dialects.base import Completion, ModelRequest, Opening, WireCall
from outrider.dialects.messages_api import MESSAGES, MessagesDialect
from outrider.errors import EngineUnavailable
from outrider.messages import Delta, Message
from outrider.trajectory import FinishReason

CALL = WireCall("POST", MESSAGES, b"beta=true")
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "messages").glob("*.txt"))


def sections(path: Path) -> dict[str, str]:
    _, *parts = ("\n" + path.read_text()).split("\n--- ")
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def builtins(value: msgspec.Struct) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def asked(request: ModelRequest) -> dict[str, Any]:
    return {
        "model": request.model,
        "flags": ["stream"] if request.stream else [],
        "sampling": {name: value for name, value in builtins(request.sampling).items() if value not in (None, [])},
        "tools": list(request.tools),
    }


def completion_of(text: str) -> Completion:
    fields = json.loads(text)
    fields["reply"] = msgspec.convert(fields["reply"], Message)
    return Completion(**fields | {"finish": FinishReason(fields["finish"])})


def streamed(case: dict[str, str], request: ModelRequest, completion: Completion) -> bytes:
    writer = MessagesDialect().stream(request)
    opening = Opening(
        id=completion.id,
        created=completion.created,
        model=completion.model,
        prompt_tokens=completion.prompt_tokens,
    )
    written = writer.open(opening)
    for step in map(json.loads, case["steps"].splitlines()):
        if "delta" in step:
            written += writer.delta(msgspec.convert(step["delta"], Delta))
        elif "ping" in step:
            written += writer.ping()
        else:
            written += writer.error(EngineUnavailable(step["error"]))
    return written + writer.close(completion)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    case = sections(path)
    request = MessagesDialect().parse(CALL, case["request"].encode(), {})
    read = [request.messages.parse(index) for index in range(len(request.messages))]
    assert list(map(builtins, read)) == list(map(json.loads, case["messages"].splitlines()))
    assert asked(request) == json.loads(case["asked"])
    completion = completion_of(case["completion"])
    assert streamed(case, request, completion).decode() == case["stream"]
    if "reply" in case:
        assert MessagesDialect().reply(request, completion).decode() == case["reply"].strip()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_typed_models_of_the_official_client_accept_it(path: Path) -> None:
    case = sections(path)
    if "reply" in case:
        WireMessage.model_validate_json(case["reply"], strict=True)
    for event in case["stream"].removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        payload = data.removeprefix("data: ")
        match name:
            case "event: ping":
                assert payload == '{"type":"ping"}'
            case "event: error":
                ErrorResponse.model_validate_json(payload, strict=True)
            case _:
                assert name == f"event: {EVENT.validate_json(payload, strict=True).type}"


def test_there_are_transcripts() -> None:
    assert len(GOLDEN) >= 6
