"""The weight of each token in verl's loss, by verl's own code: advantages, padding, mini-batches, micro-batches and
policy loss. The example is computed by hand: rollout A has 7 rows and reward 1, rollout B has 1 row and reward 0."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_to_nested

from outrider.errors import InvalidField
from outrider.trainers.verl_advantages import AGGREGATION, ESTIMATORS, SCALABLE_LOSSES, check_weights
from outrider.trainers.verl_rows import VerlSettings

pytestmark = pytest.mark.trainers

# Tokens of context (0) are between the trained tokens (1) of a row. A has 22 trained tokens, B has 2.
MASKS = {
    "u_0_0": [1, 1, 0, 1],
    "u_0_1": [1],
    "u_0_2": [1, 0, 0, 1, 1, 1],
    "u_0_3": [0, 1],
    "u_0_4": [1, 1, 1, 1, 1],
    "u_0_5": [1, 0, 1],
    "u_0_6": [1, 1, 1, 1, 1, 1],
    "u_1_0": [1, 0, 1],
}
KEYS = list(MASKS)
REWARDS = dict.fromkeys(KEYS[:7], 1.0) | {"u_1_0": 0.0}
DEVIATION = 2**-0.5
"""The sample standard deviation of the rewards 1 and 0. If rows counted instead of rollouts, it would be that of 8
rows."""
WEIGHTS = {
    "outrider_rollout": [1 / 2 / 22] * 7 + [1 / 2 / 2],
    "outrider_row": [1 / 8 / sum(MASKS[key]) for key in KEYS],
    "outrider_token": [1 / 24] * 8,
}
"""The weight of a token of each row, by the formulas in docs/trainers/weights.md."""


@pytest.fixture(autouse=True)
def _registered() -> None:
    for name, estimator in ESTIMATORS.items():
        core_algos.register_adv_est(name)(estimator)


def sample(key: str, rewards: dict[str, float]) -> dict[str, Any]:
    """Return a row in the form of verl's queue."""
    mask = torch.tensor(MASKS[key])
    last = int(mask.nonzero()[-1])
    return {
        "prompts": torch.tensor([5, 6]),
        "responses": torch.arange(len(mask)),
        "input_ids": torch.arange(2 + len(mask)),
        "position_ids": torch.arange(2 + len(mask)),
        "response_mask": mask,
        "loss_mask": mask,
        "rm_scores": torch.zeros(len(mask)).index_fill(0, torch.tensor([last]), rewards[key]),
        "uid": key,
    }


def advantages(rows: list[dict[str, Any]], keys: list[str], estimator: str, **algorithm: Any) -> torch.Tensor:
    """Compute advantages [rows, response length] as verl's V1 trainer does."""
    mask, rewards = (
        torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)
        for name in ("response_mask", "rm_scores")
    )
    uids = [row["uid"] if estimator in ESTIMATORS else row["uid"].split("_")[0] for row in rows]
    batch = DataProto.from_single_dict(
        {"response_mask": mask, "token_level_rewards": rewards, "uid": np.array(uids, dtype=object)}
    )
    config = AlgoConfig(adv_estimator=estimator, **algorithm)
    batch = compute_advantage_for_multi_trajectories(
        batch, keys, estimator, norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo, config=config
    )
    found: torch.Tensor = batch.batch["advantages"]
    return found


def of_rows(table: torch.Tensor) -> dict[str, float]:
    """Return the advantage of each row, from its last trained token."""
    return {key: float(row[len(MASKS[key]) - 1]) for key, row in zip(KEYS, table, strict=True)}


