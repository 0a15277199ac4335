"""The Anthropic Messages dialect over real HTTP: the official SDK against the gateway on the scripted engine."""

from __future__ import annotations

import asyncio
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
from outrider.spec import Limits
from sessions.world import World, a_world, call_markup
from support import messages
from support.later import anthropic
from support.sdk_clients import anthropic_client

BASH: Any = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
HELLO: Any = {"model": "any", "max_tokens": 16_000, "messages": [{"role": "user", "content": "hello"}]}
LONG: Any = {**HELLO, "messages": [{"role": "user", "content": "many words " * 50}]}
THINKS_AND_CALLS = "<think>\nLet me see.\n</think>\n\nI look." + call_markup("ls")


@asynccontextmanager
async def a_client(folder: Path, *replies: Any, **script: Any) -> AsyncIterator[tuple[World, anthropic.AsyncAnthropic]]:
    """The official client, with the session's key as its API key."""
    async with (
        a_world(folder, replies, **script) as world,
        serving(Gateway(OneSession(world.models))) as url,
        anthropic_client(url, api_key=KEY) as client,
        asyncio.timeout(20),
    ):
        yield world, client


async def ask(client: anthropic.AsyncAnthropic, how: str, **fields: Any) -> anthropic.types.Message:
    """Make one call: in one piece, streamed and assembled by the SDK, or streamed and assembled here."""
    if how == "whole":
        whole: anthropic.types.Message = await client.messages.create(**fields)
        return whole
    if how == "helper":
        async with client.messages.stream(**fields) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_message()
    events = [event async for event in await client.messages.create(**fields, stream=True)]
    return put_together(events)


def put_together(events: list[Any]) -> anthropic.types.Message:
    """Return the message that raw events make. Checks the types and the order of the events."""
    for event in events:
        messages.event().validate_python(event.model_dump(exclude_unset=True), strict=True)
    start, *middle, last, stop = events
    assert [start.type, last.type, stop.type] == ["message_start", "message_delta", "message_stop"]
    message = start.message.model_copy()
    blocks: list[dict[str, Any]] = []
    opened = False
    for event in middle:
        if event.type == "content_block_start":
            assert (opened, event.index) == (False, len(blocks))
            opened = True
            blocks.append(event.content_block.model_dump(exclude_unset=True))
        elif event.type == "content_block_stop":
            assert (opened, event.index) == (True, len(blocks) - 1)
            opened = False
            if "partial" in blocks[-1]:
                blocks[-1]["input"] = json.loads(blocks[-1].pop("partial"))
        else:
            assert (opened, event.index) == (True, len(blocks) - 1)
            add(blocks[-1], event.delta)
    assert not opened
    fields = {"content": blocks, "usage": last.usage.model_dump(), "stop_reason": last.delta.stop_reason}
    fields["stop_sequence"] = last.delta.stop_sequence
    return anthropic.types.Message.model_validate({**message.model_dump(), **fields})


def add(block: dict[str, Any], delta: Any) -> None:
    if delta.type == "input_json_delta":
        block["partial"] = block.get("partial", "") + delta.partial_json
        return
    field = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[delta.type]
    block[field] += getattr(delta, field)


HOW = pytest.mark.parametrize("how", ["whole", "helper", "raw"])


