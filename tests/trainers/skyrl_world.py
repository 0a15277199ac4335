"""An input of SkyRL's generators as SkyRL's trainer makes it, rebuilt from skyrl 0.4 (`skyrl/train/generators/base.py`
and `prepare_generator_input`), and the rules of `validate_generator_output` that every output must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


VLLM_PARAMS: dict[str, Any] = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 64,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}
"""The result of `get_vllm_sampling_params`."""


def generator_cfg(**options: bool) -> SimpleNamespace:
    """Return the options of `cfg.generator` that a bridge reads."""
    off = {"step_wise_trajectories": False, "apply_overlong_filtering": False, "zero_reward_on_non_stop": False}
    return SimpleNamespace(**off | options)


def generator_input(
    tasks: Sequence[dict[str, Any]], n: int, *, phase: str = "train", trajectory_id: Any = TrajectoryID, **params: Any
) -> dict[str, Any]:
    """Return an input with `n` rows for each task. The task is in the column `task` of its rows."""
    rows = [(f"row{number}", task, sample) for number, task in enumerate(tasks) for sample in range(n)]
    return {
        "prompts": [[{"role": "user", "content": f"say {uid}"}] for uid, _, _ in rows],
        "env_classes": ["outrider" for _ in rows],
        "env_extras": [{"task": task, "data_source": "test"} for _, task, _ in rows],
        "sampling_params": VLLM_PARAMS | params,
        "trajectory_ids": [trajectory_id(instance_id=uid, repetition_id=sample) for uid, _, sample in rows],
        "batch_metadata": SimpleNamespace(global_step=7, training_phase=phase),
    }


def check_output(prompts: int, output: dict[str, Any], *, step_wise: bool = False) -> None:
    rows = len(output["response_ids"])
    assert rows == prompts or step_wise
    columns = ["prompt_token_ids", "loss_masks", "rewards", "stop_reasons", "trajectory_ids"]
    columns += ["trajectory_generation_times", "env_metrics"]
    columns += ["rollout_logprobs"] if output["rollout_logprobs"] is not None else []
    columns += ["is_last_step"] if step_wise else []
    assert {name: len(output[name]) for name in columns} == dict.fromkeys(columns, rows)
    for row in range(rows):
        length = len(output["response_ids"][row])
        assert length == len(output["loss_masks"][row]) > 0
        assert output["prompt_token_ids"][row]
        if output["rollout_logprobs"] is not None:
            assert len(output["rollout_logprobs"][row]) == length
    if not step_wise:
        assert output["is_last_step"] is None
        return
    seen: list[str] = []
    for row in range(rows):
        name = output["trajectory_ids"][row].to_string()
        following = output["trajectory_ids"][row + 1].to_string() if row + 1 < rows else ""
        assert output["is_last_step"][row] is (name != following)
        if name != following:
            assert name not in seen
            seen.append(name)
