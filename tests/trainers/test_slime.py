"""The slime bridge against a real service; slime's side is rebuilt from its sources (`slime_world.py`)."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api.test_vision import vision_service
from outrider.client.client import AsyncClient
from outrider.errors import EngineError, EvaluatorError, HarnessError, InvalidField, ServiceError, Unauthorized
from outrider.lifecycle import GroupState
from outrider.schemas import GroupView
from outrider.service.service import Service
from outrider.trainers import slime
from support.scribe import Scribe, scribe_task
from support.service import running_service, say, scripted_engine
from support.vision import task as looking

from .slime_world import (
    DataSource,
    EvalSet,
    FullyAsyncWorker,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    Sample,
    TrainingSide,
    logged_evaluation,
    slime_args,
    slime_modules,
)

FILTER = "trainers.slime_world.nonzero_std"


@pytest.fixture(autouse=True)
def _slime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OUTRIDER_URL", "OUTRIDER_TOKEN", "OUTRIDER_SLIME"):
        monkeypatch.delenv(name, raising=False)
    with slime_modules():
        yield


def prompt(name: str, **task: Any) -> Sample:
    return Sample(prompt=f"say {name}", label="hello", metadata={"task": scribe_task(name, **task)})


async def train(
    args: Any, source: DataSource, rollout_id: int = 0, *, function: Any = slime.generate_rollout, keep: bool = False
) -> RolloutFnTrainOutput:
    """Call a rollout function from a thread, as slime's process does, where no event loop runs."""
    try:
        output = await asyncio.to_thread(function, args, rollout_id, source)
    finally:
        if not keep:
            await asyncio.to_thread(slime.close, source)
    assert isinstance(output, RolloutFnTrainOutput)
    return output


async def the_groups(service: Service) -> list[GroupView]:
    return list((await service.results(after=0, wait=0, limit=100, samples=True)).groups)


