"""The SkyRL bridge against a real service, without SkyRL: order, columns, placeholders, rows of a trajectory.

The tests in `tests/trainers/skyrl` pass such outputs to SkyRL's own code.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outrider.client.client import AsyncClient
from outrider.errors import HarnessError, InvalidField, ServiceError
from outrider.schemas import GroupView
from outrider.service.service import Service
from outrider.trainers.skyrl import FAILED_IN_A_ROW, OutriderGenerator
from support.scribe import scribe_task
from support.service import running_service, say

from .skyrl_world import check_output, generator_cfg, generator_input


def metrics_of_0_3(
    responses: Any, rewards: Any, *, loss_masks: Any, trajectory_completion_times: Any
) -> dict[str, Any]:
    return {"usual": len(responses), "times": trajectory_completion_times}


def metrics_of_0_4(
    responses: Any, rewards: Any, *, loss_masks: Any, trajectory_completion_times: Any, trajectory_time_splits: Any
) -> dict[str, Any]:
    return {"usual": len(responses), "times": trajectory_completion_times, "splits": trajectory_time_splits}


def stand_in(monkeypatch: pytest.MonkeyPatch, metrics_of: Callable[..., dict[str, Any]]) -> None:
    """Install a stand-in for the one function of SkyRL that the bridge calls."""
    utils = ModuleType("skyrl.train.generators.utils")
    setattr(utils, "get_rollout_metrics", metrics_of)  # noqa: B010
    for name in ("skyrl", "skyrl.train", "skyrl.train.generators"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)


@pytest.fixture(autouse=True)
def _usual_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, metrics_of_0_4)


def generator_for(url: str, settings: dict[str, Any] | None = None, **options: bool) -> OutriderGenerator:
    generator = OutriderGenerator(generator_cfg(**options), {"url": url} | (settings or {}))
    generator.weigh_rollouts()
    return generator


async def by_uid(service: Service) -> dict[str, GroupView]:
    page = await service.results(after=0, wait=0, limit=100, samples=True)
    return {group.labels["skyrl.uid"]: group for group in page.groups}


async def test_rows_come_in_the_order_of_the_input_token_for_token(tmp_path: Path) -> None:
    tasks = [scribe_task("skyrl a", rewards=[0.0, 1.0]), scribe_task("skyrl b", rewards=[0.5])]
    batch = generator_input(tasks, 2, temperature=0.5)
    # Rows of an instance need not be adjacent.
    order = [0, 2, 1, 3]
    batch |= {name: [column[at] for at in order] for name, column in batch.items() if isinstance(column, list)}
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two")]) as (service, url):
        output = await generator_for(url, {"metrics": ["number"]}).generate(batch)
        groups = await by_uid(service)
    check_output(4, output)
    assert output["trajectory_ids"] == batch["trajectory_ids"]
    for at, trajectory_id in enumerate(batch["trajectory_ids"]):
        group = groups[trajectory_id.instance_id]
        sample = list(group.samples or ())[trajectory_id.repetition_id]
        assert output["prompt_token_ids"][at] + output["response_ids"][at] == sample.ids.tolist()
        assert len(output["prompt_token_ids"][at]) == sample.prompt_length
        assert output["loss_masks"][at] == sample.loss_mask[sample.prompt_length :].tolist()
        assert output["rollout_logprobs"][at] == sample.logprobs[sample.prompt_length :].tolist()
        assert output["rewards"][at] == sample.reward
        assert output["env_metrics"][at]["session_id"] == sample.session_id
        assert output["env_metrics"][at]["number"] == sample.metrics["number"]
    assert output["stop_reasons"] == ["stop"] * 4
    assert {group.n for group in groups.values()} == {2}
    assert groups["row0"].labels == {"skyrl.uid": "row0", "skyrl.global_step": "7"}
    metrics = output["rollout_metrics"]
    assert (metrics["usual"], metrics["outrider/turns_mean"], metrics["outrider/failed_trajectories"]) == (4, 2.0, 0)
    assert (metrics["outrider/version_min"], metrics["outrider/version_max"]) == (0, 0)


async def test_without_logprobs_there_is_no_such_column(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        output = await generator_for(url).generate(generator_input([scribe_task("skyrl plain")], 1, logprobs=None))
    assert output["rollout_logprobs"] is None
    check_output(1, output)


async def test_step_wise_rows_are_the_branches_of_a_trajectory(tmp_path: Path) -> None:
    batch = generator_input([scribe_task("skyrl steps", rewards=[0.5], rewrites=[0, 1])], 2)
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two"), say("three")]) as (service, url):
        output = await generator_for(url, step_wise_trajectories=True).generate(batch)
        [group] = (await by_uid(service)).values()
    check_output(2, output, step_wise=True)
    assert output["is_last_step"] == [False, True, False, True]
    assert output["rewards"] == [0.5] * 4
    for sample_index in range(2):
        rows = [sample for sample in group.samples if sample.sample_index == sample_index]
        given = [
            output["prompt_token_ids"][at] + output["response_ids"][at]
            for at in (2 * sample_index, 2 * sample_index + 1)
        ]
        assert given == [rows[1].ids.tolist(), rows[0].ids.tolist()]  # the main conversation is last
    trained = [sum(mask) for mask in output["loss_masks"]]
    assert sum(trained) == sum(sum(sample.loss_mask) for sample in group.samples or ())


async def test_rewards_of_turns_are_per_token_where_the_setting_says_so(tmp_path: Path) -> None:
    task = scribe_task("skyrl turns", rewards=[0.5], rewrites=[0], turns={"0": 2.0, "2": -1.0}, rows={"1": 7.0})
    tasks = [task, scribe_task("skyrl turns ill", fails=[0])]
    settings = {"rewards": "token"}
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two"), say("three")]) as (_, url):
        output = await generator_for(url, settings, step_wise_trajectories=True).generate(generator_input(tasks, 1))
    other, main, ill = output["rewards"]
    for rewards, mask in zip(output["rewards"], output["loss_masks"], strict=True):
        assert len(rewards) == len(mask)
        assert all(trained or not reward for reward, trained in zip(rewards, mask, strict=True))
    assert [reward for reward in other if reward] == [7.0 - 1.0]  # row 1 trains turn 2 only
    assert [reward for reward in main if reward] == [2.0, 0.5]  # row 0 trains turns 0 and 1
    assert ill == [0.0]


async def test_min_usable_is_refused_because_it_would_mask_every_instance(tmp_path: Path) -> None:
    tasks = [scribe_task("skyrl usable", rewards=[0.0, 1.0])]
    async with running_service(tmp_path=tmp_path) as (_, url):
        generator = generator_for(url, {"min_usable": 1})
        with pytest.raises(InvalidField, match="min_usable is 1, and a group has 2 sessions"):
            await generator.generate(generator_input(tasks, 2))
        check_output(2, await generator.generate(generator_input(tasks, 2, phase="eval")))
        check_output(1, await generator.generate(generator_input(tasks, 1)))


async def test_rows_are_left_out_only_where_the_settings_say_so_and_counted(tmp_path: Path) -> None:
    batch = generator_input([scribe_task("skyrl main", rewrites=range(9))], 1)
    async with running_service(tmp_path=tmp_path) as (service, url):
        with pytest.raises(InvalidField, match="more than one row that trains") as raised:
            await generator_for(url).generate(batch)
        output = await generator_for(url, {"rows": "main"}).generate(batch)
        evaluated = await generator_for(url).generate(
            generator_input([scribe_task("skyrl main", rewrites=range(9))], 1, phase="eval")
        )
        [_, group, _] = (await service.results(after=0, wait=0, limit=9, samples=True)).groups
    assert "step_wise_trajectories=true" in (raised.value.hint or "")
    check_output(1, output)
    check_output(1, evaluated)
    [main, other] = group.samples or ()
    assert sum(output["loss_masks"][0]) == sum(main.loss_mask)
    assert output["rollout_metrics"]["outrider/rows_left_out"] == 1
    assert output["rollout_metrics"]["outrider/tokens_left_out"] == sum(other.loss_mask) > 0


async def test_step_wise_rows_need_a_trainer_that_weighs_rollouts() -> None:
    """Without such a trainer, a rollout with seven rows would have seven times the weight. The error comes before
    anything is submitted."""
    batch = generator_input([scribe_task("skyrl unweighed")], 1)
    generator = OutriderGenerator(generator_cfg(step_wise_trajectories=True), {"url": "http://127.0.0.1:9"})
    with pytest.raises(InvalidField, match="the weight of a rollout") as raised:
        await generator.generate(batch)
    assert "LossPerRollout" in (raised.value.hint or "")


@pytest.mark.parametrize("name", ["enable_return_sample_support_set", "enable_return_routed_experts"])
def test_columns_that_the_service_has_not_are_refused(name: str) -> None:
    cfg = generator_cfg()
    cfg.inference_engine = SimpleNamespace(**{name: True})
    with pytest.raises(InvalidField, match="no such column"):
        OutriderGenerator(cfg)


async def test_time_with_and_without_a_model_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = generator_input([scribe_task("skyrl times", rewrites=range(9), seconds=[0.3] * 9)], 2)
    async with running_service(tmp_path=tmp_path) as (service, url):
        output = await generator_for(url, step_wise_trajectories=True).generate(batch)
        [group] = (await by_uid(service)).values()
        stand_in(monkeypatch, metrics_of_0_3)
        older = await generator_for(url, step_wise_trajectories=True).generate(batch)
    results = [session.result for session in group.sessions]
    by_session = [(result.model_seconds, result.seconds.run) for result in results if result is not None]
    assert all(0 < calls < seconds and seconds - calls > 0.25 for calls, seconds in by_session)
    split = output["trajectory_time_splits"]
    assert split["llm"] == [calls for calls, _ in by_session for _ in range(2)]  # one for each of the two rows
    assert [a + b for a, b in zip(split["llm"], split["env"], strict=True)] == pytest.approx(
        output["trajectory_generation_times"]
    )
    metrics = output["rollout_metrics"]
    assert (len(metrics["times"]), len(metrics["splits"]["llm"])) == (2, 2)  # once for each trajectory
    assert output["rollout_sample_support"] is None
    assert older.keys() == output.keys() - {"trajectory_time_splits", "rollout_sample_support"}


@pytest.mark.parametrize("step_wise", [False, True])
async def test_one_failure_makes_its_instance_placeholders(tmp_path: Path, step_wise: bool) -> None:
    tasks = [scribe_task(f"skyrl ill {step_wise}", fails=[1]), scribe_task(f"skyrl well {step_wise}")]
    batch = generator_input(tasks, 3)
    async with running_service(tmp_path=tmp_path) as (_, url):
        output = await generator_for(url, step_wise_trajectories=step_wise).generate(batch)
    check_output(6, output, step_wise=step_wise)
    for column, value in {
        "prompt_token_ids": [0],
        "response_ids": [0],
        "loss_masks": [0],
        "rollout_logprobs": [0.0],
    }.items():
        assert output[column][:3] == [value] * 3
    assert output["rewards"] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert output["stop_reasons"] == ["error"] * 3 + ["stop"] * 3
    assert all(sum(mask) for mask in output["loss_masks"][3:])
    assert output["rollout_metrics"]["outrider/failed_trajectories"] == 1
    assert output["rollout_metrics"]["outrider/masked_instances"] == 1
    assert sum("the scribe fell ill" in about.get("error", "") for about in output["env_metrics"]) == 1


async def test_in_an_evaluation_only_the_failed_trajectory_is_one(tmp_path: Path) -> None:
    batch = generator_input([scribe_task("skyrl evaluated", fails=[1])], 3, phase="eval")
    async with running_service(tmp_path=tmp_path) as (service, url):
        output = await generator_for(url).generate(batch)
        [group] = (await by_uid(service)).values()
    assert sorted(output["rewards"]) == [0.0, 1.0, 1.0]
    assert sorted(output["stop_reasons"]) == ["error", "stop", "stop"]
    assert output["rollout_metrics"]["outrider/masked_instances"] == 0
    assert group.priority == 100


async def test_the_service_is_told_skyrls_steps(tmp_path: Path) -> None:
    batch = generator_input([scribe_task("skyrl versions")], 1)
    async with running_service(tmp_path=tmp_path) as (_, url):
        generator = generator_for(url, {"versions": "step"})
        first = await generator.generate(batch)
        batch["batch_metadata"].global_step = 8
        second = await generator.generate(batch)
        by_engine = await generator_for(url).generate(batch)
    versions = [output["rollout_metrics"]["outrider/version_max"] for output in (first, second, by_engine)]
    assert versions == [6, 7, 7]


async def test_no_batch_overtakes_the_version_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL's asynchronous trainer requests many instances at once."""
    resume, failures = AsyncClient.resume_policy, [ServiceError("out of reach")]

    async def slow(client: AsyncClient, *versions: int) -> Any:
        await asyncio.sleep(0.3)
        if failures:
            raise failures.pop()
        return await resume(client, *versions)

    monkeypatch.setattr(AsyncClient, "resume_policy", slow)
    batches = [generator_input([scribe_task(f"skyrl at once {number}")], 1) for number in range(2)]
    async with running_service(tmp_path=tmp_path) as (_, url):
        generator = generator_for(url, {"versions": "step"})
        with pytest.raises(ServiceError):
            await generator.generate(batches[0])
        outputs = await asyncio.gather(*map(generator.generate, batches))
    assert [output["rollout_metrics"]["outrider/version_min"] for output in outputs] == [6, 6]


