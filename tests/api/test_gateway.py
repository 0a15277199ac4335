"""The gateway over real HTTP: streaming during sampling, hang-ups, and every refusal in the dialect's own form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from outrider.api.gateway import Gateway, _ClientReply, _with_pings
from outrider.errors import Unauthorized
from outrider.lab.fakes.engine_servers.app import serving
from outrider.sessions.models import MOST_FAILURES, SessionModels
from outrider.spec import Limits
from outrider.trajectory import FinishReason
from sessions.world import BASH, World, a_world, call_markup
from support.later import openai
from support.sdk_clients import openai_client

KEY = "the-session-key"
CHAT = f"/s/{KEY}/v1/chat/completions"
HELLO = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
LONG = {"model": "any", "messages": [{"role": "user", "content": "many words " * 50}]}


class OneSession:
    """A node with one session."""

    def __init__(self, models: SessionModels) -> None:
        self._models = models

    async def refusal(self, key: str) -> Unauthorized:
        return Unauthorized("this session key is unknown, or its run is over")

    def models(self, key: str) -> SessionModels | None:
        return self._models if key == KEY else None


@asynccontextmanager
async def a_gateway(folder: Path, *replies: Any, **script: Any) -> AsyncIterator[tuple[World, aiohttp.ClientSession]]:
    async with (
        a_world(folder, replies, **script) as world,
        serving(Gateway(OneSession(world.models))) as url,
        aiohttp.ClientSession(url) as http,
    ):
        yield world, http


async def test_a_silent_stream_is_pinged_until_its_end() -> None:
    """Work may continue for a moment after the end of the reply, such as the turn's bookkeeping. No ping is sent
    then."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def work() -> None:
        while len(sent) < 4:  # noqa: ASYNC110  # pings
            await asyncio.sleep(0.001)
        await reply.end(b"end")
        await asyncio.sleep(0.05)

    reply = _ClientReply(send)
    writer = cast(Any, SimpleNamespace(content_type="text/event-stream", ping=b": ping\n\n"))
    await _with_pings(work(), reply, writer, seconds=0.001)
    begin, *pings, end = sent
    assert begin["type"] == "http.response.start"
    assert [ping["body"] for ping in pings] == [writer.ping] * len(pings)
    assert (end["body"], end["more_body"]) == (b"end", False)


async def test_a_reply_in_one_piece(tmp_path: Path) -> None:
    async with a_gateway(tmp_path, "hi<|im_end|>") as (world, http):
        async with http.post(CHAT, json=HELLO) as reply:
            body = await reply.json()
        assert reply.status == 200
        assert body["choices"][0]["message"]["content"] == "hi"
        assert body["usage"]["completion_tokens"] == len(world.turns[0].output_ids) // 4


async def test_text_arrives_while_the_engine_is_stalled(tmp_path: Path) -> None:
    async with a_gateway(tmp_path, {"reply": "first words and more<|im_end|>", "stall": 5}) as (world, http):
        async with http.post(CHAT, json={**HELLO, "stream": True}) as reply:
            seen = ""
            while "first" not in seen:
                line = (await reply.content.readline()).decode()
                if line.startswith("data: "):
                    seen += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            assert world.turns == []
            world.engine.release()
            rest = (await reply.content.read()).decode()
        assert rest.endswith("data: [DONE]\n\n")
        assert len(world.turns) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_aborts_its_generation(tmp_path: Path, stream: bool) -> None:
    async with a_gateway(tmp_path, {"reply": "never to be finished<|im_end|>", "stall": 3}) as (world, http):
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(_read(http, {**HELLO, "stream": stream}))
            await world.engine.stalled.wait()
            asking.cancel()
        await world.engine.abort_seen.wait()
        await world.conversation.close()
        assert [turn.finish for turn in world.turns] == [FinishReason.ABORT]


async def _read(http: aiohttp.ClientSession, body: dict[str, Any]) -> bytes:
    async with http.post(CHAT, json=body) as reply:
        return await reply.read()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/s/another-key/v1/chat/completions", 401, "invalid_api_key"),
        ("POST", f"/s/{KEY}/v1/embeddings", 404, None),
        ("POST", f"/s/{KEY}/v1/chat/completions/", 404, None),
        ("GET", CHAT, 404, None),
        ("POST", "/v1/chat/completions", 401, "invalid_api_key"),
        ("POST", "/v1/groups", 404, None),
        ("POST", "/s/", 404, None),
    ],
)
async def test_what_is_not_served_is_refused_in_the_dialects_shape(
    tmp_path: Path, method: str, path: str, status: int, code: str | None
) -> None:
    async with a_gateway(tmp_path, "hi<|im_end|>") as (world, http):
        async with http.request(method, path, json=HELLO) as reply:
            error = (await reply.json())["error"]
        assert reply.status == status
        assert error["message"]
        if code is not None:
            assert error["code"] == code
        assert world.turns == []


