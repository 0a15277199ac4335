"""The official client against the real gateway in the Responses dialect, streamed and whole, on a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from api.test_gateway import KEY, OneSession
from outrider.api.gateway import Gateway
from outrider.lab.fakes.engine_servers.app import serving
from outrider.spec import Limits
from outrider.trajectory import FinishReason
from sessions.world import World, a_world, call_markup
from support.later import openai
from support.responses import CUSTOM, FUNCTION, NAMESPACE, USER, echo, events
from support.sdk_clients import openai_client

STREAM = pytest.mark.parametrize("stream", [False, True])
THOUGHT = "<think>\nLet me think.\n</think>\n\n"


class Client:
    """The official client, for streamed and whole replies, and the world behind it."""

    def __init__(self, world: World, url: str, sdk: openai.AsyncOpenAI) -> None:
        self.world = world
        self.url = url
        self.sdk = sdk

    async def ask(self, input: Any, stream: bool, **fields: Any) -> openai.types.responses.Response:
        """Return a response that the client's strict types accept."""
        asked = {"model": "any", "input": input, **fields}
        if not stream:
            whole = await self.sdk.responses.create(**asked)
            return openai.types.responses.Response.model_validate(whole.to_dict(mode="json"), strict=True)
        async with self.sdk.responses.stream(**asked) as told:
            async for _ in told:
                pass
            final = await told.get_final_response()
        return openai.types.responses.Response.model_validate(final.to_dict(mode="json"), strict=True)

    def joins(self) -> list[str]:
        return [turn.join.value for turn in self.world.turns]

    def drift(self) -> int:
        return sum(turn.drift_tokens for turn in self.world.turns)


@asynccontextmanager
async def a_client(folder: Path, *replies: Any, **script: Any) -> AsyncIterator[Client]:
    async with (
        a_world(folder, replies, **script) as world,
        serving(Gateway(OneSession(world.models))) as url,
        openai_client(f"{url}/s/{KEY}/v1") as sdk,
    ):
        yield Client(world, url, sdk)


def custom_markup(name: str, arguments: Any) -> str:
    return (
        f"<tool_call>\n{msgspec.json.encode({'name': name, 'arguments': arguments}).decode()}\n</tool_call><|im_end|>"
    )


def items(response: openai.types.responses.Response) -> list[dict[str, Any]]:
    return [item.to_dict(mode="json", exclude_unset=True) for item in response.output]


@STREAM
async def test_text(tmp_path: Path, stream: bool) -> None:
    async with a_client(tmp_path, "hello there<|im_end|>") as client:
        got = await client.ask("hi", stream, instructions="Be brief.")
        assert (got.output_text, got.status) == ("hello there", "completed")
        assert got.usage is not None
        assert got.usage.output_tokens == len(client.world.turns[0].output_ids) // 4
        assert got.usage.input_tokens == client.world.turns[0].prompt_length
        assert [message.content for message in client.world.turns[0].messages] == ["Be brief.", "hi"]


@STREAM
async def test_calls_over_turns_append(tmp_path: Path, stream: bool) -> None:
    async with a_client(tmp_path, "Let me see." + call_markup("ls"), "done<|im_end|>") as client:
        first = await client.ask([USER], stream, tools=[FUNCTION], store=False)
        said, call = first.output
        assert (said.type, call.type, call.name, json.loads(str(call.arguments))) == (
            "message",
            "function_call",
            "bash",
            {"command": "ls"},
        )
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "a.txt"}
        second = await client.ask([USER, *echo(items(first)), output], stream, tools=[FUNCTION], store=False)
        assert second.output_text == "done"
        assert (client.joins(), client.drift()) == (["root", "append"], 0)


@STREAM
async def test_custom_tools_and_namespaces_over_turns_append(tmp_path: Path, stream: bool) -> None:
    replies = [custom_markup("patch", {"input": "+ x\n"}), custom_markup("fs__write", {"path": 1}), "done<|im_end|>"]
    tools = [CUSTOM, NAMESPACE]
    async with a_client(tmp_path, *replies) as client:
        first = await client.ask([USER], stream, tools=tools)
        (call,) = first.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "+ x\n")
        history = [USER, *echo(items(first)), answer(call)]
        second = await client.ask(history, stream, tools=tools)
        (odd,) = second.output
        assert (odd.type, odd.name, odd.namespace, json.loads(odd.input)) == (
            "custom_tool_call",
            "write",
            "fs",
            {"path": 1},
        )
        history += [*echo(items(second)), answer(odd)]
        assert (await client.ask(history, stream, tools=tools)).output_text == "done"
        assert (client.joins(), client.drift()) == (["root", "append", "append"], 0)


def answer(call: Any) -> dict[str, Any]:
    return {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}


