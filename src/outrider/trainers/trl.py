"""Trains with TRL on rollouts of a service: `GRPOTrainer` with `Rollouts`, `AsyncGRPOTrainer` with `RolloutWorker`.

    class Trainer(ServiceLogprobs, GRPOTrainer):
        pass

    with Client() as client, PolicyWeights(client) as weights, Rollouts(client, tasks, weights) as rollouts:
        Trainer(model, service_reward, args, steps_dataset(1000), rollout_func=rollouts).train()

A session has a row for each branch of its conversation. A sampled token is trained in at most one row. A failed session
has no reward, and is left out of all means. The two trainers differ:

- GRPOTrainer takes exactly one row of each session: the first row with trained tokens, usually the main branch's. Other
  rows with trained tokens are an error. With `rows="main"`, they are left out and counted instead. A failed session
  gets a row of one token with mask 0.
- AsyncGRPOTrainer takes all rows with trained tokens, each with the advantage of its session. With
  `AsyncLossPerRollout`, each session has the same weight in the loss, no matter how many rows it has.

Importing this module does not import TRL. Invariant: a trainer receives a token with mask 1 only once, together with
the log-probability recorded when an engine of the service sampled it.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import queue
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
import numpy as np

from outrider.client.client import Client
from outrider.client.pass_rate import evaluation_task
from outrider.client.sampling import (
    Batch,
    Choice,
    Counts,
    DynamicSampler,
    Overdue,
    Refill,
    SamplerState,
    Source,
    Surplus,
    group_advantages,
    rewards_differ,
    rewards_of,
)
from outrider.environment import install_command
from outrider.errors import InvalidField, ServiceError
from outrider.schemas import GroupView, SessionView
from outrider.spec import MAX_PRIORITY
from outrider.tokens.rendering.image_grids import Grid
from outrider.trainers.pictures import image_in_grid, readable_end
from outrider.trainers.shared_settings import BridgeSettings
from outrider.trainers.trajectories import TrainingRow, Trajectory, trajectories_of
from outrider.trainers.weight_publishing import PolicyWeights
from outrider.trajectory import SampleImage

if TYPE_CHECKING:
    from torch import Tensor

TESTED = "1.16"
SETTINGS = BridgeSettings()
"""The default settings of a bridge. They select all of a session's rows that have trained tokens."""
STATE_FILE = "outrider_sampler.json"
"""The file for the sampler's state in a trainer's checkpoint."""
UNUSED_FILE = "outrider_unused_rows.pt"
"""The file for the rows of the current batch in a trainer's checkpoint. It exists only if the checkpoint was written
between two steps that share a batch."""
ASYNC_HOOKS = ("rollout_worker", "weight_transfer")
"""The arguments of AsyncGRPOTrainer that take a `RolloutWorker` and a `ServiceWeights`."""
PROMPT_COLUMN = "prompt"
IMAGE_INPUTS = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
REWARD_COLUMN = "outrider_reward"


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row for GRPOTrainer. `completion_ids`, `mask`, `logprobs` and `versions` have equal length.

    versions: the policy version of each token, or -1 where `mask` is 0.
    reward: None for a session that was not graded.
    images: the images whose placeholder tokens are in the row.
    cut: the number of trained tokens that were cut off. A row is cut before its first placeholder token that belongs to
        no image."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float | None
    images: tuple[SampleImage, ...] = ()
    cut: int = 0


class StepStats(msgspec.Struct, kw_only=True):
    """The statistics of one batch.

    reward: mean reward of all groups that were graded since the previous batch, including dropped groups.
    spread: mean standard deviation of the rewards within each of these groups.
    kept_reward: mean reward of the groups in the batch.
    staleness_mean, staleness_max: the mean and maximum age of the trained tokens. The age of a token is the number of
        versions by which it is older than the policy in training.
    waited: how long the trainer waited for the batch, in seconds.
    held: how much of `waited` a full batch spent waiting for slow groups (`sampling.Batch`).
    left_out_rows: number of rows that were left out because the batch has one row for each session.
    left_out_tokens: number of trained tokens in these rows, plus the tokens that `BatchRow.cut` counts.
    empty_rows: number of rows without a trained token.
    errors: number of sessions of the batch that failed.
    drift_tokens: number of ids that an engine reported differently from the recorded ids.
    logprob_gap: the largest difference between a token's recorded log-probability and the trainer's value, computed
        with the weights that sampled the token. None if it was not measured.
    compared_tokens: number of tokens compared for `logprob_gap`.
    """

    step: int
    version: int
    reward: float
    spread: float
    kept_reward: float
    staleness_mean: float
    staleness_max: int
    waited: float
    held: float
    groups: Counts
    left_out_rows: int
    left_out_tokens: int
    empty_rows: int
    errors: int
    drift_tokens: int
    logprob_gap: float | None = None
    compared_tokens: int = 0

    def metrics(self) -> dict[str, float]:
        """Return the metrics that TRL logs, by name."""
        found = {
            "reward_all_groups": self.reward,
            "group_spread": self.spread,
            "staleness/mean": self.staleness_mean,
            "staleness/max": float(self.staleness_max),
            "waited_seconds": self.waited,
            "held_seconds": self.held,
            "left_out_rows": float(self.left_out_rows),
            "left_out_tokens": float(self.left_out_tokens),
            "empty_rows": float(self.empty_rows),
            "drift_tokens": float(self.drift_tokens),
        }
        for name in ("informative", "overdue", "uninformative", "retried", "given_up", "stale"):
            found[f"groups/{name}"] = float(getattr(self.groups, name))
        if self.logprob_gap is not None:
            found["logprob_gap"] = self.logprob_gap
        return {f"outrider/{name}": value for name, value in found.items()}


