"""Recorded responses of real servers, replayed to the adapters: SGLang 0.5.17 and vLLM 0.26.0, on one H200.

Each line of tests/golden/real_engines is one response: its status, its unchanged body (of long streams only the first
three events and the last two; `cut` is True if the capture or the server broke off), and the expected result of the
adapter. The adapters request only streams, so a generation that came in one piece is replayed as a stream of one event.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.worlds import ADAPTERS, HASTY
from outrider.engines.base import Chunk, Engine, EngineOptions, GenerateRequest, SamplingParams
from outrider.errors import EngineError
from outrider.lab.fakes.engine_servers.app import serving
from outrider.wire.http_server import Receive, Scope, Send

GOLDEN = Path(__file__).parent.parent / "golden" / "real_engines"
KINDS = {"sglang": "sglang-0.5.17", "vllm": "vllm-0.26.0"}
GENERATE = {"sglang": ("/generate",), "vllm": ("/inference/v1/generate", "/v1/completions")}


class Made(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of the adapter. `versions` are the spans as triples. `error` is the name of the error's class, and
    `says` is a part of its message."""

    ids: list[int] = []
    logprobs: list[float] = []
    finish: str | None = None
    stop_match: int | str | None = None
    versions: list[tuple[int, int, int]] = []
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_ids: list[int] | None = None
    error: str | None = None
    says: str = ""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A recorded response. `prompt` and `max_tokens` are the sizes in the request."""

    name: str
    method: str
    path: str
    status: int
    content_type: str
    body: str
    cut: bool = False
    prompt: int = 8
    max_tokens: int = 8
    made: Made | None = None

    def sent(self) -> tuple[bytes, bytes]:
        """Content type and body."""
        if self.status == 200 and any(self.path in routes for routes in GENERATE.values()) and self.body[:1] == "{":
            return b"text/event-stream", f"data: {self.body}\n\ndata: [DONE]\n\n".encode()
        return self.content_type.encode(), self.body.encode()


def replies(kind: str) -> list[Reply]:
    lines = (GOLDEN / f"{KINDS[kind]}.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Reply) for line in lines]


GENERATIONS = [
    pytest.param(kind, reply, id=f"{kind} {reply.name}")
    for kind in KINDS
    for reply in replies(kind)
    if reply.path in GENERATE[kind] and reply.method == "POST"
]


class Replaying:
    """Sends the recorded response of each path. The sizes of the body's pieces are taken from `sizes` in turn."""

    def __init__(self, *known: Reply, sizes: Sequence[int] = (1 << 20,)) -> None:
        self.replies = {(reply.method, reply.path): reply for reply in known}
        self.asked: list[str] = []
        self._sizes = sizes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        self.asked.append(scope["path"])
        query = scope["query_string"].decode()
        path = scope["path"] + (f"?{query}" if query else "")
        reply = self.replies.get((scope["method"], path)) or self.replies.get((scope["method"], scope["path"]))
        content_type, body = reply.sent() if reply else (b"application/json", b'{"detail":"Not Found"}')
        headers = [(b"content-type", content_type)]
        if reply is not None and reply.cut:
            headers.append((b"content-length", b"1000000"))
        status = 404 if reply is None else reply.status
        await send({"type": "http.response.start", "status": status, "headers": headers})
        at = turn = 0
        while at < len(body):
            size = self._sizes[turn % len(self._sizes)]
            await send({"type": "http.response.body", "body": body[at : at + size], "more_body": True})
            at, turn = at + size, turn + 1
        if reply is None or not reply.cut:
            await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def adapter(kind: str, server: Replaying) -> AsyncIterator[Any]:
    async with serving(server) as url:
        engine = ADAPTERS[kind](EngineOptions(name="real", url=url), retry=HASTY)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()


async def make(engine: Engine, reply: Reply) -> Made:
    request = GenerateRequest(
        request_id="r" * 32,
        session_key="s",
        input_ids=np.arange(5, 5 + reply.prompt, dtype=np.int32) % 600,
        sampling=SamplingParams(max_tokens=reply.max_tokens, stop=("il ba",)),
    )
    chunks: list[Chunk] = []
    error: EngineError | None = None
    try:
        async with aclosing(engine.generate(request)) as found:
            async for chunk in found:
                chunks.append(chunk)
    except EngineError as raised:
        error = raised
    last = chunks[-1] if chunks else Chunk(ids=[], logprobs=[])
    return Made(
        ids=[token for chunk in chunks for token in chunk.ids],
        logprobs=[value for chunk in chunks for value in chunk.logprobs],
        finish=last.finish,
        stop_match=last.stop_match,
        versions=[(span.version, span.start, span.end) for span in last.versions],
        cached_tokens=last.cached_tokens,
        prompt_tokens=last.prompt_tokens,
        prompt_ids=next((chunk.prompt_ids for chunk in chunks if chunk.prompt_ids), None),
        error=type(error).__name__ if error else None,
        says=error.message if error else "",
    )