def gradients(
    estimator: str, *, mini: int, ranks: int = 1, mode: str = AGGREGATION, seed: int = 0, drift: float = 0.0
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """One pass of verl over the example, with mini-batches of `mini` rows on `ranks` data-parallel ranks. Returns the
    gradient of each row's log-probabilities, these log-probabilities minus the old ones, and the loss: both gradient
    and loss are the means over the mini-batches."""
    keys = list(KEYS)
    rows = [sample(key, REWARDS) for key in keys]
    while len(rows) % mini:
        padding, _ = construct_minimal_padding_template(rows[0] | {"session_id": 0}, {}, eos_token_id=2)
        padding.pop("session_id")
        keys.append(f"pad_{len(rows)}_0")
        rows.append({name: padding[name] for name in rows[0]} | {"uid": "pad"})
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)  # verl reorders rows, to balance the ranks
    keys, rows = [keys[place] for place in order], [rows[place] for place in order]
    table = advantages(rows, keys, estimator)
    generator = torch.Generator().manual_seed(seed)
    drifts = [drift * (2 * torch.rand(len(row["input_ids"]), generator=generator) - 1) for row in rows]
    policies = [torch.nn.Parameter(each) for each in drifts]  # relative to the old policy, whose values are 0
    names = ("prompts", "responses", "input_ids", "response_mask", "loss_mask")
    columns = {name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged) for name in names}
    columns["advantages"] = response_to_nested(table, columns["response_mask"])
    columns["old_log_probs"] = response_to_nested(torch.zeros_like(table), columns["response_mask"])
    batch = tu.get_tensordict(columns | {"place": torch.arange(len(rows))})
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False, loss_agg_mode=mode
    )
    total = 0.0
    parts = [tu.make_iterator(part, mini // ranks, epochs=1) for part in tu.chunk_tensordict(batch, ranks)]
    for of_ranks in zip(*parts, strict=True):
        tokens = sum(int(part["loss_mask"].values().sum()) for part in of_ranks)
        for part in of_ranks:
            tu.assign_non_tensor(
                part, dp_size=ranks, global_batch_size=mini, batch_num_tokens=tokens, max_token_len_per_gpu=140
            )
            micro_batches, _ = prepare_micro_batches(part, use_dynamic_bsz_balance=False)
            for micro in micro_batches:
                output = [policies[place] for place in micro["place"].tolist()]
                loss, _ = ppo_loss(
                    config, {"log_probs": torch.nested.as_nested_tensor(output, layout=torch.jagged)}, micro
                )
                (loss / ranks).backward()  # data-parallel training averages the gradients of its ranks
                total += float(loss.detach()) / ranks
    steps = len(rows) // mini
    grads, moved = {}, {}
    for key, policy, row in zip(keys, policies, rows, strict=True):
        shifted = slice(len(row["prompts"]) - 1, -1)
        assert policy.grad is not None
        if key in MASKS:
            grads[key], moved[key] = policy.grad[shifted] / steps, policy.detach()[shifted]
        else:
            assert not policy.grad.any()
    return grads, moved, total / steps


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("mini", "ranks"), [(8, 1), (8, 2), (4, 1), (4, 2), (6, 1), (6, 3), (2, 2)])
def test_each_token_has_the_weight_of_the_formula(estimator: str, mini: int, ranks: int) -> None:
    grads, _, _ = gradients(estimator, mini=mini, ranks=ranks, seed=mini + ranks)
    for key, weight in zip(KEYS, WEIGHTS[estimator], strict=True):
        advantage = (REWARDS[key] - 0.5) / (DEVIATION + 1e-6)
        expected = -weight * advantage * torch.tensor(MASKS[key])
        torch.testing.assert_close(grads[key], expected.float(), rtol=1e-5, atol=1e-8)
    if estimator == "outrider_rollout":
        of_a = sum(float(grads[key].sum()) for key in KEYS[:7])
        assert of_a == pytest.approx(-float(grads["u_1_0"].sum()), rel=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_clipped_tokens_have_the_loss_and_the_gradient_of_the_formula(estimator: str) -> None:
    grads, moved, loss = gradients(estimator, mini=4, ranks=2, drift=0.5)
    expected = torch.zeros(())
    policies = {key: torch.nn.Parameter(moved[key]) for key in KEYS}
    clipped = 0
    for key, weight in zip(KEYS, WEIGHTS[estimator], strict=True):
        advantage = (REWARDS[key] - 0.5) / (DEVIATION + 1e-6)
        ratio = policies[key].exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        expected = expected - weight * (gain * torch.tensor(MASKS[key])).sum()
        clipped += int((gain != ratio * advantage).sum())
    expected.backward()
    assert clipped >= 3
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for key in KEYS:
        torch.testing.assert_close(grads[key], policies[key].grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("mode", "ratio"),
    [("token-mean", 11.0), ("token-sum", 11.0), ("seq-mean-token-sum", 11.0), (AGGREGATION, 7.0)],
)
def test_verls_own_grpo_counts_the_rows_or_the_tokens(mode: str, ratio: float) -> None:
    """verl's own GRPO weighs rows or tokens and not rollouts, so the manager refuses verl's own estimators for sessions
    with several rows."""
    grads, _, _ = gradients("grpo", mini=8, mode=mode)
    of_a, of_b = sum(float(grads[key].sum()) for key in KEYS[:7]), float(grads["u_1_0"].sum())
    assert -of_a / of_b == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("rloo", (1 / 7, -1.0)),
        ("opo", (2 / 24, -22 / 24)),
        ("grpo", (0.5 / (DEVIATION + 1e-6), -0.5 / (DEVIATION + 1e-6))),
        *((name, (0.5 / (DEVIATION + 1e-6), -0.5 / (DEVIATION + 1e-6))) for name in ESTIMATORS),
    ],
)
def test_members_of_a_group(estimator: str, expected: tuple[float, float]) -> None:
    """Of the estimators of verl, only GRPO compares rollouts; the others compare rows."""
    rows = [sample(key, REWARDS) for key in KEYS]
    _, returns = estimate(rows) if estimator in ESTIMATORS else (None, advantages(rows, KEYS, estimator))
    found = of_rows(returns)
    assert [found[key] for key in KEYS] == pytest.approx([expected[0]] * 7 + [expected[1]], rel=1e-5)