async def test_calls_that_were_answered_with_an_error_are_counted_by_kind(tmp_path: Path) -> None:
    """Names from clients are printable and at most 100 characters long, and their number is limited."""
    async with a_gateway(tmp_path, "hi<|im_end|>") as (world, http):
        for _ in range(2):
            await http.post(f"/s/{KEY}/v1/embeddings", json=HELLO)
        await http.post("/v1/rerank", json=HELLO, headers={"Authorization": f"Bearer {KEY}"})
        await http.post("/s/another-key/v1/embeddings", json=HELLO)
        await http.post(CHAT, json={**HELLO, "n": 2})
        await http.post(CHAT, json=HELLO)
        counted = world.models.failed_calls.counted
        assert counted == {"not_found: POST /v1/embeddings": 2, "not_found: POST /v1/rerank": 1, "bad_request: n": 1}
        assert world.models.failed_calls.summary() == (
            "; calls answered with an error: not_found: POST /v1/embeddings (2), not_found: POST /v1/rerank (1), "
            "bad_request: n (1)"
        )
        for number in range(MOST_FAILURES):
            await http.post(f"/s/{KEY}/x{number}%1b{'y' * 200}")
    assert len(counted) == MOST_FAILURES + 1
    assert counted["other"] == 3
    assert all(name.isprintable() and len(name) <= 100 for name in counted)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"not json", None),
        (b"[]", None),
        (b"{}", "model"),
        (b'{"model": "m", "messages": []}', "messages"),
        (b'{"model": "m", "messages": [{"role": "user", "content": 7}]}', "messages[0].content"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}', None),
    ],
)
async def test_a_bad_body_is_a_400_that_names_the_field(tmp_path: Path, body: bytes, param: str | None) -> None:
    async with a_gateway(tmp_path, "hi<|im_end|>") as (_, http):
        async with http.post(CHAT, data=body) as reply:
            error = (await reply.json())["error"]
        assert reply.status == 400
        assert param is None or error["param"] == param


async def test_context_overflow_is_the_dialects_own_error(tmp_path: Path) -> None:
    async with a_gateway(tmp_path, "hi<|im_end|>", context_tokens=16) as (_, http):
        async with http.post(CHAT, json={**LONG, "stream": True}) as reply:
            error = (await reply.json())["error"]
        assert (reply.status, error["code"]) == (400, "context_length_exceeded")


async def test_an_engine_that_dies_mid_stream_ends_the_stream_with_an_error_event(tmp_path: Path) -> None:
    script = {"reply": "some words here<|im_end|>", "fail": "unavailable", "after": 2}
    async with a_gateway(tmp_path, script) as (_, http):
        text = (await _read(http, {**HELLO, "stream": True})).decode()
        assert '"error"' in text
        assert text.endswith("data: [DONE]\n\n")


async def test_a_used_up_session_is_told_so(tmp_path: Path) -> None:
    async with a_gateway(tmp_path, "hi<|im_end|>", limits=Limits(turns=1)) as (_, http):
        await _read(http, HELLO)
        async with http.post(CHAT, json=HELLO) as reply:
            assert reply.status == 429


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_in_flight_when_the_run_ends_is_answered(tmp_path: Path, stream: bool) -> None:
    async with a_gateway(tmp_path, {"reply": "never to be finished<|im_end|>", "stall": 0}) as (world, http):
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(_status(http, {**HELLO, "stream": stream}))
            await world.engine.stalled.wait()
            await world.conversation.close()
        assert asking.result() == 410


async def _status(http: aiohttp.ClientSession, body: dict[str, Any]) -> int:
    async with http.post(CHAT, json=body) as reply:
        await reply.read()
        return reply.status


async def test_the_models_route_names_the_policy(tmp_path: Path) -> None:
    async with a_gateway(tmp_path, "hi<|im_end|>") as (_, http):
        async with http.get(f"/s/{KEY}/v1/models") as reply:
            body = await reply.json()
        assert [model["id"] for model in body["data"]] == ["policy"]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_official_sdk_drives_a_tool_call_over_two_turns(tmp_path: Path, stream: bool) -> None:
    async with (
        a_world(tmp_path, ["Let me see." + call_markup("ls"), "done<|im_end|>"]) as world,
        serving(Gateway(OneSession(world.models))) as url,
        openai_client(f"{url}/v1", api_key=KEY) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "list"}]
        first = await _ask(client, messages, stream)
        assert first.content == "Let me see."
        assert json.loads(first.tool_calls[0].function.arguments) == {"command": "ls"}
        messages += [
            first.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a.txt"},
        ]
        second = await _ask(client, messages, stream)
        assert second.content == "done"
        assert [turn.join.value for turn in world.turns] == ["root", "append"]


async def _ask(client: openai.AsyncOpenAI, messages: list[Any], stream: bool) -> Any:
    if not stream:
        whole = await client.chat.completions.create(model="any", messages=messages, tools=[cast(Any, BASH)])
        return whole.choices[0].message
    async with client.chat.completions.stream(model="any", messages=messages, tools=[cast(Any, BASH)]) as events:
        return (await events.get_final_completion()).choices[0].message


async def test_an_image_for_a_model_that_is_given_token_ids_is_refused(tmp_path: Path) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
    async with a_gateway(tmp_path, "hi<|im_end|>") as (world, http):
        async with http.post(CHAT, json={"model": "any", "messages": [{"role": "user", "content": content}]}) as reply:
            error = (await reply.json())["error"]
        assert (reply.status, error["type"]) == (400, "invalid_request_error")
        assert "text only" in error["message"]
        assert world.turns == []