@HOW
async def test_thinking_text_and_a_tool_call_over_two_turns(tmp_path: Path, how: str) -> None:
    async with a_client(tmp_path, THINKS_AND_CALLS, "done<|im_end|>") as (world, client):
        asked = {**HELLO, "tools": [BASH], "system": "Be brief.", "thinking": {"type": "adaptive"}}
        first = await ask(client, how, **asked)
        thinking, text, call = first.content
        assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
        assert (thinking.thinking, text.text) == ("Let me see.", "I look.")
        assert thinking.signature
        assert (call.name, call.input) == ("bash", {"command": "ls"})
        assert (first.stop_reason, first.role, first.model) == ("tool_use", "assistant", "any")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "a.txt"}
        asked["messages"] = [
            *HELLO["messages"],
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        second = await ask(client, how, **asked)
        assert [block.type for block in second.content] == ["text"]
        assert (second.content[0].text, second.stop_reason) == ("done", "end_turn")
        assert [turn.join.value for turn in world.turns] == ["root", "append"]
        assert {turn.dialect for turn in world.turns} == {"messages"}
        for message, turn in zip((first, second), world.turns, strict=True):
            assert message.usage.input_tokens == turn.prompt_length
            assert message.usage.output_tokens == len(turn.output_ids) // 4


async def test_the_start_of_a_stream_tells_the_prompts_tokens(tmp_path: Path) -> None:
    async with a_client(tmp_path, "hi<|im_end|>") as (world, client):
        events = [event async for event in await client.messages.create(**HELLO, stream=True)]
        assert events[0].message.usage.input_tokens == world.turns[0].prompt_length > 0
        assert events[0].message.content == []


@HOW
async def test_what_ended_a_reply(tmp_path: Path, how: str) -> None:
    async with a_client(tmp_path, "one STOP two<|im_end|>", "no more<|im_end|>", "many many words") as (_, client):
        stops = ["never", "STOP"]
        stopped = await ask(client, how, **HELLO, stop_sequences=stops)
        ended = await ask(client, how, **LONG, stop_sequences=stops)
        cut = await ask(client, how, **{**HELLO, "max_tokens": 2})
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("one", "stop_sequence", "STOP")
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


@HOW
async def test_an_empty_reply_is_a_message(tmp_path: Path, how: str) -> None:
    async with a_client(tmp_path, "<|im_end|>") as (_, client):
        empty = await ask(client, how, **HELLO)
    assert [block.to_dict() for block in empty.content] == [{"type": "text", "text": ""}]
    assert empty.stop_reason == "end_turn"


async def test_a_call_that_is_no_call_comes_back_as_text(tmp_path: Path) -> None:
    malformed = "<tool_call>\nnot json\n</tool_call>"
    async with a_client(tmp_path, f"{malformed}<|im_end|>") as (world, client):
        got = await ask(client, "helper", **HELLO, tools=[BASH])
    assert (got.content[0].text, got.stop_reason) == (malformed, "end_turn")
    assert world.turns[0].malformed_calls == 1


async def test_claude_codes_own_shapes_stay_on_one_branch(tmp_path: Path) -> None:
    """Claude Code sends a billing line, system messages between others, cache markers that move, and the same content
    as a string in one request and as a list in another."""
    marker = {"cache_control": {"type": "ephemeral"}}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.329.abc; cc_entrypoint=sdk-cli;"}
    async with a_client(tmp_path, THINKS_AND_CALLS, "done<|im_end|>", "bye<|im_end|>") as (world, client):
        asked: Any = {
            **HELLO,
            "tools": [BASH],
            "system": [billing, {"type": "text", "text": "Be brief.", **marker}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", **marker}]}],
            "extra_query": {"beta": "true"},
            "extra_headers": {"x-claude-code-agent-id": "a1", "anthropic-beta": "context-management-2025-06-27"},
            "extra_body": {"context_management": {"edits": []}, "output_config": {"effort": "high"}},
            "metadata": {"user_id": "{}"},
        }
        first = await ask(client, "helper", **asked)
        call = first.content[2]
        assert call.type == "tool_use"
        asked["messages"] = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, {**call.to_dict(), **marker}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "a.txt"}]},
            {"role": "system", "content": "The date has changed."},
        ]
        await ask(client, "helper", **asked)
        asked["messages"] += [
            {"role": "assistant", "content": "done"},
            {"role": "user", "content": [{"type": "text", "text": "thanks", **marker}]},
        ]
        asked["messages"][3]["content"] = [{"type": "text", "text": "The date has changed.", **marker}]
        asked["system"] = "Be brief."
        await ask(client, "helper", **asked)
    assert [turn.join.value for turn in world.turns] == ["root", "append", "append"]
    assert [turn.drift_tokens for turn in world.turns] == [0, 0, 0]


async def test_counting_generates_nothing(tmp_path: Path) -> None:
    async with a_client(tmp_path, "hi<|im_end|>") as (world, client):
        counted = await client.messages.count_tokens(
            model="any", system="Be brief.", messages=HELLO["messages"], tools=[BASH]
        )
        assert world.turns == []
        await ask(client, "whole", **HELLO, system="Be brief.", tools=[BASH])
        assert counted.input_tokens == world.turns[0].prompt_length


async def test_models(tmp_path: Path) -> None:
    async with a_client(tmp_path, "hi<|im_end|>", context_tokens=4096) as (_, client):
        listed = [model async for model in client.models.list()]
        one = await client.models.retrieve("policy")
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("another")
    assert listed == [one]
    assert (one.id, one.type, one.display_name, one.max_input_tokens) == ("policy", "model", "policy", 4096)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_offers_hosted_tools_runs(tmp_path: Path, stream: bool) -> None:
    hosted: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    async with a_client(tmp_path, "hi<|im_end|>") as (world, client):
        await client.messages.create(**{**HELLO, "stream": stream}, extra_body={"tools": [BASH, hosted]})
        assert (await client.messages.count_tokens(model="any", messages=HELLO["messages"], tools=[BASH])) == (
            await client.messages.count_tokens(model="any", messages=HELLO["messages"], tools=[BASH, hosted])
        )
    assert [turn.ignored for turn in world.turns] == [("tools.web_search_20250305",)]


