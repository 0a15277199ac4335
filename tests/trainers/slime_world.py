"""The environment of a rollout function in slime, rebuilt from slime's sources of August 2026 and later.

slime cannot be installed from PyPI, where its package is empty. This module rewrites the fields, shapes and rules of
slime's sources, as far as the bridge uses them. Compared with github.com/THUDM/slime file by file:

    slime/ray/rollout.py, slime/data/batch_builder.py, slime/data/data_source.py   13b347f8da1f
    slime/rollout/fully_async_rollout.py                                           17211d4485e9
    slime/rollout/sglang_rollout.py (filters, evaluation, aborts)                  0044b40d6584
    slime/observability/rollout_metrics.py                                         0a2bc654e0a1
    slime/utils/metric_utils.py (pass rates)                                       45fcf06f3343
    slime/backends/megatron_utils/loss.py, cp_utils.py (denominators of the loss)  624b824a898a
    slime/backends/megatron_utils/data.py, utils/processing_utils.py (images)      624b824a898a

`TrainingSide` processes the output as `RolloutManager` and its `BatchBuilder` do, including the trap of
`rewards_by_default`; only some revisions of slime normalise for "rloo". `logged_evaluation` computes the metrics of an
evaluation. `FullyAsyncWorker` is slime's fully asynchronous rollout with `--custom-generate-function-path`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np


@dataclass
class Sample:
    """`slime.utils.types.Sample`: one response to one prompt."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None

    def get_reward_value(self, args: Any) -> float:
        return float(self.reward[args.reward_key] if args.reward_key else self.reward)


@dataclass
class RolloutFnTrainOutput:
    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def nonzero_std(args: Any, samples: list[Sample], **_: Any) -> DynamicFilterOutput:
    """Keep a group if its rewards differ, as slime's `check_reward_nonzero_std` does."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    return DynamicFilterOutput(keep=max(rewards) > min(rewards), reason=f"zero_std_{rewards[0]}")


def spares_few(args: Any, samples: list[Sample], **_: Any) -> DynamicFilterOutput:
    """Drop groups with equal rewards, unless slime would then have too few groups. The filter also writes into the
    samples."""
    for sample in samples:
        sample.metadata["seen"] = True
    return DynamicFilterOutput(nonzero_std(args, samples).keep, "alike", keep_when_insufficient=True)


class Dataset:
    """`slime.utils.data.Dataset`, for a file of JSON lines."""

    def __init__(self, path: str, tokenizer: Any, processor: Any, max_length: int | None, **options: Any) -> None:
        assert tokenizer is None  # without a tokenizer, prompts are not filtered by length
        assert max_length is None
        assert options["multimodal_keys"] is None
        assert options["apply_chat_template"] is False
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        self.samples = [
            Sample(
                prompt=row[options["prompt_key"]],
                label=row.get(options["label_key"]),
                metadata=row.get(options["metadata_key"]) or {},
            )
            for row in rows
        ]


class DataSource:
    """Stands for `RolloutDataSourceWithBuffer`. Gives the prompts in order, over and over. Groups that were given back
    come first."""

    def __init__(self, args: Any, prompts: Sequence[Sample]) -> None:
        self.buffer: list[list[Sample]] = []
        self.given = 0
        self._args = args
        self._prompts = prompts

    def get_samples(self, number: int) -> list[list[Sample]]:
        found = self.buffer[:number]
        del self.buffer[:number]
        while len(found) < number:
            group: list[Sample] = []
            for _ in range(self._args.n_samples_per_prompt):
                sample = copy.deepcopy(self._prompts[self.given % len(self._prompts)])
                sample.group_index = self.given
                sample.index = self.given * self._args.n_samples_per_prompt + len(group)
                group.append(sample)
            self.given += 1
            found.append(group)
        return found

    def add_samples(self, groups: list[list[Sample]]) -> None:
        for group in groups:
            assert len(group) == self._args.n_samples_per_prompt
            self.buffer.append(group)


class EvalSet:
    """`slime.utils.eval_config.EvalDatasetConfig`."""

    def __init__(self, name: str, path: Path, n: int = 1, **options: Any) -> None:
        self.name = name
        self.path = str(path)
        self.n_samples_per_eval_prompt = n
        self.input_key, self.label_key, self.metadata_key, self.tool_key = "prompt", "label", "metadata", None
        self.temperature, self.top_p, self.top_k, self.max_response_len = 0.6, 1.0, -1, 64
        self.stop, self.stop_token_ids, self.min_new_tokens, self.repetition_penalty = None, None, None, None
        self.multimodal_keys = None
        vars(self).update(options)

    def inject_metadata(self, metadata: Any) -> dict[str, Any]:
        return dict(metadata or {}) | {"evaluated": self.name}


def slime_args(url: str, **options: Any) -> SimpleNamespace:
    """Return the options that the bridge reads, with slime's defaults if there are any."""
    return SimpleNamespace(
        **{
            "outrider": {"url": url},
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "over_sampling_batch_size": 2,
            "dynamic_sampling_filter_path": None,
            "rollout_sample_filter_path": None,
            "partial_rollout": False,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "rollout_max_response_len": 64,
            "rollout_stop": None,
            "rollout_stop_token_ids": None,
            "rollout_seed": 42,
            "reward_key": None,
            "eval_reward_key": None,
            "advantage_estimator": "grpo",
            "rewards_normalization": True,
            "grpo_std_normalization": True,
            "custom_reward_post_process_path": "outrider.trainers.slime.post_process_rewards",
            "custom_convert_samples_to_train_data_path": None,
            "eval_datasets": [],
            "eval_min_new_tokens": None,
            "multimodal_keys": None,
            "log_passrate": False,
        }
        | options
    )


