"""The adapters in docs/relay.md, with stand-ins for the engines that they adapt."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines.contract import collect
from outrider.engines.base import EngineOptions, GenerateRequest, SamplingParams
from outrider.engines.relay.engine import RelayEngine
from outrider.relay import Worker
from outrider.trajectory import FinishReason, VersionSpan
from support.relay import AT_ONCE, relay_served
from support.waiting import until

from .pages import page

REQUEST = GenerateRequest(
    request_id="request",
    session_key="session",
    input_ids=np.array([1, 2], dtype=np.int32),
    sampling=SamplingParams(max_tokens=3, temperature=0.5, stop=("x",), stop_token_ids=(9,), logit_bias={4: 1.5}),
)


def generate_with(words: str) -> Any:
    """Return the function `generate_with` of the block that contains `words`."""
    [block] = [block for block in page("docs/relay.md").blocks if words in block.text and "generate_with" in block.text]
    names: dict[str, Any] = {}
    exec(compile(block.text, block.where, "exec"), names)
    return names["generate_with"]


async def admitted(engine: RelayEngine) -> bool:
    return (await engine.health()).ok


async def relayed(generate: Any) -> Any:
    engine = RelayEngine(EngineOptions(name="trainer"))
    async with relay_served(engine) as url, Worker(url, generate, reconnecting=AT_ONCE) as worker:
        await worker.attached()
        await until(lambda: admitted(engine))
        return await collect(engine.generate(REQUEST))


@pytest.mark.parametrize(
    ("ids", "reason", "finish"),
    [
        ([5, 9], "completed", FinishReason.STOP),
        ([5, 6, 7], "completed", FinishReason.LENGTH),
        ([5], "aborted", FinishReason.ABORT),
    ],
)
async def test_verl(ids: list[int], reason: str, finish: FinishReason) -> None:
    asked: list[dict[str, Any]] = []

    class Client:
        async def generate(self, request_id: str, **named: Any) -> Any:
            asked.append({"request_id": request_id, **named})
            return SimpleNamespace(
                token_ids=ids, log_probs=[-0.1] * len(ids), stop_reason=reason, extra_fields={"global_steps": 4}
            )

    whole = await relayed(generate_with("extra_fields")(Client()))
    assert (whole.ids, whole.logprobs, whole.finish) == (ids, [-0.1] * len(ids), finish)
    assert whole.versions == (VersionSpan(4, 0, len(ids)),)
    [call] = asked
    assert call["prompt_ids"] == [1, 2]
    assert call["sampling_params"]["stop_token_ids"] == [9]
    assert call["sampling_params"]["max_tokens"] == 3


async def test_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)

    module("vllm", SamplingParams=SimpleNamespace)
    module("vllm.inputs", TokensPrompt=dict)
    module("vllm.sampling_params", RequestOutputKind=SimpleNamespace(DELTA="delta"))

    class Engine:
        async def __call__(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
            assert prompt == {"prompt_token_ids": [1, 2]}
            assert (params.max_tokens, params.logprobs, params.logit_bias) == (3, 0, {4: 1.5})
            for token, finish in ((5, None), (9, "stop")):
                entry = {token: SimpleNamespace(logprob=-0.25)}
                new = SimpleNamespace(
                    token_ids=(token,), logprobs=[entry], finish_reason=finish, stop_reason=token if finish else None
                )
                yield SimpleNamespace(outputs=[new])

    whole = await relayed(generate_with("TokensPrompt")(SimpleNamespace(generate=Engine().__call__)))
    assert (whole.ids, whole.logprobs) == ([5, 9], [-0.25, -0.25])
    assert (whole.finish, whole.stop_match) == (FinishReason.STOP, 9)