async def test_when_all_of_a_batch_fail_the_first_error_is_raised(tmp_path: Path) -> None:
    tasks = [scribe_task("skyrl all ill", fails=range(9)), scribe_task("skyrl all worse", fails=range(9))]
    async with running_service(tmp_path=tmp_path) as (_, url):
        with pytest.raises(HarnessError, match="the scribe fell ill"):
            await generator_for(url).generate(generator_input(tasks, 2))
        with pytest.raises(HarnessError, match="the scribe fell ill"):
            await generator_for(url).generate(generator_input(tasks[:1], 2, phase="eval"))


async def test_one_group_that_fails_does_not_end_the_asynchronous_trainer(tmp_path: Path) -> None:
    """The asynchronous trainer requests one group at a time, and any error ends its process. An error is raised only
    after FAILED_IN_A_ROW failures in a row."""
    ill = generator_input([scribe_task("skyrl alone ill", fails=range(99))], 2)
    well = generator_input([scribe_task("skyrl alone well")], 2)
    async with running_service(tmp_path=tmp_path) as (_, url):
        generator = generator_for(url)
        for batch in (ill, well, *[ill] * (FAILED_IN_A_ROW - 1)):
            output = await generator.generate(batch)
            check_output(2, output)
            assert output["stop_reasons"] == (["stop"] * 2 if batch is well else ["error"] * 2)
            assert any(map(sum, output["loss_masks"])) is (batch is well)
            assert ("outrider/version_min" in output["rollout_metrics"]) is (batch is well)
        with pytest.raises(HarnessError, match="the scribe fell ill"):
            await generator.generate(ill)


