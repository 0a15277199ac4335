"""What the served engine answers to a plain HTTP client: shapes, refusals, one-piece replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from engines.worlds import CONTEXT_TOKENS, REPLY, scripted
from outrider.testing.engine_servers import ServeSettings, engine_app, serving
from outrider.testing.scripted_engine import ScriptedEngine, scripted_logprob
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
        ("vllm", "/nowhere", {}, 404),
        ("sglang", "/generate", {"input_ids": [1], "sampling_params": {"max_tokens": 3}}, 400),
        ("sglang", "/generate", {"input_ids": [1], "sampling_params": {"top_p": "x"}}, 400),
        ("sglang", "/generate", {"input_ids": [1], "sampling_params": {"regex": "a", "ebnf": "b"}}, 400),
        ("vllm", "/inference/v1/generate", {"token_ids": [1], "sampling_params": {"structured_outputs": {}}}, 400),
        ("sglang", "/generate", {"input_ids": []}, 400),
        ("sglang", "/pause_generation", {"mode": "maybe"}, 400),
        ("sglang", "/inference/v1/generate", {}, 404),
    ],
)
async def test_bad_requests_are_refused(
    protocol: Literal["vllm", "sglang"], path: str, body: Any, status: int, tokenizer_folder: Path
) -> None:
    async with client(tokenizer_folder, protocol) as session:
        answered, reply = await post(session, path, body)
    assert answered == status
    assert reply["error"]["code"] == status
    assert reply["error"]["message"]


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
