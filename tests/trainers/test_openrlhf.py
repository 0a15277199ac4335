"""The OpenRLHF bridge against a real service, without OpenRLHF: the results of calls, and their failures.

The tests in `tests/trainers/openrlhf` pass such results to OpenRLHF's own code.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.client.client import AsyncClient
from outrider.engines.base import GenerateRequest, SamplingParams
from outrider.errors import EngineError, EngineUnavailable, HarnessError, InvalidField
from outrider.schemas import GroupView
from outrider.service.service import Service
from outrider.spec import EngineSpec
from outrider.trainers.openrlhf import EngineGenerate, Executor, OpenRLHFSettings, agent_executor
from outrider.trainers.shared_settings import read_settings
from support.scribe import scribe_task
from support.service import running_service, say

VLLM_PARAMS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": None,
    "min_tokens": 1,
    "repetition_penalty": 1.0,
    "stop": [],
    "logprobs": 1,
}
"""The fields of `vllm.SamplingParams` that the bridge reads, with OpenRLHF's values."""


def executor_for(url: str, task: dict[str, Any], **settings: Any) -> Executor:
    return Executor(
        read_settings(
            OpenRLHFSettings, {"url": url, "task": task, **settings}, source="test", variable="OUTRIDER_OPENRLHF"
        )
    )


async def execute(executor: Executor, *, label: Any = "", max_length: int = 4096, **params: Any) -> dict[str, Any]:
    return await executor.execute("say hello", label, SimpleNamespace(**VLLM_PARAMS | params), max_length, None, None)


async def the_groups(service: Service) -> list[GroupView]:
    return list((await service.results(after=0, wait=0, limit=100, samples=True)).groups)