def steps_dataset(groups: int) -> Any:
    """Return a dataset for GRPOTrainer with `groups` rows. The contents of the rows have no effect. The number of rows
    must be at least the number of groups in a batch. The tasks come from `Rollouts` and not from the dataset, because a
    group that the filter drops is replaced by a group of another task."""
    from datasets import Dataset

    return Dataset.from_dict({PROMPT_COLUMN: [f"group {number}" for number in range(groups)]})


def service_reward(*, outrider_reward: list[float | None], **columns: Any) -> list[float | None]:
    """The reward function for GRPOTrainer. It returns the rewards of the service's evaluator. A session without a
    verdict has the reward None, and TRL leaves it out of the group's mean."""
    return outrider_reward


class Rollouts:
    """The `rollout_func` of a GRPOTrainer. Use as `with Rollouts(client, tasks, weights) as rollouts`.

    The first call of each step publishes the trainer's weights. Each call returns the next batch of a `DynamicSampler`,
    whose documentation describes the arguments that are not listed here:

    max_age: the maximum age of a token. The age is the number of versions by which the token is older than the current
        version. The groups that run while the trainer trains are at least one version old when they are used.
    eval_tasks: the tasks of the trainer's evaluations. No filter applies to evaluations. Each evaluation begins with
        the first task, and each batch of an evaluation takes the next tasks. The groups of an evaluation have the
        priority `priority` + 1, but at most 1000.
    measure: compare the recorded log-probabilities with the trainer's own, computed with the weights that sampled each
        token (`StepStats.logprob_gap`). This costs one more forward pass for each version in a batch. To have the
        weights of all these versions, set `weights.keep` to at least `max_age` + 1.
    rows: GRPOTrainer has room for one row of a session. With "all", a second row with trained tokens in a training
        batch is an error. With "main", only the first row trains, and the other rows are counted
        (`StepStats.left_out_rows`).
    state: the result of `sampler_state(checkpoint)`, for a trainer that loads a checkpoint in its own way.
        `train(resume_from_checkpoint=...)` loads the state itself.

    If the block ends without an error, running groups are cancelled. After an error, the groups continue, so that a
    restarted trainer can use them.
    """

    def __init__(
        self,
        client: Client,
        tasks: Source,
        weights: PolicyWeights,
        *,
        eval_tasks: Source | None = None,
        inflight: int | None = None,
        informative: Callable[[GroupView], Choice] = rewards_differ,
        refill: Refill = "asynchronous",
        surplus: Surplus = "carry",
        max_age: int | None = 1,
        overdue: Overdue = "wait",
        priority: int = 0,
        min_usable: int | None = None,
        expires_seconds: float | None = None,
        measure: bool = False,
        rows: Literal["all", "main"] = "all",
        state: SamplerState | None = None,
    ) -> None:
        self.history: list[StepStats] = []
        """The statistics of each training batch, in order."""
        self.weights = weights
        self.measure = measure
        self.versions: list[list[int]] = []
        """The versions of the tokens of the last batch, one list for each completion."""
        self.images: list[tuple[SampleImage, ...]] = []
        """The images of the rows of the last batch."""
        self._pixels: dict[tuple[str, Grid], Mapping[str, Tensor]] = {}
        self._client = client
        self._rows = rows
        self._tasks = tasks
        self._eval_tasks = eval_tasks
        self._informative = informative
        self._settings: dict[str, Any] = {
            "inflight": inflight,
            "refill": refill,
            "surplus": surplus,
            "max_age": max_age,
            "overdue": overdue,
            "priority": priority,
            "min_usable": min_usable,
            "expires_seconds": expires_seconds,
            "state": state,
        }
        if state is not None:
            weights.begin_above(state.version)
        self._evaluated = (-1, 0)  # the step of the last evaluation, and the number of the evaluation's next task
        self._graded: list[list[float]] = []
        self._sampler: DynamicSampler | None = None
        self._shape = (0, 0)
        self._published_at = -1
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._sampler is not None and error is None:
                self._client.run(self._sampler.stop())
        finally:
            self._sampler = None
            self._stack.close()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return the rows of len(prompts) sessions, in the form that TRL expects from a `rollout_func`. The rows of a
        group are adjacent. The contents of `prompts` are not used.

        Raises InvalidField if the trainer's configuration would make it train on data other than the service's, or if a
        session has too many rows for the setting `rows`. Raises ServiceError if there are too few tasks, or if the
        service cannot be reached.
        """
        _check_trainer(trainer)
        training = bool(trainer.model.training)
        n = trainer.num_generations if training else trainer.num_generations_eval
        target, odd = divmod(len(prompts), n)
        if odd:
            raise InvalidField(
                f"a batch of {len(prompts)} rows has no whole groups of {n}",
                field="per_device_train_batch_size" if training else "per_device_eval_batch_size",
                hint=f"make it a multiple of num_generations, {n}",
            )
        if trainer.state.global_step != self._published_at:
            self.publish(trainer)
        if training:
            batch = self._next_batch(n, target)
        elif self._eval_tasks is not None:
            batch = self._evaluation_batch(self._eval_tasks, n, target, trainer.state.global_step)
        else:
            raise InvalidField("the trainer evaluates, and there are no tasks for it", field="eval_tasks")
        if batch is None or len(batch.groups) < target:
            raise ServiceError(
                f"the tasks are used up: {len(batch.groups) if batch else 0} of {target} groups are left for a batch",
                hint="give the tasks as a sequence, which is repeated without end, or lower max_steps",
            )
        processor = getattr(trainer, "processing_class", None)
        groups = [rows_of(group, placeholders_of(processor)) for group in batch.groups]
        if training and self._rows == "all":
            _refuse_to_leave_out([row for group in groups for row in group.left_out])
        rows = [row for group in groups for row in group.rows]
        self.versions = [row.versions for row in rows]
        self._read_images(rows, processor)
        if training:
            self.history.append(self._stats(trainer.state.global_step, batch, groups))
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "logprobs": [row.logprobs for row in rows],
            "env_mask": [row.mask for row in rows],
            REWARD_COLUMN: [row.reward for row in rows],
        }

    def _read_images(self, rows: Sequence[BatchRow], processor: Any) -> None:
        """Compute the pixel values of the images in a batch, each image once."""
        self.images = [row.images for row in rows]
        self._pixels = {}
        for image in (image for row in rows for image in row.images):
            assert image.grid is not None
            if (image.digest, image.grid) not in self._pixels:
                read = image_in_grid(
                    self._client.image(image.digest).data,
                    image.grid,
                    processor.image_processor,
                    trainer="the trainer",
                    field="processing_class",
                )
                self._pixels[image.digest, image.grid] = read.inputs

    def image_inputs(self, ids: Tensor, attention: Tensor, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the model's image inputs for `rows` of the last batch, by default for all rows. `ids` and `attention`
        have the shape (rows, length), padded on both sides. Returns an empty dictionary if the rows have no images."""
        import torch

        images = self.images if rows is None else [self.images[row] for row in rows]
        if not any(images):
            return {}
        kinds = torch.zeros_like(ids)
        for row, (begin, own) in enumerate(zip(attention.argmax(dim=1).tolist(), images, strict=True)):
            for start, end in (image.span for image in own if image.span is not None):
                kinds[row, begin + start : begin + end] = 1
        shown = [image for own in images for image in own]
        made = [self._pixels[image.digest, image.grid] for image in shown if image.grid is not None]
        return {
            name: torch.cat([one[name] for one in made]).to(ids.device) for name in ("pixel_values", "image_grid_thw")
        } | {"num_images": [len(own) for own in images], "mm_token_type_ids": kinds}

    def publish(self, trainer: Any) -> None:
        """Publish the trainer's current weights to the engines."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        version = self.weights.publish(model.named_parameters())
        if self._sampler is not None:
            self._client.run(self._sampler.set_version(version))
        self._published_at = trainer.state.global_step

    def state(self) -> SamplerState | None:
        """Return the sampler's state, or None before the first batch."""
        return self._client.run(_state_of(self._sampler)) if self._sampler is not None else None

    def resume(self, state: SamplerState) -> None:
        """Continue from the sampler's state in a checkpoint. Raises InvalidField after the first batch, or if the
        constructor was given another state."""
        if self._sampler is not None:
            raise InvalidField(
                "these rollouts have made batches already, and a checkpoint's state would train their prompts again",
                field="resume_from_checkpoint",
                hint="make new Rollouts for a trainer that continues from a checkpoint",
            )
        if self._settings["state"] not in (None, state):
            raise InvalidField(
                "the state given to Rollouts is not that of the checkpoint",
                field="state",
                hint="leave `state` out: the trainer loads it from the checkpoint",
            )
        self._settings["state"] = state
        self.weights.begin_above(state.version)

    def _next_batch(self, n: int, target: int) -> Batch | None:
        if self._sampler is None:
            self._shape = (n, target)
            sampler = DynamicSampler(
                self._client.asynchronous,
                self._tasks,
                n=n,
                target=target,
                informative=self._noted,
                **self._settings,
            )
            self._sampler = self._stack.enter_context(self._client.open(sampler))
            self._client.run(self._sampler.set_version(self.weights.version))
        elif self._shape != (n, target):
            raise InvalidField(
                f"a batch of {target} groups of {n}, after batches of {self._shape[1]} groups of {self._shape[0]}",
                field="prompts",
            )
        return self._client.run(self._sampler.batch())

    def _evaluation_batch(self, tasks: Source, n: int, target: int, step: int) -> Batch | None:
        """Return the next `target` groups of the evaluation at step `step`. Each batch begins after the tasks of the
        evaluation's previous batch."""
        begin = self._evaluated[1] if self._evaluated[0] == step else 0
        state = SamplerState(run=secrets.token_hex(8), next=begin, pending=(), version=0, batches=0)

        def marked(number: int) -> dict[str, Any]:
            return evaluation_task(tasks(number) if callable(tasks) else tasks[number % len(tasks)])

        priority = min(self._settings["priority"] + 1, MAX_PRIORITY)
        sampler = DynamicSampler(
            self._client.asynchronous, marked, n=n, target=target, refill="static", priority=priority, state=state
        )
        with self._client.open(sampler) as opened:
            batch = self._client.run(opened.batch())
            self._evaluated = (step, self._client.run(_state_of(opened)).next)
        return batch

    def _noted(self, group: GroupView) -> Choice:
        """Apply the filter to a graded group. The group's rewards are also recorded for the statistics, because a
        dropped group is not in any batch."""
        self._graded.append(rewards_of(group))
        return self._informative(group)

    def _stats(self, step: int, batch: Batch, groups: Sequence[GroupRows]) -> StepStats:
        graded, self._graded = self._graded, []
        ages = [
            self.weights.version - version
            for group in groups
            for row in group.rows
            for version in row.versions
            if version >= 0
        ]
        kept = [reward for group in batch.groups for reward in rewards_of(group)]
        # If all groups of this batch had already finished when the previous batch was returned, no group was graded
        # since then. Use this batch's rewards instead.
        graded = graded or [rewards_of(group) for group in batch.groups]
        results = [session.result for group in batch.groups for session in group.sessions if session.result]
        return StepStats(
            step=step,
            version=self.weights.version,
            reward=fmean(reward for rewards in graded for reward in rewards),
            spread=fmean(pstdev(rewards) for rewards in graded),
            kept_reward=fmean(kept),
            staleness_mean=fmean(ages),
            staleness_max=max(ages),
            waited=batch.waited,
            held=batch.held,
            groups=batch.counts,
            left_out_rows=sum(len(group.left_out) for group in groups),
            left_out_tokens=sum(sum(row.mask) for group in groups for row in group.left_out)
            + sum(row.cut for group in groups for row in group.rows),
            empty_rows=sum(not any(row.mask) for group in groups for row in group.rows),
            errors=sum(result.error is not None for result in results),
            drift_tokens=sum(result.tokens.drift for result in results),
        )


