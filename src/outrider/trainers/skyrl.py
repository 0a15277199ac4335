"""The bridge to SkyRL: a generator that runs each trajectory as a session of an Outrider service.

    class Trainer(LossPerRollout, RayPPOTrainer):
        pass

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return OutriderGenerator(cfg.generator, settings)

        def get_trainer(self, **parts):
            return Trainer(**parts)

OutriderGenerator implements `skyrl.train.generators.base.GeneratorInterface` of SkyRL 0.3 and 0.4. This module imports
SkyRL only to compute SkyRL's usual metrics. Invariants:

- The rows are in the order of the input, and the rows of one trajectory are adjacent.
- All columns have equal length.
- Each row with trained tokens is either in the output or counted as left out.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from outrider.errors import InvalidField
from outrider.lifecycle import StopReason
from outrider.spec import EVALUATION_LABEL
from outrider.trainers.shared_client import shared_client
from outrider.trainers.shared_settings import BridgeSettings, group_of, read_settings, refuse_min_usable, task_for
from outrider.trainers.trajectories import Trajectory, chosen_metrics, left_out_of, trajectories_of
from outrider.trajectory import Sample

if TYPE_CHECKING:
    from torch import Tensor

VARIABLE = "OUTRIDER_SKYRL"
FAILED_IN_A_ROW = 16
"""An instance (prompt) has failed if all its trajectories have failed. For training inputs with a single instance,
`generate` raises an error only after this number of consecutive failed instances. The cause then probably affects all
instances."""


class SkyRLSettings(BridgeSettings):
    """The settings that all bridges share, and these:

    versions: "engine" if the engines report the policy version. With "step", the bridge sets the policy version to the
        number of finished training steps, before the first batch of each step.
    rewards: "row" for one number per row. "token" for one number per response token, with a turn's reward at the end of
        the turn. SkyRL joins batches, so all batches must have rewards of the same form.
    """

    versions: Literal["engine", "step"] = "engine"
    rewards: Literal["row", "token"] = "row"


class OutriderGenerator:
    """A SkyRL generator that runs its trajectories on a service. `generator_cfg` is SkyRL's `cfg.generator`. `settings`
    are SkyRLSettings, overridden by $OUTRIDER_SKYRL.

    With `step_wise_trajectories` and the setting `rows="all"`, a trajectory has a row for each branch with trained
    tokens, with the main conversation's row last. To train on all these rows, the trainer needs the mixin
    `LossPerRollout`.

    Otherwise, a trajectory has only the main conversation's row. If a session has other rows with trained tokens,
    training with `rows="all"` raises an error. With `rows="main"`, and in evaluations, the other rows are left out and
    counted.

    SkyRL cannot leave out a failed trajectory. In training, all trajectories of its instance (prompt) are therefore
    replaced by placeholders (one token with mask 0), as in SkyRL's own Harbor example. In an evaluation, only the
    failed trajectory is replaced, and its reward is 0.
    """

    def __init__(self, generator_cfg: Any, settings: Mapping[str, Any] | None = None) -> None:
        self._settings = read_settings(SkyRLSettings, settings, source="settings", variable=VARIABLE)
        self._reported = 0
        self._reporting = asyncio.Lock()
        self._failed_in_a_row = 0
        self._by_token = self._settings.rewards == "token"
        self._step_wise = bool(generator_cfg.step_wise_trajectories)
        self._masks_overlong = bool(generator_cfg.apply_overlong_filtering)
        self._zeroes_overlong = bool(generator_cfg.zero_reward_on_non_stop)
        self._weighed = False
        _refuse_what_engines_do_not_report(generator_cfg)

    def weigh_rollouts(self) -> None:
        """Record that the trainer weighs rollouts equally, no matter how many rows they have. `LossPerRollout` calls
        this."""
        self._weighed = True

    async def generate(self, input_batch: Mapping[str, Any], disable_tqdm: bool = False) -> dict[str, Any]:
        """Run the trajectories of the input, and return SkyRL's GeneratorOutput.

        If all trajectories failed, raises the first error. For a training input with a single instance, the error is
        raised only after FAILED_IN_A_ROW consecutive failed instances. Raises InvalidField for an input without
        trajectory ids or with a row that cannot be converted to a task. Raises ServiceError if the service cannot be
        reached."""
        ids = input_batch.get("trajectory_ids")
        if not ids:
            raise InvalidField("the input has no trajectory_ids", field="trajectory_ids")
        metadata = input_batch.get("batch_metadata")
        evaluating = metadata is not None and metadata.training_phase == "eval"
        if self._step_wise and self._settings.rows == "all" and not (self._weighed or evaluating):
            raise InvalidField(
                "SkyRL gives each row of a rollout the weight of a rollout",
                field="trainer",
                hint="class Trainer(LossPerRollout, RayPPOTrainer), returned by the experiment's get_trainer;"
                ' or the setting rows = "main", with which only the main conversation trains',
            )
        # `global_step` includes the current step, which is not finished
        steps = 0 if metadata is None or evaluating else metadata.global_step - 1
        logprobs = (input_batch.get("sampling_params") or {}).get("logprobs") is not None
        places: dict[str, list[int]] = {}
        for place, trajectory_id in enumerate(ids):
            places.setdefault(trajectory_id.instance_id, []).append(place)
        groups = [self._group(input_batch, uid, at, evaluating) for uid, at in places.items()]
        async with shared_client(self._settings.url, self._settings.token) as client:
            if self._settings.versions == "step":
                async with self._reporting:  # no other batch of this step begins before the version is set
                    if steps > self._reported:
                        await client.client.resume_policy(steps)
                        self._reported = steps
            done = await client.run_all(groups)
        taken = self._settings if self._step_wise else self._settings.model_copy(update={"rows": "main"})
        found: dict[int, Trajectory] = {}
        left_out: list[Sample] = []
        for at, group in zip(places.values(), done, strict=True):
            trajectories = trajectories_of(group, taken, logprobs=logprobs)
            left_out += [row for each in trajectories if each.rows for row in left_out_of(group, each)]
            found |= zip(at, trajectories, strict=True)
        if left_out and self._settings.rows == "all" and not evaluating:
            raise InvalidField(
                f"session {left_out[0].session_id} has more than one row that trains, and without step-wise"
                " trajectories SkyRL has room for one",
                field="generator.step_wise_trajectories",
                hint='generator.step_wise_trajectories=true trains all rows; with the bridge\'s setting rows = "main"'
                " the other rows are left out, and counted in outrider/rows_left_out and outrider/tokens_left_out",
            )
        errors = [each.error for each in found.values() if each.error is not None]
        self._failed_in_a_row = self._failed_in_a_row + len(places) if len(errors) == len(ids) else 0
        # SkyRL's asynchronous trainer requests one instance at a time, and any error ends the trainer's process. So
        # replace a failed instance by placeholders, unless too many consecutive instances have failed.
        bearable = len(places) == 1 and not evaluating and self._failed_in_a_row < FAILED_IN_A_ROW
        if len(errors) == len(ids) and not bearable:
            raise errors[0]
        failed = {ids[place].instance_id for place, each in found.items() if each.error is not None}
        rows: list[dict[str, Any]] = []
        splits: list[dict[str, float]] = []
        trained: list[Trajectory] = []
        for place, trajectory_id in enumerate(ids):
            each = found[place]
            if each.error is not None or (trajectory_id.instance_id in failed and not evaluating):
                rows.append(self._placeholder(each, trajectory_id))
            else:
                rows += self._rows(each, trajectory_id)
                trained.append(each)
            splits += [_split_of(each)] * (len(rows) - len(splits))
        columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        own = {  # SkyRL adds up these metrics over the parts of a batch
            "outrider/failed_trajectories": len(errors),
            "outrider/masked_instances": 0 if evaluating else len(failed),
            "outrider/rows_left_out": len(left_out),
            "outrider/tokens_left_out": sum(int(sample.loss_mask.sum()) for sample in left_out),
        }
        usual, added = _usual_metrics(columns, splits)
        return {
            **columns,
            **added,
            **({} if logprobs else {"rollout_logprobs": None}),
            **({} if self._step_wise else {"is_last_step": None}),
            "rollout_expert_indices": None,
            "pixel_values": None,
            "image_grid_thw": None,
            "rollout_metrics": usual | _metrics_of(trained) | own,
        }

    def _group(
        self, input_batch: Mapping[str, Any], uid: str, places: Sequence[int], evaluating: bool
    ) -> dict[str, Any]:
        """Return the group of one instance, with a sample for each of the instance's trajectories. `places` are their
        positions in the input."""
        prompt = input_batch["prompts"][places[0]]
        extras = input_batch.get("env_extras")
        metadata = input_batch.get("batch_metadata")
        if not evaluating:
            refuse_min_usable(self._settings, len(places))
        task = task_for(
            self._settings,
            {"prompt": prompt, "uid": uid, **(extras[places[0]] if extras else {})},
            prompt=prompt,
            sampling=input_batch.get("sampling_params") or {},
            labels={
                "skyrl.uid": uid,
                "skyrl.global_step": getattr(metadata, "global_step", None),
                EVALUATION_LABEL: "skyrl" if evaluating else None,
            },
        )
        return group_of(self._settings, task, n=len(places), evaluating=evaluating)

    def _rows(self, trajectory: Trajectory, trajectory_id: Any) -> list[dict[str, Any]]:
        """Return the values of SkyRL's columns for each row of a trajectory. The main conversation's row is last."""
        # SkyRL's stop reason is "stop" if the agent ended by itself, and "length" if a token limit was reached. If
        # another limit was reached, the stop reason is Outrider's.
        ended = trajectory.result.stop_reason
        reason = ended.value if trajectory.truncated else "stop"
        if ended in (StopReason.MAX_TOKENS, StopReason.CONTEXT_OVERFLOW) or any(row.cut for row in trajectory.rows):
            reason = "length"
        metrics = chosen_metrics(trajectory, self._settings)
        found = []
        for row in reversed(trajectory.rows):
            rewards = row.sample.token_rewards(len(row.ids))[row.start :] if self._by_token else row.reward
            if self._zeroes_overlong and reason != "stop":
                rewards = [0.0] * len(rewards) if isinstance(rewards, list) else 0.0
            masked = self._masks_overlong and reason != "stop"
            found.append(
                {
                    "prompt_token_ids": row.ids[: row.start],
                    "response_ids": row.ids[row.start :],
                    "rewards": rewards,
                    "loss_masks": [0] * (len(row.ids) - row.start) if masked else row.mask[row.start :],
                    "rollout_logprobs": row.logprobs[row.start :],
                    "stop_reasons": reason,
                    "trajectory_ids": trajectory_id,
                    "trajectory_generation_times": trajectory.seconds,
                    "is_last_step": row is trajectory.rows[0],
                    "env_metrics": {"session_id": trajectory.session.id, "stop_reason": ended.value, **metrics},
                }
            )
        return found

    def _placeholder(self, trajectory: Trajectory, trajectory_id: Any) -> dict[str, Any]:
        error = trajectory.error.message if trajectory.error else "another trajectory of this instance failed"
        return {
            "prompt_token_ids": [0],
            "response_ids": [0],
            "rewards": [0.0] if self._by_token else 0.0,
            "loss_masks": [0],
            "rollout_logprobs": [0.0],
            "stop_reasons": "error",
            "trajectory_ids": trajectory_id,
            "trajectory_generation_times": trajectory.seconds,
            "is_last_step": True,
            "env_metrics": {"session_id": trajectory.session.id, "error": error},
        }


def _metrics_of(trained: Sequence[Trajectory]) -> dict[str, float]:
    rows = [row for each in trained for row in each.rows]
    found: dict[str, float] = {
        "outrider/cut_tokens": sum(row.cut for row in rows),
    }
    if rows:
        # SkyRL combines each of these metrics over the parts of a batch. The end of the metric's name gives the
        # function: "mean", "min" or "max".
        found |= {
            "outrider/turns_mean": sum(each.result.turns for each in trained) / len(trained),
            "outrider/version_min": min(row.sample.min_version for row in rows),
            "outrider/version_max": max(row.sample.max_version for row in rows),
        }
    return found


def _split_of(trajectory: Trajectory) -> dict[str, float]:
    """Split the agent's running time in seconds, under SkyRL's names: `llm` is the time in model calls, and `env` is
    the rest."""
    calls = min(trajectory.result.model_seconds, trajectory.seconds)
    return {"llm": calls, "env": trajectory.seconds - calls}


def _usual_metrics(
    columns: Mapping[str, Sequence[Any]], splits: Sequence[Mapping[str, float]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return SkyRL's own metrics of the rows in `columns`, and the columns that only SkyRL 0.4 has. For SkyRL 0.3 there
    are no such columns, because SkyRL 0.3 fails on a column that is a dictionary. The times of a trajectory count once,
    even if the trajectory has several rows."""
    metrics_of = importlib.import_module("skyrl.train.generators.utils").get_rollout_metrics
    last = [row for row, is_last in enumerate(columns["is_last_step"]) if is_last]
    options: dict[str, Any] = {
        "loss_masks": columns["loss_masks"],
        "trajectory_completion_times": [columns["trajectory_generation_times"][row] for row in last],
    }
    added: dict[str, Any] = {}
    if "trajectory_time_splits" in inspect.signature(metrics_of).parameters:
        options["trajectory_time_splits"] = {name: [splits[row][name] for row in last] for name in splits[0]}
        added = {
            "trajectory_time_splits": {name: [split[name] for split in splits] for name in splits[0]},
            "rollout_sample_support": None,
        }
    return metrics_of(columns["response_ids"], columns["rewards"], **options), added


