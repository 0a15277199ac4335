"""The embedded engine: the contract, exact log-probabilities, and weight updates while it generates."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.contract import CHECKS, Factory, Rig, tokenizes
from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.base import Chunk, EngineOptions, GenerateRequest
from outrider.engines.embedded import EmbeddedEngine
from outrider.engines.pool.pool import EnginePool
from outrider.errors import ContextOverflow, EngineRejected, EngineUnavailable, InvalidField, ModelMismatch
from outrider.lab.demo.dialogue import POLICY
from outrider.trajectory import FinishReason, VersionSpan
from support.embedded import DIALOGUE, PROMPT, TOKENIZER, everything, request, running, together
from support.later import torch
from support.reference_llama import ReferenceLlama

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
EXACT = 1e-4


@pytest.fixture(scope="module")
def reference() -> ReferenceLlama:
    return ReferenceLlama(POLICY)


@pytest.mark.deep
@pytest.mark.parametrize("check", [*CHECKS, tokenizes], ids=lambda check: check.__name__)
async def test_contract(check: Callable[[Factory], Awaitable[None]], reference: ReferenceLlama) -> None:
    @asynccontextmanager
    async def factory(*, slow: bool = False) -> AsyncGenerator[Rig, None]:
        async with running(context_tokens=512) as engine:
            yield _rig(engine, reference, 400 if slow else 24)

    await check(factory)


def rows(engine: EmbeddedEngine) -> int:
    """The number of generations in the batch."""
    assert engine._thread is not None
    return len(engine._thread._batch.rows)


def _rig(engine: EmbeddedEngine, reference: ReferenceLlama, max_tokens: int) -> Rig:
    def oracle(asked: GenerateRequest) -> tuple[list[int], list[float]]:
        prompt = asked.input_ids.tolist()
        ids = reference.greedy(prompt, asked.sampling.max_tokens)
        return ids, reference.logprobs(prompt, ids)

    async def aborted() -> None:
        while rows(engine):  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.002)  # more often would only hold up the engine's thread

    def crash(*_: object) -> None:
        raise ZeroDivisionError

    def kill() -> None:
        assert engine._thread is not None
        engine._thread._batch._forward = crash  # type: ignore[assignment]  # the test is that it returns nothing

    return Rig(
        engine=engine,
        prompt=np.array(PROMPT, dtype=np.int32),
        max_tokens=max_tokens,
        context_tokens=512,
        decode=TOKENIZER.decode,
        encode=TOKENIZER.encode,
        aborted=aborted,
        kill=kill,
        finish=lambda: None,  # its generations end by themselves, hundreds of steps later
        oracle=oracle,
        logprob_tolerance=EXACT,
    )


async def test_logprobs_are_raw_whatever_is_sampled_from(reference: ReferenceLlama) -> None:
    async with running() as engine:
        variants: list[dict[str, Any]] = [{"temperature": 2.0}, {"temperature": 1.0, "top_k": 3}, {"temperature": 0.0}]
        for sampling in variants:
            got = await everything(engine.generate(request(seed=5, **sampling)))
            assert got.logprobs == pytest.approx(reference.logprobs(PROMPT, got.ids), abs=EXACT)


async def test_logprobs_on_a_reused_prefix(reference: ReferenceLlama) -> None:
    async with running(slots=2) as engine:
        first = await everything(engine.generate(request(temperature=1.0, seed=1)))
        longer = [*PROMPT, *first.ids, *DIALOGUE[-20:]]
        second = await everything(engine.generate(request(longer, temperature=1.0, seed=2)))
        assert first.cached_tokens == 0
        assert second.cached_tokens == len(PROMPT) + len(first.ids) - 1
        assert second.logprobs == pytest.approx(reference.logprobs(longer, second.ids), abs=EXACT)


async def test_logprobs_of_eight_at_once_and_of_long_prompts(reference: ReferenceLlama) -> None:
    long = (DIALOGUE * 8)[:600]
    prompts = [long[: 70 * (n + 1)] for n in range(7)] + [long]
    async with running(slots=4) as engine:
        asked = [request(prompt, temperature=1.0, seed=n, max_tokens=12) for n, prompt in enumerate(prompts)]
        for prompt, got in zip(prompts, await together(engine, asked), strict=True):
            assert got.logprobs == pytest.approx(reference.logprobs(prompt, got.ids), abs=EXACT)


@pytest.mark.deep
@pytest.mark.transformers
async def test_logprobs_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    async with running() as engine:
        got = await everything(engine.generate(request(temperature=1.0, seed=3)))
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *got.ids]])).logits[0, len(PROMPT) - 1 : -1]
    theirs = logits.log_softmax(dim=-1)[range(len(got.ids)), got.ids].tolist()
    assert got.logprobs == pytest.approx(theirs, abs=EXACT)


async def test_a_seed_repeats_in_any_company_and_no_seed_varies() -> None:
    hot: dict[str, Any] = {"temperature": 1.5, "max_tokens": 12}
    async with running() as engine:
        alone = await everything(engine.generate(request(seed=7, **hot)))
        asked = [request(seed=7, **hot), *(request(seed=seed, **hot) for seed in range(7))]
        again, *others = await together(engine, asked)
        free = await together(engine, [request(**hot) for _ in range(8)])
    assert again.ids == alone.ids
    assert len({tuple(other.ids) for other in others}) > 1
    assert len({tuple(other.ids) for other in free}) > 1


async def test_requests_wait_for_a_slot_and_all_are_served() -> None:
    async with running(slots=2) as engine:
        got = await together(engine, [request(max_tokens=n % 5 + 1) for n in range(20)])
        assert [len(one.ids) for one in got] == [n % 5 + 1 for n in range(20)]
        assert rows(engine) == 0


async def test_closing_frees_the_slot_for_one_that_waits() -> None:
    async with running(slots=1) as engine:
        holder = engine.generate(request(max_tokens=900))
        await anext(holder)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(everything(engine.generate(request(max_tokens=1))))
            await anext(holder)
            await anext(holder)
            assert not waiting.done()
            await holder.aclose()
        assert len(waiting.result().ids) == 1


async def test_output_ends_where_the_context_does() -> None:
    async with running(context_tokens=len(PROMPT) + 5) as engine:
        got = await everything(engine.generate(request(max_tokens=100)))
        assert (len(got.ids), got.finish) == (5, FinishReason.LENGTH)
        with pytest.raises(ContextOverflow):
            await everything(engine.generate(request([*PROMPT, 1, 1, 1, 1, 1])))


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([], {}, "input_ids"),
        ([1, 99999], {}, "input_ids"),
        ([-1], {}, "input_ids"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"stop": ("",)}, "stop"),
    ],
)
async def test_bad_requests_are_rejected(prompt: list[int], sampling: dict[str, object], field: str) -> None:
    async with running() as engine:
        with pytest.raises(EngineRejected) as caught:
            await everything(engine.generate(request(prompt, **sampling)))
        assert caught.value.field == field


@pytest.mark.deep
async def test_an_update_in_flight_with_the_same_weights_changes_no_logprob(reference: ReferenceLlama) -> None:
    """Eight generations run, ten prefixes are kept, and two long prompts arrive with the update."""
    same = {name: tensor.float() for name, tensor in reference.state.items()}
    async with running(slots=10) as engine:
        await together(engine, [request([*PROMPT, n]) for n in range(10)])
        streams = [engine.generate(request(temperature=1.0, seed=n, max_tokens=200)) for n in range(8)]
        firsts = [await anext(stream) for stream in streams]
        async with asyncio.TaskGroup() as group:
            rests = [group.create_task(everything(stream)) for stream in streams]
            late = [group.create_task(everything(engine.generate(request((DIALOGUE * 8)[:600])))) for _ in "ab"]
            await engine.update_weights(same, 4)
        for first, task in zip(firsts, rests, strict=True):
            rest = task.result()
            ids, logprobs = first.ids + rest.ids, first.logprobs + rest.logprobs
            assert logprobs == pytest.approx(reference.logprobs(PROMPT, ids), abs=EXACT)
            changed = rest.versions[0].end
            assert 0 < changed < 200
            assert rest.versions == (VersionSpan(0, 0, changed), VersionSpan(4, changed, 200))
        for task in late:
            expected = reference.logprobs((DIALOGUE * 8)[:600], task.result().ids)
            assert task.result().logprobs == pytest.approx(expected, abs=EXACT)
        assert (await engine.health()).version == 4


async def test_an_update_in_flight_with_other_weights(reference: ReferenceLlama) -> None:
    """Before the update, log-probabilities come from the old weights. After it, nothing computed with the old weights
    is reused."""
    other = {name: (tensor * 1.05).float() for name, tensor in reference.state.items()}
    changed_reference = ReferenceLlama(POLICY, other)
    async with running(slots=2) as engine:
        stream = engine.generate(request(temperature=1.0, seed=1, max_tokens=60))
        first = await anext(stream)
        await engine.pause("keep")
        await engine.update_weights(other, 9)
        await engine.resume()
        rest = await everything(stream)
        ids, logprobs = first.ids + rest.ids, first.logprobs + rest.logprobs
        old, new = rest.versions
        assert (old.version, new.version, new.end) == (0, 9, 60)
        expected = reference.logprobs(PROMPT, ids)
        assert logprobs[: old.end] == pytest.approx(expected[: old.end], abs=EXACT)
        assert logprobs[old.end :] != pytest.approx(expected[old.end :], abs=1e-2)
        assert logprobs[old.end :] == pytest.approx(changed_reference.logprobs(PROMPT, ids)[old.end :], abs=EXACT)

        longer = [*PROMPT, *ids, *DIALOGUE[-20:]]
        after = await everything(engine.generate(request(longer)))
        assert after.cached_tokens == len(PROMPT) + len(ids) - 1, "the new weights' own prefix"
        assert after.versions == (VersionSpan(9, 0, 16),)
        assert after.logprobs == pytest.approx(changed_reference.logprobs(longer, after.ids), abs=EXACT)


async def test_an_update_drops_the_prefixes_of_idle_slots(reference: ReferenceLlama) -> None:
    other = {name: (tensor * 1.05).float() for name, tensor in reference.state.items()}
    async with running() as engine:
        await everything(engine.generate(request(DIALOGUE)))
        await engine.update_weights(other, 1)
        got = await everything(engine.generate(request(DIALOGUE)))
    assert got.cached_tokens == 0
    assert got.logprobs == pytest.approx(ReferenceLlama(POLICY, other).logprobs(DIALOGUE, got.ids), abs=EXACT)


async def test_an_update_is_whole_or_not_at_all(reference: ReferenceLlama, tmp_path: Path) -> None:
    good = {name: tensor.float() for name, tensor in reference.state.items()}
    name = "model.layers.1.self_attn.k_proj.weight"
    bad = [
        {key: value for key, value in good.items() if key != name},
        good | {name: good[name][:-1]},
        good | {name: good[name] * float("nan")},
        {key: value * 2 for key, value in good.items() if key != name},
    ]
    async with running() as engine:
        for state in bad:
            with pytest.raises(EngineRejected, match=name.replace(".", r"\.")):
                await engine.update_weights(state, 1)
        with pytest.raises(EngineRejected):
            await engine.update_weights(tmp_path, 1)
        got = await everything(engine.generate(request()))
        assert got.versions == (VersionSpan(0, 0, 16),)
        assert got.logprobs == pytest.approx(reference.logprobs(PROMPT, got.ids), abs=EXACT)
        await engine.update_weights(POLICY, 2)
        assert (await everything(engine.generate(request()))).versions == (VersionSpan(2, 0, 16),)


async def test_a_qwen2_shaped_model(tmp_path: Path) -> None:
    """The model has biases on query, key and value, and an output head of its own."""
    from safetensors.torch import save_file

    config = json.loads((POLICY / "config.json").read_text())
    config |= {"model_type": "qwen2", "tie_word_embeddings": False, "num_hidden_layers": 1, "vocab_size": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from outrider.engines.embedded.model import Llama, ModelShape
    from outrider.engines.embedded.weights import export_weights

    torch.manual_seed(0)
    save_file(export_weights(Llama(ModelShape.from_config(config))), tmp_path / "model.safetensors")
    engine = EmbeddedEngine(EngineOptions(name="qwen", model=str(tmp_path)))
    await engine.start()
    try:
        got = await everything(engine.generate(request([1, 2, 3], temperature=1.0, seed=0)))
        with pytest.raises(EngineRejected):
            await everything(engine.generate(request([1], stop=("a",))))
    finally:
        await engine.close()
    assert got.logprobs == pytest.approx(ReferenceLlama(tmp_path).logprobs([1, 2, 3], got.ids), abs=EXACT)


async def test_closing_ends_what_is_in_flight() -> None:
    async with running() as engine:
        stream = engine.generate(request(max_tokens=900))
        await anext(stream)
        await engine.close()
        with pytest.raises(EngineUnavailable):
            await everything(stream)
        with pytest.raises(EngineUnavailable):
            await engine.resume()


async def test_start_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    engine = EmbeddedEngine(EngineOptions(name="none", model=str(tmp_path)))
    with pytest.raises(EngineUnavailable):
        await engine.start()
    assert not (await engine.health()).ok
    config = json.loads((POLICY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(ModelMismatch, match="gpt2"):
        await EmbeddedEngine(EngineOptions(name="gpt", model=str(tmp_path))).start()


@pytest.mark.parametrize("options", [{"slots": 0}, {"slot": 4}, {"context_tokens": 1}, {"threads": "two"}])
def test_wrong_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(InvalidField):
        EmbeddedEngine(EngineOptions(name="x", model=str(POLICY), options=options))


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EngineUnavailable) as caught:
        EmbeddedEngine(EngineOptions(name="x", model=str(POLICY)))
    assert caught.value.hint == "pip install 'safetensors>=0.4' 'torch>=2.4'"


async def test_a_reply_cannot_be_held_to_a_form() -> None:
    form = Constraint(ConstraintKind.REGEX, "(maple|jade)!?")
    async with running() as engine:
        assert not engine.constraints
        with pytest.raises(EngineRejected, match="cannot constrain a reply"):
            await everything(engine.generate(request(constraint=form)))
        assert rows(engine) == 0


async def test_penalties_change_what_a_greedy_generation_says() -> None:
    async with running() as engine:
        plain, biased = await together(engine, [request(), request(logit_bias={PROMPT[0]: 100.0})])
        assert set(biased.ids) == {PROMPT[0]} != set(plain.ids)
        with pytest.raises(EngineRejected, match="vocabulary"):
            await everything(engine.generate(request(logit_bias={1 << 20: 1.0})))


@pytest.mark.deep
async def test_a_generation_that_an_update_cuts_is_exact_in_both_parts(
    reference: ReferenceLlama, tmp_path: Path
) -> None:
    """A pool's policy update with weights from a file: after the cut all values, including those of the prompt, are
    computed with the new weights."""
    from safetensors.torch import save_file

    other = {name: (tensor * 1.05).float() for name, tensor in reference.state.items()}
    save_file({name: tensor.contiguous() for name, tensor in other.items()}, tmp_path / "model.safetensors")
    async with running(slots=4) as engine, EnginePool(text=TOKENIZER.stream) as pool:
        await pool.add_engine(engine)
        asked = [request(temperature=1.0, seed=n, max_tokens=200) for n in range(6)]
        asked = [msgspec.structs.replace(each, session_key=f"s{n}") for n, each in enumerate(asked)]
        streams = [pool.calls.generate(each) for each in asked]
        firsts = [await anext(stream) for stream in streams[:3]]
        async with asyncio.TaskGroup() as group:
            rests = [group.create_task(everything(stream)) for stream in streams]
            await pool.policy.update(7, mode="abort", weights=str(tmp_path))
        changed_reference = ReferenceLlama(POLICY, other)
        for number, task in enumerate(rests):
            rest, first = task.result(), firsts[number] if number < 3 else Chunk(ids=[], logprobs=[])
            ids, logprobs = first.ids + rest.ids, first.logprobs + rest.logprobs
            assert len(ids) == 200
            cut = next((span.end for span in rest.versions if span.version == 0), 0)
            assert [span.version for span in rest.versions] == ([0, 7] if cut else [7])
            assert logprobs[:cut] == pytest.approx(reference.logprobs(PROMPT, ids)[:cut], abs=EXACT)
            assert logprobs[cut:] == pytest.approx(changed_reference.logprobs(PROMPT, ids)[cut:], abs=EXACT)
        assert any(task.result().versions[0].version == 0 for task in rests)