async def test_what_tokens_ended_is_a_length_and_skyrls_options_apply(tmp_path: Path) -> None:
    batch = generator_input([scribe_task("skyrl long") | {"limits": {"turns": 1}}], 1)
    async with running_service(tmp_path=tmp_path) as (_, url):
        by_turns = await generator_for(url).generate(batch)
        cap = len(by_turns["prompt_token_ids"][0]) + 1
        by_length = await generator_for(url, {"max_row_tokens": cap}).generate(batch)
        masked = await generator_for(url, apply_overlong_filtering=True).generate(batch)
        zero = await generator_for(url, zero_reward_on_non_stop=True).generate(batch)
    assert (by_turns["stop_reasons"], by_length["stop_reasons"]) == (["max_turns"], ["length"])
    assert len(by_length["response_ids"][0]) == 1
    assert (sum(by_turns["loss_masks"][0]) > 1, sum(masked["loss_masks"][0])) == (True, 0)
    assert (by_turns["rewards"], zero["rewards"]) == ([1.0], [0.0])


async def test_an_input_that_cannot_be_rolled_out_is_refused(tmp_path: Path) -> None:
    generator = generator_for("http://127.0.0.1:9")
    with pytest.raises(InvalidField, match="no trajectory_ids"):
        await generator.generate(generator_input([], 1))
    with pytest.raises(InvalidField, match="column 'task' is a int"):
        await generator.generate(generator_input([scribe_task("skyrl good"), 5], 1))  # type: ignore[list-item]


async def test_a_task_that_the_service_refuses_stops_the_others(tmp_path: Path) -> None:
    tasks = [scribe_task("skyrl slow", seconds=[60]), scribe_task("skyrl odd") | {"colour": "red"}]
    async with running_service(tmp_path=tmp_path) as (service, url):
        with pytest.raises(InvalidField, match=r"field: task\.colour"):
            await generator_for(url).generate(generator_input(tasks, 1))
        groups = await service.results(after=0, wait=20, limit=10, samples=False)
    assert [group.cancelled for group in groups.groups] in ([], [True])
