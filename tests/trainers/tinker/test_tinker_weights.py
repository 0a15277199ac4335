"""The weight of each token in tinker-cookbook's datums, compared with the example of docs/trainers/weights.md, which is
computed by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
import tinker
import torch
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages, trajectory_to_data
from tinker_cookbook.rl.types import TrajectoryGroup

from outrider.trainers.exports import tinker_datum
from outrider.trainers.shared_settings import BridgeSettings
from outrider.trainers.tinker import advantages_per_rollout, trajectory_of
from outrider.trainers.trajectories import trajectories_of
from outrider.trajectory import Sample
from trainers.sample import group, row

pytestmark = pytest.mark.trainers

LENGTHS = {1.0: [3, 1, 4, 1, 5, 2, 6], 0.0: [2]}
"""Trained tokens of each row. Rollout A has reward 1 and 7 rows, rollout B has reward 0 and one row."""
PROMPT = [10, 11]


def rollouts() -> TrajectoryGroup:
    """Return the two rollouts in the form that the bridge gives to the cookbook. The rows of A begin with different
    ids, as rows of sub-agents do."""
    trajectories = []
    for lengths in LENGTHS.values():
        samples = [made_row(number, length) for number, length in enumerate(lengths)]
        [trajectory] = trajectories_of(group(*samples), BridgeSettings(), logprobs=True)
        trajectories.append(trajectory_of(trajectory, None))
    return TrajectoryGroup(trajectories, list(LENGTHS), [{}, {}])


def made_row(number: int, length: int) -> Sample:
    return row(
        row=number,
        ids=[number + 100, *PROMPT, *range(20, 20 + length)],
        loss_mask=[0, 0, 0, *[1] * length],
        logprobs=[0.0, 0.0, 0.0, *[-0.5] * length],
        versions=[-1, -1, -1, *[4] * length],
        prompt_length=3,
    )


@pytest.mark.parametrize(
    ("corrected", "weights"),
    [
        (False, {1.0: Fraction(1, 24), 0.0: Fraction(1, 24)}),
        (True, {1.0: Fraction(1, 44), 0.0: Fraction(1, 4)}),
    ],
    ids=["compute_advantages: per token", "advantages_per_rollout: per rollout"],
)
def test_each_token_has_the_weight_of_the_formula(corrected: bool, weights: dict[float, Fraction]) -> None:
    """The loss is Tinker's documented importance_sampling: the sum over all tokens of all datums. It is divided by the
    24 trained tokens, so that the weights add up to 1. The cookbook centres rewards, so A's advantage is 1/2 and B's
    is -1/2."""
    groups = [rollouts()]
    advantages = advantages_per_rollout(groups) if corrected else compute_advantages(groups)
    data, places = assemble_training_data(groups, advantages)
    assert [place["traj_idx"] for place in places] == [0] * 7 + [1]
    together = {1.0: 0.0, 0.0: 0.0}
    for datum, place in zip(data, places, strict=True):
        reward = list(LENGTHS)[place["traj_idx"]]
        columns = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
        policy = columns["logprobs"].clone().requires_grad_()
        loss = -((policy - columns["logprobs"]).exp() * columns["advantages"]).sum() / 24
        loss.backward()
        advantage = reward - 0.5
        torch.testing.assert_close(policy.grad, -advantage * float(weights[reward]) * columns["mask"])
        together[reward] += float(policy.grad.abs().sum()) / abs(advantage)
    assert together == pytest.approx(
        {reward: float(weights[reward] * sum(lengths)) for reward, lengths in LENGTHS.items()}
    )


def test_the_exports_datum_is_the_cookbooks() -> None:
    """`exports.tinker_datum` gives the same datum as the cookbook, in the class of tinker 0.38."""
    made = tinker_datum(sample := made_row(0, 3), advantage=0.5)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(made["model_input"]), loss_fn_inputs=made["loss_fn_inputs"]
    )
    [trajectory] = trajectories_of(group(sample), BridgeSettings(), logprobs=True)
    [expected] = trajectory_to_data(trajectory_of(trajectory, None), 0.5)
    assert datum.model_input == expected.model_input
    for name, column in datum.loss_fn_inputs.items():
        assert column.to_torch().tolist() == expected.loss_fn_inputs[name].to_torch().tolist()
    assert made["weights"] == expected.loss_fn_inputs["mask"].to_torch().tolist()


def test_the_weights_of_a_batch_add_up_to_its_tokens() -> None:
    groups = [rollouts(), rollouts()]
    first, second = advantages_per_rollout(groups)
    assert first.tolist() == second.tolist() == pytest.approx([0.5 * 48 / (4 * 22), -0.5 * 48 / (4 * 2)])
