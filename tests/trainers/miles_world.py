"""The parts of miles, a fork of slime, that differ from `slime_world.py` for a rollout function.

miles is not on PyPI. This module rewrites the shapes and rules of miles' sources, as far as the bridge uses them.
Compared with github.com/radixark/miles at 31f1ca961a94 (21 August 2026), file by file:

    miles/rollout/base_types.py, miles/rollout/inference_rollout/compatibility.py
    miles/ray/rollout/rollout_manager.py (`_get_rollout_data`, `eval`)
    miles/ray/rollout/rollout_data_conversion.py, miles/ray/rollout/train_data_conversion.py
    miles/utils/types.py, miles/utils/data.py, miles/utils/eval_config.py

miles calls rollout functions through an adapter for slime's functions. The adapter returns an output of miles' own
classes unchanged. It takes an output of any other class as the samples (or the data of an evaluation) and wraps it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

from .slime_world import (
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    Sample,
    TrainingSide,
    slime_args,
    slime_modules,
)


@dataclass(frozen=True)
class RolloutInput:
    """Stands for `RolloutFnTrainInput` and `RolloutFnEvalInput`."""

    rollout_id: int
    evaluation: bool
    weight_version: int | None = None


class FunctionAdapter:
    """Stands for `LegacyRolloutFnAdapter`, which `load_rollout_function` uses for a path that does not name a class."""

    def __init__(self, args: Any, data_source: Any, function: Callable[..., Any]) -> None:
        assert not inspect.isclass(function)
        self._args = args
        self._data_source = data_source
        self._function = function

    def __call__(self, given: RolloutInput) -> Any:
        output = self._function(self._args, given.rollout_id, self._data_source, evaluation=given.evaluation)
        if not isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
            output = RolloutFnEvalOutput(data=output) if given.evaluation else RolloutFnTrainOutput(samples=output)
        return output


async def generated(function: Callable[..., Any], args: Any, sample: Sample, sampling: dict[str, Any]) -> Any:
    """Call a function as `LegacyGenerateFnAdapter` does. `load_generate_function` uses this adapter for a function of
    three arguments or more whose first argument is not called `input`."""
    names = list(inspect.signature(function).parameters)
    assert len(names) >= 3
    assert names[0] != "input"
    assert not inspect.isclass(function)
    assert "evaluation" in names
    return await function(args, sample, sampling, evaluation=False)


def miles_args(url: str, **options: Any) -> SimpleNamespace:
    """Return the options that the bridge reads, with the defaults of miles for options that slime does not have."""
    own = {"max_weight_staleness": None, "multi_lora": False, "use_rollout_indexer_replay": False}
    return slime_args(url, **own | options)


class MilesTrainingSide(TrainingSide):
    """Converts the output of a rollout function to columns, as `postprocess_rollout_data` and
    `convert_samples_to_train_data` do."""

    def rewards_by_default(self) -> list[float]:
        """Normalise rewards as miles does: over the rollouts of each `group_index`. Raises ValueError if the samples of
        a rollout have different rewards. Removed samples count."""
        args = self._args
        shared: dict[Any, dict[Any, float]] = {}
        for sample in self.samples:
            own = shared.setdefault(sample.group_index, {})
            reward = sample.get_reward_value(args)
            rollout = sample.index if sample.rollout_id is None else sample.rollout_id
            if own.setdefault(rollout, reward) != reward:
                raise ValueError(f"all samples in rollout {rollout!r} must share one reward")
        found = []
        for sample in self.samples:
            rewards = list(shared[sample.group_index].values())
            value = sample.get_reward_value(args) - fmean(rewards)
            scaled = args.advantage_estimator in ("grpo", "gspo") and args.grpo_std_normalization and len(rewards) > 1
            if scaled and stdev(rewards) > 0:
                value /= stdev(rewards) + 1e-6
            found.append(value)
        return found


@contextmanager
def miles_modules() -> Iterator[None]:
    with slime_modules("miles"):
        yield