def estimate(rows: list[dict[str, Any]], **algorithm: Any) -> Any:
    mask, rewards = (
        torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)
        for name in ("response_mask", "rm_scores")
    )
    return ESTIMATORS["outrider_rollout"](
        token_level_rewards=rewards,
        response_mask=mask,
        index=np.array([row["uid"] for row in rows], dtype=object),
        config=AlgoConfig(**algorithm),
    )


def test_a_row_with_its_own_reward_is_compared_with_the_groups_rollouts() -> None:
    """The statistics use the rewards of the main rows: 1 (row 6) and 0. Rows 0 and 3 have rewards of their own, and row
    2 has the reward of a turn in addition."""
    rows = [sample(key, REWARDS | {"u_0_0": 3.0, "u_0_3": -1.0}) for key in KEYS]
    rows[2]["rm_scores"][0] = 0.25
    _, returns = estimate(rows)
    found = of_rows(returns)
    of_reward = {reward: (reward - 0.5) / (DEVIATION + 1e-6) for reward in (-1.0, 0.0, 1.0, 1.25, 3.0)}
    assert [found[key] for key in KEYS] == pytest.approx(
        [of_reward[reward] for reward in (3.0, 1.0, 1.25, -1.0, 1.0, 1.0, 1.0, 0.0)], rel=1e-5
    )
    _, returns = estimate(rows, norm_adv_by_std_in_grpo=False)
    assert of_rows(returns)["u_0_3"] == pytest.approx(-1.5)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "grpo"])
def test_of_verls_own_estimators_two_credit_the_reward_of_a_turn_to_the_tokens_before_it(estimator: str) -> None:
    row = sample("u_0_0", REWARDS)
    row["rm_scores"][1] = 0.25  # a turn ends at the second token; the row's own reward is at the last
    columns = {"response_mask": row["response_mask"][None], "token_level_rewards": row["rm_scores"][None]}
    batch = DataProto.from_single_dict(
        columns | {"values": torch.zeros(1, 4), "uid": np.array(["u"], dtype=object)},
    )
    config = AlgoConfig(adv_estimator=estimator)
    found = compute_advantage_for_multi_trajectories(batch, ["u_0_0"], estimator, config=config).batch["returns"]
    trained = found[0][row["response_mask"] == 1].tolist()
    assert trained == pytest.approx([1.25, 1.25, 1.25 if estimator == "grpo" else 1.0])