def _refuse_what_engines_do_not_report(generator_cfg: Any) -> None:
    """Raise InvalidField if SkyRL is configured to use columns that the service's samples do not have. SkyRL would
    train without these columns, and only some of its versions would report this."""
    engine = getattr(generator_cfg, "inference_engine", None)
    for name in ("enable_return_sample_support_set", "enable_return_routed_experts"):
        if getattr(engine, name, False):
            field = f"generator.inference_engine.{name}"
            raise InvalidField("the service's samples have no such column", field=field, hint=f"{field}=false")


class LossPerRollout:
    """A mixin for SkyRL's trainers that gives each rollout the same weight in the loss.

    It must be the first base class: `class Trainer(LossPerRollout, RayPPOTrainer)`.

    The policy loss of a mini-batch becomes 1/R * sum_r 1/T_r * sum_t l_t. R is the number of rollouts with trained
    tokens in the mini-batch. T_r is the number of trained tokens t in all rows of rollout r. SkyRL's own reductions
    weigh rows or tokens, so a rollout with seven rows would have seven times the weight.

    The mixin multiplies the advantages of each row by a positive number, so PPO clips the same tokens as without the
    mixin. Raises InvalidField for a configuration that would change these weights.
    """

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        algorithm = self.cfg.trainer.algorithm
        if algorithm.loss_reduction != "token_mean":
            raise InvalidField(
                f"LossPerRollout weighs the rollouts, and trainer.algorithm.loss_reduction={algorithm.loss_reduction!r}"
                " would weigh them once more",
                field="trainer.algorithm.loss_reduction",
                hint="trainer.algorithm.loss_reduction=token_mean",
            )
        if algorithm.advantage_batch_normalize:
            raise InvalidField(
                "SkyRL would normalise the advantages after LossPerRollout has weighed them",
                field="trainer.algorithm.advantage_batch_normalize",
                hint="trainer.algorithm.advantage_batch_normalize=false",
            )
        if isinstance(self.generator, OutriderGenerator):
            self.generator.weigh_rollouts()

    def compute_advantages_and_returns(self: Any, data: Any) -> Any:
        data = super().compute_advantages_and_returns(data)  # type: ignore[misc]  # the method is in SkyRL's class
        last = data.metadata.get("is_last_step") or [True] * len(data["loss_mask"])
        boundaries = data.metadata["policy_mini_batch_boundaries"]
        data["advantages"] = data["advantages"] * row_weights(data["loss_mask"], last, boundaries)[:, None]
        return data


