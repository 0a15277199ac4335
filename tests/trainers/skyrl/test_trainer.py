"""The generator's output in SkyRL, 0.4.0 or 0.3.0: validation, joining, merging of steps, training batch, advantages,
filters, and the weights of rollouts in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_policy_loss
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.base import GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.generators.utils import concatenate_generator_outputs, merge_stepwise_output, prepare_generator_input
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import validate_generator_output

from outrider.errors import InvalidField
from outrider.trainers.skyrl import LossPerRollout, OutriderGenerator
from support.scribe import scribe_task
from support.service import running_service, say
from trainers.skyrl_world import VLLM_PARAMS

pytestmark = pytest.mark.trainers

PAD = 0


class Generator(OutriderGenerator, GeneratorInterface):  # type: ignore[misc]
    """The bridge has all that SkyRL's interface requires."""


def config(**generator: Any) -> Any:
    overrides = {
        "generator.n_samples_per_prompt": 2,
        "trainer.policy_mini_batch_size": 2,
        "trainer.train_batch_size": 2,
    }
    overrides |= {f"generator.{name}": value for name, value in generator.items()}
    return SkyRLTrainConfig.from_cli_overrides([f"{name}={str(value).lower()}" for name, value in overrides.items()])


class Trainer(LossPerRollout, RayPPOTrainer):  # type: ignore[misc]
    pass


def trainer_for(cfg: Any, kind: type = Trainer, ranks: int = 1) -> Any:
    """Return SkyRL's trainer without its models and engines."""
    trainer: Any = object.__new__(kind)
    trainer.cfg = cfg
    trainer.tokenizer = SimpleNamespace(pad_token_id=PAD)
    trainer.all_metrics = {}
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: ranks)
    return trainer


