"""VLLMEngine against a real vLLM, through both of its routes, with the demo's policy."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from outrider.engines.adapters.vllm import VLLMEngine
from outrider.engines.base import Chunk, EngineOptions, GenerateRequest, SamplingParams
from outrider.errors import ContextOverflow
from outrider.lifecycle import StopReason
from outrider.trajectory import BranchKind, FinishReason, Sample, TokenMode, VersionSpan
from support.samples import make_sample

from .logprobs import assert_agrees
from .vllm_cpu import CONTEXT_TOKENS, Starved, VllmServer, promptly, unless_starved, vllm_server
from .vllm_tap import CLOSED, TOKEN_ROUTE, tapped

pytestmark = pytest.mark.real

PROMPT = '<|im_start|>user\nWhere is "maple"?<|im_end|>\n<|im_start|>assistant\n'
NONSENSE = [5, 6, 7]
# Long enough that a client on a busy machine acts before the generation ends, which takes about two seconds.
LONG = SamplingParams(max_tokens=4000, min_tokens=4000)
HOTTEST = 2.0  # vLLM's maximum


@pytest_asyncio.fixture
async def closed(vllm_url: VllmServer) -> AsyncIterator[VllmServer]:
    """The server behind a tap that closes the token route, as on a server without `--enable-scale-out`. The tap runs in
    the test's own event loop."""
    async with tapped(vllm_url.url, token_route=False) as tap:
        yield replace(vllm_url, url=tap.url, token_route=False)


@pytest.fixture(params=["generate", "completions"])
def server(request: pytest.FixtureRequest, vllm_url: VllmServer, closed: VllmServer) -> VllmServer:
    return vllm_url if request.param == "generate" else closed


@pytest_asyncio.fixture
async def engine(server: VllmServer) -> AsyncIterator[VLLMEngine]:
    engine = VLLMEngine(EngineOptions(name="real", url=server.url, model=server.model))
    await engine.start()
    try:
        assert (await engine.health()).ok  # as the pool does before it gives an engine work
        yield engine
    finally:
        await engine.close()


@pytest.fixture(scope="session")
def tokenizer(policy_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(policy_folder / "tokenizer.json"))


async def sampled(engine: VLLMEngine, ids: list[int], sampling: SamplingParams) -> Chunk:
    """Return the whole generation as one chunk. Checks the invariants of every stream."""
    async with aclosing(engine.generate(request_for(ids, sampling))) as stream:
        chunks = [chunk async for chunk in stream]
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all(len(chunk.ids) == len(chunk.logprobs) for chunk in chunks)
    last = chunks[-1]
    whole = [token for chunk in chunks for token in chunk.ids]
    assert last.versions == (VersionSpan(0, 0, len(whole)),)
    logprobs = [value for chunk in chunks for value in chunk.logprobs]
    return Chunk(ids=whole, logprobs=logprobs, finish=last.finish, stop_match=last.stop_match, versions=last.versions)


def request_for(ids: list[int], sampling: SamplingParams) -> GenerateRequest:
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        session_key="session",
        input_ids=np.array(ids, dtype=np.int32),
        sampling=sampling,
    )


def sample_of(engine: VLLMEngine, prompt: list[int], output: Chunk) -> Sample:
    masked, trained = len(prompt), len(output.ids)
    return make_sample(
        group_id="group",
        session_id="session",
        attempt=1,
        sample_index=0,
        row=0,
        rows=1,
        kind=BranchKind.MAIN,
        turns=(0,),
        ids=[*prompt, *output.ids],
        loss_mask=[0] * masked + [1] * trained,
        logprobs=[0.0] * masked + output.logprobs,
        versions=[-1] * masked + [0] * trained,
        prompt_length=masked,
        reward=None,
        mode=TokenMode.TOKENS,
        logprob_kind=engine.logprob_kind,
        stop_reason=StopReason.COMPLETED,
        min_version=0,
        max_version=0,
    )


async def status_of_token_route(server: VllmServer) -> int:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}}
    async with aiohttp.ClientSession() as http, http.post(f"{server.url}{TOKEN_ROUTE}", json=body) as reply:
        return reply.status


async def test_token_route_is_open_when_asked_for(vllm_url: VllmServer) -> None:
    assert await status_of_token_route(vllm_url) == 200


@pytest.mark.nightly  # a separate server takes a minute to start, and its version is pinned
async def test_token_route_is_closed_unless_asked_for(vllm_prefix: Path, roomy_policy: Path) -> None:
    async with vllm_server(vllm_prefix, roomy_policy, token_route=False) as server:
        assert await status_of_token_route(server) == CLOSED


async def test_logprobs_are_the_models_own_before_temperature(
    engine: VLLMEngine, tokenizer: Tokenizer, server: VllmServer
) -> None:
    ways = [
        SamplingParams(max_tokens=40, temperature=1.0),
        SamplingParams(max_tokens=40, temperature=0.0),
        SamplingParams(max_tokens=40, temperature=0.3, top_p=0.9),
        SamplingParams(max_tokens=40, temperature=1.5, top_k=20, min_p=0.01),
        SamplingParams(max_tokens=40, temperature=HOTTEST),
        SamplingParams(max_tokens=40, temperature=1.0, seed=7),
    ]
    opening = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    prompts = [opening * (1 + position) for position in range(len(ways))]  # a shared prefix, as turns have
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(sampled(engine, prompt, way)) for prompt, way in zip(prompts, ways, strict=True)]
    samples = [sample_of(engine, prompt, task.result()) for prompt, task in zip(prompts, running, strict=True)]
    assert_agrees(samples, server.model_folder, tolerance=1e-4)