REFUSED = [
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type: "),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role: "),
    ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].input_schema: "),
    ({"temperature": -1}, "temperature: "),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=[said for _, said in REFUSED])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_wrong_request_names_its_field(tmp_path: Path, fields: Any, said: str, stream: bool) -> None:
    async with a_client(tmp_path, "hi<|im_end|>") as (world, client):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**{**HELLO, "stream": stream}, extra_body=fields)
    assert error_of(caught.value)["type"] == "invalid_request_error"
    assert error_of(caught.value)["message"].startswith(said)
    assert world.turns == []


def error_of(error: anthropic.APIStatusError) -> Any:
    body: Any = error.body
    assert (body["type"], body["request_id"]) == ("error", None)
    return body["error"]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_overflow_is_in_the_words_that_clients_know(tmp_path: Path, stream: bool) -> None:
    async with a_client(tmp_path, "hi<|im_end|>", context_tokens=16) as (_, client):
        counted = await client.messages.count_tokens(model="any", messages=LONG["messages"])
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**LONG, stream=stream)
    said = f"prompt is too long: {counted.input_tokens} tokens > 16 maximum"
    assert error_of(caught.value) == {"type": "invalid_request_error", "message": said}


async def test_an_engine_that_dies_in_a_stream_raises_in_the_client(tmp_path: Path) -> None:
    script = {"reply": "some words here<|im_end|>", "fail": "unavailable", "after": 2}
    async with a_client(tmp_path, script) as (_, client):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await ask(client, "helper", **HELLO)
    assert error_of(caught.value)["type"] == "overloaded_error"


async def test_a_used_up_session_is_told_so(tmp_path: Path) -> None:
    async with a_client(tmp_path, "hi<|im_end|>", limits=Limits(turns=1)) as (_, client):
        await ask(client, "whole", **HELLO)
        with pytest.raises(anthropic.RateLimitError):
            await ask(client, "helper", **HELLO)


def root(client: anthropic.AsyncAnthropic) -> str:
    return str(client.base_url).rstrip("/")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/s/another/v1/messages", 401, "authentication_error"),
        ("POST", "/v1/messages", 401, "authentication_error"),
        ("POST", f"/s/{KEY}/v1/messages/batches", 404, "not_found_error"),
        ("GET", f"/s/{KEY}/v1/messages/batches/b1/results", 404, "not_found_error"),
        ("GET", f"/s/{KEY}/v1/messages", 404, "not_found_error"),
        ("POST", f"/s/{KEY}/v1/messages/", 404, "not_found_error"),
    ],
)
async def test_what_is_not_served_is_refused_in_the_dialects_shape(
    tmp_path: Path, method: str, path: str, status: int, kind: str
) -> None:
    async with (
        a_client(tmp_path, "hi<|im_end|>") as (world, client),
        aiohttp.ClientSession(root(client)) as http,
        http.request(method, path, json=HELLO) as reply,
    ):
        body = await reply.json()
    assert (reply.status, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert world.turns == []


@pytest.mark.parametrize(
    "headers",
    [{"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {}],
    ids=["x-api-key", "bearer", "lower case", "path"],
)
async def test_every_place_of_the_key_is_read(tmp_path: Path, headers: dict[str, str]) -> None:
    async with a_client(tmp_path, "hi<|im_end|>") as (_, client), aiohttp.ClientSession() as http:
        prefix = "" if headers else f"s/{KEY}/"
        async with http.post(f"{root(client)}/{prefix}v1/messages?beta=true", json=HELLO, headers=headers) as reply:
            assert (await reply.json())["content"] == [{"type": "text", "text": "hi"}]


async def test_text_arrives_while_the_engine_is_stalled(tmp_path: Path) -> None:
    async with (
        a_client(tmp_path, {"reply": "first words and more<|im_end|>", "stall": 5}) as (world, client),
        client.messages.stream(**HELLO) as stream,
    ):
        seen = ""
        while "first" not in seen:
            seen += await anext(stream.text_stream)
        assert world.turns == []
        world.engine.release()
        assert await stream.get_final_text() == "first words and more"