def rows_of(tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows in the form of SkyRL's dataset."""
    return [
        {
            "prompt": [{"role": "user", "content": f"say {number}"}],
            "env_class": None,
            "env_extras": {"task": task, "data_source": "test"},
            "uid": str(number),
        }
        for number, task in enumerate(tasks)
    ]


async def generated(url: str, cfg: Any, tasks: Sequence[dict[str, Any]], phase: Any = "train", **settings: Any) -> Any:
    generator = Generator(cfg.generator, {"url": url, **settings})
    generator.weigh_rollouts()
    batch, uids = prepare_generator_input(rows_of(tasks), 2, dict(VLLM_PARAMS), "outrider", phase, 1)
    output = await generator.generate(batch)
    validate_generator_output(len(uids), output, step_wise=cfg.generator.step_wise_trajectories)
    if cfg.generator.step_wise_trajectories:
        uids = [trajectory_id.instance_id for trajectory_id in output["trajectory_ids"]]
    return output, uids


def advantages_of(
    cfg: Any, output: Any, uids: list[str], kind: type = RayPPOTrainer, ranks: int = 1
) -> tuple[Any, torch.Tensor]:
    trainer = trainer_for(cfg, kind, ranks)
    output, uids = trainer.postprocess_generator_output(output, uids)
    batch = trainer.convert_to_training_input(output, uids)
    batch["values"] = None
    return batch, trainer.compute_advantages_and_returns(batch)["advantages"]


async def test_a_training_batch_and_its_advantages(tmp_path: Path) -> None:
    cfg = config()
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two")]) as (service, url):
        tasks = [scribe_task("skyrl real a", rewards=[0, 1]), scribe_task("skyrl real b", rewards=[0.5])]
        output, uids = await generated(url, cfg, tasks)
        page = await service.results(after=0, wait=0, limit=100, samples=True)
    assert output["rollout_metrics"]["generate/avg_num_tokens"] > 0
    by_session = {sample.session_id: sample for group in page.groups for sample in group.samples or ()}
    samples = [by_session[about["session_id"]] for about in output["env_metrics"]]
    batch, advantages = advantages_of(cfg, output, uids)
    for row, sample in enumerate(samples):
        length = len(sample.ids)
        assert batch["sequences"][row, -length:].tolist() == sample.ids.tolist()
        trained = batch["loss_mask"][row].bool()
        masked = [at for at, mask in enumerate(sample.loss_mask) if mask]
        torch.testing.assert_close(
            batch["rollout_logprobs"][row][trained],
            torch.tensor([sample.logprobs[at] for at in masked], dtype=torch.float32),
        )
        scaled = {0.0: -(2**-0.5), 1.0: 2**-0.5, 0.5: 0.0}[sample.reward or 0.0]
        expected = torch.full((int(trained.sum()),), scaled)
        torch.testing.assert_close(advantages[row][trained], expected, atol=1e-4, rtol=0)


async def test_steps_of_a_trajectory_share_its_advantage(tmp_path: Path) -> None:
    cfg = config(step_wise_trajectories=True)
    cfg.trainer.policy_mini_batch_size = cfg.trainer.train_batch_size = 1
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two"), say("three")]) as (_, url):
        output, uids = await generated(url, cfg, [scribe_task("skyrl real steps", rewards=[0, 1], rewrites=[0, 1])])
    assert len(output["response_ids"]) == 4
    merged = merge_stepwise_output({name: value for name, value in output.items() if value is not None})
    assert len(merged["response_ids"]) == 4  # branches of a rewritten history are not prefixes of each other
    batch, advantages = advantages_of(cfg, output, uids)
    trained = batch["loss_mask"].bool()
    signs = [set(advantages[row][trained[row]].sign().tolist()) for row in range(4)]
    rewards = [reward[-1] for reward in output["rewards"]]
    assert signs == [{1.0} if reward else {-1.0} for reward in rewards]


async def test_rewards_of_turns_reach_the_training_batch(tmp_path: Path) -> None:
    cfg = config()
    cfg.trainer.policy_mini_batch_size = cfg.trainer.train_batch_size = 1
    task = scribe_task("skyrl real turns", rewards=[0, 1], turns={"0": 0.5})
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two")]) as (_, url):
        output, uids = await generated(url, cfg, [task], rewards="token")
    batch, advantages = advantages_of(cfg, output, uids)
    given = [[reward for reward in row.tolist() if reward] for row in batch["rewards"]]
    assert sorted(given) == [[0.5], [0.5, 1.0]]
    assert not batch["rewards"][batch["loss_mask"] == 0].any()
    trained = batch["loss_mask"].bool()
    for row, rewards in enumerate(given):
        assert (advantages[row][trained[row]] > 0).all() == (sum(rewards) > 1.0)


async def test_an_instance_with_a_failure_does_not_train(tmp_path: Path) -> None:
    cfg = config()
    async with running_service(tmp_path=tmp_path) as (_, url):
        tasks = [scribe_task("skyrl real ill", fails=[1]), scribe_task("skyrl real well", rewards=[0, 1])]
        output, uids = await generated(url, cfg, tasks)
    batch, advantages = advantages_of(cfg, output, uids)
    assert batch["loss_mask"].sum(-1).bool().tolist() == [False, False, True, True]
    assert advantages[:2].abs().sum() == 0
    assert advantages[2:].abs().sum() > 0


async def test_parts_of_a_batch_are_joined_as_the_asynchronous_trainer_does(tmp_path: Path) -> None:
    cfg = config()
    async with running_service(tmp_path=tmp_path) as (_, url):
        first, _ = await generated(url, cfg, [scribe_task("skyrl real part", rewards=[0, 1])])
        tasks = [scribe_task("skyrl real failing", fails=[0]), scribe_task("skyrl real part b", rewards=[1, 0])]
        second, _ = await generated(url, cfg, tasks)
        alone, _ = await generated(url, cfg, [scribe_task("skyrl real alone", fails=range(2))])
    joined = concatenate_generator_outputs([first, second, alone])
    assert len(joined["response_ids"]) == 8
    metrics = joined["rollout_metrics"]
    assert metrics["outrider/failed_trajectories"] == 3
    assert metrics["outrider/masked_instances"] == 2
    assert metrics["outrider/version_min"] == 0
    assert metrics["outrider/turns_mean"] == 2.0
    assert metrics["outrider/version_max"] == 0


async def test_dynamic_sampling_keeps_the_groups_that_differ(tmp_path: Path) -> None:
    cfg = config()
    cfg.trainer.algorithm.dynamic_sampling.type = "filter"
    trainer = trainer_for(cfg)
    trainer.dynamic_sampling_state = None
    trainer.cfg.trainer.train_batch_size = 1
    async with running_service(tmp_path=tmp_path) as (_, url):
        tasks = [scribe_task("skyrl real flat"), scribe_task("skyrl real mixed", rewards=[0, 1])]
        output, uids = await generated(url, cfg, tasks)
    kept, kept_uids, keep_sampling = trainer.handle_dynamic_sampling(output, uids)
    assert (kept_uids, keep_sampling) == (["1", "1"], False)
    assert sorted(kept["rewards"]) == [0.0, 1.0]
    validate_generator_output(2, kept)


async def test_the_output_has_the_columns_of_this_skyrl(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        output, _ = await generated(
            url, config(), [scribe_task("skyrl real columns", rewards=[0, 1], seconds=[0.2] * 2)]
        )
    assert output.keys() == set(GeneratorOutput.__annotations__)
    if "trajectory_time_splits" in output:
        joined = concatenate_generator_outputs([output, output])
        assert len(joined["trajectory_time_splits"]["llm"]) == 4
        assert joined["rollout_metrics"]["generate/trajectory_time_env_mean"] >= 0.2


def rollouts_of_many_rows() -> tuple[dict[str, Any], list[str]]:
    """Return the output for two prompts with two rollouts each, and the uids of its rows. The rewards are 1 and 0, and
    0 and 1; the first rollout has seven rows. The lists are the numbers of trained tokens of the rows. Each row has a
    token of context before its last token."""
    rows = [("p", 0, 1.0, [3, 1, 4, 1, 5, 2, 6]), ("p", 1, 0.0, [2]), ("q", 0, 0.0, [3]), ("q", 1, 1.0, [1, 4])]
    output: dict[str, Any] = {name: [] for name in ("prompt_token_ids", "response_ids", "rewards", "loss_masks")}
    output |= {name: [] for name in ("stop_reasons", "rollout_logprobs", "trajectory_ids", "is_last_step")}
    for uid, repetition, reward, lengths in rows:
        for number, length in enumerate(lengths):
            mask = [1] * (length - 1) + [0, 1]
            output["prompt_token_ids"].append([1, 2])
            output["response_ids"].append([3] * len(mask))
            output["rewards"].append(reward)
            output["loss_masks"].append(mask)
            output["stop_reasons"].append("stop")
            output["rollout_logprobs"].append([-0.5 * trained for trained in mask])
            output["trajectory_ids"].append(TrajectoryID(instance_id=uid, repetition_id=repetition))
            output["is_last_step"].append(number == len(lengths) - 1)
    output |= {"rollout_metrics": None, "rollout_expert_indices": None}
    return output, [each.instance_id for each in output["trajectory_ids"]]


def pulls(cfg: Any, kind: type, ranks: int = 1) -> list[list[float]]:
    """Return d loss / d log p of each row's trained tokens, by SkyRL's own advantages, normalisation and PPO loss,
    summed over the mini-batches."""
    output, uids = rollouts_of_many_rows()
    validate_generator_output(4, output, step_wise=True)
    batch, _ = advantages_of(cfg, output, uids, kind, ranks)
    boundaries = batch.metadata["policy_mini_batch_boundaries"]
    batch = trainer_for(cfg, kind)._normalize_advantages(batch, boundaries)
    old = batch["rollout_logprobs"]
    new = old.clone().requires_grad_()
    for start, end in boundaries:
        part = slice(start, end)
        loss, _ = ppo_policy_loss(
            new[part], old[part], batch["advantages"][part], cfg.trainer.algorithm, batch["loss_mask"][part]
        )
        loss.backward()
    assert new.grad is not None
    assert not new.grad[batch["loss_mask"] == 0].any()
    assert len(new.grad) % ranks == 0
    assert not new.grad[len(uids) :].any()
    return [new.grad[row][batch["loss_mask"][row].bool()].tolist() for row in range(len(uids))]


@pytest.mark.parametrize(("mini_batch", "rollouts", "ranks"), [(2, 4, 1), (1, 2, 1), (2, 4, 8)])
def test_each_rollout_has_the_same_weight_in_the_loss(mini_batch: int, rollouts: int, ranks: int) -> None:
    """The expected numbers are computed by hand: rewards of 1 and 0 give advantages of 2**-0.5 and -2**-0.5, and the
    weight of a token is 1 / (R T). For several ranks SkyRL adds rows that do not train."""
    cfg = config(step_wise_trajectories=True)
    cfg.trainer.policy_mini_batch_size = mini_batch
    given = pulls(cfg, Trainer, ranks)
    high = 2**-0.5 / rollouts
    first = [[-high / 22] * length for length in (3, 1, 4, 1, 5, 2, 6)]
    expected = [*first, [high / 2] * 2, [high / 3] * 3, [-high / 5], [-high / 5] * 4]
    assert [len(row) for row in given] == [len(row) for row in expected]
    for row, by_hand in zip(given, expected, strict=True):
        assert row == pytest.approx(by_hand, rel=1e-4)
    weights = [sum(map(sum, given[:7])), sum(given[7]), sum(given[8]), sum(map(sum, given[9:]))]
    assert weights == pytest.approx([-high, high, high, -high], rel=1e-4)


@pytest.mark.parametrize(
    ("reduction", "times"), [("token_mean", 11), ("sequence_mean", 7), ("seq_mean_token_sum_norm", 11)]
)
def test_skyrls_own_reductions_weigh_rows_or_tokens(reduction: str, times: int) -> None:
    """SkyRL's own reductions weigh rows or tokens and not rollouts, so the generator requires a trainer with
    `LossPerRollout`."""
    cfg = config(step_wise_trajectories=True)
    cfg.trainer.algorithm.loss_reduction = reduction
    cfg.trainer.algorithm.max_seq_len = 64
    given = pulls(cfg, RayPPOTrainer)
    assert sum(map(sum, given[:7])) == pytest.approx(-times * sum(given[7]), rel=1e-4)


def test_a_configuration_that_weighs_rollouts_again_is_refused() -> None:
    class Bare:
        def __init__(self, cfg: Any, generator: Any) -> None:
            self.cfg, self.generator = cfg, generator

    class Weighing(LossPerRollout, Bare):
        pass

    cfg = config(step_wise_trajectories=True)
    Weighing(cfg, Generator(cfg.generator))
    cfg.trainer.algorithm.advantage_batch_normalize = True
    with pytest.raises(InvalidField, match="normalise the advantages"):
        Weighing(cfg, None)
    cfg.trainer.algorithm.loss_reduction = "sequence_mean"
    with pytest.raises(InvalidField, match="weigh them once more"):
        Weighing(cfg, None)
