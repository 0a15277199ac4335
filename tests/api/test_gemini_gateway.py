"""The gateway's Google routes over real HTTP, driven by the official `google-genai` client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from api.test_gateway import KEY, OneSession
from outrider.api.gateway import Gateway
from outrider.lab.fakes.engine_servers.app import serving
from sessions.world import World, a_world, call_markup
from support.later import genai
from support.sdk_clients import google_client

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

PARAMETERS = {"type": "OBJECT", "properties": {"command": {"type": "STRING"}}}
RAW = f"/s/{KEY}/v1beta/models/any"
HELLO = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}


def with_bash() -> genai.types.GenerateContentConfig:
    schema = genai.types.Schema.model_validate(PARAMETERS)
    tool = genai.types.Tool(function_declarations=[genai.types.FunctionDeclaration(name="bash", parameters=schema)])
    by_hand = genai.types.AutomaticFunctionCallingConfig(disable=True)
    return genai.types.GenerateContentConfig(tools=[tool], automatic_function_calling=by_hand)


def with_thoughts() -> genai.types.GenerateContentConfig:
    return genai.types.GenerateContentConfig(thinking_config=genai.types.ThinkingConfig(include_thoughts=True))


@asynccontextmanager
async def a_client(
    folder: Path, *replies: Any, path: str = f"/s/{KEY}", version: str = "v1beta", **script: Any
) -> AsyncIterator[Any]:
    """Yield a scripted world and the official client of its gateway."""
    async with a_world(folder, replies, **script) as world, serving(Gateway(OneSession(world.models))) as url:
        client = google_client(url + path, api_key=KEY, api_version=version)
        try:
            yield world, client.aio
        finally:
            await client.aio.aclose()
            client.close()


@asynccontextmanager
async def a_connection(
    folder: Path, *replies: Any, **script: Any
) -> AsyncIterator[tuple[World, aiohttp.ClientSession]]:
    async with (
        a_world(folder, replies, **script) as world,
        serving(Gateway(OneSession(world.models))) as url,
        aiohttp.ClientSession(url) as http,
    ):
        yield world, http


async def ask(client: Any, contents: Any, config: Any, *, stream: bool) -> list[genai.types.GenerateContentResponse]:
    """Return the reply's chunks, or one chunk if the reply is not streamed."""
    if not stream:
        return [await client.models.generate_content(model="any", contents=contents, config=config)]
    chunks = await client.models.generate_content_stream(model="any", contents=contents, config=config)
    return [chunk async for chunk in chunks]


def parts(chunks: list[genai.types.GenerateContentResponse]) -> list[genai.types.Part]:
    return [part for chunk in chunks for part in (chunk.candidates or [])[0].content.parts]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "version"), [(f"/s/{KEY}", "v1beta"), ("", "v1"), ("", "v1alpha")])
async def test_a_plain_answer(tmp_path: Path, stream: bool, path: str, version: str) -> None:
    async with a_client(tmp_path, "hi there<|im_end|>", path=path, version=version) as (world, client):
        chunks = await ask(client, "hello", None, stream=stream)
    assert "".join(chunk.text or "" for chunk in chunks) == "hi there"
    assert (chunks[-1].candidates or [])[0].finish_reason is genai.types.FinishReason.STOP
    assert chunks[-1].usage_metadata.candidates_token_count == len(world.turns[0].output_ids) // 4
    assert (chunks[-1].model_version, world.turns[0].dialect) == ("any", "gemini")
    assert len({chunk.response_id for chunk in chunks}) == 1
    assert not stream or len(chunks) > 2


@pytest.mark.parametrize("stream", [True, False])
async def test_thoughts_are_shown_to_those_who_ask(tmp_path: Path, stream: bool) -> None:
    reply = "<think>\nLet me see.\n</think>\n\nFine.<|im_end|>"
    async with a_client(tmp_path, reply, reply) as (_, client):
        shown = parts(await ask(client, "hello", with_thoughts(), stream=stream))
        hidden = parts(await ask(client, "hello", None, stream=stream))
    assert "".join(part.text or "" for part in shown if part.thought) == "Let me see."
    assert "".join(part.text or "" for part in shown if not part.thought) == "Fine."
    assert [part.thought for part in hidden] == [None] * len(hidden)


