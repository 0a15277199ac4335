"""Weight updates on a real vLLM: a pool's policy pauses the engine, reloads the weights from a folder, and resumes."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from outrider.engines.adapters.vllm import VLLMEngine
from outrider.engines.base import Chunk, EngineOptions, GenerateRequest, SamplingParams
from outrider.engines.pool.pool import EnginePool
from outrider.errors import EngineError, EngineRejected
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason
from support.later import safetensors
from support.reference_llama import ReferenceLlama

from .vllm_cpu import STARVED, SharedVllm, VllmServer

pytestmark = pytest.mark.real

PROMPT = '<|im_start|>user\nWhere is "maple"?<|im_end|>\n<|im_start|>assistant\n'
LENGTH = 400
EXACT = 5e-4
"""Tolerance for log-probabilities. The engine computes several generations at once, which changes a log-probability by
1e-4 now and then. The log-probabilities of the two models differ by far more."""
AT_ONCE = 8


@pytest.fixture(scope="module")
def other_policy(roomy_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy with all its weights 5 % larger."""
    folder = tmp_path_factory.mktemp("other") / "policy"
    shutil.copytree(roomy_policy, folder)
    weights = safetensors.load_file(folder / "model.safetensors")
    safetensors.save_file(
        {name: tensor * 1.05 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


@pytest_asyncio.fixture
async def engine(vllm_url: VllmServer) -> AsyncIterator[VLLMEngine]:
    engine = VLLMEngine(EngineOptions(name="real", url=vllm_url.url, model=vllm_url.model))
    await engine.start()
    yield engine
    await engine.close()


def request(prompt: list[int]) -> GenerateRequest:
    """Return a request without a seed: vLLM for CPU (0.32) exits when it computes a seeded request's prompt in two
    steps."""
    sampling = SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH)
    ids, name = np.array(prompt, dtype=np.int32), uuid.uuid4().hex
    return GenerateRequest(request_id=name, session_key=name, input_ids=ids, sampling=sampling)


async def whole(pool: EnginePool, asked: GenerateRequest, begun: asyncio.Event | None = None) -> Chunk:
    """Return a reply as one chunk. `begun` is set when its first tokens arrive."""
    chunks = []
    async with aclosing(pool.calls.generate(asked)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if begun is not None and chunk.ids:
                begun.set()
    ids = [token for chunk in chunks for token in chunk.ids]
    logprobs = [value for chunk in chunks for value in chunk.logprobs]
    return msgspec.structs.replace(chunks[-1], ids=ids, logprobs=logprobs)


async def test_generations_go_on_with_the_reloaded_weights(
    engine: VLLMEngine, roomy_policy: Path, other_policy: Path
) -> None:
    """A generation that an update cuts continues with the new weights. Its first part has the log-probabilities of the
    old weights. Its second part has those of the new weights, with the whole prompt computed anew: no key or value of
    the old weights is left."""
    tokenizer = Tokenizer.load(roomy_policy)
    prompt = tokenizer.encode(PROMPT)
    old = ReferenceLlama(roomy_policy, safetensors.load_file(roomy_policy / "model.safetensors"))
    new = ReferenceLlama(roomy_policy, safetensors.load_file(other_policy / "model.safetensors"))
    async with EnginePool(vocabulary=tokenizer.vocabulary, text=tokenizer.stream) as pool, asyncio.TaskGroup() as group:
        await pool.add_engine(engine)
        begun = asyncio.Event()
        replies = [group.create_task(whole(pool, request(prompt), begun)) for _ in range(AT_ONCE)]
        await begun.wait()
        paused = asyncio.get_running_loop().time()
        await pool.policy.update(5, mode="abort", weights=str(other_policy))
        print(f"updated in {asyncio.get_running_loop().time() - paused:.2f} s")
        cut_replies = 0
        for task in replies:
            reply = await task
            assert (len(reply.ids), reply.finish) == (LENGTH, FinishReason.LENGTH)
            cut = next((span.end for span in reply.versions if span.version == 0), 0)
            assert [span.version for span in reply.versions] == [0] * (cut > 0) + [5] * (cut < LENGTH)
            cut_replies += 0 < cut < LENGTH
            assert reply.logprobs[:cut] == pytest.approx(old.logprobs(prompt, reply.ids)[:cut], abs=EXACT)
            assert reply.logprobs[cut:] == pytest.approx(new.logprobs(prompt, reply.ids)[cut:], abs=EXACT)
        if not cut_replies:
            pytest.skip(STARVED)

        begun.clear()
        running = group.create_task(whole(pool, request(prompt), begun))
        await begun.wait()
        await pool.policy.update(6, mode="finish", weights=str(roomy_policy))
        finished = await running
        assert [span.version for span in finished.versions] == [5]
        again = await whole(pool, request(prompt))
        assert [span.version for span in again.versions] == [6]
        assert again.logprobs == pytest.approx(old.logprobs(prompt, again.ids), abs=EXACT)


async def test_a_folder_that_can_be_seen_to_be_none_is_refused_and_the_engine_serves_on(
    engine: VLLMEngine, roomy_policy: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(roomy_policy)
    async with EnginePool(vocabulary=tokenizer.vocabulary, text=tokenizer.stream) as pool:
        await pool.add_engine(engine)
        version = pool.policy.version
        with pytest.raises(EngineRejected, match="there is no such folder"):
            await pool.policy.update(version + 1, mode="finish", weights=str(tmp_path / "nowhere"))
        status = pool.policy.status()
        assert (status.version, status.paused) == (version, None)
        assert len((await whole(pool, request(tokenizer.encode(PROMPT)))).ids) == LENGTH


async def test_a_folder_that_only_the_server_can_look_for_is_refused(
    engine: VLLMEngine, shared_vllm: SharedVllm, tmp_path: Path
) -> None:
    async with EnginePool() as pool:
        await pool.add_engine(engine)
        version = pool.policy.version
        with pytest.raises(EngineError, match="collective_rpc"):
            await pool.policy.update(version + 1, mode="finish", weights=str(tmp_path / "not/here"))
        status = pool.policy.status()
        assert (status.version, status.paused) == (version, None)
    # This vLLM still reports that it is healthy, but it has lost its weights and crashes at the next request.
    await shared_vllm.close()