async def test_a_call_is_a_session_token_for_token(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two")]) as (service, url):
        task = scribe_task("openrlhf", rewards=[0.25], rewrites=[0])
        executor = executor_for(url, task, metrics=["number"], rows="main")
        response = await execute(executor, label="the answer")
        [group] = await the_groups(service)
        async with AsyncClient(url) as client:
            [turn, *_] = await client.turns(group.sessions[0].id)
    [sample, other] = group.samples or ()
    assert group.sessions[0].result.samples == 2
    assert response["observation_tokens"] == sample.ids.tolist()
    assert response["rollout_log_probs"] == sample.logprobs.tolist()
    mask = [0] * len(sample.ids)
    for start, end in response["action_ranges"]:
        mask[start:end] = [1] * (end - start)
    assert mask == sample.loss_mask.tolist()
    assert len(response["action_ranges"]) == 2
    assert (response["reward"], response["scores"], response["truncated"]) == (0.25, 0.25, False)
    assert (response["prompt"], response["label"], response["images"]) == ("say hello", "the answer", None)
    logs = response["extra_logs"]
    assert (logs["outrider_turns"], logs["outrider_rows_left_out"], logs["number"]) == (3.0, 1.0, 0.0)
    assert logs["outrider_tokens_left_out"] == sum(other.loss_mask) > 0
    assert (logs["outrider_version"], logs["outrider_cut_tokens"]) == (0.0, 0.0)
    assert turn.sampling["temperature"] == 0.7


async def test_a_session_of_several_rows_is_refused_until_the_settings_choose_one(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url):
        task = scribe_task("openrlhf rows", rewrites=[0])
        with pytest.raises(InvalidField, match="has 2 rows that train, and OpenRLHF takes one") as caught:
            await execute(executor_for(url, task))
        masked = scribe_task("openrlhf masked", titles=[0]) | {"branches": {"auxiliary": "mask"}}
        one = await execute(executor_for(url, masked))
        _, group = await the_groups(service)
    assert [sample.reward for sample in group.samples or ()] == [1.0, None]
    assert "set rows to main" in (caught.value.hint or "")
    assert one["extra_logs"]["outrider_rows_left_out"] == 0.0


async def test_calls_at_once_are_sessions_of_their_own(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url):
        executor = executor_for(url, scribe_task("openrlhf many", rewards=[0, 1, 2, 3]))
        found = await asyncio.gather(*(execute(executor) for _ in range(4)))
        groups = await the_groups(service)
    assert sorted(each["reward"] for each in found) == [0.0, 1.0, 2.0, 3.0]
    assert [group.n for group in groups] == [1] * 4
    assert {tuple(each["extra_logs"]) for each in found} == {tuple(found[0]["extra_logs"])}


async def test_a_label_may_have_the_rows_columns(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url):
        task = scribe_task("openrlhf label") | {"labels": {"wanted": "is {row.answer}", "whole": "{row.label}"}}
        label = json.dumps({"answer": 42, "task": {"instruction": "say goodbye"}})
        await execute(executor_for(url, task), label=label)
        await execute(executor_for(url, task | {"labels": {"whole": "{row.label}"}}), label="{1, 2}")
        first, second = await the_groups(service)
    assert first.labels == {"wanted": "is 42", "whole": label}
    assert second.labels == {"whole": "{1, 2}"}


async def test_without_correction_there_are_no_log_probabilities(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        response = await execute(executor_for(url, scribe_task("openrlhf plain")), logprobs=None)
    assert response["rollout_log_probs"] is None


async def test_a_row_ends_at_max_length(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        executor = executor_for(url, scribe_task("openrlhf long"))
        whole = await execute(executor)
        (start, end), later = whole["action_ranges"]
        short = await execute(executor, max_length=later[0] + 1)
        assert short["observation_tokens"] == whole["observation_tokens"][: later[0] + 1]
        assert short["action_ranges"] == [(start, end), (later[0], later[0] + 1)]
        assert short["truncated"]
        assert short["extra_logs"]["outrider_cut_tokens"] == later[1] - later[0] - 1
        with pytest.raises(EngineError, match="no token to train on"):
            await execute(executor, max_length=start)


async def test_a_session_that_fails_raises_its_error(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        with pytest.raises(HarnessError, match="the scribe fell ill"):
            await execute(executor_for(url, scribe_task("openrlhf ill", fails=[0])))


async def test_what_a_task_cannot_have_is_refused_before_a_group_is_submitted(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        executor = executor_for(url, scribe_task("openrlhf refused"))
        with pytest.raises(InvalidField, match="stop="):
            await execute(executor, stop=["\n"])
        with pytest.raises(InvalidField, match="images"):
            await executor.execute("p", "", SimpleNamespace(**VLLM_PARAMS), 64, None, None, images=["x.png"])
        assert await client.groups() == ()


async def test_a_call_that_is_cancelled_cancels_its_session(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url), AsyncClient(url) as client:
        call = asyncio.create_task(execute(executor_for(url, scribe_task("openrlhf left", seconds=[60]))))
        async for event in client.events():
            if event.data.get("state") == "running":
                break
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        [group] = (await service.results(after=0, wait=20, limit=1, samples=False)).groups
        assert group.cancelled


class VLLM:
    """Stands for the `llm_engine` that OpenRLHF passes: `generate` runs in one event loop only, and returns outputs in
    vLLM's form."""

    def __init__(self, ids: list[int], finish: str = "stop") -> None:
        self.asked: list[tuple[list[int], Any]] = []
        self._loop = asyncio.get_running_loop()
        self._reply = SimpleNamespace(
            token_ids=tuple(ids),
            logprobs=[{each: SimpleNamespace(logprob=-0.5)} for each in ids],
            finish_reason=finish,
            stop_reason=None,
        )

    async def generate(self, prompt_ids: list[int], params: Any) -> Any:
        assert asyncio.get_running_loop() is self._loop
        self.asked.append((prompt_ids, params))
        return SimpleNamespace(outputs=[self._reply])


@pytest.mark.parametrize(("logprobs", "kind"), [(1, "sampling"), (None, "raw")])
async def test_openrlhfs_own_engine_generates_through_the_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logprobs: int | None, kind: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given)))
    engine = EngineSpec(kind="relay", name="trainer")
    vllm = VLLM([5, 6, 7])
    async with running_service(tmp_path=tmp_path, engines=(engine,)) as (service, url):
        executor = executor_for(url, scribe_task(f"openrlhf relay {kind}"), relay="trainer")
        params = SimpleNamespace(**VLLM_PARAMS | {"logprobs": logprobs})
        calls = [executor.execute("say hello", "", params, 4096, None, vllm) for _ in range(3)]
        found = await asyncio.gather(*calls)
        samples = [sample for group in await the_groups(service) for sample in group.samples or ()]
        asked = vllm.asked.copy()
        assert executor._relay is not None
        first = executor._relay.worker
        async with AsyncClient(url) as client:
            await client.remove_engine("trainer")
            while first is not None and first.running:
                await client.status()
        again = await executor.execute("say hello", "", params, 4096, None, vllm)
        assert executor._relay.worker is not first
        assert again["observation_tokens"] in [response["observation_tokens"] for response in found]
        await asyncio.to_thread(executor.close)
    assert len(asked) == 6
    prompts = [prompt for prompt, _ in asked]
    for response in found:
        tokens = response["observation_tokens"]
        assert [tokens[start:end] for start, end in response["action_ranges"]] == [[5, 6, 7]] * 2
        assert [tokens[:start] in prompts for start, _ in response["action_ranges"]] == [True, True]
    assert {sample.logprob_kind.value for sample in samples} == {kind}
    given = asked[0][1]
    assert (given.temperature, given.logprobs, given.stop, given.logit_bias) == (0.7, 0, [], None)


async def test_a_generation_that_vllm_gave_up_is_the_engines_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given)))
    generate = EngineGenerate(VLLM([5], finish="error"), asyncio.get_running_loop())
    ids = np.array([1, 2], dtype=np.int32)
    with pytest.raises(EngineUnavailable, match="ended a generation with 'error'"):
        await generate(
            GenerateRequest(request_id="r", session_key="s", input_ids=ids, sampling=SamplingParams(max_tokens=4))
        )


def test_settings_are_read_before_openrlhf_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_OPENRLHF", '{"rows": "some"}')
    with pytest.raises(InvalidField, match=r"OUTRIDER_OPENRLHF.rows: must be 'all' or 'main'"):
        agent_executor()
