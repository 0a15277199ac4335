"""Refuses the settings of Polar's bridge for slime, because Outrider's own bridge does not read them. The error says
what to set instead.

Polar's bridge itself works unchanged with `outrider serve --compat polar`. Invariant: a setting of Polar's bridge is
silently ignored only if it is false, zero or empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import InvalidField

PREFIX = "polar_"
INSTEAD: Mapping[str, str] = {
    "polar_rollout_url": "set outrider.url to the service's address",
    "polar_topology_path": "set outrider.url; the service reads the topology: outrider serve --config topology.yaml",
    "polar_task_template": "set outrider.task, in which {row.NAME} is an entry of the sample's metadata",
    "polar_task_id_template": "leave it out: the service chooses the ids of groups",
    "polar_instruction_template": "set outrider.task.instruction",
    "polar_reward_key": "leave it out: the reward is that of the task's evaluator",
    "polar_max_async_level": "set outrider.max_age, the policy versions by which a token may be older",
    "polar_fully_async": "use --rollout-function-path outrider.trainers.slime.generate_rollout_async",
    "polar_request_timeout": "leave it out: the client repeats its requests",
    "polar_task_timeout_floor": "set outrider.task.limits.session_seconds",
    "polar_train_agent_timeout": "set outrider.task.limits.agent_seconds",
    "polar_eval_agent_timeout": "set limits.agent_seconds in the tasks of the evaluation set",
    "polar_callback_host": "leave it out: the bridge reads results by cursor, and needs no callbacks",
    "polar_scoring_mode": "use --custom-reward-post-process-path outrider.trainers.slime.post_process_rewards",
    "polar_min_complete_accept_fraction": "set outrider.complete to all, or to any",
    "polar_early_stop_grace_sessions": "set outrider.min_usable",
    "polar_add_generation_prompt": "leave it out: the service renders the prompts",
    "polar_eval_dataset_name": "leave it out: the bridge names evaluations after slime's sets",
}
"""The settings of Polar's bridge, each with what to do instead."""


def refuse_polar_settings(args: Any) -> None:
    """Raise InvalidField if slime's arguments contain a setting of Polar's bridge that is not false, zero or empty."""
    for name, value in vars(args).items():
        if name.startswith(PREFIX) and value:
            raise InvalidField(
                f"{name} is a setting of Polar's bridge, and has no effect on Outrider's",
                field=name,
                hint=INSTEAD.get(name, "leave it out"),
            )
