"""The part of the verl bridge that does not need verl: its settings, the task of a dataset row, and a session's rows as
the columns of verl's AgentLoopOutput.

Nothing here awaits. Invariant: a session that cannot be trained on raises; it never becomes a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import EngineError, InvalidField
from outrider.spec import Name
from outrider.trainers.shared_settings import BridgeSettings, read_settings, task_for
from outrider.trainers.trajectories import TrainingRow, Trajectory, chosen_metrics
from outrider.trajectory import LogprobKind

SETTINGS = "actor_rollout_ref.rollout.custom.outrider"
VARIABLE = "OUTRIDER_VERL"
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")
"""The sampling parameters that are taken from verl, because verl recomputes log-probabilities with them."""
LABELS = ("uid", "index", "data_source", "global_steps")
"""Columns of a row that become labels of its sessions, if the row has them."""


class VerlSettings(BridgeSettings):
    """`rollout.custom.outrider`: the settings of all bridges, and these.

    actor: the named Ray actor that runs the service, instead of `url`. relay: the name of the relay engine through
    which verl's own servers generate. complete: whether "all" sessions of a prompt must succeed, or "any". Only the
    manager uses `complete` and `evaluation_priority`: an agent loop gets a single trajectory, and not whether the
    trajectory is for training or validation.
    """

    actor: Name | None = None
    relay: Name | None = None
    complete: Literal["all", "any"] = "all"


@dataclass(frozen=True)
class Terms:
    """verl's terms for a rollout: `rollout.prompt_length` and `.response_length` in tokens, whether log-probabilities
    are required (`.calculate_log_probs`), and the sampling parameters."""

    prompt_length: int
    response_length: int
    logprobs: bool
    sampling: Mapping[str, Any]


def verl_settings(custom: Mapping[str, Any] | None) -> VerlSettings:
    """Return the settings in `rollout.custom`. Each call reads the settings anew, so that no two rollouts share a
    nested value. Raises InvalidField."""
    return read_settings(VerlSettings, (custom or {}).get("outrider"), source=SETTINGS, variable=VARIABLE)


def verl_task(settings: VerlSettings, row: Mapping[str, Any], terms: Terms) -> dict[str, Any]:
    """Return the task of a dataset row, with verl's sampling parameters. The limit of sampled tokens is at most verl's
    response length. Raises InvalidField."""
    sampling = {name: terms.sampling[name] for name in SAMPLING if name in terms.sampling}
    labels = {f"verl.{name}": row[name] for name in LABELS if name in row}
    task = task_for(settings, row, prompt=row.get("raw_prompt"), sampling=sampling, labels=labels)
    limits = dict(task.get("limits") or {})
    own = limits.get("response_tokens")
    if own is None or (isinstance(own, int) and own > terms.response_length):  # the service refuses other types
        limits["response_tokens"] = terms.response_length
    return task | {"limits": limits}


def give_own_seed(task: dict[str, Any], number: Any, n: int) -> None:
    """Set the seed of a task for one of `n` trajectories of a prompt, so that no two trajectories draw the same tokens.
    (For a group of n sessions, the service does so.) `number` is the trajectory's number, None if verl does not pass
    one. Raises InvalidField."""
    seed = task["sampling"].get("seed")
    if seed is None or (number is None and n == 1):
        return
    if number is None:
        raise InvalidField(
            "verl's V0 trainer does not tell the trajectories of a prompt apart, so they cannot have seeds",
            field=f"{SETTINGS}.task.sampling.seed",
            hint="leave the seed out, or set trainer.use_v1=True",
        )
    task["sampling"]["seed"] = seed + int(number)


def columns_of(trajectory: Trajectory, settings: VerlSettings, terms: Terms, *, step: int) -> list[dict[str, Any]]:
    """Return the fields of an AgentLoopOutput, without `metrics`, for each row of a session that trains. The main
    conversation's fields are last, because verl takes the last ones as the session's own. `step` is the version of
    tokens whose engine reported no version. Raises the session's error.

    The response columns have equal length, and at least one token has mask 1. `token_rewards` has a number for each
    response id: the row's reward at the last id that trains, and the reward of a turn at the turn's end. The
    `cut_tokens` of a row are those that would have trained, but lie behind verl's lengths.
    """
    if trajectory.error is not None:
        raise trajectory.error
    reward = trajectory.reward
    info = {"score": reward, "acc": reward} | chosen_metrics(trajectory, settings)
    rows = [_columns(row, info, terms, step) for row in trajectory.rows]
    rows = [row for row in rows if any(row["response_mask"])]
    if not rows:
        raise EngineError(
            f"session {trajectory.session.id} samples its first token behind what verl takes: its prompt has"
            f" {trajectory.rows[0].start} tokens",
            hint="raise rollout.prompt_length and rollout.response_length",
        )
    rows.reverse()
    return rows


def _columns(row: TrainingRow, info: dict[str, float], terms: Terms, step: int) -> dict[str, Any]:
    sample = row.sample
    temperature = float(terms.sampling.get("temperature", 1.0))
    if terms.logprobs and sample.logprob_kind is LogprobKind.RAW and temperature not in (0.0, 1.0):
        raise EngineError(
            f"session {sample.session_id} has log-probabilities from before the temperature ({temperature:g}), and verl"
            " compares them with its own, behind it",
            hint="have the engine report those of the sampling distribution, or set rollout.temperature=1.0",
        )
    # Ids of a prompt behind prompt_length go to the response, with mask 0: so the prompt is not cut, and the sequence
    # of ids is unchanged.
    start = min(row.start, terms.prompt_length)
    end = start + terms.response_length
    mask = row.mask[start:end]
    trained = [version for version, trains in zip(row.versions[start:end], mask, strict=True) if trains]
    known = [version for version in trained if version >= 0] or [step]
    about = {
        "session_id": sample.session_id,
        "group_id": sample.group_id,
        "row": sample.row,
        "kind": sample.kind.value,
        "stop_reason": sample.stop_reason.value,
        "metrics": dict(sample.metrics),
        "altered_turns": len(sample.altered),
        "cut_tokens": row.cut + sum(row.mask[end:]),
    }
    return {
        "prompt_ids": row.ids[:start],
        "response_ids": row.ids[start:end],
        "response_mask": mask,
        "response_logprobs": row.logprobs[start:end] if terms.logprobs else None,
        "reward_score": row.reward,
        "token_rewards": sample.token_rewards(min(end, len(row.ids)))[start:],
        "num_turns": 2 * len(sample.turns),
        "extra_fields": {
            "reward_extra_info": dict(info),
            "min_global_steps": min(known),
            "max_global_steps": max(known),
            "turn_scores": [given for given in sample.turn_rewards if given is not None],
            "tool_rewards": [],
            "outrider": about,
        },
    }