class ServiceLogprobs:
    """A mixin for GRPOTrainer that uses the engines' log-probabilities.

    It must be the first base class: `class Trainer(ServiceLogprobs, GRPOTrainer)`.

    The service requires `use_vllm=False`, and TRL then uses the trainer's own log-probabilities in place of the
    engines'. Tokens of an older policy would then count as sampled by the current policy. With the mixin, the
    importance ratio and its clipping use the log-probabilities with which the tokens were sampled. The mixin also logs
    `StepStats` as `outrider/...`.

    A checkpoint contains the sampler's state. If several steps share a batch (`steps_per_generation`,
    `num_iterations`), it also contains the rows of an unfinished batch. A trainer that continues from the checkpoint
    loads the state and the rows, so it trains on each group as often as an uninterrupted trainer.
    """

    def _generate_and_score_completions(self: Any, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]  # the method is in TRL's class
        rollouts = self.rollout_func
        if not isinstance(rollouts, Rollouts):
            return output
        sampled = output.get("sampling_per_token_logps")
        if sampled is None:
            raise InvalidField(
                "this TRL gives no sampling_per_token_logps",
                field="trl",
                hint=f"the bridge is tested with TRL {TESTED}: {install_command('trl')}",
            )
        output["old_per_token_logps"] = sampled
        if any(rollouts.images):
            ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
            attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            output |= rollouts.image_inputs(ids, attention)
        if self.model.training:
            stats = rollouts.history[-1]
            if rollouts.measure:
                stats.logprob_gap, stats.compared_tokens = _logprob_gap(self, rollouts, output)
            for name, value in stats.metrics().items():
                self._metrics["train"][name].append(value)
        return output

    def _get_per_token_logps_and_entropies(
        self: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **options: Any
    ) -> Any:
        forward = self.accelerator.unwrap_model(self.model).forward
        if "position_ids" in inspect.signature(forward).parameters:
            model = _counting_from_first_token(model)
        rollouts = self.rollout_func
        # While TRL makes a batch, it does not pass the images of the service's rows, so the images are added here. In
        # the loss, TRL passes the images itself.
        if "pixel_values" not in options and isinstance(rollouts, Rollouts) and len(input_ids) == len(rollouts.images):
            options |= rollouts.image_inputs(input_ids, attention_mask)
        return super()._get_per_token_logps_and_entropies(  # type: ignore[misc]  # the method is in TRL's class
            model, input_ids, attention_mask, *args, **options
        )

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        import torch

        rollouts = self.rollout_func
        # The state is written before the call of `super`, which completes the checkpoint and removes older ones. So
        # every complete checkpoint has a sampler's state, no matter when the process is killed.
        if isinstance(rollouts, Rollouts) and (state := rollouts.state()) is not None:
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / STATE_FILE).write_bytes(msgspec.json.encode(state))
            if self._step % (self.args.steps_per_generation * self.num_iterations):
                torch.save({"step": self._step, "rows": self._buffered_inputs}, folder / UNUSED_FILE)
            else:
                (folder / UNUSED_FILE).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)  # type: ignore[misc]  # the method is in TRL's class

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        import torch

        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]  # the method is in TRL's class
        rollouts = self.rollout_func
        if isinstance(rollouts, Rollouts):
            rollouts.resume(sampler_state(resume_from_checkpoint))
            if (file := Path(resume_from_checkpoint) / UNUSED_FILE).exists():
                unused = torch.load(file, weights_only=True, map_location=self.accelerator.device)
                self._step, self._buffered_inputs = unused["step"], unused["rows"]