async def test_same_seed_gives_the_same_ids(engine: VLLMEngine, tokenizer: Tokenizer) -> None:
    opening = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    hot = SamplingParams(max_tokens=20, temperature=HOTTEST, seed=11)
    first, second = await sampled(engine, opening, hot), await sampled(engine, opening, hot)
    assert first.ids == second.ids


async def test_max_tokens_ends_with_length(engine: VLLMEngine, tokenizer: Tokenizer) -> None:
    opening = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    output = await sampled(engine, opening, SamplingParams(max_tokens=3, temperature=0.0))
    assert (len(output.ids), output.finish, output.stop_match) == (3, FinishReason.LENGTH, None)


async def test_stop_id_is_the_last_id_of_the_output(engine: VLLMEngine, tokenizer: Tokenizer) -> None:
    opening = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    free = await sampled(engine, opening, SamplingParams(max_tokens=12, temperature=0.0))
    wanted = free.ids[len(free.ids) // 2]
    stopping = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(wanted,))
    output = await sampled(engine, opening, stopping)
    assert output.ids == free.ids[: free.ids.index(wanted) + 1]
    assert (output.finish, output.stop_match) == (FinishReason.STOP, wanted)


async def test_stop_string_ends_with_the_id_that_completes_it(engine: VLLMEngine, tokenizer: Tokenizer) -> None:
    opening = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    free = await sampled(engine, opening, SamplingParams(max_tokens=12, temperature=0.0))
    texts = [tokenizer.decode(free.ids[: n + 1], skip_special_tokens=False) for n in range(len(free.ids))]
    stop = texts[2][-3:]
    expected = next(n for n, text in enumerate(texts) if stop in text) + 1
    output = await sampled(engine, opening, SamplingParams(max_tokens=12, temperature=0.0, stop=(stop,)))
    assert output.ids == free.ids[:expected]
    assert (output.finish, output.stop_match) == (FinishReason.STOP, stop)


async def test_closing_the_stream_aborts_upstream(engine: VLLMEngine, server: VllmServer) -> None:
    async def check() -> None:
        before = await metric(server, "vllm:generation_tokens_total")
        async with aclosing(engine.generate(request_for(NONSENSE, LONG))) as stream:
            await promptly(anext(stream))
            during = connections_to(server)
        assert during
        closed = False
        with suppress(TimeoutError):
            async with asyncio.timeout(5):  # our side closes the connection, independently of vLLM
                while during <= connections_to(server):  # noqa: ASYNC110  # only the kernel has the state
                    await asyncio.sleep(0.01)
                closed = True
        while await promptly(metric(server, "vllm:num_requests_running")) > 0:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.1)
        # Either the engine's process has read the hang-up only after the last token, or the whole reply had arrived
        # before the hang-up, so that the connection is kept for the next request.
        if await metric(server, "vllm:generation_tokens_total") - before >= LONG.max_tokens:
            raise Starved
        assert closed

    await unless_starved(check)


def connections_to(server: VllmServer) -> set[str]:
    """Return the inodes of this process's open connections to the server."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            own.add(descriptor.readlink().name)
    port = f":{int(server.url.rpartition(':')[2]):04X}"
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    # fields: 2 the peer, 3 the state (01: established), 9 the inode
    return {line[9] for line in lines if line[2].endswith(port) and line[3] == "01" and f"socket:[{line[9]}]" in own}


async def metric(server: VllmServer, name: str) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


@pytest.mark.parametrize("length", [CONTEXT_TOKENS, CONTEXT_TOKENS + 6])
async def test_a_prompt_that_leaves_no_room_overflows(engine: VLLMEngine, length: int) -> None:
    with pytest.raises(ContextOverflow):
        await sampled(engine, [5] * length, SamplingParams(max_tokens=8))


async def test_output_is_cut_at_the_context_length(engine: VLLMEngine) -> None:
    # Without a seed: vLLM 0.32 on CPU crashes when it prefills the prompt of a seeded request in several chunks.
    way = SamplingParams(max_tokens=64, temperature=0.0)
    output = await sampled(engine, [5] * (CONTEXT_TOKENS - 4), way)
    assert (len(output.ids), output.finish) == (4, FinishReason.LENGTH)


async def test_health_names_the_model_and_its_context(engine: VLLMEngine, server: VllmServer) -> None:
    health = await engine.health()
    assert (health.ok, health.model, health.context_tokens, health.version) == (
        True,
        server.model,
        CONTEXT_TOKENS,
        0,
    )


async def test_token_check_is_the_servers_tokenizer(engine: VLLMEngine, tokenizer: Tokenizer) -> None:
    text = 'It is in "jade".<|im_end|>'
    assert await engine.token_check(text) == tokenizer.encode(text, add_special_tokens=False).ids


async def test_tokens_keep_the_version_that_sampled_them(engine: VLLMEngine, server: VllmServer) -> None:
    """The completions route of this vLLM reports no spans, so all tokens get the version at the start of the call."""

    async def check() -> None:
        try:
            async with aclosing(engine.generate(request_for(NONSENSE, LONG))) as stream:
                chunks = [await promptly(anext(stream))]
                try:
                    await promptly(engine.pause("keep"))
                    await engine.set_version(1)
                finally:
                    await engine.resume()
                chunks += [chunk async for chunk in stream]
            assert (await engine.health()).version == 1
        finally:
            await engine.set_version(0)
        spans = chunks[-1].versions
        assert (spans[0].start, spans[-1].end) == (0, LONG.max_tokens)
        assert [span.version for span in spans] == ([0, 1] if server.token_route else [0])

    await unless_starved(check)
