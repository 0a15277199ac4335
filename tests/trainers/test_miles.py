"""The slime bridge in miles; miles' side is rebuilt from its sources (`miles_world.py`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import InvalidField
from outrider.trainers import slime
from support.scribe import scribe_task
from support.service import running_service, say

from .miles_world import FunctionAdapter, MilesTrainingSide, RolloutInput, generated, miles_args, miles_modules
from .slime_world import DataSource, EvalSet, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample


@pytest.fixture(autouse=True)
def _miles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OUTRIDER_URL", "OUTRIDER_TOKEN", "OUTRIDER_SLIME"):
        monkeypatch.delenv(name, raising=False)
    with miles_modules():
        yield


def prompt(name: str, **task: Any) -> Sample:
    return Sample(prompt=f"say {name}", label="hello", metadata={"task": scribe_task(name, **task)})


async def called(args: Any, source: DataSource, given: RolloutInput, function: Any = slime.generate_rollout) -> Any:
    """Call a rollout function as miles' manager does: through the adapter, in a thread."""
    try:
        return await asyncio.to_thread(FunctionAdapter(args, source, function), given)
    finally:
        await asyncio.to_thread(slime.close, source)


@pytest.mark.parametrize("function", [slime.generate_rollout, slime.generate_rollout_async])
async def test_a_rollout_has_every_row_and_mixes_no_groups(tmp_path: Path, function: Any) -> None:
    name = function.__name__
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two"), say("three")]) as (service, url):
        args = miles_args(url)
        prompts = [prompt(f"miles {name} a", rewards=[0, 1], rewrites=[1]), prompt(f"miles {name} b", rewards=[1, 0.5])]
        output = await called(args, DataSource(args, prompts), RolloutInput(0, False, weight_version=0), function)
        page = await service.results(after=0, wait=0, limit=100, samples=True)
    assert isinstance(output, RolloutFnTrainOutput)
    assert output.metrics is not None
    assert output.metrics["rollout/outrider/rows"] == 5
    side = MilesTrainingSide(args, output)
    rows: dict[Any, Any] = {(row.session_id, row.row): row for group in page.groups for row in group.samples or ()}
    assert len(side.samples) == 5
    for sample in side.samples:
        row = rows[sample.session_id, sample.metadata["outrider"]["row"]]
        assert sample.tokens == row.ids.tolist()
        assert sample.loss_mask == row.loss_mask[row.prompt_length :].tolist()
        assert sample.rollout_log_probs == row.logprobs[row.prompt_length :].tolist()
    # miles' own normalisation counts rollouts, as the bridge's does
    assert slime.post_process_rewards(args, side.samples)[1] == pytest.approx(side.rewards_by_default())


def test_rewards_of_rows_and_removed_samples_need_the_bridges_normalisation() -> None:
    args = miles_args("", grpo_std_normalization=False)

    def sample(rollout: int, reward: float, **more: Any) -> Sample:
        common: dict[str, Any] = {"tokens": [1, 2], "response_length": 1, "loss_mask": [1]}
        return Sample(group_index=0, index=rollout, rollout_id=rollout, reward=reward, **common, **more)

    own = [sample(0, 1.0), sample(0, 5.0), sample(1, 0.0)]
    with pytest.raises(ValueError, match="must share one reward"):
        MilesTrainingSide(args, RolloutFnTrainOutput([[own[:2], own[2:]]])).rewards_by_default()
    assert slime.post_process_rewards(args, own)[1] == [0.5, 4.5, -0.5]
    removed = [sample(0, 1.0), sample(1, 0.5), sample(2, 0.0, remove_sample=True)]
    assert MilesTrainingSide(args, RolloutFnTrainOutput([removed])).rewards_by_default() == [0.5, 0.0, -0.5]
    assert slime.post_process_rewards(args, removed)[1] == [0.25, -0.25, 0.0]


async def test_an_evaluation(tmp_path: Path) -> None:
    rows = tmp_path / "eval.jsonl"
    metadata = {"task": scribe_task("miles evaluated", rewards=[1, 0])}
    rows.write_text("".join(f"{json.dumps({'prompt': 'hi', 'metadata': metadata})}\n" for _ in range(2)))
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = miles_args(url, eval_datasets=[EvalSet("held-out", rows)])
        output = await called(args, DataSource(args, []), RolloutInput(0, True))
    assert isinstance(output, RolloutFnEvalOutput)
    assert sorted(output.data["held-out"]["rewards"]) == [0.0, 1.0]
    assert all(isinstance(sample, Sample) for sample in output.data["held-out"]["samples"])


async def test_samples_of_miles_own_loop(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = miles_args(url)
        [[first, _]] = DataSource(args, [prompt("miles alone", rewrites=[0])]).get_samples(1)
        sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "max_new_tokens": 64, "no_stop_trim": True}
        made = await generated(slime.custom_generate, args, first, sampling)
    assert [sample.rollout_id for sample in made] == [0, 0]
    assert all(sample.reward == 1.0 for sample in made)


@pytest.mark.parametrize(
    ("settings", "bound"), [({}, 2), ({"max_age": 1}, 1), ({"max_age": 0}, 0)], ids=["miles", "own", "own zero"]
)
def test_the_staleness_of_miles_bounds_the_age_of_groups(settings: dict[str, Any], bound: int) -> None:
    assert slime.max_age_of(miles_args("", max_weight_staleness=2), slime.SlimeSettings(**settings)) == bound
    assert slime.max_age_of(miles_args(""), slime.SlimeSettings()) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multi_lora": True}, "one policy"),
        ({"use_rollout_indexer_replay": True}, "indexer"),
        ({"use_rollout_routing_replay": True}, "routed experts"),
    ],
)
async def test_options_that_cannot_be_followed_are_named(options: dict[str, Any], message: str) -> None:
    args = miles_args("http://127.0.0.1:9", **options)
    with pytest.raises(InvalidField, match=message):
        await called(args, DataSource(args, []), RolloutInput(0, False))


async def test_top_p_is_no_obstacle_because_miles_replays_none(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = miles_args(url, rollout_top_p=0.9)
        output = await called(args, DataSource(args, [prompt("miles top p", rewards=[0, 1])]), RolloutInput(0, False))
    assert len(output.samples) == 2
