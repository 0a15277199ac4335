"""The policy over HTTP: its routes and the client, and replies that continue through a weight update."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from engines.worlds import ADAPTERS, HASTY, SETTINGS
from outrider.api.gateway import Gateway
from outrider.client.client import AsyncClient
from outrider.engines.base import Engine, EngineOptions
from outrider.engines.pool.pool import EnginePool
from outrider.errors import Conflict, EngineRejected
from outrider.lab.fakes.engine_servers import ServeSettings, engine_app, serving
from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.schemas import PolicyEngine, PolicyStatus
from outrider.sessions.calls.call import ModelBackend
from outrider.sessions.conversation import Conversation
from outrider.sessions.models import SessionModels
from outrider.spec import Limits, SamplingSpec
from outrider.tokens.rendering.renderer import make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import Turn, unpack_ids, unpack_logprobs
from support.service import running_service, say, scripted_engine
from support.stamping import StampingEngine
from support.tokenizer import write_tokenizer

from .test_gateway import CHAT, HELLO, OneSession

LENGTH = 40

SERVERS: dict[str, tuple[Any, dict[str, Any]]] = {
    # Servers without labels are left out: they do not set the engine's version, which determines its letters.
    **{str(world): served for world, served in SETTINGS.items() if served[1].get("labels", True)},
    "vllm-0.33": ("vllm", {"refuses_while_paused": True}),
}
PLAIN = {"vllm-plain": ("vllm", {"dev_mode": False})}


class Live(NamedTuple):
    """A session whose agent and engine are reached over HTTP."""

    pool: EnginePool
    engine: StampingEngine
    http: aiohttp.ClientSession
    turns: list[Turn]
    recorded: asyncio.Event


@asynccontextmanager
async def live(folder: Path, server: str) -> AsyncIterator[Live]:
    write_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    engine, turns, recorded = StampingEngine(folder, length=LENGTH), list[Turn](), asyncio.Event()

    async def record(turn: Turn) -> None:
        turns.append(turn)
        recorded.set()

    async with (
        reached(server, engine, tokenizer) as adapter,
        EnginePool(vocabulary=tokenizer.vocabulary, text=tokenizer.stream) as pool,
    ):
        await pool.add_engine(adapter)
        conversation = Conversation(
            ModelBackend(renderer=make_renderer(tokenizer, "qwen3"), pool=pool, model="policy"),
            session_key="s-1-1",
            limits=Limits(),
            sampling=SamplingSpec(),
            history="recorded",
            record=record,
        )
        async with serving(Gateway(OneSession(SessionModels(conversation)))) as url, aiohttp.ClientSession(url) as http:
            try:
                yield Live(pool, engine, http, turns, recorded)
            finally:
                await conversation.close()


@asynccontextmanager
async def reached(server: str, engine: StampingEngine, tokenizer: Tokenizer) -> AsyncIterator[Engine]:
    protocol, settings = (SERVERS | PLAIN)[server]
    async with serving(engine_app(engine, protocol, ServeSettings(tokenizer=tokenizer, **settings))) as url:
        adapter = ADAPTERS[protocol](EngineOptions(name=server, url=url), retry=HASTY)
        await adapter.start()
        try:
            yield adapter
        finally:
            await adapter.close()


async def text_until(reply: aiohttp.ClientResponse, letters: int | None = None) -> str:
    """Return the text of a streamed reply from here on, up to `letters` letters or to its end."""
    seen = ""
    while (letters is None or len(seen) < letters) and (line := (await reply.content.readline()).decode()):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                seen += choice["delta"].get("content") or ""
    return seen


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("server", SERVERS)
async def test_a_reply_goes_on_over_an_update(tmp_path: Path, server: str, stream: bool) -> None:
    """The agent gets one reply and the record has one turn: the ids and log-probabilities of one request, a span for
    each version, and no drift."""
    async with live(tmp_path, server) as world, asyncio.TaskGroup() as group:
        world.engine.hold(9)
        async with asyncio.timeout(20):
            asking = group.create_task(world.http.post(CHAT, json={**HELLO, "stream": stream}))
            await world.engine.held.wait()
            if stream:
                seen = await text_until(await asking, 9)
            await world.pool.policy.pause("abort")
            world.engine.release()
            assert world.turns == []
            await world.pool.policy.update(3, mode="abort", weights="weights-3")
            reply = await asking
            if stream:
                seen += await text_until(reply)
            else:
                seen = (await reply.json())["choices"][0]["message"]["content"]
        assert seen == "a" * 9 + "d" * (LENGTH - 9)
        (turn,) = world.turns
        ids, logprobs = unpack_ids(turn.output_ids).tolist(), unpack_logprobs(turn.logprobs).tolist()
        letters = world.engine.letters
        assert ids == [letters[0]] * 9 + [letters[3]] * (LENGTH - 9) + [world.engine.end]
        assert logprobs == [scripted_logprob(turn.prompt_length + at, token) for at, token in enumerate(ids)]
        assert [(span.version, span.start, span.end) for span in turn.versions] == [(0, 0, 9), (3, 9, LENGTH + 1)]
        assert turn.drift_tokens == 0
        assert world.engine.loaded == ["weights-3"]


@pytest.mark.parametrize("server", SERVERS)
async def test_new_calls_wait_for_the_new_weights(tmp_path: Path, server: str) -> None:
    async with live(tmp_path, server) as world, asyncio.TaskGroup() as group:
        async with asyncio.timeout(20):
            await world.pool.policy.pause("finish")
            asking = group.create_task(world.http.post(CHAT, json=HELLO))
            await asyncio.sleep(0.05)
            assert world.engine.sampled == 0
            await world.pool.policy.resume(2)
            reply = await asking
        assert (await reply.json())["choices"][0]["message"]["content"] == "c" * LENGTH


async def test_a_call_that_is_given_up_in_its_second_part_is_recorded_with_both_versions(tmp_path: Path) -> None:
    async with live(tmp_path, "vllm-0.31") as world:
        world.engine.hold(9)
        async with asyncio.timeout(20):
            reply = await world.http.post(CHAT, json={**HELLO, "stream": True})
            await text_until(reply, 9)
            await world.engine.held.wait()
            await world.pool.policy.pause("abort")
            world.engine.hold(5)
            await world.pool.policy.update(1, mode="abort")
            await text_until(reply, 5)
            await world.engine.held.wait()
            reply.close()
            await world.recorded.wait()
        (turn,) = world.turns
        assert [(span.version, span.start, span.end) for span in turn.versions] == [(0, 0, 9), (1, 9, 14)]


@pytest.mark.parametrize("server", ["vllm", "sglang"])
async def test_weights_that_a_server_refuses_are_refused(tmp_path: Path, server: str) -> None:
    async with live(tmp_path, server) as world:
        nowhere = str(tmp_path / "nowhere")
        with pytest.raises(EngineRejected, match=nowhere):
            await world.pool.policy.update(1, mode="finish", weights=nowhere)
        status = world.pool.policy.status()
        assert (status.version, status.paused) == (0, None)
        async with world.http.post(CHAT, json=HELLO) as reply:
            assert (await reply.json())["choices"][0]["message"]["content"] == "a" * LENGTH


async def test_a_vllm_without_development_mode_can_be_paused_only_gently(tmp_path: Path) -> None:
    async with live(tmp_path, "vllm-plain") as world:
        with pytest.raises(EngineRejected) as caught:
            await world.pool.policy.pause("abort")
        assert caught.value.hint is not None
        assert "VLLM_SERVER_DEV_MODE=1" in caught.value.hint
        assert world.pool.policy.status().paused is None
        await world.pool.policy.update(4, mode="finish")
        async with world.http.post(CHAT, json=HELLO) as reply:
            await reply.read()
        assert [span.version for span in world.turns[0].versions] == [4]


async def test_the_routes(tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, [say("hello")])
    async with running_service(tmp_path=tmp_path, engine=engine) as (_, url), AsyncClient(url) as client:

        def status(version: int, paused: Any = None) -> PolicyStatus:
            served = PolicyEngine(name="scripted", version=version, ok=True)
            return PolicyStatus(version=version, paused=paused, engines=(served,))

        assert await client.policy() == status(0)
        assert await client.pause_policy("abort") == status(0, "abort")
        assert (await client.status()).policy == status(0, "abort")
        assert await client.resume_policy(2) == status(2)
        assert await client.update_policy(3, mode="abort", weights=str(tmp_path)) == status(3)
        assert engine.weights == str(tmp_path)
        assert await client.pause_policy() == status(3, "finish")
        assert await client.resume_policy() == status(3)
        with pytest.raises(Conflict, match="version 3") as back:
            await client.update_policy(2)
        assert back.value.hint
        with pytest.raises(EngineRejected, match="nowhere"):
            await client.update_policy(4, weights="nowhere")
        assert await client.policy() == status(3)
        for field, body in (
            ("mode", {"version": 4, "mode": "keep"}),
            ("version", {}),
            ("version", {"version": -1}),
            ("version", {"version": 1 << 31}),
            ("weights", {"version": 4, "weights": ""}),
            ("wait", {"version": 4, "wait": True}),
        ):
            async with aiohttp.request("POST", f"{url}/v1/policy", json=body) as reply:
                assert (reply.status, (await reply.json())["field"]) == (422, field)
        async with aiohttp.request("POST", f"{url}/v1/policy/pause") as reply:
            assert (reply.status, (await reply.json())["paused"]) == (200, "finish")
