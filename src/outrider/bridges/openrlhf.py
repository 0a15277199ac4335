"""The bridge to OpenRLHF: an agent executor whose rollouts are sessions of a service.

The file that `--train.agent_func_path` names has two lines:

    from outrider.bridges.openrlhf import agent_executor
    AgentExecutor = agent_executor()

OpenRLHF calls `execute` once for each sample of a prompt, inside its rollout actors, and takes one row from each call
(`openrlhf.trainer.ppo_utils.samples_generator`, 0.11). This module does not import it. Invariants: the row's tokens are
those that the engine sampled, with mask and log-probabilities aligned; and a session that cannot be trained on raises.
"""

from __future__ import annotations

import importlib
import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from outrider.bridges.shared_client import shared_client
from outrider.bridges.trajectories import (
    BridgeSettings,
    chosen_metrics,
    read_settings,
    task_for,
    trajectories_of,
)
from outrider.errors import InvalidField

VARIABLE = "OUTRIDER_OPENRLHF"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "repetition_penalty", "stop")
"""What is read of vLLM's SamplingParams, which OpenRLHF passes as an object."""


class OpenRLHFSettings(BridgeSettings):
    """A call gives one row, so `rows` is "main": that of the session's main conversation."""

    rows: Literal["main"] = "main"


class Executor:
    """`openrlhf.utils.agent.AgentExecutorBase` without its base class, which only `agent_executor` needs."""

    def __init__(self, settings: OpenRLHFSettings) -> None:
        self._settings = settings

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """One session, as OpenRLHF's response. `label` may be a JSON object: the columns of the row, its task among
        them. Raises the session's error: OpenRLHF has no other way to be told, and ends its training with it."""
        if images:
            raise InvalidField(
                "the prompt has images, which this bridge does not hand over", field="images", hint="use text prompts"
            )
        cap = self._settings.max_row_tokens
        settings = self._settings.model_copy(update={"max_row_tokens": min(cap, max_length) if cap else max_length})
        sampling = {name: getattr(sampling_params, name, None) for name in SAMPLING}
        wants_logprobs = sampling_params.logprobs is not None
        task = task_for(settings, _columns(prompt, label), prompt=prompt, sampling=sampling, labels={})
        async with shared_client(settings.url, settings.token) as client:
            group = await client.run(
                {"task": task, "priority": settings.priority, "idempotency_key": secrets.token_hex(16)}
            )
        [trajectory] = trajectories_of(group, settings, logprobs=wants_logprobs)
        if trajectory.error is not None:
            raise trajectory.error
        row = trajectory.rows[0]
        return {
            "prompt": prompt,
            "label": label,
            "images": images,
            "mm_train_inputs": None,
            "observation_tokens": row.ids,
            "action_ranges": list(_ranges(row.mask)),
            "rollout_log_probs": row.logprobs if wants_logprobs else None,
            "reward": trajectory.reward,
            "scores": trajectory.reward,
            "truncated": trajectory.truncated,
            # OpenRLHF makes columns of these: every row must have the same ones, and numbers only.
            "extra_logs": {
                "outrider_turns": float(trajectory.result.turns),
                "outrider_agent_seconds": trajectory.seconds,
                "outrider_rows_left_out": float(trajectory.result.samples - 1),
                "outrider_cut_tokens": float(row.cut),
                "outrider_version": float(row.sample.min_version),
                **chosen_metrics(trajectory, settings),
            },
        }


def agent_executor(settings: Mapping[str, Any] | None = None) -> type:
    """The class that OpenRLHF looks for by the name AgentExecutor, with these settings and those in $OUTRIDER_OPENRLHF.
    Raises InvalidField for wrong settings, ImportError without OpenRLHF."""
    checked = read_settings(OpenRLHFSettings, settings, source="agent_executor()", variable=VARIABLE)
    base: type = importlib.import_module("openrlhf.utils.agent").AgentExecutorBase

    def init(self: Executor) -> None:
        Executor.__init__(self, checked)

    return type("AgentExecutor", (Executor, base), {"__init__": init, "__doc__": Executor.__doc__})


def _columns(prompt: str, label: Any) -> dict[str, Any]:
    columns = {"prompt": prompt, "label": label}
    if isinstance(label, Mapping):
        return columns | dict(label)
    if isinstance(label, str) and label.lstrip().startswith("{"):
        try:
            read = json.loads(label)
        except json.JSONDecodeError:
            return columns  # an answer that happens to begin with a brace
        return columns | read if isinstance(read, dict) else columns
    return columns


def _ranges(mask: list[int]) -> Iterator[tuple[int, int]]:
    """The spans [start, end) of ones."""
    start = None
    for place, trains in enumerate([*mask, 0]):
        if trains and start is None:
            start = place
        elif not trains and start is not None:
            yield start, place
            start = None