def as_sent(parts: list[genai.types.Part]) -> genai.types.Content:
    return genai.types.Content(role="model", parts=parts)


def without_ids(parts: list[genai.types.Part]) -> genai.types.Content:
    bare = [part.model_copy(deep=True) for part in parts]
    for part in bare:
        part.thought_signature = None
        if part.function_call:
            part.function_call.id = None
    return genai.types.Content(role="model", parts=bare)


def renamed(parts: list[genai.types.Part]) -> genai.types.Content:
    """Return the parts as Gemini CLI sends them, with the tool's name before each call's id."""
    content = without_ids(parts)
    for part, sent in zip(content.parts or (), parts, strict=True):
        if part.function_call and sent.function_call:
            part.function_call.id = f"{sent.function_call.name}__{sent.function_call.id}"
    return content


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("echo", [as_sent, without_ids, renamed])
async def test_a_tool_call_over_three_turns_is_one_branch(tmp_path: Path, stream: bool, echo: Any) -> None:
    replies = ["Let me see." + call_markup("ls"), call_markup("ls"), "done<|im_end|>"]
    async with a_client(tmp_path, *replies) as (world, client):
        contents: list[Any] = [genai.types.Content(role="user", parts=[genai.types.Part(text="list")])]
        for _ in range(2):
            got = parts(await ask(client, contents, with_bash(), stream=stream))
            [call] = [part.function_call for part in got if part.function_call]
            assert (call.name, call.args) == ("bash", {"command": "ls"})
            answer = genai.types.Part.from_function_response(name="bash", response={"output": "a.txt"})
            contents += [echo(got), genai.types.Content(role="user", parts=[answer])]
        last = await ask(client, contents, with_bash(), stream=stream)
    assert "".join(chunk.text or "" for chunk in last) == "done"
    assert [turn.join.value for turn in world.turns] == ["root", "append", "append"]
    assert [turn.drift_tokens for turn in world.turns] == [0, 0, 0]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_client_s_own_chat_is_one_branch(tmp_path: Path, stream: bool) -> None:
    """The client's chat keeps each chunk of a stream as a content of its own."""
    async with a_client(tmp_path, "one two three<|im_end|>", "four<|im_end|>") as (world, client):
        chat = client.chats.create(model="any")
        for said in ("count", "on"):
            if stream:
                [_ async for _ in await chat.send_message_stream(said)]
            else:
                await chat.send_message(said)
    assert [turn.join.value for turn in world.turns] == ["root", "append"]


async def test_tokens_are_counted_without_a_turn(tmp_path: Path) -> None:
    async with a_client(tmp_path, "hi<|im_end|>") as (world, client):
        counted = await client.models.count_tokens(model="any", contents="hello")
        reply = await client.models.generate_content(model="any", contents="hello")
    assert counted.total_tokens == reply.usage_metadata.prompt_token_count
    assert len(world.turns) == 1


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_models(tmp_path: Path, version: str) -> None:
    async with a_client(tmp_path, "hi<|im_end|>", version=version, context_tokens=4096) as (_, client):
        assert [entry.name async for entry in await client.models.list()] == ["models/policy"]
        one = await client.models.get(model="policy")
        with pytest.raises(genai.errors.ClientError) as caught:
            await client.models.get(model="nothing")
    assert (one.name, one.input_token_limit) == ("models/policy", 4096)
    assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")


