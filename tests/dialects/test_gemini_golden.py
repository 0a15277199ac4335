"""Golden transcripts of the Google dialect: what was asked, what happened, and the exact bytes of both replies.

A transcript (`tests/golden/gemini/*.txt`) is a sentence, then sections headed `--- name`:

    call         the request line: method, path and query
    request      the client's body, JSON
    messages     what each message is read as, one JSON `Message` a line
    asked        the rest of the `ModelRequest`: model, whether streamed, sampling, tools
    steps        what the stream is told, one JSON object a line: {"delta"} | {"ping"} | {"error"}
    completion   the finished call, JSON of a `Completion`
    reply        the one-piece body, exactly          (absent when the stream ends in an error)
    stream       the stream, exactly
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.genai import types

from outrider.dialects.base import Completion, ModelRequest, Opening, WireCall
from outrider.errors import EngineUnavailable
from outrider.messages import Delta, Message
from outrider.trajectory import FinishReason
from support.gemini import DIALECT, chunks, messages

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "gemini").glob("*.txt"))


def sections(path: Path) -> dict[str, str]:
    _, *parts = ("\n" + path.read_text()).split("\n--- ")
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def call_of(line: str) -> WireCall:
    method, target = line.split()
    path, _, query = target.partition("?")
    return WireCall(method, path, query.encode())


def builtins(value: msgspec.Struct) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def asked(request: ModelRequest) -> dict[str, Any]:
    return {
        "model": request.model,
        "stream": request.stream,
        "sampling": {name: value for name, value in builtins(request.sampling).items() if value not in (None, [])},
        "tools": list(request.tools),
    }


def completion_of(text: str) -> Completion:
    fields = json.loads(text)
    fields["reply"] = msgspec.convert(fields["reply"], Message)
    return Completion(**fields | {"finish": FinishReason(fields["finish"])})


def streamed(case: dict[str, str], request: ModelRequest, completion: Completion) -> bytes:
    writer = DIALECT.stream(request)
    written = writer.open(Opening(id=completion.id, created=completion.created, model=completion.model))
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
    request = DIALECT.parse(call_of(case["call"]), case["request"].encode(), {})
    assert list(map(builtins, messages(request))) == list(map(json.loads, case["messages"].splitlines()))
    assert asked(request) == json.loads(case["asked"])
    completion = completion_of(case["completion"])
    assert streamed(case, request, completion).decode().strip() == case["stream"].strip()
    if "reply" in case:
        assert DIALECT.reply(request, completion).decode() == case["reply"].strip()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_typed_models_of_the_official_client_accept_it(path: Path) -> None:
    case = sections(path)
    got = chunks(case["stream"].encode(), events="alt=sse" in case["call"])
    whole = [json.loads(case["reply"])] if "reply" in case else []
    for chunk in [*got, *whole]:
        if "error" not in chunk:
            types.GenerateContentResponse.model_validate(chunk)


def test_there_are_transcripts() -> None:
    assert len(GOLDEN) >= 6