def sampler_state(checkpoint: Path | str) -> SamplerState:
    """Read the sampler's state from a checkpoint. Raises InvalidField if the checkpoint has no readable state."""
    try:
        return msgspec.json.decode((Path(checkpoint) / STATE_FILE).read_bytes(), type=SamplerState)
    except (OSError, msgspec.DecodeError) as error:
        hint = "name the folder of a checkpoint that a trainer with ServiceLogprobs has written"
        raise InvalidField(f"no sampler's state in {checkpoint}: {error}", field="checkpoint", hint=hint) from error


def async_row_class() -> Callable[..., Any]:
    """Return TRL's class for a row of AsyncGRPOTrainer, `RolloutSample`. Raises InvalidField if the AsyncGRPOTrainer of
    the installed TRL has no argument for a rollout worker."""
    places = ("trl.experimental.async_grpo.async_rollout_worker", "trl.trainer.async_grpo_trainer")
    row: Callable[..., Any] | None = _first("RolloutSample", places)
    trainer = _first("AsyncGRPOTrainer", ("trl", "trl.experimental.async_grpo"))
    taken = inspect.signature(trainer).parameters if trainer is not None else ()
    missing = [name for name in ASYNC_HOOKS if name not in taken]
    if row is None or missing:
        found = getattr(importlib.import_module("trl"), "__version__", "installed")
        lacks = f"takes no {' and no '.join(missing)}" if missing else "has no RolloutSample"
        raise InvalidField(
            f"AsyncGRPOTrainer of TRL {found} {lacks}, so it has no place for the rollouts of a service",
            field="trl",
            hint=f"use TRL {TESTED}, with which the bridge is tested ({install_command('trl')}), or GRPOTrainer with"
            " Rollouts, which also rolls out while it trains",
        )
    return row


