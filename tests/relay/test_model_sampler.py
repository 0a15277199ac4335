"""Sampling from a Hugging Face model in training. The sampler's log-probabilities are compared with those that the
model computes in one pass."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.contract import Generation, chunks_of, collect
from outrider.engines.base import EngineOptions, GenerateRequest, SamplingParams
from outrider.engines.relay.engine import RelayEngine
from outrider.errors import ContextOverflow, EngineRejected, EngineUnavailable
from outrider.relay import Worker
from outrider.relay.hf import ModelSampler
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason, VersionSpan
from support.later import torch, transformers
from support.relay import AT_ONCE, relay_served
from support.tokenizer import write_tokenizer

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.deep,  # torch and transformers take seconds to import
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

VOCAB = 400
CONTEXT = 256
TOLERANCE = 1e-5


@pytest.fixture
def model() -> Any:
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
    )
    return transformers.Qwen3ForCausalLM(config).train()


@pytest.fixture
def sampler(model: Any) -> Iterator[ModelSampler]:
    with ModelSampler(model, rows=8) as sampler:
        yield sampler


def request(prompt: Sequence[int] = (5, 6, 7), **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="request",
        session_key="session",
        input_ids=np.array(prompt, dtype=np.int32),
        sampling=SamplingParams(**({"max_tokens": 20} | sampling)),
    )


def recomputed(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    """Return the log-probabilities of `ids`, computed in one pass over the whole row without padding and without a
    cache."""
    row = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logits = model.eval()(row).logits[0].float().log_softmax(dim=-1)
    model.train()
    places = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
    return [float(logits[place, token]) for place, token in zip(places, ids, strict=True)]


def disturb(model: Any) -> None:
    """Change the weights so that the probabilities are clearly different."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)


async def together(sampler: ModelSampler, asked: Sequence[GenerateRequest]) -> list[Generation]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(collect(sampler.engine.generate(each))) for each in asked]
    return [task.result() for task in tasks]


async def test_log_probabilities_are_the_models_own(model: Any, sampler: ModelSampler) -> None:
    """Twenty prompts of different lengths run at once in eight rows, so some prompts wait, and others join and leave
    the batch."""
    prompts = [list(range(3, 4 + (n * 13) % 50)) for n in range(20)]
    asked = [request(prompt, max_tokens=1 + (n * 7) % 40, seed=n) for n, prompt in enumerate(prompts)]
    for prompt, each, given in zip(prompts, asked, await together(sampler, asked), strict=True):
        assert len(given.ids) == each.sampling.max_tokens
        assert given.finish is FinishReason.LENGTH
        assert given.logprobs == pytest.approx(recomputed(model, prompt, given.ids), abs=TOLERANCE)
    assert model.training, "the trainer's mode is left as it was"


async def test_company_changes_nothing(sampler: ModelSampler) -> None:
    asked = [request([9] * (1 + 5 * n), seed=n, temperature=0.8, top_p=0.9) for n in range(6)]
    alone = [await collect(sampler.engine.generate(each)) for each in asked]
    for single, shared in zip(alone, await together(sampler, asked), strict=True):
        assert single.ids == shared.ids
        assert single.logprobs == pytest.approx(shared.logprobs, abs=TOLERANCE)


async def test_a_generation_goes_on_under_new_weights(model: Any, sampler: ModelSampler) -> None:
    """The log-probability of a token is computed by the weights of the token's version, over all tokens before it."""
    prompts = [[3] * n for n in (1, 9, 30)]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    streams = [sampler.engine.generate(request(prompt, max_tokens=200, seed=1)) for prompt in prompts]
    heads = [await anext(stream) for stream in streams]

    def update() -> None:
        with sampler.weights():
            disturb(model)
            sampler.engine.version = 1

    await asyncio.to_thread(update)
    tails = [await chunks_of(stream) for stream in streams]
    after = {name: weight.clone() for name, weight in model.state_dict().items()}
    for prompt, head, tail in zip(prompts, heads, tails, strict=True):
        ids = head.ids + [token for chunk in tail for token in chunk.ids]
        logprobs = head.logprobs + [value for chunk in tail for value in chunk.logprobs]
        old, new = tail[-1].versions
        assert (old.version, old.start, new.version, new.end) == (0, 0, 1, 200)
        assert old.end == new.start
        assert 0 < old.end < 200
        model.load_state_dict(before)
        by_old = recomputed(model, prompt, ids)
        model.load_state_dict(after)
        by_new = recomputed(model, prompt, ids)
        assert logprobs[: old.end] == pytest.approx(by_old[: old.end], abs=TOLERANCE)
        assert logprobs[old.end :] == pytest.approx(by_new[old.end :], abs=TOLERANCE)
        assert max(abs(a - b) for a, b in zip(by_old, by_new, strict=True)) > 0.01, "the weights did change"


