"""The served engine's responses to a plain HTTP client: shapes, refusals, one-piece replies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from engines.worlds import CONTEXT_TOKENS, REPLY, scripted
from outrider.lab.fakes.engine_servers import ServeSettings, engine_app, serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine, scripted_logprob
from outrider.tokens.rendering.tokenizer import Tokenizer


@asynccontextmanager
async def client(
    folder: Path, protocol: Literal["vllm", "sglang"], engine: ScriptedEngine | None = None, **settings: Any
) -> AsyncGenerator[aiohttp.ClientSession, None]:
    app = engine_app(engine or scripted(folder), protocol, ServeSettings(tokenizer=Tokenizer.load(folder), **settings))
    async with serving(app) as url, aiohttp.ClientSession(url) as session:
        yield session


async def post(session: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    async with session.post(path, json=body) as response:
        return response.status, await response.json()


async def test_vllm_replies_in_one_piece(tokenizer_folder: Path) -> None:
    ids = Tokenizer.load(tokenizer_folder).encode(REPLY)
    async with client(tokenizer_folder, "vllm") as session:
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}, "request_id": "x"}
        status, reply = await post(session, "/inference/v1/generate", body)
        assert (status, reply["request_id"]) == (200, "generate-tokens-x")
        choice = reply["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"]) == (ids[:3], "length")
        assert choice["logprobs"]["content"][2]["logprob"] == scripted_logprob(4, ids[2])
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
        assert reply["usage"]["completion_tokens"] == 3
        asked = {"prompt": [5, 6], "max_tokens": 200, "logprobs": 0}
        status, reply = await post(session, "/v1/completions", asked)
        assert (status, reply["choices"][0]["text"]) == (200, REPLY)
        assert "token_ids" not in reply["choices"][0]


async def test_sglang_replies_in_one_piece(tokenizer_folder: Path) -> None:
    ids = Tokenizer.load(tokenizer_folder).encode(REPLY)
    async with client(tokenizer_folder, "sglang", incremental=True) as session:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
        status, reply = await post(session, "/generate", body)
        assert (status, reply["output_ids"]) == (200, ids[:3])
        meta = reply["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 3}
        assert [entry[:2] for entry in meta["output_token_logprobs"]] == [
            [scripted_logprob(2 + offset, token), token] for offset, token in enumerate(ids[:3])
        ]


@pytest.mark.parametrize(
    ("protocol", "path", "body", "status"),
    [
        ("vllm", "/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, 400),
        ("vllm", "/inference/v1/generate", {"token_ids": [-1], "sampling_params": {}}, 400),
        ("vllm", "/inference/v1/generate", {"token_ids": ["a"], "sampling_params": {}}, 400),
        ("vllm", "/v1/completions", {"prompt": [1] * (CONTEXT_TOKENS + 1)}, 400),
        ("vllm", "/pause?mode=maybe", {}, 400),
        ("sglang", "/generate", {"input_ids": [1], "sampling_params": {"regex": "a", "ebnf": "b"}}, 400),
        ("vllm", "/inference/v1/generate", {"token_ids": [1], "sampling_params": {"structured_outputs": {}}}, 400),
        ("sglang", "/generate", {"input_ids": []}, 400),
        ("sglang", "/generate", {"input_ids": [1], "sampling_params": {"top_p": 0.0}}, 400),
        ("sglang", "/generate", {"input_ids": [1], "sampling_params": {"min_new_tokens": 129}}, 400),
        ("sglang", "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": CONTEXT_TOKENS}}, 400),
        ("sglang", "/generate", {"input_ids": [1] * CONTEXT_TOKENS}, 400),
        ("sglang", "/pause_generation", {"mode": "maybe"}, 400),
    ],
)
async def test_bad_requests_are_refused(
    protocol: Literal["vllm", "sglang"], path: str, body: Any, status: int, tokenizer_folder: Path
) -> None:
    async with client(tokenizer_folder, protocol) as session:
        answered, reply = await post(session, path, body)
    assert answered == status
    assert reply["error"]["message"]
    assert reply["error"].get("code") == (status if protocol == "vllm" else None)


@pytest.mark.parametrize(("protocol", "path"), [("vllm", "/nowhere"), ("sglang", "/inference/v1/generate")])
async def test_a_route_that_is_not_there(
    protocol: Literal["vllm", "sglang"], path: str, tokenizer_folder: Path
) -> None:
    async with client(tokenizer_folder, protocol) as session:
        assert await post(session, path, {}) == (404, {"detail": "Not Found"})


async def test_vllm_of_0_26_knows_no_label(tokenizer_folder: Path) -> None:
    async with client(tokenizer_folder, "vllm", labels=False) as session:
        status, _ = await post(session, "/update_weight_version", {"new_version": "7"})
        assert status == 404
        async with session.get("/weight_info") as answer:
            assert answer.status == 404


@pytest.mark.parametrize("sampling", [{"max_tokens": 3}, {"top_p": "x"}, {"temperature": "hot"}])
async def test_sglang_fails_over_sampling_that_it_does_not_know(tokenizer_folder: Path, sampling: Any) -> None:
    async with (
        client(tokenizer_folder, "sglang") as session,
        session.post("/generate", json={"input_ids": [1], "sampling_params": sampling}) as answer,
    ):
        assert (answer.status, answer.content_type) == (500, "text/plain")
        assert await answer.text() == "Internal Server Error"


async def test_sglang_errors_of_a_stream_are_events(tokenizer_folder: Path) -> None:
    body = {"input_ids": [1] * 500, "sampling_params": {"max_new_tokens": 64}, "stream": True}
    async with client(tokenizer_folder, "sglang") as session, session.post("/generate", json=body) as answer:
        assert answer.status == 200
        text = await answer.text()
    assert '"type":"invalid_request_error","code":400,"retryable":false' in text
    assert "You requested a total of 564 tokens: 500 tokens from the input messages and 64 tokens" in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("token", [-3, 10_000_000])
async def test_one_bad_id_ends_sglang(tokenizer_folder: Path, token: int) -> None:
    engine = scripted(tokenizer_folder, replies=[{"reply": REPLY, "stall": 2}])
    async with client(tokenizer_folder, "sglang", engine) as session:
        running = asyncio.ensure_future(post(session, "/generate", {"input_ids": [5]}))
        await engine.stalled.wait()
        for path, body in (("/generate", {"input_ids": [5, token]}), ("/tokenize", {"prompt": "x"})):
            with pytest.raises(aiohttp.ClientError):
                await post(session, path, body)
        await asyncio.wait([running])
        assert isinstance(running.exception(), aiohttp.ClientError)


@pytest.mark.parametrize(("mode", "dies"), [("in_place", True), ("retract", False), ("abort", False)])
async def test_a_flush_ends_sglang_with_requests_frozen_in_place(
    tokenizer_folder: Path, tmp_path: Path, mode: str, dies: bool
) -> None:
    engine = scripted(tokenizer_folder, replies=[{"reply": REPLY, "stall": 2}])
    body = {"model_path": str(tmp_path), "weight_version": "7", "flush_cache": True, "keep_pause": True}
    async with client(tokenizer_folder, "sglang", engine) as session:
        running = asyncio.ensure_future(post(session, "/generate", {"input_ids": [5]}))
        await engine.stalled.wait()
        await post(session, "/pause_generation", {"mode": mode})
        if dies:
            with pytest.raises(aiohttp.ClientError):
                await post(session, "/update_weights_from_disk", body)
        else:
            status, answer = await post(session, "/update_weights_from_disk", body)
            assert (status, answer["success"]) == (200, True)
        engine.release()
        if not dies:
            await post(session, "/continue_generation", {})
        await asyncio.wait([running])
        assert isinstance(running.exception(), aiohttp.ClientError) == dies


@pytest.mark.parametrize("stream", [True, False])
async def test_sglang_holds_requests_back_and_aborts_those_of_a_pause_that_aborts(
    tokenizer_folder: Path, stream: bool
) -> None:
    body = {"input_ids": [5], "rid": "r" * 32, "stream": stream}
    async with client(tokenizer_folder, "sglang") as session, asyncio.TaskGroup() as group:
        await post(session, "/pause_generation", {"mode": "abort"})
        held = group.create_task(_text(session, body))
        async with session.get("/model_info") as answer:
            assert answer.status == 200
        assert not held.done()
        await post(session, "/continue_generation", {})
        status, text = await held
        assert f"Request {'r' * 32} was aborted" in text
        assert (status, '"code":499' in text) == ((200, True) if stream else (499, False))


async def _text(session: aiohttp.ClientSession, body: Any) -> tuple[int, str]:
    async with session.post("/generate", json=body) as response:
        return response.status, await response.text()


async def test_a_disabled_generate_route_names_its_flag(tokenizer_folder: Path) -> None:
    async with client(tokenizer_folder, "vllm", generate_route=False) as session:
        status, reply = await post(session, "/inference/v1/generate", {})
    assert status == 403
    assert "--enable-scale-out" in reply["error"]["message"]


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
async def test_a_client_that_leaves_before_the_first_token_aborts(
    protocol: Literal["vllm", "sglang"], tokenizer_folder: Path
) -> None:
    engine = scripted(tokenizer_folder, replies=[{"reply": REPLY, "stall": 0}])
    bodies: dict[str, tuple[str, Any]] = {
        "vllm": ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 9}}),
        "sglang": ("/generate", {"input_ids": [5]}),
    }
    async with client(tokenizer_folder, protocol, engine) as session, asyncio.TaskGroup() as group:
        leaving = group.create_task(post(session, *bodies[protocol]))
        await engine.stalled.wait()
        leaving.cancel()
        await engine.abort_seen.wait()


async def test_sglang_version_updates_abort_unless_told_otherwise(tokenizer_folder: Path) -> None:
    engine = scripted(tokenizer_folder, replies=[{"reply": REPLY, "stall": 2}])
    async with client(tokenizer_folder, "sglang", engine) as session:
        body = {"input_ids": [5], "stream": True}
        async with session.post("/generate", json=body) as response:
            await engine.stalled.wait()
            status, _ = await post(session, "/update_weight_version", {"new_version": "4"})
            text = await response.text()
        assert status == 200
        assert '"type":"abort"' in text
        async with session.get("/model_info") as answer:
            assert (await answer.json())["weight_version"] == "4"


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_that_is_accepted_as_the_server_ends_is_cut(tokenizer_folder: Path, turns: int) -> None:
    async with serving(engine_app(scripted(tokenizer_folder))) as url:
        client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        for _ in range(turns):
            await asyncio.sleep(0)
    with client:
        client.setblocking(False)
        async with asyncio.timeout(5):
            with suppress(ConnectionResetError):
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