def test_a_rollout_without_a_group_has_the_advantage_zero() -> None:
    weighted, _ = estimate([sample(key, REWARDS) for key in KEYS[:7]])
    assert not weighted.any()


def test_the_estimators_need_the_managers_keys() -> None:
    rows = [sample(key, REWARDS) | {"uid": "u"} for key in KEYS]
    with pytest.raises(InvalidField, match="do not name their sessions") as caught:
        estimate(rows)
    assert "OutriderAgentLoopManager" in (caught.value.hint or "")


@pytest.mark.parametrize("mode", sorted(set(core_algos.POLICY_LOSS_REGISTRY) - {"bypass_mode"}))
def test_the_losses_that_may_be_weighted_are_proportional_to_the_advantages(mode: str) -> None:
    """The losses in SCALABLE_LOSSES are those for which the gradient of a batch is the sum of its rows' gradients, and
    is multiplied by a factor of the advantages. "bypass_mode" is refused, too, because it changes the mask."""
    mask = torch.ones(4, 8)
    mask[0, 3:] = 0
    generator = torch.Generator().manual_seed(1)
    old, new, advantage = (0.8 * torch.randn(4, 8, generator=generator) for _ in range(3))
    options = {"loss_agg_mode": AGGREGATION, "policy_loss": PolicyLossConfig(dro_beta=0.1)}
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=27, global_batch_size=4, loss_scale_factor=None)

    def gradient(rows: slice, factor: float) -> torch.Tensor:
        policy = torch.nn.Parameter(new.clone())
        loss, _ = core_algos.get_policy_loss_fn(mode)(
            old_log_prob=old[rows],
            log_prob=policy[rows],
            advantages=factor * advantage[rows],
            response_mask=mask[rows],
            loss_agg_mode=AGGREGATION,
            config=config,
        )
        loss.backward()
        assert policy.grad is not None
        return policy.grad

    torch.manual_seed(0)
    whole = gradient(slice(None), 1.0)
    torch.manual_seed(0)
    scaled = gradient(slice(None), 7.0)
    parts = gradient(slice(0, 1), 1.0) + gradient(slice(1, 4), 1.0)
    same = partial(torch.allclose, rtol=1e-4, atol=1e-7)
    assert (same(scaled, 7 * whole) and same(parts, whole)) == (mode in SCALABLE_LOSSES)


def verl_config(**changes: Any) -> Any:
    given = {"name": "outrider_rollout", "aggregation": AGGREGATION, "loss": "vanilla", "n": 8} | changes
    actor = SimpleNamespace(loss_agg_mode=given["aggregation"], policy_loss={"loss_mode": given["loss"]})
    rollout = SimpleNamespace(n=given["n"])
    return SimpleNamespace(
        algorithm=SimpleNamespace(adv_estimator=given["name"]),
        actor_rollout_ref=SimpleNamespace(actor=actor, rollout=rollout),
    )


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({"name": "grpo"}, "all", "with algorithm.adv_estimator=grpo verl counts each row as a rollout"),
        ({"name": "gae"}, "all", "with algorithm.adv_estimator=gae verl counts each row as a rollout"),
        ({"aggregation": "token-mean"}, "all", "loss_agg_mode is token-mean"),
        ({"aggregation": "token-mean"}, "main", "loss_agg_mode is token-mean"),
        ({"loss": "clip_cov"}, "all", "loss_mode is clip_cov"),
        ({"n": 1}, "all", "rollout.n is 1"),
    ],
)
def test_what_would_weight_rollouts_by_their_rows_is_refused(changes: Any, rows: Any, message: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_weights(verl_config(**changes), VerlSettings(rows=rows))
    assert message in caught.value.message
    if "name" in changes:
        assert "algorithm.adv_estimator=outrider_rollout" in (caught.value.hint or "")
        assert "rows=main" in (caught.value.hint or "")


def test_one_row_for_each_rollout_needs_no_estimator_of_ours() -> None:
    check_weights(verl_config(name="grpo", aggregation="token-mean"), VerlSettings(rows="main"))
    check_weights(verl_config(), VerlSettings())