async def test_trainer_and_sampler_take_turns(model: Any, sampler: ModelSampler) -> None:
    """The trainer gets the model between two steps, although the sampler always has work. No step runs until the
    trainer has finished."""
    stream = sampler.engine.generate(request(max_tokens=200))
    await anext(stream)
    forward, steps, inside = model.forward, 0, threading.Event()

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal steps
        assert not inside.is_set()
        steps += 1
        return forward(*given, **named)

    def train() -> int:
        with sampler.weights():
            inside.set()
            before = steps
            loss = forward(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss
            loss.backward()
            inside.clear()
            return steps - before

    model.forward = counted
    assert await asyncio.to_thread(train) == 0
    assert model.lm_head.weight.grad is not None
    rest = await chunks_of(stream)
    assert rest[-1].finish is FinishReason.LENGTH
    assert steps > 0


async def test_stops_and_refusals(model: Any, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(folder)
    with ModelSampler(model, tokenizer=folder) as sampler:
        whole = await collect(sampler.engine.generate(request(temperature=0.0)))
        stop = whole.ids[4]
        cut = await collect(sampler.engine.generate(request(temperature=0.0, stop_token_ids=(stop,))))
        assert cut.ids == whole.ids[: whole.ids.index(stop) + 1]
        assert (cut.finish, cut.stop_match) == (FinishReason.STOP, stop)
        with pytest.raises(ContextOverflow):
            await collect(sampler.engine.generate(request([1] * CONTEXT)))
        with pytest.raises(EngineRejected, match="temperature"):
            await collect(sampler.engine.generate(request(temperature=-1.0)))
        assert await sampler.engine.token_check("hello") == tokenizer.encode("hello")


async def test_a_reader_that_leaves_gives_its_row_back(sampler: ModelSampler) -> None:
    for _ in range(20):  # more readers than rows
        stream = sampler.engine.generate(request(max_tokens=200))
        await anext(stream)
        await stream.aclose()
    assert len((await collect(sampler.engine.generate(request()))).ids) == 20


async def test_a_model_that_fails_is_unavailable(model: Any) -> None:
    def broken(*given: Any, **named: Any) -> Any:
        raise RuntimeError("out of memory")

    with ModelSampler(model) as sampler:
        model.forward = broken
        with pytest.raises(EngineUnavailable, match="out of memory"):
            await collect(sampler.engine.generate(request()))
        health = await sampler.engine.health()
        assert not health.ok
        assert "out of memory" in health.detail
        with pytest.raises(EngineUnavailable, match="out of memory"):
            await collect(sampler.engine.generate(request()))


async def test_it_serves_through_the_relay_while_a_trainer_updates(model: Any, sampler: ModelSampler) -> None:
    relay = RelayEngine(EngineOptions(name="trainer"))
    stop = threading.Event()
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()

    def trainer(url: str) -> int:
        step = 0
        with Worker(url, sampler.engine, reconnecting=AT_ONCE).in_thread() as worker:
            loop.call_soon_threadsafe(ready.set)
            while not stop.is_set():
                step += 1
                with sampler.weights():
                    disturb(model)
                    worker.set_version(step)
        return step

    async with relay_served(relay) as url:
        training = asyncio.create_task(asyncio.to_thread(trainer, url))
        await ready.wait()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect(relay.generate(request([7] * n, max_tokens=60)))) for n in range(1, 7)]
        stop.set()
        steps = await training
    for task in tasks:
        versions = [span.version for span in task.result().versions]
        assert versions == sorted(versions)
        assert len(versions) > 1
        assert versions[-1] <= steps
        assert isinstance(task.result().versions[0], VersionSpan)


async def test_tokens_that_nobody_has_read_yet_keep_their_version(model: Any, sampler: ModelSampler) -> None:
    """The weights change while sampled tokens are unread, and the generation is aborted after the reader has read on.
    The three tokens that were read have the version that sampled them."""
    chunks = sampler.engine.generate(request(max_tokens=200, seed=1))
    await anext(chunks)
    while len(sampler._batch.rows[0].ids) < 3 + 8:  # noqa: ASYNC110  # no event
        await asyncio.sleep(0)
    with sampler.weights():
        sampler.engine.version = 1
    await anext(chunks)
    await anext(chunks)
    await sampler.engine.pause("abort")
    last = await anext(chunks)
    await chunks.aclose()
    assert (last.finish, last.versions) == (FinishReason.ABORT, (VersionSpan(0, 0, 3),))