@STREAM
@pytest.mark.parametrize("kept", ["keep", "drop", "sealed"])
async def test_reasoning_kept_dropped_or_sealed_appends(tmp_path: Path, stream: bool, kept: str) -> None:
    asked: dict[str, Any] = {
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    async with a_client(tmp_path, THOUGHT + "Yes.<|im_end|>", "done<|im_end|>") as client:
        first = await client.ask([USER], stream, **asked)
        reasoning, said = first.output
        assert (reasoning.type, said.type, first.output_text) == ("reasoning", "message", "Yes.")
        assert reasoning.summary[0].text == "Let me think."
        await client.ask([USER, *echo(items(first), kept), USER], stream, **asked)
        assert (client.joins(), client.drift()) == (["root", "append"], 0)


@STREAM
async def test_a_previous_response_is_gone_on_from(tmp_path: Path, stream: bool) -> None:
    async with a_client(tmp_path, THOUGHT + "one<|im_end|>", "two<|im_end|>", "three<|im_end|>") as client:
        first = await client.ask("hi", stream)
        second = await client.ask("more", stream, previous_response_id=first.id)
        await client.ask("and more", stream, previous_response_id=second.id)
        assert second.previous_response_id == first.id
        assert client.joins() == ["root", "append", "append"]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.ask("hi", stream, previous_response_id="resp_none")
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


@STREAM
async def test_a_reply_cut_by_its_limit_is_incomplete(tmp_path: Path, stream: bool) -> None:
    async with a_client(tmp_path, "one two three four five six<|im_end|>") as client:
        if stream:
            told = [
                event
                async for event in await client.sdk.responses.create(
                    model="any", input="hi", max_output_tokens=3, stream=True
                )
            ]
            assert told[-1].type == "response.incomplete"
            got = told[-1].response
        else:
            got = await client.ask("hi", stream, max_output_tokens=3)
        assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert client.world.turns[0].finish is FinishReason.LENGTH


async def test_every_event_of_a_stream_has_its_strict_type(tmp_path: Path) -> None:
    replies = [THOUGHT + "Let me see." + call_markup("ls"), custom_markup("patch", {"input": "x"})]
    async with a_client(tmp_path, *replies) as client, aiohttp.ClientSession() as http:
        seen: set[str] = set()
        for _ in replies:
            body = {"model": "any", "input": "hi", "tools": [FUNCTION, CUSTOM], "stream": True}
            async with http.post(f"{client.url}/s/{KEY}/v1/responses", json=body) as reply:
                assert reply.content_type == "text/event-stream"
                seen |= {event["type"] for event in events(await reply.read())}
        assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= seen
        assert {"response.custom_tool_call_input.delta", "response.completed"} <= seen


async def test_text_arrives_while_the_engine_is_stalled(tmp_path: Path) -> None:
    async with a_client(tmp_path, {"reply": "first words and more<|im_end|>", "stall": 5}) as client:
        said = ""
        async for event in await client.sdk.responses.create(model="any", input="hi", stream=True):
            if event.type == "response.output_text.delta":
                said += event.delta
                if "first" in said and client.world.turns == []:
                    client.world.engine.release()
        assert said == "first words and more"


async def test_an_engine_that_dies_mid_stream_raises_in_the_client(tmp_path: Path) -> None:
    script = {"reply": "some words here<|im_end|>", "fail": "unavailable", "after": 2}
    async with a_client(tmp_path, script) as client:
        with pytest.raises(openai.APIError):
            await client.ask("hi", True)


@STREAM
async def test_context_overflow_is_the_dialects_own_error(tmp_path: Path, stream: bool) -> None:
    async with a_client(tmp_path, "hi<|im_end|>", context_tokens=16) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.ask("many words " * 50, stream)
        assert caught.value.code == "context_length_exceeded"


async def test_a_wrong_item_is_a_400_that_names_it(tmp_path: Path) -> None:
    async with a_client(tmp_path, "hi<|im_end|>") as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.ask([USER, {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], True)
        assert caught.value.param == "input[1].content[0].type"
        assert client.world.turns == []


async def test_a_used_up_session_is_told_so(tmp_path: Path) -> None:
    async with a_client(tmp_path, "hi<|im_end|>", limits=Limits(turns=1)) as client:
        await client.ask("hi", False)
        with pytest.raises(openai.RateLimitError):
            await client.ask("hi", False)


async def test_an_unknown_key_is_a_401(tmp_path: Path) -> None:
    async with a_client(tmp_path, "hi<|im_end|>") as client:
        elsewhere = client.sdk.with_options(base_url=f"{client.url}/v1")
        with pytest.raises(openai.AuthenticationError):
            await elsewhere.responses.create(model="any", input="hi")


async def test_a_stored_response_cannot_be_fetched(tmp_path: Path) -> None:
    async with a_client(tmp_path, "hi<|im_end|>") as client:
        made = await client.ask("hi", False)
        with pytest.raises(openai.NotFoundError):
            await client.sdk.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.sdk.responses.delete(made.id)


async def test_tokens_are_counted_as_they_would_be_sent(tmp_path: Path) -> None:
    async with a_client(tmp_path, "hi<|im_end|>") as client:
        counted = await client.sdk.responses.input_tokens.count(model="any", input="hello there")
        made = await client.ask("hello there", False)
        assert made.usage is not None
        assert counted.input_tokens == made.usage.input_tokens
        assert len(client.world.turns) == 1
