"""Frozen models through the gateway: which model a call uses, in each dialect, and with the official clients."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from outrider.api.gateway import Gateway
from outrider.engines.base import EngineOptions
from outrider.engines.pool.pool import EnginePool
from outrider.errors import EngineUnavailable
from outrider.lab.fakes.engine_servers.app import serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.messages import Message, Role
from outrider.sessions.calls.call import ModelBackend
from outrider.sessions.calls.limits import LARGE
from outrider.sessions.conversation import Conversation
from outrider.sessions.models import InProcessClient, SessionModels
from outrider.spec import Limits, SamplingSpec
from outrider.tokens.rendering.renderer import make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason, Turn
from sessions.world import a_world
from support.later import openai
from support.sdk_clients import anthropic_client, google_client, openai_client
from support.tokenizer import write_other_tokenizer

from .test_gateway import KEY, OneSession

USER: list[Any] = [{"role": "user", "content": "The argument of the agent is that the score of the judge is high."}]
SAID = {"policy": "I do it.", "judge": "The score is high."}


class Pair:
    """A policy and a judge behind one key, and the recorded turns of each."""

    def __init__(self, url: str, models: SessionModels, turns: dict[str, list[Turn]], judge: ScriptedEngine) -> None:
        self.url = url
        self.models = models
        self.turns = turns
        self.judge = judge

    def names(self) -> dict[str, int]:
        return {name: len(turns) for name, turns in self.turns.items()}


@asynccontextmanager
async def a_pair(folder: Path, reply: Any = f"{SAID['judge']}<|im_end|>", **limits: int) -> AsyncIterator[Pair]:
    other = str(write_other_tokenizer(folder / "other"))
    engine = ScriptedEngine(
        EngineOptions(name="judge-0", tokenizer=other, options={"replies": [reply], "context_tokens": 512})
    )
    tokenizer = Tokenizer.load(other)
    turns: list[Turn] = []

    async def record(turn: Turn) -> None:
        turns.append(turn)

    async with (
        a_world(folder, [f"{SAID['policy']}<|im_end|>"], context_tokens=100_000) as world,
        EnginePool(serves="judge", vocabulary=tokenizer.vocabulary, patience=0.05) as pool,
    ):
        await pool.add_engine(engine)
        judge = Conversation(
            ModelBackend(renderer=make_renderer(tokenizer, "qwen3"), pool=pool, model="judge"),
            session_key="s-1-1-judge",
            limits=Limits(**limits),
            sampling=SamplingSpec(),
            history="recorded",
            record=record,
            frozen="judge",
        )
        models = SessionModels(world.conversation, {"judge": judge})
        try:
            async with serving(Gateway(OneSession(models))) as url:
                yield Pair(f"{url}/s/{KEY}", models, {"policy": world.turns, "judge": turns}, engine)
        finally:
            await models.close()


async def test_the_openai_sdk_calls_both(tmp_path: Path) -> None:
    async with (
        a_pair(tmp_path) as pair,
        openai_client(f"{pair.url}/v1") as client,
    ):
        for asked, name in [("judge", "judge"), ("policy", "policy"), ("gpt-5", "policy"), ("judge", "judge")]:
            whole = await client.chat.completions.create(model=asked, messages=USER)
            assert (whole.model, whole.choices[0].message.content) == (asked, SAID[name])
            stream = await client.chat.completions.create(model=asked, messages=USER, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == SAID[name]
            response = await client.responses.create(model=asked, input=USER)
            assert (response.model, response.output_text) == (asked, SAID[name])
        assert [model.id async for model in client.models.list()] == ["policy", "judge"]
        assert (await client.models.retrieve("judge")).to_dict()["max_model_len"] == 512
        counted = [
            (await client.responses.input_tokens.count(model=name, input=USER[0]["content"])).input_tokens
            for name in SAID
        ]
        assert counted == [pair.turns["policy"][0].prompt_length, pair.turns["judge"][0].prompt_length]
        assert counted[0] != counted[1]
        assert pair.names() == {"policy": 6, "judge": 6}
        assert {turn.dialect for turn in pair.turns["judge"]} == {"chat", "responses"}


@pytest.mark.deep
async def test_the_anthropic_sdk_calls_both(tmp_path: Path) -> None:
    async with (
        a_pair(tmp_path) as pair,
        anthropic_client(pair.url) as client,
    ):
        counted = []
        for name in SAID:
            whole = await client.messages.create(model=name, messages=USER, max_tokens=50)
            assert [block.text for block in whole.content if block.type == "text"] == [SAID[name]]
            async with client.messages.stream(model=name, messages=USER, max_tokens=50) as stream:
                assert await stream.get_final_text() == SAID[name]
            counted.append((await client.messages.count_tokens(model=name, messages=USER)).input_tokens)
        assert counted == [turns[0].prompt_length for turns in pair.turns.values()]
        listed = [model async for model in client.models.list()]
        assert [(model.id, model.max_input_tokens) for model in listed] == [("policy", 100_000), ("judge", 512)]
        assert pair.names() == {"policy": 2, "judge": 2}


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
async def test_the_google_sdk_calls_both(tmp_path: Path) -> None:
    text = USER[0]["content"]
    async with a_pair(tmp_path) as pair:
        client = google_client(pair.url, api_key=KEY).aio
        try:
            counted = []
            for name in SAID:
                whole = await client.models.generate_content(model=name, contents=text)
                assert whole.text == SAID[name]
                stream = await client.models.generate_content_stream(model=name, contents=text)
                assert "".join([chunk.text or "" async for chunk in stream]) == SAID[name]
                counted.append((await client.models.count_tokens(model=name, contents=text)).total_tokens)
            assert counted == [turns[0].prompt_length for turns in pair.turns.values()]
            listed = [model async for model in await client.models.list()]
            assert [(model.name, model.input_token_limit) for model in listed] == [
                ("models/policy", 100_000),
                ("models/judge", 512),
            ]
        finally:
            await client.aclose()
        assert pair.names() == {"policy": 2, "judge": 2}


async def test_a_limit_is_told_with_the_models_name(tmp_path: Path) -> None:
    async with (
        a_pair(tmp_path, turns=1) as pair,
        openai_client(f"{pair.url}/v1") as c,
    ):
        await c.chat.completions.create(model="judge", messages=USER)
        with pytest.raises(openai.RateLimitError, match="'judge': max_turns"):
            await c.chat.completions.create(model="judge", messages=USER)
        await c.chat.completions.create(model="policy", messages=USER)
        assert pair.models.policy.limit is None
        assert pair.models.failure is None


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", b'{"model": "policy", "messages": [], "model": "judge"}', None),
        ("/v1/chat/completions", b'{"model": "judge", "messages": ', None),
        ("/v1/chat/completions", b'{"model": ["judge"], "messages": []}', None),
        ("/v1/chat/completions", b"\xff", None),
        ("/v1/chat/completions", b"", None),
        ("/v1/chat/completions", b'{"model": "\\u006audge", "messages": [{"role": "user", "content": "x"}]}', "judge"),
        ("/v1/chat/completions", b'{"model": "Judge", "messages": [{"role": "user", "content": "x"}]}', "policy"),
        ("/v1/responses", b'{"input": "x"}', None),
        ("/v1beta/models/judge:generateContent", b'{"contents": [{"parts": [{"text": "x"}]}]}', "judge"),
        ("/v1beta/models/models/judge:generateContent", b'{"contents": [{"parts": [{"text": "x"}]}]}', "judge"),
        (
            "/v1/messages",
            b'{"model": "judge", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}',
            "judge",
        ),
    ],
)
async def test_which_model_a_body_is_for(tmp_path: Path, path: str, body: bytes, name: str | None) -> None:
    """A call is for a frozen model only if it has exactly the model's name, in any JSON notation. An unreadable body is
    refused."""
    async with a_pair(tmp_path) as pair, aiohttp.ClientSession() as http:
        async with http.post(pair.url + path, data=body) as reply:
            assert reply.status == (200 if name else 400), await reply.text()
        assert pair.names() == {"policy": int(name == "policy"), "judge": int(name == "judge")}


async def test_a_long_request_is_held_against_its_own_models_context(tmp_path: Path) -> None:
    """The judge's context has 512 tokens, and the policy's 100,000. The text fits neither, and each refusal names the
    context of the model that was called."""
    text = "x" * (LARGE + (1 << 19))
    async with a_pair(tmp_path) as pair, aiohttp.ClientSession() as http:
        said = {}
        for model in ("judge", "policy"):
            body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
            async with http.post(f"{pair.url}/v1/chat/completions", data=io.BytesIO(body)) as reply:
                assert reply.status == 400
                said[model] = (await reply.json())["error"]["message"]
        assert "the model's context is 512" in said["judge"]
        assert "the model's context is 100000" in said["policy"]
        assert pair.models.failure is None  # a prompt that is too long is the caller's fault
        assert pair.models.bodies.size == pair.models.under_way == 0


async def test_a_dead_engine_fails_its_own_calls_only(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as pair, aiohttp.ClientSession(pair.url + "/") as http:
        pair.judge.kill()
        statuses = {}
        for model in SAID:
            async with http.post("v1/chat/completions", json={"model": model, "messages": USER}) as reply:
                statuses[model] = reply.status
        async with http.get("v1/models") as reply:  # does not wait for the dead engine
            assert [model["id"] for model in (await reply.json())["data"]] == ["policy", "judge"]
        assert statuses == {"policy": 200, "judge": 503}
        failure = pair.models.failure
        assert isinstance(failure, EngineUnavailable)
        assert "judge" in failure.message
        assert pair.models.policy.failure is None


async def test_a_run_that_ends_cuts_all_of_its_calls_off(tmp_path: Path) -> None:
    async with a_pair(tmp_path, {"reply": "never to be finished<|im_end|>", "stall": 2}) as pair:
        async with aiohttp.ClientSession(pair.url + "/") as http:
            async with http.post(
                "v1/chat/completions", json={"model": "judge", "messages": USER, "stream": True}
            ) as reply:
                await pair.judge.stalled.wait()
                await pair.models.close()
                await reply.read()
            async with http.post("v1/chat/completions", json={"model": "judge", "messages": USER}) as reply:
                assert reply.status == 410
        assert [turn.finish for turn in pair.turns["judge"]] == [FinishReason.ABORT]
        assert not pair.models.hung_up


async def test_an_agent_in_process_names_the_model(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as pair:
        client = InProcessClient(pair.models)
        asked = [Message(role=Role.USER, content="x")]
        said = [(await client.chat(asked, model=model)).content for model in (None, "judge", "policy")]
        assert said == [SAID["policy"], SAID["judge"], SAID["policy"]]
