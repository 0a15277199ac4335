"""The adapter for ProRL's token route, and the kind of engine that an address gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from engines import contract
from engines.contract import Factory, Rig, collect
from engines.worlds import CONTEXT_TOKENS, REPLY, scripted
from outrider.engines.adapters.prorl import ProrlEngine, kind_of_server
from outrider.engines.base import EngineOptions, GenerateRequest, SamplingParams
from outrider.errors import ContextOverflow, EngineError, EngineMisbehaved, EngineRejected, EngineUnavailable
from outrider.lab.fakes.engine_servers import ServeSettings, engine_app, serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine, scripted_logprob
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason
from support.answering import answering

KNOWN = {"prompt_ids", "temperature", "top_p", "max_tokens", "seed", "stop_token_ids", "logprobs"}


def token_route(fake: ScriptedEngine) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """ProRL's token route in front of a scripted engine."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if not (await fake.health()).ok:
            return web.Response(status=503)
        if request.path != "/generate":
            return web.Response(status=404)
        body = await request.json()
        assert body.keys() <= KNOWN
        sampling = SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            seed=body.get("seed"),
            stop_token_ids=tuple(body["stop_token_ids"]),
        )
        ids = np.array(body["prompt_ids"], dtype=np.int32)
        asked = GenerateRequest(request_id="r", session_key="s", input_ids=ids, sampling=sampling)
        try:
            whole = await collect(fake.generate(asked))
        except ContextOverflow as error:
            return web.json_response({"error": {"code": "context_length_exceeded", "message": str(error)}}, status=400)
        except EngineError as error:
            return web.json_response({"detail": str(error)}, status=error.http_status)
        return web.json_response({"response_ids": whole.ids, "logprobs": whole.logprobs})

    return handle


def factory_of(folder: Path) -> Factory:
    @asynccontextmanager
    async def factory(*, slow: bool = False) -> AsyncIterator[Rig]:
        fake, tokenizer = scripted(folder, replies=[REPLY]), Tokenizer.load(folder)
        ids = tokenizer.encode(REPLY)

        async def aborted() -> None:
            await fake.abort_seen.wait()

        def oracle(request: GenerateRequest) -> tuple[list[int], list[float]]:
            start = len(request.input_ids)
            return ids, [scripted_logprob(start + offset, token) for offset, token in enumerate(ids)]

        async with answering(token_route(fake)) as url:
            options = {"context_tokens": CONTEXT_TOKENS, "logprobs_mode": "processed_logprobs"}
            engine = ProrlEngine(EngineOptions(name="token", url=url, model="m", options=options))
            await engine.start()
            try:
                yield Rig(
                    engine=engine,
                    prompt=np.array(tokenizer.encode("<|im_start|>user\nWhere?<|im_end|>\n"), dtype=np.int32),
                    max_tokens=200,
                    context_tokens=CONTEXT_TOKENS,
                    decode=tokenizer.decode,
                    encode=tokenizer.encode,
                    aborted=aborted,
                    kill=fake.kill,
                    finish=fake.release,
                    oracle=oracle,
                )
            finally:
                await engine.close()

    return factory


@pytest.mark.parametrize(
    "check",
    [
        contract.streams_equal_lengths_and_one_finish,
        contract.gives_exact_values,
        contract.stops_at_a_stop_id,
        contract.respects_max_tokens,
        contract.types_overflow,
        contract.types_unavailability,
        contract.tells_its_context,
        contract.serves_many_at_once,
    ],
    ids=lambda check: check.__name__,
)
async def test_the_parts_of_the_contract_without_a_stream(
    check: Callable[[Factory], Awaitable[None]], tokenizer_folder: Path
) -> None:
    await check(factory_of(tokenizer_folder))


async def replied(answer: Any, **sampling: Any) -> contract.Generation:
    async def handle(request: web.Request) -> web.StreamResponse:
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    async with answering(handle) as url:
        engine = ProrlEngine(EngineOptions(name="token", url=url))
        await engine.start()
        try:
            params = SamplingParams(**({"max_tokens": 4} | sampling))
            ids = np.array([5, 6], dtype=np.int32)
            return await collect(
                engine.generate(GenerateRequest(request_id="r", session_key="s", input_ids=ids, sampling=params))
            )
        finally:
            await engine.close()