def _first(name: str, modules: Sequence[str]) -> Any:
    """Return the attribute `name` of the first module that has it, or None."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    return None


class RowAdvantage(float):
    """The advantage of a row, a float. `tokens` is the number of trained tokens in all rows of the row's session."""

    tokens: int

    def __new__(cls, advantage: float, tokens: int) -> Self:
        made = super().__new__(cls, advantage)
        made.tokens = tokens
        return made


class AsyncLossPerRollout:
    """A mixin for AsyncGRPOTrainer that gives each rollout the same weight in the loss.

    It must be the first base class: `class Trainer(AsyncLossPerRollout, AsyncGRPOTrainer)`.

    The loss of a micro-batch becomes 1/R * sum_r 1/T_r * sum_t l_t. T_r is the number of trained tokens t in all rows
    of rollout r. R is the number of rollouts in the micro-batch. A rollout with only half of its tokens in the
    micro-batch counts as half a rollout. TRL's own loss is a mean over tokens, so a rollout with seven rows would have
    seven times the weight. The mixin only multiplies advantages by positive numbers, so PPO clips the same tokens as
    without the mixin.
    """

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if isinstance(self.rollout_worker, RolloutWorker):
            self.rollout_worker.weigh_rollouts()

    def get_train_dataloader(self: Any) -> Any:
        from torch.utils.data import DataLoader

        loader = super().get_train_dataloader()  # type: ignore[misc]  # the method is in TRL's class
        collate = partial(_weighed, loader.collate_fn)
        return self.accelerator.prepare(DataLoader(loader.dataset, batch_size=1, collate_fn=collate))


def _weighed(collate: Callable[[Any], Any], examples: Sequence[Any]) -> Any:
    """Collate a micro-batch of TRL's packed rows, with advantages multiplied so that each rollout has the same weight.
    TRL itself divides the loss by the number of trained tokens in the micro-batch. Rows that are not from
    `RolloutWorker` keep their advantages."""
    samples = [sample for packed in examples[0] for sample in packed.samples]
    if not all(isinstance(sample["advantage"], RowAdvantage) for sample in samples):
        return collate(examples)
    trained = [int(sample["completion_mask"].sum()) for sample in samples]
    rollouts = sum(tokens / sample["advantage"].tokens for tokens, sample in zip(trained, samples, strict=True))
    for sample in samples:
        sample["advantage"] *= sum(trained) / (rollouts * sample["advantage"].tokens)
    return collate(examples)


