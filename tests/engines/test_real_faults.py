"""Failures observed with real servers on a GPU, reproduced by fakes: pauses, probes, dead servers, old keys."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest

from engines.contract import collect
from engines.test_adapters import sglang_event
from engines.test_policy import until_waiting
from engines.upstream import Answer, upstream
from engines.worlds import ADAPTERS, HASTY, REPLY, SETTINGS, World, scripted
from outrider.concurrency.events import Broadcast
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.adapters.openai import OpenAIEngine
from outrider.engines.adapters.sglang import SGLangEngine
from outrider.engines.adapters.vllm import VLLMEngine, unreadable_weights
from outrider.engines.base import (
    Capability,
    ChatRequest,
    Chunk,
    EngineOptions,
    GenerateRequest,
    SamplingParams,
    capabilities_of,
)
from outrider.engines.http.failures import Sizes, StatusFailure, translate
from outrider.engines.pool.pool import EnginePool
from outrider.errors import ContextOverflow, EngineRejected, EngineUnavailable, InvalidField
from outrider.lab.fakes.engine_servers import ServeSettings, engine_app, serving
from outrider.lab.fakes.engine_servers.prefix_cache import PrefixCache
from outrider.messages import Message, Role
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason, VersionSpan
from outrider.wire.http_server import Application, Receive, Scope, Send
from support.stamping import StampingEngine
from support.tokenizer import write_tokenizer

AT_ONCE = RetryPolicy(first=0.0, longest=0.0)
PROMPT = np.arange(5, 25, dtype=np.int32)
GENERATE: dict[World, str] = {
    "vllm": "/inference/v1/generate",
    "vllm-0.26": "/inference/v1/generate",
    "vllm-completions": "/v1/completions",
    "sglang": "/generate",
    "sglang-incremental": "/generate",
}
SERVERS = list(GENERATE)


class Watched:
    """An application that counts the requests for each path."""

    def __init__(self, app: Application) -> None:
        self.asked: Counter[str] = Counter()
        self._app = app
        self._more = Broadcast()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked[scope["path"]] += 1
        self._more.send()
        await self._app(scope, receive, send)

    async def until(self, path: str, times: int = 1) -> None:
        """Return when a path was requested `times` times and the application's tasks are blocked."""
        while True:
            more = self._more.next()
            if self.asked[path] >= times:
                break
            await more.wait()
        await until_waiting()


class Live(NamedTuple):
    """A scripted engine behind a fake server, an adapter for the server, a pool, and another client of the server.
    `server` counts the requests."""

    pool: EnginePool
    adapter: Any
    fake: Any
    cache: PrefixCache
    others: aiohttp.ClientSession
    server: Watched
    url: str


@asynccontextmanager
async def live(world: World, folder: Path, fake: Any = None) -> AsyncIterator[Live]:
    protocol, settings = SETTINGS[world]
    fake = fake or scripted(folder)
    tokenizer, cache = Tokenizer.load(folder), PrefixCache()
    app = Watched(engine_app(fake, protocol, ServeSettings(tokenizer=tokenizer, prefix_cache=cache, **settings)))
    async with (
        serving(app) as url,
        aiohttp.ClientSession(url) as others,
        EnginePool(vocabulary=tokenizer.vocabulary, probing=AT_ONCE, patience=5.0) as pool,
    ):
        engine = ADAPTERS[protocol](EngineOptions(name=world, url=url), retry=HASTY)
        await engine.start()
        try:
            async with asyncio.timeout(20):
                yield Live(pool, engine, fake, cache, others, app, url)
        finally:
            await engine.close()


def request(session: str = "s", prompt: Any = PROMPT, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{session:0>32}",
        session_key=session,
        input_ids=np.asarray(prompt, dtype=np.int32),
        sampling=SamplingParams(**{"max_tokens": 200} | sampling),
    )


async def read(pool: EnginePool, wanted: GenerateRequest) -> list[Chunk]:
    async with aclosing(pool.calls.generate(wanted)) as chunks:
        return [chunk async for chunk in chunks]


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