class TrainingSide:
    """Converts the output of a rollout function to columns, as `RolloutManager` does."""

    def __init__(self, args: Any, output: RolloutFnTrainOutput) -> None:
        self._args = args
        self._check_rollout_ids(output.samples)
        assert args.rollout_top_p == 1.0, "slime asks every sample for the ids that top-p sampling kept"
        flat: list[Any] = output.samples
        while isinstance(flat[0], list):
            flat = [inner for outer in flat for inner in outer]
        self.samples: list[Sample] = flat
        for sample in flat:
            assert sample.loss_mask is not None
            assert len(sample.loss_mask) == sample.response_length
            assert len(sample.tokens) > sample.response_length > 0
            assert sample.rollout_log_probs is None or len(sample.rollout_log_probs) == sample.response_length
        assert len({sample.rollout_log_probs is None for sample in flat}) == 1

    def rewards_by_default(self) -> list[float]:
        """Normalise rewards as slime does. The trap: if the number of samples differs from a plain rollout's, slime
        takes all samples as one group."""
        args = self._args
        rewards = np.array([sample.get_reward_value(args) for sample in self.samples])
        plain = len(rewards) == args.n_samples_per_prompt * args.rollout_batch_size
        groups = rewards.reshape(-1, args.n_samples_per_prompt) if plain else rewards.reshape(1, -1)
        centred = groups - groups.mean(axis=1, keepdims=True)
        if args.advantage_estimator in ("grpo", "gspo", "cispo") and args.grpo_std_normalization:
            centred = centred / (centred.std(axis=1, ddof=1, keepdims=True) + 1e-6)
        if args.advantage_estimator == "rloo":
            centred = centred * groups.shape[1] / (groups.shape[1] - 1)
        return [float(value) for value in centred.flatten()]

    def multimodal_inputs(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return the inputs for the images of a micro-batch, as `get_batch` passes them to the model beside the
        concatenated tokens: for each key, the tensors of the samples, concatenated."""
        joined: dict[str, Any] = {}
        for number in numbers:
            for key, tensor in (self.samples[number].multimodal_train_inputs or {}).items():
                joined[key] = np.concatenate([joined[key], tensor.numpy()]) if key in joined else tensor.numpy()
        return joined

    def mask_sums(self) -> list[int]:
        """Return for each sample the number of trained tokens in its rollout: the denominator of the sample's loss."""
        sums: dict[Any, int] = {}
        masks = [[] if sample.remove_sample else sample.loss_mask or [] for sample in self.samples]
        for sample, mask in zip(self.samples, masks, strict=True):
            sums[sample.rollout_id] = sums.get(sample.rollout_id, 0) + sum(mask)
        return [sums[sample.rollout_id] for sample in self.samples]

    def loss(
        self, values: Sequence[Sequence[float]], micro_batches: Sequence[Sequence[int]], *, per_token: bool = False
    ) -> float:
        """Return the loss of one step. `values` has the loss of each token of each sample. The computation is that of
        `loss_function` and `get_sum_of_sample_mean` in slime/backends/megatron_utils, without the factors that cancel
        Megatron's divisions. A step has whole rollouts, but a micro-batch (the numbers of its samples) may have a part
        of a rollout. `per_token` is `--calculate-per-token-loss`."""
        sums = self.mask_sums()
        rollouts = len({sample.rollout_id for sample in self.samples})
        masks = [[] if sample.remove_sample else sample.loss_mask or [] for sample in self.samples]
        total = 0.0
        for numbers in micro_batches:
            for number in numbers:
                masked = sum(value for value, kept in zip(values[number], masks[number], strict=True) if kept)
                total += masked if per_token else masked / max(sums[number], 1)
        return total / (sum(map(sum, masks)) if per_token else rollouts)

    def _check_rollout_ids(self, node: Any, depth: int = 0) -> None:
        if depth >= 2 and isinstance(node[0], Sample) and len(node) > 1:
            ids = {sample.rollout_id for sample in node}
            assert len(ids) == 1
            assert None not in ids
        for inner in node if isinstance(node[0], list) else ():
            self._check_rollout_ids(inner, depth + 1)


def logged_evaluation(args: Any, data: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the metrics that slime logs for an evaluation: the sum of the rewards divided by their number, and pass
    rates, for which a reward must be 1 and n consecutive rewards belong to one prompt."""
    found: dict[str, float] = {}
    for name, of_set in data.items():
        rewards = of_set["rewards"]
        found[name] = sum(rewards) / len(rewards)
        n = args.n_samples_per_eval_prompt
        if args.log_passrate and n > 1:
            groups = np.array(rewards).reshape(len(rewards) // n, n)
            found[f"{name}-pass@{n}"] = float((groups == 1).any(axis=1).mean())
    return found


class FullyAsyncWorker:
    """The part of `slime.rollout.fully_async_rollout` that decides about a group. A group with an aborted sample goes
    back to the data source unchanged. A group whose generation raises an error is dropped, and slime logs a line."""

    def __init__(self, args: Any, source: DataSource, generate: Any) -> None:
        self.done: list[list[Any]] = []
        self.dropped: list[Exception] = []
        self._args = args
        self._source = source
        self._generate = generate

    async def roll_one_group(self) -> None:
        [group] = self._source.get_samples(1)
        try:
            rolled = [await self._generate_and_rm(sample) for sample in group]
        except Exception as error:
            self.dropped.append(error)
            return
        if any(getattr(sample, "status", None) is Sample.Status.ABORTED for sample in rolled):
            self._source.add_samples([rolled])
        else:
            self.done.append(rolled)

    async def _generate_and_rm(self, sample: Sample) -> Any:
        if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
            assert sample.reward is not None
            return sample
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 64, "no_stop_trim": True}
        return await self._generate(self._args, sample, sampling, evaluation=False)


@contextmanager
def slime_modules(package: str = "slime", load_processor: Any = None) -> Iterator[None]:
    """Install the modules that the bridge imports by name. `package` is slime or a fork of slime."""
    processing = ModuleType(f"{package}.utils.processing_utils")
    vars(processing).update(load_processor=load_processor)
    base_types, data = ModuleType(f"{package}.rollout.base_types"), ModuleType(f"{package}.utils.data")
    vars(base_types).update(RolloutFnTrainOutput=RolloutFnTrainOutput, RolloutFnEvalOutput=RolloutFnEvalOutput)
    vars(data).update(Dataset=Dataset)
    names = (package, f"{package}.rollout", f"{package}.utils")
    modules = {name: ModuleType(name) for name in names} | {
        each.__name__: each for each in (base_types, data, processing)
    }
    with patch.dict(sys.modules, modules):
        yield
