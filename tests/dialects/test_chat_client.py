"""The official client against the dialect's own bytes, over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from outrider.dialects.base import Completion, ModelRequest, Opening, StreamWriter, WireCall
from outrider.dialects.chat import CHAT_DIALECT
from outrider.errors import ContextOverflow, EngineUnavailable, OutriderError, RequestError, Unauthorized
from outrider.messages import Delta, Message, Role, ToolCall
from outrider.trajectory import FinishReason
from support.later import openai
from support.sdk_clients import openai_client
from support.wire import CALL

DIALECT = CHAT_DIALECT
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STEPS = (
    Delta(reasoning="Let me ", ids=[1], logprobs=[-0.5]),
    Delta(reasoning="see.", text="Fi", ids=[2, 3], logprobs=[-0.25, -1.5]),
    Delta(ids=[4], logprobs=[-0.1]),
    Delta(text="ne\u2028\n.", ids=[5], logprobs=[-0.2]),
)
PIECES = ((b"Let me ",), (b"see.", b"Fi"), (b"<call>",), (b"ne\xe2\x80\xa8\n.",))
DONE = Completion(
    id="1",
    created=1_700_000_000,
    model="m",
    reply=Message(
        role=Role.ASSISTANT,
        content="Fine\u2028\n.",
        reasoning="Let me see.",
        tool_calls=(ToolCall("call_a", "bash", '{"cmd": "ls"}'), ToolCall("call_b", "now", "{}")),
    ),
    finish=FinishReason.STOP,
    prompt_tokens=3,
    completion_tokens=5,
    cached_tokens=2,
    prompt_ids=np.array([7, 8, 9], dtype=np.int32),
    output_ids=np.array([1, 2, 3, 4, 5], dtype=np.int32),
    logprobs=np.array([-0.5, -0.25, -1.5, -0.1, -0.2]),
    pieces=tuple(piece for pieces in PIECES for piece in pieces),
)

Play = Callable[[ModelRequest, StreamWriter], list[bytes]]


def whole(request: ModelRequest, writer: StreamWriter) -> list[bytes]:
    """A reply from its opening to its end, with a ping while the prompt is read."""
    opening = writer.open(Opening(id=DONE.id, created=DONE.created, model=DONE.model, prompt_ids=DONE.prompt_ids))
    deltas = [writer.delta(step, pieces) for step, pieces in zip(STEPS, PIECES, strict=True)]
    return [writer.ping, opening, *deltas, writer.close(DONE)]


def broken(request: ModelRequest, writer: StreamWriter) -> list[bytes]:
    return [*whole(request, writer)[:3], DIALECT.stream(request).error(EngineUnavailable("the engine went away"))]


@asynccontextmanager
async def served(play: Play = whole, refusal: OutriderError | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client of a server that answers every request with the dialect's bytes."""

    async def complete(http: web.Request) -> web.StreamResponse:
        try:
            request = DIALECT.parse(CALL, await http.read(), {})
            if refusal is not None:
                raise refusal
        except OutriderError as error:
            return web.json_response(DIALECT.error(error), status=error.http_status)
        if not request.stream:
            return web.Response(body=DIALECT.reply(request, DONE), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for written in play(request, DIALECT.stream(request)):
            await response.write(written)
        return response

    async def models(_: web.Request) -> web.Response:
        return web.Response(
            body=DIALECT.models(WireCall("GET", "/v1/models"), {"m": 4096}), content_type="application/json"
        )

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", complete), web.get("/v1/models", models)])
    async with (
        TestServer(app) as server,
        openai_client(str(server.make_url("/v1"))) as client,
        asyncio.timeout(20),
    ):
        yield client


async def stream(client: openai.AsyncOpenAI, **ask: Any) -> list[openai.types.chat.ChatCompletionChunk]:
    return [chunk async for chunk in await client.chat.completions.create(**ASK, **ask, stream=True)]


def calls(message: Any) -> list[tuple[str, str, str]]:
    return [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]


SENT_CALLS = [msgspec.structs.astuple(call) for call in DONE.reply.tool_calls]


async def test_one_piece() -> None:
    async with served() as client:
        got = await client.chat.completions.create(**ASK, logprobs=True, extra_body={"return_token_ids": True})
    (choice,) = got.choices
    assert (choice.message.content, choice.finish_reason) == (DONE.reply.content, "tool_calls")
    assert choice.message.model_extra == {"reasoning_content": DONE.reply.reasoning}
    assert calls(choice.message) == SENT_CALLS
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5, -0.25, -1.5, -0.1, -0.2]
    assert choice.model_extra == {"token_ids": [1, 2, 3, 4, 5]}
    assert got.model_extra == {"prompt_token_ids": [7, 8, 9]}
    assert got.usage is not None
    assert got.usage.prompt_tokens_details is not None
    assert (got.usage.total_tokens, got.usage.prompt_tokens_details.cached_tokens) == (8, 2)


async def test_streamed_chunk_by_chunk() -> None:
    async with served() as client:
        chunks = await stream(client, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == DONE.reply.content
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == DONE.reply.reasoning
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        "tool_calls"
    ]
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == [8]
    assert chunks[-1].choices == []


async def test_streamed_and_put_together_by_the_client() -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("bash", "now")]
    async with (
        served() as client,
        client.chat.completions.stream(**ASK, tools=tools, logprobs=True) as streaming,
    ):
        got = await streaming.get_final_completion()
    (choice,) = got.choices
    assert (choice.message.content, choice.finish_reason) == (DONE.reply.content, "tool_calls")
    assert calls(choice.message) == SENT_CALLS
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5, -0.25, -1.5, -0.1, -0.2]


async def test_streamed_token_ids() -> None:
    async with served() as client:
        chunks = await stream(client, extra_body={"return_token_ids": True})
    assert [(chunk.model_extra or {}).get("prompt_token_ids") for chunk in chunks] == [[7, 8, 9]] + [None] * (
        len(chunks) - 1
    )
    choices = [choice.model_extra or {} for chunk in chunks for choice in chunk.choices]
    assert [number for extra in choices for number in extra.get("token_ids", [])] == [1, 2, 3, 4, 5]


async def test_a_stream_that_breaks_raises_in_the_client() -> None:
    async with served(broken) as client:
        with pytest.raises(openai.APIError, match="the engine went away"):
            await stream(client)


@pytest.mark.parametrize(
    ("refusal", "raised", "code"),
    [
        (ContextOverflow("300 tokens do not fit in 256"), "BadRequestError", "context_length_exceeded"),
        (Unauthorized("no such key"), "AuthenticationError", "invalid_api_key"),
        (EngineUnavailable("none"), "InternalServerError", "engine_unavailable"),
    ],
)
async def test_a_refusal_is_the_client_s_own_error(refusal: OutriderError, raised: str, code: str) -> None:
    async with served(refusal=refusal) as client:
        with pytest.raises(getattr(openai, raised)) as caught:
            await client.chat.completions.create(**ASK)
    assert caught.value.code == code


async def test_a_wrong_request_names_its_field() -> None:
    async with served() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ASK, n=2)
    assert (caught.value.param, caught.value.code) == ("n", RequestError.code)


async def test_models() -> None:
    async with served() as client:
        assert [model.id async for model in client.models.list()] == ["m"]