class RolloutWorker:
    """The `rollout_worker` of an AsyncGRPOTrainer (RolloutWorkerProtocol), with `ServiceWeights` as `weight_transfer`.
    The trainer must have the mixin `AsyncLossPerRollout`; otherwise `start` raises an error.

    A `DynamicSampler` keeps `inflight` groups of `n` sessions running. Every row with trained tokens is put into
    `rollout_buffer`, with the advantage of its session; `advantages` selects how advantages are computed. While the
    buffer is full (`buffered` rows), finished groups wait in the sampler. The constructor raises InvalidField if the
    installed TRL has no argument for a rollout worker.

    groups_per_version: the number of groups that the trainer trains on between two updates of the weights. This is the
        number of groups in a batch of the optimizer, times `weight_sync_steps`.
    max_age: the trainer's max_staleness. The sampler submits no more groups than the trainer can use before the groups
        exceed this age.
    """

    def __init__(
        self,
        client: Client,
        tasks: Source,
        weights: PolicyWeights,
        *,
        n: int,
        groups_per_version: int,
        inflight: int = 16,
        buffered: int = 256,
        advantages: Literal["grpo", "mean", "leave_one_out"] = "grpo",
        informative: Callable[[GroupView], Choice] = rewards_differ,
        max_age: int | None = 4,
        overdue: Overdue = "wait",
        priority: int = 0,
        min_usable: int | None = None,
        expires_seconds: float | None = None,
        state: SamplerState | None = None,
    ) -> None:
        self._row_class = async_row_class()
        self._weighed = False
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(buffered)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        if state is not None:
            weights.begin_above(state.version)
        self._client = client
        self._weights = weights
        self._advantages = advantages
        self._sampler = DynamicSampler(
            client.asynchronous,
            tasks,
            n=n,
            target=1,
            inflight=inflight,
            informative=informative,
            max_age=max_age,
            overdue=overdue,
            groups_per_version=groups_per_version,
            priority=priority,
            min_usable=min_usable,
            expires_seconds=expires_seconds,
            state=state,
        )
        self._running = ExitStack()
        self._started = False
        self._behind = 0  # the service's policy version minus the trainer's
        self._failure: Exception | None = None
        self._last_row = time.monotonic()

    def weigh_rollouts(self) -> None:
        """Record that the trainer weighs rollouts equally, no matter how many rows they have. `AsyncLossPerRollout`
        calls this."""
        self._weighed = True

    def start(self) -> None:
        """Start the rollouts. Raises InvalidField for a trainer without `AsyncLossPerRollout`, because such a trainer
        would weigh tokens instead of rollouts."""
        if not self._weighed:
            raise InvalidField(
                "the trainer would give a rollout with many rows the weight of many rollouts",
                field="trainer",
                hint="class Trainer(AsyncLossPerRollout, AsyncGRPOTrainer): pass",
            )
        self._last_row = time.monotonic()
        self._running.enter_context(self._client.open(self._rolling_out()))
        self._started = True

    def stop(self) -> None:
        """Stop the worker, and cancel the running groups unless the worker has failed. Does nothing if the worker is
        not running."""
        self._started = False
        self._running.close()

    def update_model_version(self, model_version: int) -> None:
        self._behind = self._weights.version - model_version
        # While the trainer trained, the sampler may have had no group to run, because of `max_age`.
        self._last_row = time.monotonic()
        if self._started:
            self._client.run(self._sampler.set_version(self._weights.version))

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the worker. Raises ServiceError if the worker is running, but has added no row in
        the `stale_after_s` seconds since its last row or since the newest version of the policy."""
        if self._failure is not None:
            raise self._failure
        if self._started and time.monotonic() - self._last_row > stale_after_s:
            raise ServiceError(
                f"no group was done within {stale_after_s:.0f} s",
                hint="see whether sessions run: outrider status; slow tasks need a larger heartbeat_stale_after_s",
            )

    def state(self) -> SamplerState:
        """Return the sampler's state. Rows that are still in `rollout_buffer` count as used for training."""
        if not self._started:  # the state does not change before `start`, and the client may be closed
            return self._sampler.state()
        return self._client.run(_state_of(self._sampler))

    @asynccontextmanager
    async def _rolling_out(self) -> AsyncIterator[None]:
        async with self._sampler as sampler:
            await sampler.set_version(max(self._weights.version, sampler.version))
            try:
                async with asyncio.TaskGroup() as tasks:
                    filling = tasks.create_task(self._fill(sampler), name="rollout worker")
                    try:
                        yield
                    finally:
                        filling.cancel()
            finally:
                # Outside of the task group, which would wrap an error. After a failure the groups continue, so that a
                # new worker can use them.
                if self._failure is None:
                    await sampler.stop()

    async def _fill(self, sampler: DynamicSampler) -> None:
        try:
            async for batch in sampler:
                for group in batch.groups:
                    for row in self._rows(group, batch.number):
                        while self.rollout_buffer.full():  # noqa: ASYNC110  # the trainer's thread empties the buffer
                            await asyncio.sleep(0.02)
                        row.enqueued_at = time.time()
                        self.rollout_buffer.put_nowait(row)
                        self._last_row = time.monotonic()
                for name, value in batch.counts.flat().items():
                    self.metrics_queue.put({f"outrider/groups_{name}_total": float(value)})
                self.metrics_queue.put({"outrider/held_seconds_total": batch.held})
            raise ServiceError(
                "the tasks are used up", hint="give the tasks as a sequence, which is repeated without end"
            )
        # Any error is kept, and `check_health` raises it. Otherwise the trainer would wait forever.
        except Exception as error:
            self._failure = error

    def _rows(self, group: GroupView, number: int) -> Iterator[Any]:
        """Yield a RolloutSample for every row with trained tokens. Raises InvalidField for a row with images, because a
        RolloutSample cannot hold pixel values. Raises the error of a session if no session of the group has a row."""
        for sample in group.samples or ():
            if sample.images:
                raise InvalidField(
                    f"session {sample.session_id} has images, and AsyncGRPOTrainer's rows have no place for them",
                    field="task",
                    hint="train it with GRPOTrainer and Rollouts, or use tasks without images",
                )
        trajectories = trajectories_of(group, SETTINGS, logprobs=True)
        _first_row(group, trajectories)
        rewards = {each.session.id: reward for each in trajectories if (reward := _rollout_reward(each)) is not None}
        worth = group_advantages(list(rewards.values()), self._advantages)
        advantages = dict(zip(rewards, worth, strict=True))
        spread = pstdev(rewards.values())
        # A row may have a reward of its own. The row's advantage then compares this reward, instead of the session's
        # reward, with the rewards of the group's rollouts.
        per_reward = 1.0 if self._advantages != "grpo" else 1.0 / (spread + 1e-4) if spread else 0.0
        for trajectory in trajectories:
            tokens = sum(sum(row.mask) for row in trajectory.rows)
            for row in trajectory.rows:
                session = trajectory.session.id
                advantage = advantages[session] + (row.reward - rewards[session]) * per_reward
                yield self._row_class(
                    prompt=[],
                    completion=[],
                    input_ids=np.asarray(row.ids, dtype=np.int64),
                    completion_mask=np.asarray(row.mask, dtype=np.int64),
                    old_log_probs=np.asarray(row.logprobs, dtype=np.float32),
                    advantage=RowAdvantage(advantage if len(rewards) > 1 else 0.0, tokens),
                    model_version=min(row.trained_versions()) - self._behind,
                    group_id=number,
                    metrics={"reward_std": spread, "reward": trajectory.reward},
                )


