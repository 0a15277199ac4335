"""`VerlGenerate` over verl's own clients, whose servers are fakes: ids, versions and limits of every attempt."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.base import Chunk, GenerateRequest, SamplingParams
from outrider.errors import ContextOverflow, EngineError, EngineRejected, EngineUnavailable
from outrider.trainers.verl import VerlGenerate
from outrider.trajectory import FinishReason, VersionSpan

pytestmark = pytest.mark.trainers


class Servers:
    """Returns `outputs` in order, raises those that are exceptions, and records the requests in `asked`."""

    def __init__(self, outputs: Sequence[TokenOutput | Exception]) -> None:
        self.outputs = list(outputs)
        self.asked: list[dict[str, Any]] = []

    async def answer(self, **asked: Any) -> TokenOutput:
        self.asked.append(asked)
        output = self.outputs.pop(0)
        if isinstance(output, Exception):
            raise output
        return output


class Balanced:
    """Replaces the balancer of a client of verl."""

    servers: Servers

    async def _acquire_server(self, request_id: str, **extra: Any) -> Any:
        return "server", SimpleNamespace(generate=SimpleNamespace(remote=self.servers.answer))

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        pass


class Client(Balanced, LLMServerClient):  # type: ignore[misc]  # verl has no types
    pass


class AsyncClient(Balanced, FullyAsyncLLMServerClient):  # type: ignore[misc]  # verl has no types
    pass


def client(kind: Any, *outputs: TokenOutput | Exception, name: str = "vllm", context: int | None = 64) -> Any:
    rollout = SimpleNamespace(
        name=name, max_model_len=context, prompt_length=8, response_length=8, full_determinism=False
    )
    made = kind(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
    made.servers = Servers(outputs)
    return made


def output(ids: list[int], reason: str = "completed", version: int | None = 3) -> TokenOutput:
    logprobs = [-token / 8 for token in ids]
    return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason=reason, extra_fields={"global_steps": version})


def request(tokens: int = 4, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 8} | sampling)
    ids = np.arange(tokens, dtype=np.int32)
    return GenerateRequest(request_id="r-1", session_key="s-1", input_ids=ids, sampling=params)


async def chunks(made: Any, asked: GenerateRequest | None = None) -> list[Chunk]:
    return [chunk async for chunk in VerlGenerate(made, abort_pause=0.0)(asked or request())]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_reply_with_its_version(kind: Any) -> None:
    made = client(kind, output([5, 6, 7]))
    [chunk] = await chunks(made, request(temperature=0.5, stop=("x",), seed=0))
    assert (chunk.ids, chunk.logprobs) == ([5, 6, 7], [-0.625, -0.75, -0.875])
    assert chunk.finish is FinishReason.STOP
    assert chunk.versions == (VersionSpan(3, 0, 3),)
    [asked] = made.servers.asked
    assert asked["prompt_ids"] == [0, 1, 2, 3]
    assert asked["sampling_params"] == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "stop": ["x"],
        "seed": 0,
        "max_tokens": 8,
    }


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_an_aborted_generation_goes_on_and_each_part_keeps_its_version(kind: Any) -> None:
    made = client(kind, output([5, 6], "aborted", 3), output([], "abort", 4), output([7, 8, 9], version=5))
    parts = await chunks(made)
    assert [part.ids for part in parts] == [[5, 6], [7, 8, 9]]
    assert [part.finish for part in parts] == [None, FinishReason.STOP]
    assert parts[-1].versions == (VersionSpan(3, 0, 2), VersionSpan(5, 2, 5))
    assert [asked["prompt_ids"][4:] for asked in made.servers.asked] == [[], [5, 6], [5, 6]]
    assert [asked["sampling_params"]["max_tokens"] for asked in made.servers.asked] == [8, 6, 6]


async def test_the_limits_of_tokens_and_of_the_context() -> None:
    [chunk] = await chunks(client(Client, output([1] * 8)))
    assert chunk.finish is FinishReason.LENGTH  # verl reports "completed" for both limits
    made = client(Client, output([1, 2]), context=6)
    [chunk] = await chunks(made)
    assert chunk.finish is FinishReason.LENGTH
    assert made.servers.asked[0]["sampling_params"]["max_tokens"] == 2
    for length, context in ((6, 6), (16, None)):
        with pytest.raises(ContextOverflow, match=f"the prompt has {length} tokens"):
            await chunks(client(Client, context=context), request(length))
    aborted = await chunks(client(Client, output([1] * 8, "aborted")))
    assert [part.finish for part in aborted] == [FinishReason.LENGTH]


async def test_versions_that_a_server_did_not_tell_are_not_guessed() -> None:
    parts = await chunks(client(Client, output([5], "aborted", 3), output([6], version=None)))
    assert parts[-1].versions == ()


async def test_what_verl_cannot_do_and_how_it_fails() -> None:
    constraint = Constraint(kind=ConstraintKind.REGEX, text="a+")
    with pytest.raises(EngineRejected, match="structured output"):
        await chunks(client(Client), request(constraint=constraint))
    with pytest.raises(EngineUnavailable, match="verl's server failed: no servers"):
        await chunks(client(Client, RuntimeError("no servers")))
    silent = output([5, 6])
    silent.log_probs = None
    with pytest.raises(EngineError, match="0 log-probabilities for 2 tokens"):
        await chunks(client(Client, silent))


async def test_sglangs_own_names() -> None:
    made = client(Client, output([5]), name="sglang")
    await chunks(made, request(seed=7, min_tokens=2))
    asked = made.servers.asked[0]["sampling_params"]
    assert (asked["sampling_seed"], asked["min_new_tokens"]) == (7, 2)
    assert "seed" not in asked


def test_it_can_be_pickled() -> None:
    made = Client(SimpleNamespace(actor_rollout_ref=None))
    assert isinstance(pickle.loads(pickle.dumps(VerlGenerate(made))), VerlGenerate)
