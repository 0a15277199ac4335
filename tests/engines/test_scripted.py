"""Behaviour of the scripted engine outside the contract: its script, its failures, its log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.contract import collect
from outrider.engines.base import Chunk, EngineOptions, GenerateRequest, SamplingParams
from outrider.errors import ContextOverflow, EngineError, EngineRejected, EngineUnavailable, InvalidField
from outrider.lab.fakes.scripted_engine import ScriptedEngine, scripted_logprob
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason, VersionSpan


def request(prompt: list[int], session: str = "s", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        session_key=session,
        input_ids=np.array(prompt, dtype=np.int32),
        sampling=SamplingParams(**({"max_tokens": 100} | sampling)),
    )


def engine_of(*replies: Any, folder: Path | None = None, **options: Any) -> ScriptedEngine:
    tokenizer = str(folder) if folder else None
    return ScriptedEngine(EngineOptions(name="e", tokenizer=tokenizer, options={"replies": list(replies)} | options))


@given(position=st.integers(0, 1 << 20), token_id=st.integers(0, 1 << 18))
def test_logprobs_survive_float32(position: int, token_id: int) -> None:
    value = scripted_logprob(position, token_id)
    assert -4 <= value < 0
    assert float(np.float32(value)) == value


async def test_replies_are_given_in_order_to_each_session() -> None:
    engine = engine_of({"ids": [1]}, {"ids": [2]}, {"ids": [3]})
    said = [(await collect(engine.generate(request([9], session)))).ids[0] for session in "aabaaab"]
    assert said == [1, 2, 1, 3, 3, 3, 2]
    assert [asked.session_key for asked in engine.requests] == list("aabaaab")


async def test_only_the_sessions_that_asked_last_keep_their_place() -> None:
    options = EngineOptions(name="e", options={"replies": [{"ids": [1]}, {"ids": [2]}, {"ids": [3]}]})
    engine = ScriptedEngine(options, remembered_sessions=2)
    said = [(await collect(engine.generate(request([9], session)))).ids[0] for session in "abacab"]
    assert said == [1, 1, 2, 1, 3, 1]  # b had been idle for the longest time when c came


async def test_rules_go_before_lines(tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    engine = engine_of("line", {"when": "jade", "reply": "rule<|im_end|>"}, folder=tokenizer_folder)
    for prompt, said in (("It is in jade.", "rule<|im_end|>"), ("It is.", "line"), ("jade", "rule<|im_end|>")):
        whole = await collect(engine.generate(request(tokenizer.encode(prompt))))
        assert tokenizer.decode(whole.ids) == said


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("fail", "expected"),
    [("unavailable", EngineUnavailable), ("overflow", ContextOverflow), ("rejected", EngineRejected)],
)
async def test_failures_come_after_their_tokens(fail: str, expected: type[EngineError], after: int) -> None:
    engine = engine_of({"ids": [1, 2, 3], "fail": fail, "after": after}, {"ids": [4]})
    seen: list[int] = []
    with pytest.raises(expected):
        await _into(seen, engine.generate(request([9])))
    assert seen == [1, 2, 3][:after]
    assert (await collect(engine.generate(request([9])))).ids == [4]


async def test_what_ends_before_its_failure_does_not_fail() -> None:
    engine = engine_of({"ids": [1, 2, 3, 4], "fail": "unavailable", "after": 3})
    whole = await collect(engine.generate(request([9], max_tokens=2)))
    assert (whole.ids, whole.finish) == ([1, 2], FinishReason.LENGTH)


async def test_an_update_in_flight_splits_the_versions() -> None:
    engine = engine_of({"ids": [1, 2, 3, 4, 5], "stall": 2}, chunk_tokens=5)
    chunks = engine.generate(request([9]))
    assert (await anext(chunks)).ids == [1, 2]
    await engine.set_version(3)
    engine.release()
    last = await anext(chunks)
    assert last.ids == [3, 4, 5]
    assert last.versions == (VersionSpan(0, 0, 2), VersionSpan(3, 2, 5))


async def test_a_reply_that_ends_at_its_limit_has_stopped() -> None:
    engine = engine_of({"ids": [1, 2, 3]})
    assert (await collect(engine.generate(request([9], max_tokens=3)))).finish is FinishReason.STOP
    assert (await collect(engine.generate(request([9], max_tokens=2)))).finish is FinishReason.LENGTH


async def test_the_prompt_and_its_room_must_fit() -> None:
    engine = engine_of({"ids": [1]}, context_tokens=10)
    assert (await collect(engine.generate(request([9] * 4, max_tokens=6)))).ids == [1]
    with pytest.raises(ContextOverflow, match="10 tokens"):
        await collect(engine.generate(request([9] * 4, max_tokens=7)))


async def test_an_empty_script_refuses() -> None:
    with pytest.raises(EngineRejected):
        await collect(engine_of().generate(request([9])))


@pytest.mark.parametrize(
    "options", [{"replies": ["text"]}, {"replies": [{"repyl": "x"}]}, {"chunk_tokens": 0}, {"speed": 3}]
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidField):
        ScriptedEngine(EngineOptions(name="e", options=options))


async def _into(seen: list[int], chunks: AsyncGenerator[Chunk, None]) -> None:
    async for chunk in chunks:
        seen += chunk.ids