async def _state_of(sampler: DynamicSampler) -> SamplerState:
    """Return the sampler's state. This is a coroutine so that it runs on the sampler's event loop, where nothing else
    can change the state meanwhile."""
    return sampler.state()


class ServiceWeights:
    """The `weight_transfer` of an AsyncGRPOTrainer (WeightTransferProtocol). It publishes the trainer's weights through
    `weights`.

    A single call to the service pauses the policy, makes the engines load the weights, and resumes the policy. So
    `pause` and `resume` do nothing.
    """

    def __init__(self, weights: PolicyWeights) -> None:
        self._weights = weights

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        self._weights.publish(iterator)

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class GroupRows(msgspec.Struct, frozen=True):
    """The rows of a group. `rows` has one row for each session, in order. `left_out` has all other rows with trained
    tokens."""

    rows: list[BatchRow]
    left_out: list[TrainingRow]


def placeholders_of(processor: Any) -> frozenset[int]:
    """Return a set with the id of the image placeholder token. The set is empty if `processor`, the trainer's
    `processing_class`, makes no pixel values."""
    makes = hasattr(processor, "image_processor") and hasattr(processor, "image_token_id")
    return frozenset({int(processor.image_token_id)}) if makes else frozenset()


def rows_of(group: GroupView, placeholders: frozenset[int] = frozenset()) -> GroupRows:
    """Return the rows of a group for GRPOTrainer. If no session has a row, raises the first error of a session, or
    ServiceError for a group without sessions. Raises InvalidField if the group has images and `placeholders` is
    empty."""
    for sample in group.samples or ():
        if sample.images and not placeholders:
            raise InvalidField(
                f"session {sample.session_id} has images, and the trainer's processing_class makes no pixel values",
                field="processing_class",
                hint="give the trainer the model's processor: AutoProcessor.from_pretrained(...)",
            )
    trajectories = trajectories_of(group, SETTINGS, logprobs=True, images=True)
    some = _first_row(group, trajectories)
    rows = [_batch_row(each, some, placeholders) for each in trajectories]
    return GroupRows(rows, [row for each in trajectories for row in each.rows[1:]])


def _first_row(group: GroupView, trajectories: Sequence[Trajectory]) -> TrainingRow:
    """Return the first row of a group. If no session has a row, raises the first error of a session, or ServiceError
    for a group without sessions."""
    for trajectory in trajectories:
        if trajectory.rows:
            return trajectory.rows[0]
    raise next((each.error for each in trajectories if each.error), ServiceError(f"group {group.id} is empty"))


def _batch_row(trajectory: Trajectory, other: TrainingRow, placeholders: frozenset[int]) -> BatchRow:
    """Return the first row of a session as a row for GRPOTrainer. The row is cut before the first placeholder token
    that belongs to no image. A model may sample such a token, but raises an error when it reads such a token.

    If no trained token remains, returns a row of one token with mask 0 and the prompt of `other`."""
    row = trajectory.rows[0] if trajectory.rows else None
    cut = 0
    if row is not None:
        end = readable_end(row, len(row.ids), placeholders)
        cut = sum(row.mask[end:])
        if any(row.mask[:end]):
            return BatchRow(
                prompt_ids=row.ids[: row.start],
                completion_ids=row.ids[row.start : end],
                mask=row.mask[row.start : end],
                logprobs=row.logprobs[row.start : end],
                versions=row.versions[row.start : end],
                reward=row.reward,
                images=_images_before(row, end),
                cut=cut,
            )
    return BatchRow(
        prompt_ids=other.ids[: other.start],
        completion_ids=[next(token for token in reversed(other.ids) if token not in placeholders)],
        mask=[0],
        logprobs=[0.0],
        versions=[-1],
        reward=row.reward if row is not None else _reward_of(trajectory.session),
        images=_images_before(other, other.start),
        cut=cut,
    )