async def test_a_rollout_is_groups_of_the_data_source_token_for_token(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two")]) as (service, url):
        args = slime_args(url, rollout_temperature=0.8)
        source = DataSource(args, [prompt("slime a", rewards=[0, 1]), prompt("slime b", rewards=[0.5])])
        before = copy.deepcopy(source._prompts)
        output = await train(args, source)
        groups = {group.labels["slime.group"]: group for group in await the_groups(service)}
        async with AsyncClient(url) as client:
            [turn, *_] = await client.turns(groups["0"].sessions[0].id)
    assert (turn.sampling["temperature"], turn.sampling["max_tokens"]) == (0.8, 64)
    assert [[sample.index for sample in group] for group in output.samples] == [[0, 1], [2, 3]]
    side = TrainingSide(args, output)
    for sample in side.samples:
        ours = list(groups[str(sample.group_index)].samples or ())[(sample.index or 0) % 2]
        assert sample.tokens == ours.ids.tolist()
        assert sample.response_length == len(ours.ids) - ours.prompt_length
        assert sample.loss_mask == ours.loss_mask[ours.prompt_length :].tolist()
        assert sample.rollout_log_probs == ours.logprobs[ours.prompt_length :].tolist()
        assert (sample.reward, sample.session_id) == (ours.reward, ours.session_id)
        assert (sample.weight_versions, sample.status) == (["0"], Sample.Status.COMPLETED)
        assert (sample.rollout_id, sample.remove_sample) == (sample.index, False)
        assert sample.metadata["outrider"]["stop_reason"] == "completed"
    assert source._prompts == before
    assert output.metrics is not None
    assert output.metrics["rollout/outrider/submitted"] >= 2
    assert output.metrics["rollout/outrider/version_max"] == 0


async def test_groups_that_the_filter_drops_are_replaced(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(url, dynamic_sampling_filter_path=FILTER)
        flat = [prompt(f"slime flat {number}") for number in range(3)]
        mixed = [prompt(f"slime mixed {number}", rewards=[0, 1]) for number in range(2)]
        source = DataSource(args, [*flat, *mixed])
        output = await train(args, source)
    assert {group[0].prompt for group in output.samples} == {"say slime mixed 0", "say slime mixed 1"}
    assert output.metrics is not None
    assert output.metrics["rollout/dynamic_filter/drop_zero_std_1.0"] >= 3
    assert all(group[0].prompt.startswith("say slime flat") for group in source.buffer)


async def test_unfinished_groups_go_back_and_come_first_in_the_next_rollout(tmp_path: Path) -> None:
    engine = scripted_engine(
        tmp_path, [{"when": "slime slow", "reply": say("late"), "stall": 1}, {"when": "say", "reply": say("hello")}]
    )
    async with running_service(tmp_path=tmp_path, engine=engine) as (_, url):
        args = slime_args(url, over_sampling_batch_size=3)
        source = DataSource(args, [prompt("slime slow")] + [prompt(f"slime quick {number}") for number in range(9)])
        first = await train(args, source, keep=True)
        async with AsyncClient(url) as client:
            cancelled = [group for group in await client.groups() if group.cancelled]
        returned = list(source.buffer)
        engine.release()
        second = await train(args, source, 1)
    assert [group[0].prompt for group in first.samples] == ["say slime quick 0", "say slime quick 1"]
    assert {group.labels["slime.group"] for group in cancelled} >= {"0"}
    slow = returned[[group[0].prompt for group in returned].index("say slime slow")]
    assert [sample.status for sample in slow] == [Sample.Status.PENDING] * 2
    assert all(sample.tokens == [] for sample in slow)
    assert second.samples
    # No group is lost: each group that was taken is trained on, or is back in the buffer.
    taken = {group[0].group_index for group in [*first.samples, *second.samples, *source.buffer]}
    assert taken == set(range(source.given))


async def test_sessions_with_several_rows_fan_out_and_count_once(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(url)
        source = DataSource(
            args, [prompt("slime fan", rewards=[0, 1], rewrites=[0]), prompt("slime one", rewards=[0, 1])]
        )
        output = await train(args, source)
    assert sorted(len(rows) for group in output.samples for rows in group) == [1, 1, 1, 2]
    side = TrainingSide(args, output)
    rewards, normalised = slime.post_process_rewards(args, side.samples)
    assert sorted(rewards) == [0.0, 0.0, 0.0, 1.0, 1.0]
    each = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert normalised == pytest.approx([each if reward else -each for reward in rewards])
    assert side.rewards_by_default() != pytest.approx(normalised)  # the trap: slime takes all samples as one group
    of_fan = [
        sample for sample in side.samples if sum(one.rollout_id == sample.rollout_id for one in side.samples) == 2
    ]
    total = sum(sum(sample.loss_mask or ()) for sample in of_fan)
    assert [side.mask_sums()[side.samples.index(sample)] for sample in of_fan] == [total, total]
    assert [sample.metadata["outrider"]["row"] for sample in of_fan] == [0, 1]


async def test_with_main_rows_slimes_own_normalisation_is_right(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(url, custom_reward_post_process_path=None)
        args.outrider["rows"] = "main"
        source = DataSource(
            args, [prompt("slime main", rewards=[0, 1], rewrites=[0]), prompt("slime too", rewards=[0, 1])]
        )
        output = await train(args, source)
    side = TrainingSide(args, output)
    assert len(side.samples) == 4
    assert side.rewards_by_default() == pytest.approx(slime.post_process_rewards(args, side.samples)[1])


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("micro_batches", [[range(8)], [[0, 7, 3], [1, 2], [4, 5, 6]]])
def test_each_token_has_the_weight_of_the_formula(micro_batches: list[list[int]], per_token: bool) -> None:
    """Rollout A has 7 rows with 22 trained tokens and reward 1; rollout B has one row with 2 trained tokens and reward
    0. The expected values are computed by hand, with the sample standard deviation."""
    masks = [[1, 1, 0, 1], [1], [1, 0, 0, 1, 1, 1], [0, 1], [1] * 5, [1, 0, 1], [1] * 6, [1, 0, 1]]
    rows = [
        Sample(
            group_index=0,
            index=number // 7,
            rollout_id=number // 7,
            reward=1.0 - number // 7,
            tokens=[1, *range(len(mask))],
            response_length=len(mask),
            loss_mask=mask,
        )
        for number, mask in enumerate(masks)
    ]
    args = slime_args("", rollout_batch_size=1)
    side = TrainingSide(args, RolloutFnTrainOutput([[rows[:7], rows[7:]]]))
    _, advantages = slime.post_process_rewards(args, side.samples)
    for number, mask in enumerate(masks):
        for place, trained in enumerate(mask):
            # The loss of a token is -ratio * advantage: the derivative by its log-probability is -advantage where the
            # ratio is 1, and the loss is linear in the tokens' losses.
            values = [[0.0] * len(other) for other in masks]
            values[number][place] = -advantages[number]
            weight = 1 / 24 if per_token else 1 / 2 / (22 if number < 7 else 2)
            advantage = (0.5 if number < 7 else -0.5) / (math.sqrt(0.5) + 1e-6)
            found = side.loss(values, micro_batches, per_token=per_token)
            assert found == pytest.approx(-weight * advantage * trained)


def test_rows_with_rewards_of_their_own_do_not_move_the_groups_mean() -> None:
    args = slime_args("", advantage_estimator="grpo", grpo_std_normalization=False)
    samples = [
        Sample(group_index=0, index=0, rollout_id=0, reward=1.0, tokens=[1, 2], response_length=1, loss_mask=[1]),
        Sample(group_index=0, index=0, rollout_id=0, reward=5.0, tokens=[1, 2], response_length=1, loss_mask=[1]),
        Sample(group_index=0, index=1, rollout_id=1, reward=0.0, tokens=[1, 2], response_length=1, loss_mask=[1]),
    ]
    assert slime.post_process_rewards(args, samples)[1] == [0.5, 4.5, -0.5]


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_row_with_a_reward_of_its_own_among_equal_rollouts(estimator: str) -> None:
    args = slime_args("", advantage_estimator=estimator, grpo_std_normalization=True)
    rewards = {0: [0.5, 1.0], 1: [0.5], 2: [0.5]}
    samples = [
        Sample(group_index=0, index=at, rollout_id=at, reward=reward, tokens=[1, 2], response_length=1, loss_mask=[1])
        for at, own in rewards.items()
        for reward in own
    ]
    _, normalised = slime.post_process_rewards(args, samples)
    assert normalised == [0.0, 0.5 if estimator == "rloo" else 0.0, 0.0, 0.0]


def test_a_row_is_compared_with_the_other_rollouts_by_rloo() -> None:
    args = slime_args("", advantage_estimator="rloo")
    rewards = {0: [1.0, 4.0], 1: [0.0], 2: [-1.0]}
    samples = [
        Sample(group_index=0, index=at, rollout_id=at, reward=reward, tokens=[1, 2], response_length=1, loss_mask=[1])
        for at, own in rewards.items()
        for reward in own
    ]
    assert slime.post_process_rewards(args, samples)[1] == pytest.approx([1.5, 4.5, 0.0, -1.5])


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "rloo", "ppo"])
@pytest.mark.parametrize("scaled", [True, False])
def test_plain_rollouts_are_normalised_as_slime_does(estimator: str, scaled: bool) -> None:
    args = slime_args("", advantage_estimator=estimator, grpo_std_normalization=scaled, n_samples_per_prompt=3)
    samples = [
        Sample(group_index=at // 3, index=at, reward=reward, tokens=[1, 2], response_length=1, loss_mask=[1])
        for at, reward in enumerate([0.0, 1.0, 0.25, 3.0, 3.0, 3.0])
    ]
    side = TrainingSide(args, RolloutFnTrainOutput([samples[:3], samples[3:]]))
    rewards, normalised = slime.post_process_rewards(args, samples)
    assert rewards == [0.0, 1.0, 0.25, 3.0, 3.0, 3.0]
    assert normalised == pytest.approx(rewards if estimator == "ppo" else side.rewards_by_default())


@pytest.mark.deep
async def test_a_group_with_a_failure_is_rolled_out_again_or_filled_up(tmp_path: Path) -> None:
    prompts = [prompt("slime ill", rewards=[0, 1], fails=[2])] + [
        prompt(f"slime fit {n}", rewards=[0, 1]) for n in range(9)
    ]
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(url, n_samples_per_prompt=3)
        again = await train(args, DataSource(args, prompts[: args.rollout_batch_size]))
        Scribe.started["slime ill"] = 0
        args.outrider["complete"] = "any"
        filled = await train(args, DataSource(args, prompts))
    [ill] = [group for group in again.samples if group[0].prompt == "say slime ill"]
    assert [sample.remove_sample for sample in ill] == [False] * 3
    assert (again.metrics or {})["rollout/dynamic_filter/drop_incomplete"] == 1
    assert (again.metrics or {})["rollout/outrider/retried"] == 1
    [ill] = [group for group in filled.samples if group[0].prompt == "say slime ill"]
    [removed] = [sample for sample in ill if sample.remove_sample]
    assert (removed.status, removed.loss_mask, removed.reward) == (Sample.Status.FAILED, [0], 0.0)
    assert "the scribe fell ill" in removed.metadata["outrider"]["error"]
    side = TrainingSide(args, filled)
    normalised = dict(zip(map(id, side.samples), slime.post_process_rewards(args, side.samples)[1], strict=True))
    each = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert sorted(normalised[id(sample)] for sample in ill) == pytest.approx([-each, 0.0, each])


async def test_the_reward_key_names_a_metric(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(url, reward_key="number")
        prompts = [prompt("slime key a"), prompt("slime key b")]
        side = TrainingSide(args, await train(args, DataSource(args, prompts)))
        assert sorted(sample.get_reward_value(args) for sample in side.samples) == [0.0, 0.0, 1.0, 1.0]
        args.reward_key = "speed"
        with pytest.raises(
            InvalidField, match=r"reward key is 'speed', and the verdict of session .* has only number, reward"
        ):
            await train(args, DataSource(args, [prompt("slime key c"), prompt("slime key d")]))


@pytest.mark.deep
async def test_groups_run_on_between_asynchronous_rollouts(tmp_path: Path) -> None:
    engine = scripted_engine(
        tmp_path, [{"when": "slime long", "reply": say("late"), "stall": 1}, {"when": "say", "reply": say("hello")}]
    )
    async with running_service(tmp_path=tmp_path, engine=engine) as (service, url):
        args = slime_args(url, over_sampling_batch_size=3)
        source = DataSource(args, [prompt("slime long")] + [prompt(f"slime short {number}") for number in range(30)])
        call: dict[str, Any] = {"function": slime.generate_rollout_async, "keep": True}
        first = await train(args, source, 0, **call)
        engine.release()
        prompts = [group[0].prompt for group in first.samples]
        assert "say slime long" not in prompts
        while "say slime long" not in prompts:  # its group was submitted in the first rollout
            later = await train(args, source, 1, **call)
            prompts += [group[0].prompt for group in later.samples]
        groups = await the_groups(service)
        await asyncio.to_thread(slime.close, source)
        async with AsyncClient(url) as client:
            left = await client.groups(limit=200)
    assert len(prompts) == len(set(prompts))
    assert not any(group.cancelled for group in groups)
    assert [group.labels["slime.group"] for group in groups].count("0") == 1
    assert all(group.cancelled for group in left if group.state is not GroupState.DONE)
    assert source.buffer == []


@pytest.mark.deep
async def test_prompts_that_are_drawn_while_others_are_forgotten_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = slime._Prompts.forget_all_but

    def slowly(prompts: slime._Prompts, numbers: Iterable[int]) -> None:
        time.sleep(0.5)  # meanwhile groups end, and others are submitted
        forget(prompts, numbers)

    monkeypatch.setattr(slime._Prompts, "forget_all_but", slowly)
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(url, over_sampling_batch_size=4)
        source = DataSource(args, [prompt(f"slime drawn {number}") for number in range(60)])
        outputs = [
            await train(args, source, number, function=slime.generate_rollout_async, keep=True) for number in range(4)
        ]
        await asyncio.to_thread(slime.close, source)
    prompts = [group[0].prompt for output in outputs for group in output.samples]
    assert len(prompts) == len(set(prompts)) == 8


async def test_a_policy_that_was_paused_for_an_evaluation_runs_again(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "say it", "metadata": {"task": scribe_task("slime before")}}) + "\n")
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        args = slime_args(url, partial_rollout=True, eval_datasets=[EvalSet("held", rows)])
        source = DataSource(args, [prompt("slime unused")])
        await asyncio.to_thread(slime.generate_rollout, args, 0, source, evaluation=True)
        assert (await client.policy()).paused == "abort"
        await asyncio.to_thread(slime.close, source)
        assert (await client.policy()).paused is None


async def test_a_partial_rollout_goes_on_after_a_pause(tmp_path: Path) -> None:
    engine = scripted_engine(
        tmp_path,
        [{"when": "slime part", "reply": say("a long reply"), "stall": 2}, {"when": "say", "reply": say("hello")}],
    )
    async with running_service(tmp_path=tmp_path, engine=engine) as (service, url), AsyncClient(url) as client:
        args = slime_args(url, over_sampling_batch_size=3, partial_rollout=True)
        source = DataSource(args, [prompt("slime part")] + [prompt(f"slime whole {number}") for number in range(30)])
        first = await train(args, source, 0, keep=True)
        assert (await client.policy()).paused == "abort"
        assert "say slime part" not in {group[0].prompt for group in first.samples}
        engine.release()
        await engine.set_version(1)  # slime has pushed new weights
        samples: list[Sample] = []
        for rollout_id in range(1, 9):
            output = await train(args, source, rollout_id, keep=True)
            samples = [sample for group in output.samples for sample in group if group[0].prompt == "say slime part"]
            if samples:
                break
        [part] = [group for group in await the_groups(service) if group.labels["slime.group"] == "0"]
        await asyncio.to_thread(slime.close, source)
        assert (await client.policy()).paused is None
    assert not part.cancelled
    assert [session.attempt for session in part.sessions] == [1, 1]
    assert {tuple(sample.weight_versions) for sample in samples} == {("0", "1")}


@pytest.mark.deep
async def test_old_groups_are_dropped_and_rolled_out_again(tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, [say("hello")])
    async with running_service(tmp_path=tmp_path, engine=engine) as (_, url):
        args = slime_args(url, over_sampling_batch_size=4)
        args.outrider["max_age"] = 0
        source = DataSource(args, [prompt(f"slime aged {number}") for number in range(40)])
        call: dict[str, Any] = {"function": slime.generate_rollout_async, "keep": True}
        first = await train(args, source, 0, **call)
        engine.version = 5
        async with AsyncClient(url) as client:
            # The next tokens bring the new version to the service.
            group = await client.submit({"task": {"instruction": "say it"} | scribe_task("slime between")})
            await client.wait([group.id])
        second = await train(args, source, 1, **call)
        await asyncio.to_thread(slime.close, source)
    assert {version for group in first.samples for sample in group for version in sample.weight_versions} == {"0"}
    assert {version for group in second.samples for sample in group for version in sample.weight_versions} == {"5"}


async def test_custom_generate_fills_the_sample_of_slimes_own_loop(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url):
        args = slime_args(url)
        params = {"temperature": 1.0, "max_new_tokens": 8, "skip_special_tokens": False, "stop": None}
        sample = prompt("slime custom", rewards=[0.5], rewrites=[1, 2])
        sample.group_index, sample.index = 3, 11
        one = await slime.custom_generate(args, sample, params)
        several = await slime.custom_generate(args, sample, params)
        evaluated = await slime.custom_generate(args, sample, params, evaluation=True)
        groups = await the_groups(service)
    assert (one.reward, one.status, one.rollout_id) == (0.5, Sample.Status.COMPLETED, 11)
    assert one.tokens == next(iter(groups[0].samples or ())).ids.tolist()
    assert [each.rollout_id for each in several] == [11, 11]
    assert isinstance(evaluated, Sample)
    assert [group.priority for group in groups] == [0, 0, 100]
    assert sample.status is Sample.Status.PENDING


async def test_an_evaluation_in_slimes_own_loop_needs_no_processor_of_images(tmp_path: Path) -> None:
    async with vision_service(tmp_path, [say("done")]) as (_, client, _engine):
        args = slime_args(str(client.url), hf_checkpoint=str(tmp_path / "no model"))
        sample = Sample(prompt="look", metadata={"task": looking("chat", [("look", [0])])})
        evaluated = await slime.custom_generate(args, sample, {}, evaluation=True)
        [group] = await client.groups()
        [ours] = (await client.group(group.id, samples=True)).samples or ()
    assert ours.images
    assert (evaluated.tokens, evaluated.reward) == (ours.ids.tolist(), ours.reward)
    assert evaluated.multimodal_train_inputs is None


async def test_custom_generate_fails_as_it_is_told(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(url)
        sample = prompt("slime custom ill", fails=range(9))
        with pytest.raises(HarnessError, match="the scribe fell ill"):
            await slime.custom_generate(args, sample, {})
        args.outrider |= {"on_failure": "abort", "rows": "main"}
        aborted = await slime.custom_generate(args, sample, {})
        with pytest.raises(HarnessError, match="the scribe fell ill"):
            await slime.custom_generate(args, sample, {}, evaluation=True)
        args.outrider["on_failure"] = "remove"
        removed = await slime.custom_generate(args, sample, {})
        args.eval_reward_key = "reward"
        evaluated = await slime.custom_generate(args, sample, {}, evaluation=True)
        graded = await slime.custom_generate(args, prompt("slime custom well"), {}, evaluation=True)
    assert evaluated.reward == {"reward": 0.0}
    assert graded.reward.keys() >= {"reward"}
    assert (aborted.status, aborted.tokens, aborted.reward) == (Sample.Status.ABORTED, [], None)
    assert (removed.status, removed.remove_sample, removed.reward) == (Sample.Status.FAILED, True, 0.0)


async def test_slimes_fully_asynchronous_loop_repeats_what_failed(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(url)
        args.outrider |= {"on_failure": "abort", "rows": "main"}
        source = DataSource(args, [prompt("slime repeated", rewards=[0, 1, 2], fails=[1], rewrites=[0, 2])])
        worker = FullyAsyncWorker(args, source, slime.custom_generate)
        await worker.roll_one_group()
        assert (len(source.buffer), worker.done) == (1, [])
        await worker.roll_one_group()
    assert worker.dropped == []
    [group] = worker.done
    assert [sample.reward for sample in group] == [0.0, 2.0]
    assert [sample.rollout_id for sample in group] == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_rm": True}, "--group-rm is set: the reward is that of the task's evaluator"),
        ({"apply_chat_template": True}, "--apply-chat-template is set"),
        ({"use_rollout_routing_replay": True}, "--use-rollout-routing-replay is set"),
        ({"polar_rollout_url": "http://x"}, "polar_rollout_url is a setting of Polar's bridge"),
        ({"polar_new": 1, "polar_fully_async": False}, "polar_new is a setting of Polar's bridge"),
        ({"rollout_top_p": 0.9, "outrider": {"logprobs": False}}, "slime replays the ids that top-p sampling kept"),
        ({"outrider": {"on_failure": "abort"}}, "slime cannot repeat a group with a session of several rows"),
        ({"partial_rollout": True}, "slime cannot hold a group with a session of several rows"),
        (
            {"custom_reward_post_process_path": None, "outrider": {"rows": "main", "on_failure": "remove"}},
            "slime would count a failed session as a rollout with reward 0",
        ),
    ],
)
async def test_what_slimes_own_loops_cannot_do_is_named(options: dict[str, Any], message: str) -> None:
    args = slime_args("http://127.0.0.1:9", **options)
    with pytest.raises(InvalidField) as caught:
        await slime.custom_generate(args, prompt("slime own loop"), {})
    assert message in caught.value.message


@pytest.mark.deep
async def test_pass_rates_are_of_whole_groups(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        tasks = {
            "both": [
                scribe_task("slime pass a", fails=[0]),
                scribe_task("slime pass b", rewards=[0, 1]),
                scribe_task("slime pass c", rewards=[0]),
            ],
            "well": [scribe_task("slime pass d")],
        }
        files = []
        for name, of_set in tasks.items():
            files.append(tmp_path / name)
            rows = [{"prompt": "say it", "metadata": {"task": task}} for task in of_set]
            files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
        sets = [EvalSet(file.name, file, n=2) for file in files]
        args = slime_args(url, eval_datasets=sets, n_samples_per_eval_prompt=2)
        source = DataSource(args, [])
        for counted in (True, False):
            args.log_passrate = counted
            Scribe.started.clear()
            output = await asyncio.to_thread(slime.generate_rollout, args, 3, source, True)
            logged = logged_evaluation(args, output.data)
            assert logged == pytest.approx(
                {"both": 0.25, "both-pass@2": 0.5, "well": 1.0, "well-pass@2": 1.0}
                if counted
                else {"both": 0.4, "well": 1.0}
            )
            assert output.metrics == {"eval/both/outrider_failed": 1, "eval/well/outrider_failed": 0}
        await asyncio.to_thread(slime.close, source)


@pytest.mark.parametrize(
    ("options", "of_set", "rows", "message"),
    [
        ({}, {"stop": ["\n"]}, 1, "the sampling parameter stop="),
        ({"rollout_stop_token_ids": [7]}, {}, 1, "the sampling parameter stop_token_ids="),
        ({"eval_min_new_tokens": 5}, {}, 1, "the sampling parameter min_new_tokens=5"),
        ({}, {"multimodal_keys": {"image": "image"}}, 1, "the evaluation set 'odd' has images"),
        ({"multimodal_keys": {"image": "image"}}, {}, 1, "the evaluation set 'odd' has images"),
        ({}, {}, 0, "the evaluation set 'odd' "),
    ],
)
async def test_an_evaluation_that_cannot_be_followed_is_named(
    tmp_path: Path, options: dict[str, Any], of_set: dict[str, Any], rows: int, message: str
) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text('{"prompt": "say a"}\n' * rows)
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(url, eval_datasets=[EvalSet("odd", file, **of_set)], **options)
        source = DataSource(args, [])
        with pytest.raises(InvalidField) as caught:
            await asyncio.to_thread(slime.generate_rollout, args, 3, source, True)
        await asyncio.to_thread(slime.close, source)
    assert message in caught.value.message


@pytest.mark.deep
async def test_a_filter_may_keep_what_it_cannot_spare(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(
            url, over_sampling_batch_size=3, dynamic_sampling_filter_path="trainers.slime_world.spares_few"
        )
        source = DataSource(args, [prompt(f"slime spared {number}") for number in range(9)])
        for rollout_id in range(2):
            output = await train(args, source, rollout_id, keep=True)
            assert len(output.samples) == 2
            assert (output.metrics or {})["rollout/dynamic_filter/drop_alike"] == 1
            assert not any("seen" in sample.metadata for group in output.samples for sample in group)
        await asyncio.to_thread(slime.close, source)


async def test_a_graded_sample_without_a_token_to_train_on_is_removed(tmp_path: Path) -> None:
    """The prompt of the sample is longer than `max_row_tokens`, which must not end the training of all other
    samples."""
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(url, n_samples_per_prompt=1, advantage_estimator="ppo")
        long, short = prompt("slime lengthy", rewards=[0.5]), prompt("slime brief")
        long.metadata["task"]["instruction"] = "say it " * 200
        args.outrider["max_row_tokens"] = 400
        side = TrainingSide(args, await train(args, DataSource(args, [long, short])))
        with pytest.raises(EngineError, match="no token to train on"):
            await train(args, DataSource(args, [long]))
    [removed, kept] = side.samples
    assert (removed.remove_sample, removed.loss_mask, removed.reward) == (True, [0], 0.5)
    assert "no token to train on" in removed.metadata["outrider"]["error"]
    assert (kept.remove_sample, kept.reward) == (False, 1.0)


async def test_a_wrong_address_or_token_is_told_at_the_start(tmp_path: Path) -> None:
    args = slime_args("http://127.0.0.1:9")
    source = DataSource(args, [prompt("slime nobody")])
    with pytest.raises(ServiceError, match="cannot reach the service"):
        await asyncio.to_thread(slime._Bridge.of, args, source, first_patience=0.0)
    assert source not in slime._Bridge.open_bridges
    async with running_service(tmp_path=tmp_path, token="right") as (_, url):
        args = slime_args(url)
        args.outrider["token"] = "wrong"
        with pytest.raises(Unauthorized, match="not a token of this service") as caught:
            await train(args, DataSource(args, [prompt("slime nobody")]))
    assert "OUTRIDER_TOKEN" in (caught.value.hint or "")


async def test_an_evaluation_has_its_own_seeds_and_leaves_failures_out(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url):
        rows = [
            {"prompt": "say a", "metadata": {"task": scribe_task("slime eval a", rewards=[0, 1], rewrites=[0])}},
            {"prompt": "say b", "metadata": {"task": scribe_task("slime eval b", fails=[1])}},
        ]
        file = tmp_path / "eval.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        args = slime_args(url, eval_datasets=[EvalSet("small", file, n=2)])
        source = DataSource(args, [])
        output = await asyncio.to_thread(slime.generate_rollout, args, 3, source, True)
        await asyncio.to_thread(slime.close, source)
        groups = await the_groups(service)
        async with AsyncClient(url) as client:
            turns = [await client.turns(session.id) for group in groups for session in group.sessions]
    assert isinstance(output, RolloutFnEvalOutput)
    found = output.data["small"]
    assert sorted(found["rewards"]) == [0.0, 1.0, 1.0]
    assert (found["truncated"], len(found["samples"])) == ([False] * 3, 3)
    assert {sample.metadata["evaluated"] for sample in found["samples"]} == {"small"}
    assert output.metrics == {"eval/small/outrider_failed": 1}
    assert {group.priority for group in groups} == {100}
    assert {turn.sampling["temperature"] for of_session in turns for turn in of_session} == {0.6}
    assert all(turn.sampling["seed"] is not None for of_session in turns for turn in of_session)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"custom_reward_post_process_path": None}, "slime would normalise the rewards of the batch as one group"),
        ({"rollout_top_p": 0.9}, "slime replays the ids that top-p sampling kept"),
        ({"use_rollout_routing_replay": True}, "--use-rollout-routing-replay is set: the routed experts"),
        ({"apply_chat_template": True}, "--apply-chat-template is set"),
        ({"rollout_stop": ["\n"]}, "the sampling parameter stop="),
        ({"outrider": {"min_usable": 1}}, "min_usable is 1, and a group has 2 sessions"),
        ({"outrider": {"rows": "some"}}, "outrider in --custom-config-path.rows: must be 'all' or 'main'"),
    ],
)
async def test_options_that_cannot_be_followed_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(url, **options)
        args.outrider.setdefault("url", url)
        with pytest.raises(InvalidField) as caught:
            await train(args, DataSource(args, [prompt("slime refused")]))
    assert message in caught.value.message


def test_the_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_SLIME", '{"complete": "most"}')
    with pytest.raises(InvalidField, match=r"OUTRIDER_SLIME.complete: must be 'all' or 'any'"):
        asyncio.run(slime.custom_generate(slime_args("http://127.0.0.1:9"), prompt("slime nowhere"), {}))


@pytest.mark.parametrize("key", [None, "number"])
async def test_a_metric_that_the_verdicts_lack_ends_the_rollout(tmp_path: Path, key: str | None) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        args = slime_args(url, reward_key=key)
        args.outrider["metrics"] = ["speed"]
        with pytest.raises(EvaluatorError, match="has no metric 'speed'"):
            await train(args, DataSource(args, [prompt("slime metric")]))
        evaluated = slime.custom_generate(args, prompt("slime metric of an evaluation"), {}, evaluation=True)
        if key is None:  # an evaluation set may have another evaluator
            assert (await evaluated).reward == 1.0
        else:
            with pytest.raises(EvaluatorError, match="has no metric 'speed'"):
                await evaluated
        args.outrider["metrics"] = ["number"]
        one = await slime.custom_generate(args, prompt(f"slime metric that is there {key}"), {})
    assert one.reward == ({"reward": 1.0, "number": 0.0} if key else 1.0)