async def post(world: Live, path: str, body: Any = None) -> int:
    async with world.others.post(path, json=body) as answer:
        await answer.read()
        return answer.status


# Pauses


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_paused_sglang_is_attached_and_resumed(tokenizer_folder: Path, mode: str) -> None:
    """A service killed during an update leaves SGLang paused. While it is paused, `/health` hangs for 20 s."""
    async with live("sglang", tokenizer_folder) as world:
        await post(world, "/pause_generation", {"mode": mode})
        async with asyncio.timeout(5):
            await world.pool.add_engine(world.adapter)
            reply = asyncio.ensure_future(read(world.pool, request()))
            await world.server.until("/generate")
            await world.pool.policy.resume()
            assert ids_of(await reply) == Tokenizer.load(tokenizer_folder).encode(REPLY)
        assert not world.server.asked["/health"]


@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 0.5}], ids=["plain", "no engine can go on with it"])
@pytest.mark.parametrize("world_name", ["sglang", "sglang-incremental"])
async def test_a_request_that_sglang_drops_for_somebody_elses_pause_begins_again(
    tokenizer_folder: Path, world_name: World, sampling: dict[str, Any]
) -> None:
    """The server replies with code 499, which used to reach the agent as a 400."""
    async with live(world_name, tokenizer_folder) as world:
        await world.pool.add_engine(world.adapter)
        await post(world, "/pause_generation", {"mode": "abort"})
        reply = asyncio.ensure_future(read(world.pool, request(**sampling)))
        await world.server.until("/generate")
        await post(world, "/continue_generation", {})
        chunks = await reply
        assert ids_of(chunks) == Tokenizer.load(tokenizer_folder).encode(REPLY)
        assert chunks[-1].finish is FinishReason.STOP
        (status,) = world.pool.status()
        assert (status.ok, status.failures, status.misbehaved) == (True, 0, 0)


@pytest.mark.parametrize("server", SERVERS)
async def test_nothing_is_in_flight_once_a_pause_has_cut(tokenizer_folder: Path, server: World) -> None:
    """The server holds a request that arrives at the moment of the pause. The request is given up and sent again."""
    protocol = SETTINGS[server][0]
    routes = {"sglang": "/pause_generation", "vllm": "/pause?mode=abort"}
    async with live(server, tokenizer_folder) as world:
        await world.pool.add_engine(world.adapter)
        await post(world, routes[protocol], {"mode": "abort"})
        reply = asyncio.ensure_future(read(world.pool, request()))
        await world.server.until(GENERATE[server])
        await world.pool.policy.pause("abort")
        await until_waiting()
        assert world.pool.status()[0].in_flight == 0
        assert not reply.done()
        await world.pool.policy.resume(3)
        chunks = await reply
        assert ids_of(chunks) == Tokenizer.load(tokenizer_folder).encode(REPLY)
        assert chunks[-1].versions == (VersionSpan(3, 0, len(ids_of(chunks))),)
        (status,) = world.pool.status()
        assert (status.failures, status.misbehaved) == (0, 0)


async def test_an_update_spares_sglang_with_somebody_elses_request(tokenizer_folder: Path, tmp_path: Path) -> None:
    """If the other request were frozen in place, the server would crash when its cache is flushed."""
    fake = scripted(tokenizer_folder, replies=[{"reply": REPLY, "stall": 2}])
    async with live("sglang", tokenizer_folder, fake) as world:
        await world.pool.add_engine(world.adapter)
        other = asyncio.ensure_future(post(world, "/generate", {"input_ids": [5]}))
        await world.fake.stalled.wait()
        await world.pool.policy.update(1, mode="finish", weights=str(tmp_path))
        assert await other == 200
        world.fake.release()
        assert ids_of(await read(world.pool, request())) == Tokenizer.load(tokenizer_folder).encode(REPLY)


ABORTED = {"error": {"message": "Request x was aborted", "type": "invalid_request_error", "code": 499}}
WAITED = {"type": "abort", "message": "Abort in waiting queue"}