def row_weights(loss_mask: Tensor, last: Sequence[bool], boundaries: Sequence[tuple[int, int]]) -> Tensor:
    """Return a factor for each row's advantages. With these factors, a mean over a mini-batch's tokens gives each
    rollout the same weight.

    loss_mask: [rows, tokens].
    last: whether a row is the last of its rollout. The rows of a rollout are adjacent.
    boundaries: the range [start, end) of each mini-batch.

    The rows of a rollout with T trained tokens have the factor N / (R * T): N is the number of trained tokens in the
    mini-batch, and R is the number of rollouts to which these tokens belong. Rows outside all mini-batches, and rows of
    rollouts without a trained token, have the factor 0.
    """
    import torch

    tokens = loss_mask.sum(dim=-1).float()
    ends = torch.tensor(last, dtype=torch.long)
    rollout = ends.cumsum(0) - ends  # the number of rollouts that ended before this row
    weights = torch.zeros_like(tokens)
    for start, end in boundaries:
        own = rollout[start:end] - rollout[start]
        trained = torch.zeros_like(tokens).index_add(0, own, tokens[start:end])
        factors = tokens[start:end].sum() / ((trained > 0).sum() * trained)
        weights[start:end] = torch.where(trained > 0, factors, 0.0)[own]
    return weights