def _images_before(row: TrainingRow, end: int) -> tuple[SampleImage, ...]:
    return tuple(image for image in row.sample.images if image.span is not None and image.span[1] <= end)


def _refuse_to_leave_out(rows: Sequence[TrainingRow]) -> None:
    if rows:
        tokens = sum(sum(row.mask) for row in rows)
        raise InvalidField(
            f"session {rows[0].sample.session_id} has more than one row that trains, and GRPOTrainer has room for one:"
            f" {len(rows)} rows of the batch, with {tokens} trained tokens, would be left out",
            field="rows",
            hint='AsyncGRPOTrainer with RolloutWorker trains all rows; Rollouts(..., rows="main") leaves the others out'
            " and counts them in outrider/left_out_rows and outrider/left_out_tokens",
        )


def _rollout_reward(trajectory: Trajectory) -> float | None:
    """Return a rollout's reward for comparison with its group: the reward of its first row or, if no row has trained
    tokens, the verdict's. Returns None if the rollout was not graded."""
    return trajectory.rows[0].reward if trajectory.rows else _reward_of(trajectory.session)


def _reward_of(session: SessionView) -> float | None:
    verdict = session.result.verdict if session.result else None
    return verdict.reward if verdict else None


def _check_trainer(trainer: Any) -> None:
    """Raise InvalidField for a trainer that would silently train on data other than the service's samples."""
    if not isinstance(trainer, ServiceLogprobs):
        raise InvalidField(
            f"{type(trainer).__name__} would not use the log-probabilities that tokens were sampled with",
            field="trainer",
            hint="class Trainer(ServiceLogprobs, GRPOTrainer): pass",
        )
    trl: Any = trainer
    if not (hasattr(trl, "_step") and hasattr(trl, "_buffered_inputs")):
        raise InvalidField(
            "this TRL stores the rows of a batch in another place, so a checkpoint would lose rows",
            field="trl",
            hint=f"the bridge is tested with TRL {TESTED}: {install_command('trl')}",
        )
    if trl.use_vllm:
        raise InvalidField("the service generates", field="use_vllm", hint="GRPOConfig(use_vllm=False)")
    if trl.accelerator.num_processes > 1:
        raise InvalidField(
            f"{trl.accelerator.num_processes} processes would each take batches of their own",
            field="num_processes",
            hint="run the trainer in one process, or use AsyncGRPOTrainer, which has one worker for all",
        )


def _logprob_gap(trainer: Any, rollouts: Rollouts, output: Mapping[str, Any]) -> tuple[float | None, int]:
    """Compare the recorded log-probabilities with those that the trainer computes with the weights of each token's
    version. Returns the largest difference and the number of tokens compared. Tokens whose weights are no longer stored
    are left out. If no token is compared, the difference is None."""
    import torch

    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    width = output["completion_ids"].size(1)
    versions = torch.full_like(output["completion_ids"], -1)
    for row, own in enumerate(rollouts.versions):
        versions[row, : len(own)] = torch.tensor(own)
    gap, compared = None, 0
    for version in versions.unique().tolist():
        state = None if version < 0 else rollouts.weights.read(version)
        if state is None:
            continue
        model = _with_weights(trainer.accelerator.unwrap_model(trainer.model), state)
        rows = (versions == version).any(dim=1)
        images = rollouts.image_inputs(ids[rows], attention[rows], rows.nonzero().flatten().tolist())
        with torch.no_grad():
            computed, *_ = trainer._get_per_token_logps_and_entropies(
                model, ids[rows], attention[rows], width, **{"pixel_values": None, **images}
            )
        here = versions[rows] == version
        worst = float((computed - output["sampling_per_token_logps"][rows]).abs()[here].max())
        gap = max(worst, gap or 0.0)
        compared += int(here.sum())
    return gap, compared


def _counting_from_first_token(model: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the model in a function that gives position 0 to a row's first token, as the engine does.

    TRL pads prompts on the left, and its positions count the padding. Rotary embeddings depend only on differences of
    positions, but their angles are rounded to float32. So where attention is sharp, a shift by a few positions changes
    a log-probability by up to 8e-5.

    For a batch with images, the model itself computes positions that do not count the padding. Empty pixel values are
    left out, because the model's image encoder cannot read them.
    """

    def call(**inputs: Any) -> Any:
        if (pixels := inputs.get("pixel_values")) is not None:
            if len(pixels):
                return model(**inputs)
            inputs = {name: value for name, value in inputs.items() if name not in IMAGE_INPUTS}
        positions = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)
        return model(**inputs, position_ids=positions)

    return call


def _with_weights(model: Any, state: Mapping[str, Tensor]) -> Callable[..., Any]:
    """Wrap the model in a function that uses the parameters in `state` instead of the model's own."""
    from torch.func import functional_call

    def call(**inputs: Any) -> Any:
        return functional_call(model, dict(state), (), inputs)

    return call
