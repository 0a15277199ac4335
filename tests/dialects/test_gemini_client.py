"""The official client against the dialect's own bytes, over a real connection, with pings between the chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from outrider.dialects.base import ModelRequest, Opening, WireCall
from outrider.errors import EngineUnavailable
from outrider.messages import Delta, ToolCall
from support.gemini import DIALECT, completed, said, stream
from support.later import genai
from support.sdk_clients import google_client

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

STEPS = [Delta(reasoning="Let me "), Delta(reasoning="see.", text="Fi"), Delta(ids=[4]), Delta(text="ne\u2028\x85\n.")]
DONE = completed(
    said(
        "Fine\u2028\x85\n.",
        reasoning="Let me see.",
        tool_calls=(ToolCall("call_a", "bash", '{"cmd": "ls\u2028"}'), ToolCall("call_b", "now", "{}")),
    )
)


def thoughts() -> genai.types.GenerateContentConfig:
    return genai.types.GenerateContentConfig(thinking_config=genai.types.ThinkingConfig(include_thoughts=True))


def broken(request: ModelRequest) -> bytes:
    writer = DIALECT.stream(request)
    written = writer.open(Opening(id=DONE.id, created=DONE.created, model=DONE.model)) + writer.delta(STEPS[1])
    return written + writer.ping + writer.error(EngineUnavailable("the engine went away"))


@asynccontextmanager
async def served(*, breaks: bool = False) -> AsyncIterator[Any]:
    """The client of a server that answers every request with the dialect's bytes, one at a time."""

    async def answer(http: web.Request) -> web.StreamResponse:
        call = WireCall(http.method, http.path, http.query_string.encode())
        request = DIALECT.parse(call, await http.read(), {})
        if not request.stream:
            return web.Response(body=DIALECT.reply(request, DONE), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": DIALECT.stream(request).content_type})
        await response.prepare(http)
        for byte in broken(request) if breaks else stream(request, STEPS, DONE):
            await response.write(bytes([byte]))
        return response

    app = web.Application()
    app.add_routes([web.post("/{version}/models/{call}", answer)])
    async with TestServer(app) as server, asyncio.timeout(20):
        client = google_client(str(server.make_url("/")))
        try:
            yield client.aio.models
        finally:
            await client.aio.aclose()
            client.close()


def check(parts: list[genai.types.Part]) -> None:
    assert "".join(part.text or "" for part in parts if part.thought) == DONE.reply.reasoning
    assert "".join(part.text or "" for part in parts if not part.thought) == DONE.reply.content
    calls = [part.function_call for part in parts if part.function_call]
    assert [(call.id, call.name, call.args) for call in calls] == [
        ("call_a", "bash", {"cmd": "ls\u2028"}),
        ("call_b", "now", {}),
    ]
    assert [part.thought_signature for part in parts if part.function_call] == [b"outrider:call_a", b"outrider:call_b"]


async def test_one_piece() -> None:
    async with served() as models:
        got = await models.generate_content(model="m", contents="hi", config=thoughts())
    check(got.candidates[0].content.parts)
    assert (got.usage_metadata.total_token_count, got.usage_metadata.cached_content_token_count) == (10, 2)


async def test_streamed_with_a_ping_between_any_two_chunks() -> None:
    async with served() as models:
        chunks = [
            chunk async for chunk in await models.generate_content_stream(model="m", contents="hi", config=thoughts())
        ]
    check([part for chunk in chunks for part in chunk.candidates[0].content.parts])
    assert [chunk.candidates[0].finish_reason for chunk in chunks] == [None] * 4 + [genai.types.FinishReason.STOP]
    assert chunks[-1].usage_metadata.total_token_count == 10


async def test_a_stream_that_breaks_raises_in_the_client() -> None:
    async with served(breaks=True) as models:
        with pytest.raises(genai.errors.ServerError, match="the engine went away"):
            [_ async for _ in await models.generate_content_stream(model="m", contents="hi")]