@pytest.mark.parametrize("stream", [True, False])
async def test_refusals_are_the_client_s_own_errors(tmp_path: Path, stream: bool) -> None:
    two = genai.types.GenerateContentConfig(candidate_count=2)
    async with a_client(tmp_path, "hi<|im_end|>", context_tokens=16) as (world, client):
        with pytest.raises(genai.errors.ClientError, match="exceeds the maximum number of tokens allowed") as overflow:
            await ask(client, "many words " * 50, None, stream=stream)
        with pytest.raises(genai.errors.ClientError, match="candidateCount") as refused:
            await ask(client, "hello", two, stream=stream)
    assert (overflow.value.code, overflow.value.status) == (400, "INVALID_ARGUMENT")
    assert (
        refused.value.details["error"]["details"][1]["fieldViolations"][0]["field"] == "generationConfig.candidateCount"
    )
    assert world.turns == []


async def test_an_unknown_key_is_unauthenticated(tmp_path: Path) -> None:
    async with a_client(tmp_path, "hi<|im_end|>", path="/s/another-key") as (_, client):
        with pytest.raises(genai.errors.ClientError) as caught:
            await client.models.generate_content(model="any", contents="hello")
    assert (caught.value.code, caught.value.status) == (401, "UNAUTHENTICATED")


async def test_an_engine_that_dies_mid_stream_raises_in_the_client(tmp_path: Path) -> None:
    script = {"reply": "some words here<|im_end|>", "fail": "unavailable", "after": 2}
    async with a_client(tmp_path, script) as (_, client):
        with pytest.raises(genai.errors.ServerError) as caught:
            await ask(client, "hello", None, stream=True)
    assert (caught.value.code, caught.value.status) == (503, "UNAVAILABLE")


async def test_text_arrives_while_the_engine_is_stalled(tmp_path: Path) -> None:
    async with a_client(tmp_path, {"reply": "first words and more<|im_end|>", "stall": 5}) as (world, client):
        chunks = await client.models.generate_content_stream(model="any", contents="hello")
        seen, released = "", False
        async for chunk in chunks:
            seen += chunk.text or ""
            if "first" in seen and not released:
                await world.engine.stalled.wait()
                assert world.turns == []
                world.engine.release()
                released = True
    assert seen == "first words and more"


def said(array: bytes) -> str:
    """Return the text in a reply's array, or in the part of the array that has arrived."""
    if array == b"]":
        return ""
    found = [part["text"] for chunk in json.loads(array) for part in chunk["candidates"][0]["content"]["parts"]]
    return "".join(found)


async def test_without_alt_sse_a_stream_is_one_growing_array(tmp_path: Path) -> None:
    async with a_connection(tmp_path, {"reply": "first words and more<|im_end|>", "stall": 5}) as (world, http):
        async with http.post(f"{RAW}:streamGenerateContent", json=HELLO) as reply:
            begun = b""
            while "first" not in said(begun.rstrip(b",\n") + b"]"):
                begun += await reply.content.readuntil(b"\n")
            assert world.turns == []
            world.engine.release()
            whole = begun + await reply.content.read()
        assert reply.content_type == "application/json"
    assert said(whole) == "first words and more"
    assert json.loads(whole)[-1]["candidates"][0]["finishReason"] == "STOP"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", f"{RAW}:embedContent", 404),
        ("POST", f"/s/{KEY}/v1beta/cachedContents", 404),
        ("GET", f"{RAW}:generateContent", 404),
        ("POST", "/v1beta/models/any:generateContent", 401),
        ("POST", f"{RAW}:generateContent", 400),
    ],
)
async def test_what_is_not_served_is_refused_in_google_s_shape(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    async with a_connection(tmp_path, "hi<|im_end|>") as (world, http):
        async with http.request(method, path, data=b"{}") as reply:
            error = (await reply.json())["error"]
        assert (reply.status, error["code"], world.turns) == (status, status, [])
        assert error["status"] in ("NOT_FOUND", "UNAUTHENTICATED", "INVALID_ARGUMENT")


async def test_a_model_s_name_may_hold_slashes(tmp_path: Path) -> None:
    path = f"/s/{KEY}/v1/models/org%2Fmodel-7b:generateContent"
    async with a_connection(tmp_path, "hi<|im_end|>") as (_, http), http.post(path, json=HELLO) as reply:
        assert (await reply.json())["modelVersion"] == "org/model-7b"