def queued(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    """The last event of a request that was put back in the queue and aborted there. It repeats the last id."""
    return sglang_event(ids, logprobs, len(ids), WAITED) | {"output_ids": ids[-1:]}


@pytest.mark.parametrize(
    ("events", "ids"),
    [
        ([ABORTED], []),
        ([sglang_event([7], [-0.5], 1), ABORTED], [7]),
        ([queued([], [])], []),
        ([sglang_event([7, 8], [-0.5, -1.0], 2), queued([7, 8], [-0.5, -1.0])], [7, 8]),
        ([sglang_event([7], [-0.5], 1), queued([7, 8, 9], [-0.5, -1.0, -2.0])], [7, 8, 9]),
    ],
    ids=["499", "499 after a token", "waited", "waited again", "waited again, tokens unseen"],
)
async def test_what_sglang_says_of_a_request_that_it_drops(events: list[Any], ids: list[int]) -> None:
    async with upstream(Answer(events=events)) as (url, server):
        engine = SGLangEngine(EngineOptions(name="e", url=url), retry=HASTY)
        await engine.start()
        whole = await collect(engine.generate(request()))
        await engine.close()
    assert (whole.ids, whole.finish) == (ids, FinishReason.ABORT)
    assert len(server.posts) == 1


@pytest.mark.parametrize(
    ("status", "message", "dropped"),
    [
        (499, "canned", True),
        (400, f"Request {'a' * 32} was aborted", True),
        (400, "the request was aborted", False),
    ],
)
async def test_a_refusal_that_is_a_drop(status: int, message: str, dropped: bool) -> None:
    async with upstream(Answer(status, message=message)) as (url, _):
        engine = SGLangEngine(EngineOptions(name="e", url=url), retry=HASTY)
        await engine.start()
        try:
            if dropped:
                assert (await collect(engine.generate(request()))).finish is FinishReason.ABORT
            else:
                with pytest.raises(EngineRejected):
                    await collect(engine.generate(request()))
        finally:
            await engine.close()


async def test_an_engine_that_only_ever_drops_a_request_is_not_asked_for_ever() -> None:
    async with upstream(Answer(events=[ABORTED]), pages=PAGES) as (url, server), EnginePool() as pool:
        engine = SGLangEngine(EngineOptions(name="e", url=url), retry=HASTY)
        await engine.start()
        await pool.add_engine(engine)
        assert (await read(pool, request()))[-1].finish is FinishReason.ABORT
        await engine.close()
    assert 1 < len(server.posts) < 9


PAGES = {"/v1/models": {"data": [{"id": "m", "max_model_len": 512}]}, "/model_info": {"weight_version": "default"}}


# Properties that a server does not report


async def test_sglang_that_repeats_itself_is_told_of(caplog: pytest.LogCaptureFixture, tokenizer_folder: Path) -> None:
    with caplog.at_level(logging.WARNING, "outrider.engine"):
        async with live("sglang", tokenizer_folder) as world:
            for _ in range(2):
                assert (await world.adapter.health()).ok
            await collect(world.adapter.generate(request()))
            assert "--incremental-streaming-output" in world.adapter.advice
            await world.pool.add_engine(world.adapter)
            assert world.pool.status()[0].advice == world.adapter.advice
    assert len(caplog.records) == 1
    async with live("sglang-incremental", tokenizer_folder) as world:
        await world.adapter.health()
        await collect(world.adapter.generate(request()))
        assert world.adapter.advice == ""


@pytest.mark.parametrize(("total", "advised"), [(True, True), (False, False)], ids=["cumulative", "deltas"])
async def test_a_stream_tells_where_the_server_does_not(total: bool, advised: bool) -> None:
    second = sglang_event([1, 2], [-0.5, -1.0], 2) if total else sglang_event([2], [-1.0], 2)
    third = sglang_event([1, 2], [-0.5, -1.0], 2, WAITED) if total else sglang_event([], [], 2, WAITED)
    async with upstream(Answer(events=[sglang_event([1], [-0.5], 1), second, third])) as (url, _):
        engine = SGLangEngine(EngineOptions(name="e", url=url), retry=HASTY)
        await engine.start()
        await collect(engine.generate(request()))
        await engine.close()
    assert bool(engine.advice) == advised


@pytest.mark.parametrize(("server", "advised"), [("vllm", False), ("vllm-0.26", True)])
async def test_vllm_that_counts_no_cached_tokens_is_told_of(
    tokenizer_folder: Path, server: World, advised: bool
) -> None:
    async with live(server, tokenizer_folder) as world:
        await world.pool.add_engine(world.adapter)
        chunks = await read(world.pool, request())
        assert (chunks[-1].cached_tokens is None) == advised
        assert ("--enable-prompt-tokens-details" in world.pool.status()[0].advice) == advised


# Missing weights


async def test_vllm_is_not_given_a_folder_that_is_not_there(tokenizer_folder: Path, tmp_path: Path) -> None:
    """vLLM exits if it gets such a folder."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    async with live("vllm-0.26", tokenizer_folder) as world:
        await world.pool.add_engine(world.adapter)
        for name, words in (("nowhere", "no such folder"), ("empty", "no file .safetensors"), ("file", "no folder")):
            with pytest.raises(EngineRejected, match=words):
                await world.pool.policy.update(1, mode="finish", weights=str(tmp_path / name))
        assert world.pool.policy.status().version == 0
        assert ids_of(await read(world.pool, request())) == Tokenizer.load(tokenizer_folder).encode(REPLY)
        (tmp_path / "empty" / "model.safetensors").touch()
        await world.pool.policy.update(1, mode="finish", weights=str(tmp_path / "empty"))
        assert world.pool.policy.status().version == 1


@pytest.mark.parametrize(
    ("server", "weights"),
    [
        ("http://10.0.0.5:8000", "{here}/nowhere"),  # another machine's disk
        ("http://127.0.0.1:8000", "/no/parent/here"),  # like a path in a container
        ("http://127.0.0.1:8000", "relative"),  # relative to the server's own folder
        ("http://127.0.0.1:8000", "{here}/" + "x" * 300),  # the name is too long for stat
    ],
)
def test_weights_that_cannot_be_seen_from_here_are_left_to_the_server(
    tmp_path: Path, server: str, weights: str
) -> None:
    assert unreadable_weights([server], weights.format(here=tmp_path)) is None


async def test_a_vllm_that_has_ended_itself_is_told_of(tokenizer_folder: Path) -> None:
    async with live("vllm", tokenizer_folder) as world:
        await world.pool.add_engine(world.adapter)
        with pytest.raises(EngineUnavailable, match="has ended itself over the weights in /nowhere/at/all") as caught:
            await world.pool.policy.update(1, mode="finish", weights="/nowhere/at/all")
        assert "start it again" in str(caught.value.hint)
        (status,) = world.pool.status()
        assert not status.ok


# Token ids outside the vocabulary


@pytest.mark.parametrize(
    ("sampling", "error"),
    [
        ({"logit_bias": {10_000_000: 1.0}}, InvalidField),
        ({"stop_token_ids": (10_000_000,)}, InvalidField),
        ({"prompt": [5, -3]}, EngineRejected),
        ({"prompt": [5, 10_000_000]}, EngineRejected),
        ({"prompt": []}, EngineRejected),
    ],
)
async def test_no_engine_is_sent_an_id_that_it_does_not_have(
    tokenizer_folder: Path, sampling: dict[str, Any], error: type[Exception]
) -> None:
    async with live("sglang", tokenizer_folder) as world:
        await world.pool.add_engine(world.adapter)
        with pytest.raises(error):
            await read(world.pool, request(**sampling))
        assert not world.fake.requests
        assert world.pool.status()[0].ok
        await read(world.pool, request())


@pytest.mark.parametrize("prompt", [64, 63])
def test_a_prompt_as_long_as_the_context_overflows_it(prompt: int) -> None:
    words = f"The input ({prompt} tokens) is longer than the model's context length ({prompt} tokens)."
    failure = StatusFailure(400, b'{"error":{"message":"%b"}}' % words.encode())
    assert isinstance(translate(failure, "e", Sizes(prompt=prompt, output=9)), ContextOverflow)
    other = StatusFailure(400, b'{"error":{"message":"page %d of the manual"}}' % prompt)
    assert isinstance(translate(other, "e", Sizes(prompt=prompt, output=9)), EngineRejected)


# Keys and values of old weights


@pytest.mark.parametrize("server", SERVERS)
async def test_old_keys_are_not_used_when_the_trainer_changes_the_weights_itself(
    tokenizer_folder: Path, server: World
) -> None:
    async with live(server, tokenizer_folder) as world:
        await world.pool.add_engine(world.adapter)
        await read(world.pool, request("a"))
        await read(world.pool, request("b"))
        assert world.cache.hits == 16  # within a version, prefixes are found: 16 of 20, in blocks of 4
        await world.pool.policy.pause("finish")
        world.fake.version = 1  # the trainer has loaded the weights itself, and only reports the version
        await world.pool.policy.resume(1)
        await read(world.pool, request("c"))
        assert (world.cache.hits, world.cache.stale) == (16, 0)
        await read(world.pool, request("d"))
        assert (world.cache.hits, world.cache.stale) == (32, 0)
        await world.pool.policy.resume(1)  # the same version again
        await read(world.pool, request("e"))
        assert (world.cache.hits, world.cache.stale) == (48, 0)


@pytest.mark.parametrize("server", SERVERS)
async def test_a_generation_that_goes_on_over_an_update_uses_no_old_keys(tmp_path: Path, server: World) -> None:
    engine = StampingEngine(write_tokenizer(tmp_path), length=40)
    async with live(server, tmp_path, engine) as world:
        await world.pool.add_engine(world.adapter)
        engine.hold(9)
        reply = asyncio.ensure_future(read(world.pool, request()))
        await engine.held.wait()
        await world.pool.policy.pause("abort")
        engine.release()
        engine.version = 2
        await world.pool.policy.resume(2)
        chunks = await reply
        assert chunks[-1].versions == (VersionSpan(0, 0, 9), VersionSpan(2, 9, 41))
        assert (world.cache.stale, len(set(world.cache.salts))) == (0, 2)
        (status,) = world.pool.status()
        assert (status.ok, status.failures) == (True, 0)


async def test_a_stream_without_a_finish_is_a_failure_where_no_pause_of_ours_aborts_it(tmp_path: Path) -> None:
    engine = StampingEngine(write_tokenizer(tmp_path), length=40)
    async with live("vllm-0.26", tmp_path, engine) as world:
        engine.hold(9)
        reply = asyncio.ensure_future(collect(world.adapter.generate(request())))
        await engine.held.wait()
        await post(world, "/pause?mode=abort")  # a pause by another client
        engine.release()
        with pytest.raises(EngineUnavailable, match="ended its stream before"):
            await reply


async def test_a_stream_that_our_pause_aborted_is_an_abort_when_it_is_read_later(tmp_path: Path) -> None:
    engine = StampingEngine(write_tokenizer(tmp_path), length=40)
    async with live("vllm-0.26", tmp_path, engine) as world:
        engine.hold(9)
        async with aclosing(world.adapter.generate(request())) as chunks:
            first = await anext(chunks)
            await engine.held.wait()
            await world.adapter.pause("abort")
            engine.release()
            await world.adapter.resume()
            rest = [chunk async for chunk in chunks]
        assert rest[-1].finish is FinishReason.ABORT
        assert len(first.ids) + sum(len(chunk.ids) for chunk in rest) == 9


async def test_a_stream_that_our_pause_aborted_before_its_first_event_says_nothing_of_the_servers_routes() -> None:
    async with upstream(Answer(events=[])) as (url, server):
        adapter = VLLMEngine(EngineOptions(name="v", url=url))
        await adapter.start()
        try:
            events = adapter._http.events

            async def paused(*args: Any) -> AsyncGenerator[Any, None]:
                adapter._gate.close()
                adapter._gate.open()
                async for batch in events(*args):
                    yield batch

            adapter._http.events = paused  # type: ignore[assignment]
            async with aclosing(adapter.generate(request())) as chunks:
                [chunk] = [chunk async for chunk in chunks]
        finally:
            await adapter.close()
        assert (chunk.finish, chunk.ids) == (FinishReason.ABORT, [])
        assert [path for path, _ in server.posts] == ["/inference/v1/generate"]


@pytest.mark.parametrize("server", ["vllm", "vllm-0.26"])
async def test_a_request_that_was_held_over_an_update_is_asked_again(tokenizer_folder: Path, server: World) -> None:
    """The request has the salt of the old weights, and the server computes it with the new ones."""
    async with live(server, tokenizer_folder) as world:
        await world.adapter.health()
        await collect(world.adapter.generate(request("a")))
        await post(world, "/pause?mode=abort")
        held = asyncio.ensure_future(collect(world.adapter.generate(request("b"))))
        await world.server.until(GENERATE[server], 2)
        world.fake.version = 1
        await world.adapter.set_version(1)  # the order for a process that does not pause the server itself
        await post(world, "/resume")
        whole = await held
        assert (whole.ids, whole.finish) == ([], FinishReason.ABORT)


async def test_sglang_says_itself_that_its_weights_are_newer(tokenizer_folder: Path) -> None:
    """The trainer changes the version only on the server. The salt changes after the first reply that reports the new
    version."""
    async with live("sglang", tokenizer_folder) as world:
        await world.pool.add_engine(world.adapter)
        await read(world.pool, request("a"))
        await post(world, "/update_weight_version", {"new_version": "4", "abort_all_requests": False})
        await read(world.pool, request("b"))
        await read(world.pool, request("c"))
        assert len(set(world.cache.salts)) == 2


async def test_two_services_share_no_salt(tokenizer_folder: Path) -> None:
    """Version 1 of one run has other weights than version 1 of another."""
    async with live("vllm", tokenizer_folder) as world:
        url = world.url
        for run in ("one", "two"):
            engine = VLLMEngine(EngineOptions(name=run, url=url), retry=HASTY)
            await engine.start()
            await engine.set_version(1)
            await collect(engine.generate(request()))
            await engine.close()
        assert len(set(world.cache.salts)) == 2


async def test_a_version_that_comes_again_after_going_back_has_another_salt(tokenizer_folder: Path) -> None:
    async with live("vllm", tokenizer_folder) as world:
        await world.pool.add_engine(world.adapter)
        for version in (2, 1, 2):
            await world.pool.policy.resume(version, go_back=True)
            await read(world.pool, request(str(version)))
        assert len(set(world.cache.salts)) == 3


async def test_an_openai_server_that_gives_ids_gets_a_salt_too() -> None:
    asking = ChatRequest(
        request_id="r" * 32,
        session_key="s",
        messages=(Message(role=Role.USER, content="hi"),),
        tools=(),
        sampling=SamplingParams(max_tokens=9),
    )
    reply = {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}
    async with upstream(Answer(events=[reply])) as (url, server):
        for ids in (True, False):
            engine = OpenAIEngine(EngineOptions(name="e", url=url, model="m", options={"ids": ids}), retry=HASTY)
            await engine.start()
            await engine.set_version(3)
            async with aclosing(engine.chat(asking)) as chunks:
                assert [chunk async for chunk in chunks]
            await engine.close()
            assert (Capability.VERSIONED_CACHE in capabilities_of(engine)) == ids
    (_, first), (_, second) = server.posts
    assert first["cache_salt"].endswith("-3")
    assert "cache_salt" not in second


async def test_an_engine_that_may_use_old_keys_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = StampingEngine(write_tokenizer(tmp_path))
    with caplog.at_level(logging.WARNING, "outrider.engine"):
        async with EnginePool() as pool:
            await pool.add_engine(engine)
            await pool.policy.update(1, mode="finish", weights="weights")  # the engine has loaded them without the pool
            assert not caplog.records
            await pool.policy.resume(2)
            await pool.policy.resume(3)
    assert [record.args for record in caplog.records] == [("stamping",)]