async def test_the_end_of_a_reply_is_seen_in_its_ids() -> None:
    for ids, finish, match in (
        ([7, 2], FinishReason.STOP, 2),
        ([7, 8, 9, 2], FinishReason.STOP, 2),
        ([7, 8, 9, 8], FinishReason.LENGTH, None),
        ([7], FinishReason.STOP, None),
        ([], FinishReason.STOP, None),
    ):
        whole = await replied({"response_ids": ids, "logprobs": [-0.5] * len(ids)}, stop_token_ids=(2,))
        assert (whole.ids, whole.finish, whole.stop_match) == (ids, finish, match)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"response_ids": [7, 8], "logprobs": [-0.5]}, "1 log-probabilities for 2 sampled tokens"),
        ({"response_ids": [7, 8]}, "0 log-probabilities for 2"),
        ({"response_ids": [7, 8], "logprobs": [-0.5, None]}, "1 log-probabilities for 2"),
        ({"text": "hello"}, "without ProRL's fields"),
        ({"response_ids": ["7"], "logprobs": [-0.5]}, "without ProRL's fields"),
        (web.Response(text="<html>"), "not JSON"),
    ],
)
async def test_a_reply_without_its_numbers_is_no_reply(answer: Any, words: str) -> None:
    with pytest.raises(EngineMisbehaved, match=words):
        await replied(answer)


@pytest.mark.parametrize(
    "sampling", [{"top_k": 5}, {"min_p": 0.1}, {"stop": ("x",)}, {"repetition_penalty": 1.1}, {"logit_bias": {3: 1.0}}]
)
async def test_a_parameter_that_the_route_does_not_have_is_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(EngineRejected, match=f"no parameter {next(iter(sampling))}"):
        await replied({"response_ids": [], "logprobs": []}, **sampling)


async def test_a_pause_waits_and_the_version_is_the_one_that_was_set() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        begun.set()
        await go_on.wait()
        return web.json_response({"response_ids": [7], "logprobs": [-0.5]})

    async with answering(handle) as url, asyncio.TaskGroup() as tasks:
        engine = ProrlEngine(EngineOptions(name="token", url=url))
        await engine.start()
        with pytest.raises(EngineRejected, match="cannot abort"):
            await engine.pause("abort")
        sampling = SamplingParams(max_tokens=4)
        ids = np.array([5], dtype=np.int32)
        asked = GenerateRequest(request_id="r", session_key="s", input_ids=ids, sampling=sampling)
        first = tasks.create_task(collect(engine.generate(asked)))
        await begun.wait()
        pause = tasks.create_task(engine.pause("finish"))
        await asyncio.sleep(0)
        assert not pause.done()
        go_on.set()
        await pause
        assert first.done() or (await first).ids
        await engine.set_version(3)
        second = tasks.create_task(collect(engine.generate(asked)))
        await asyncio.sleep(0)
        assert not second.done()
        await engine.resume()
        assert [span.version for span in (await first).versions] == [0]
        assert [span.version for span in (await second).versions] == [3]
        await engine.close()


async def test_the_kind_of_an_address_is_seen_in_its_list_of_models(tokenizer_folder: Path) -> None:
    for protocol in ("vllm", "sglang"):
        settings = ServeSettings(tokenizer=Tokenizer.load(tokenizer_folder))
        async with serving(engine_app(scripted(tokenizer_folder), protocol, settings)) as url:
            assert await kind_of_server(f"{url}/v1") == await kind_of_server(url) == protocol

    async def other(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "owned_by": "someone"}]})
        return web.Response(status=404)

    async def none(request: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    async def odd(request: web.Request) -> web.StreamResponse:
        return web.Response(text=json.dumps({"data": [1, {"owned_by": ["vllm"]}]}))

    for handler in (other, none, odd):
        async with answering(handler) as url:
            assert (await kind_of_server(f"{url}/v1/"), await kind_of_server(url)) == ("openai", "prorl")
    with pytest.raises(EngineUnavailable):
        await kind_of_server("http://127.0.0.1:9")