def sampled(kind: str, reply: Reply) -> list[tuple[int, float]]:
    """The tokens of a reply and their log-probabilities, read without the adapter."""
    events = [line[6:] for line in reply.body.splitlines() if line.startswith("data: {") and line.endswith("}")]
    found: list[tuple[int, float]] = []
    for event in map(json.loads, events or [reply.body]):
        if kind == "sglang" and "meta_info" in event:  # each event has all tokens so far
            found = [(entry[1], entry[0]) for entry in event["meta_info"].get("output_token_logprobs", [])]
        for choice in event.get("choices", []):
            logprobs = choice["logprobs"]
            values = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs["content"]]
            found += zip(choice["token_ids"], values, strict=True)
    return found


PIECES = ((1 << 20,), (1,), (7, 1, 131), (4096, 3))
"""Sizes of the pieces in which a reply arrives: whole, byte by byte, odd, and large."""


@pytest.mark.parametrize(("kind", "reply"), GENERATIONS)
async def test_a_generation(kind: str, reply: Reply) -> None:
    for sizes in PIECES:
        async with adapter(kind, Replaying(reply, sizes=sizes)) as engine:
            made = await make(engine, reply)
        expected = reply.made
        assert expected is not None
        assert expected.says in made.says
        assert msgspec.structs.replace(made, says="") == msgspec.structs.replace(expected, says=""), sizes
        if made.finish is not None:
            assert list(zip(made.ids, made.logprobs, strict=True)) == sampled(kind, reply), sizes


def page(kind: str, name: str) -> Reply:
    return next(reply for reply in replies(kind) if reply.name == name)


@pytest.mark.parametrize("server", [page("sglang", "get /health"), page("sglang", "/health while paused by in_place")])
async def test_sglang_is_well_whatever_its_health_route_says(server: Reply) -> None:
    """The health route returns 503 until the server is warm, and while it is paused."""
    models, info = page("sglang", "get /v1/models"), page("sglang", "get /model_info")
    replaying = Replaying(server, models, info)
    async with adapter("sglang", replaying) as engine:
        health = await engine.health()
    assert (health.ok, health.model, health.context_tokens, health.version) == (True, "PATH/demo64", 16384, 0)
    assert "/health" not in replaying.asked


async def test_sglang_after_an_update() -> None:
    replaying = Replaying(
        page("sglang", "pause abort"),
        page("sglang", "weights while paused by abort, keep_pause"),
        page("sglang", "continue abort"),
        page("sglang", "/v1/models while paused by retract"),
        page("sglang", "model_info after"),
        page("sglang", "asked while paused by retract"),
    )
    async with adapter("sglang", replaying) as engine:
        await engine.pause("abort")
        await engine.update_weights("PATH/demo64b", 7)
        await engine.resume()
        assert (await engine.health()).version == 7
        assert (await make(engine, page("sglang", "asked while paused by retract"))).versions == [(7, 0, 8)]


async def test_vllm_after_an_update() -> None:
    """vLLM has no route for a label, so the adapter keeps the version."""
    replaying = Replaying(
        *(
            page("vllm", name)
            for name in ("get /health", "get /v1/models", "get /weight_info", "pause abort", "reload")
        ),
        *(page("vllm", name) for name in ("reset_prefix_cache", "label", "resume abort", "as Outrider asks, 8")),
    )
    async with adapter("vllm", replaying) as engine:
        health = await engine.health()
        assert (health.ok, health.model, health.context_tokens, health.version) == (True, "policy", 16384, 0)
        await engine.pause("abort")
        await engine.update_weights("PATH/demo64b", 7)
        await engine.resume()
        assert (await engine.health()).version == 7
        assert (await make(engine, page("vllm", "as Outrider asks, 8"))).versions == [(7, 0, 8)]


@pytest.mark.parametrize("kind", KINDS)
async def test_tokenise(kind: str) -> None:
    async with adapter(kind, Replaying(page(kind, "tokenize"))) as engine:
        assert await engine.token_check("Hello there") == [48, 77, 306, 87, 229, 92, 406, 77]
