"""The part of the verl bridge that does not import verl. It reads the settings, converts a dataset row to a task, and
converts a session's rows to the columns of verl's AgentLoopOutput.

Nothing here awaits. Invariant: a session that cannot be trained on raises an error and gives no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import EngineError, InvalidField
from outrider.spec import Name
from outrider.trainers.pictures import readable_end
from outrider.trainers.shared_settings import BridgeSettings, read_settings, task_for
from outrider.trainers.trajectories import TrainingRow, Trajectory, chosen_metrics
from outrider.trajectory import LogprobKind

SETTINGS = "actor_rollout_ref.rollout.custom.outrider"
VARIABLE = "OUTRIDER_VERL"
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")
"""Sampling parameters that always come from verl, never from the task, because verl recomputes log-probabilities with
them."""
LABELS = ("uid", "index", "data_source", "global_steps")
"""Columns of a dataset row that become labels of the row's sessions. A row need not have them."""


class VerlSettings(BridgeSettings):
    """The settings in `rollout.custom.outrider`: the settings that all bridges share, and these:

    actor: the name of the Ray actor that runs the service. It replaces `url`.
    relay: the name of the service's relay engine. verl's own servers answer the calls to this engine.
    complete: with "all", a prompt fails if any of its sessions fails. With "any", a prompt fails only if all its
        sessions fail.

    Only the manager uses `complete` and `evaluation_priority`. An agent loop gets a single trajectory, without the
    information whether the trajectory is for training or for validation.
    """

    actor: Name | None = None
    relay: Name | None = None
    complete: Literal["all", "any"] = "all"


@dataclass(frozen=True)
class Terms:
    """What verl's configuration requires of a rollout.

    prompt_length, response_length: the maximum lengths in tokens, from verl's `rollout`.
    logprobs: whether log-probabilities are required (`rollout.calculate_log_probs`).
    sampling: verl's sampling parameters.
    media_ids: the ids of the image and video placeholders of the model's processor. If verl has no processor, the set
        is empty, and rows with images are refused."""

    prompt_length: int
    response_length: int
    logprobs: bool
    sampling: Mapping[str, Any]
    media_ids: frozenset[int] = frozenset()


def verl_settings(custom: Mapping[str, Any] | None) -> VerlSettings:
    """Read the bridge's settings from `rollout.custom`. Each call makes a new object, so rollouts do not share nested
    values. Raises InvalidField for wrong settings."""
    return read_settings(VerlSettings, (custom or {}).get("outrider"), source=SETTINGS, variable=VARIABLE)


def verl_task(settings: VerlSettings, row: Mapping[str, Any], terms: Terms) -> dict[str, Any]:
    """Return the task of a dataset row, with verl's sampling parameters. A session may sample at most as many tokens as
    verl's response length. Raises InvalidField for a row that cannot be converted."""
    sampling = {name: terms.sampling[name] for name in SAMPLING if name in terms.sampling}
    labels = {f"verl.{name}": row[name] for name in LABELS if name in row}
    task = task_for(settings, row, prompt=row.get("raw_prompt"), sampling=sampling, labels=labels)
    limits = dict(task.get("limits") or {})
    own = limits.get("response_tokens")
    # A value of another type is left unchanged: the service refuses it.
    if own is None or (isinstance(own, int) and own > terms.response_length):
        limits["response_tokens"] = terms.response_length
    return task | {"limits": limits}


def give_own_seed(task: dict[str, Any], number: Any, n: int) -> None:
    """Give a trajectory its own seed, if the task has a seed. With equal seeds, all `n` trajectories of a prompt would
    draw the same tokens. (In a group of n sessions, the service itself changes the seeds.) `number` is the trajectory's
    number, or None if verl does not pass it.

    Raises InvalidField if the task has a seed, verl passes no number, and `n` is above 1."""
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
    """Return the fields of an AgentLoopOutput, except `metrics`, for each of a session's rows with trained tokens. The
    field `images` is extra: the caller makes `multi_modal_data` from the images. The main conversation's row is last,
    because verl treats the last output as that of the session.

    The response columns have equal length, and at least one token has mask 1. `step` is used as the version if the
    engine reported none. Raises the session's error. Raises EngineError if no trained token is within verl's lengths.

    token_rewards: a number for each response id: the row's reward at the last trained id, and a turn's reward at the
        turn's end.
    cut_tokens: the number of trained tokens that were cut off. A row is cut to verl's lengths, to `max_row_tokens`, and
        before a placeholder token that does not belong to a whole image.
    """
    if trajectory.error is not None:
        raise trajectory.error
    reward = trajectory.reward
    info = {"score": reward, "acc": reward} | chosen_metrics(trajectory, settings)
    rows = [_columns(row, info, terms, step) for row in trajectory.rows]
    rows = [row for row in rows if any(row["response_mask"])]
    if not rows:
        raise EngineError(
            f"session {trajectory.session.id} samples its first token after verl's prompt and response lengths: the"
            f" prompt has {trajectory.rows[0].start} tokens",
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
            " computes log-probabilities after the temperature",
            hint="make the engine report log-probabilities after the temperature, or set rollout.temperature=1.0",
        )
    # If the prompt is longer than `prompt_length`, the rest of it is not cut off, but becomes part of the response,
    # with mask 0.
    start = min(row.start, terms.prompt_length)
    end = readable_end(row, min(start + terms.response_length, len(row.ids)), terms.media_ids)
    start = min(start, end)
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
        "images": [image for image in sample.images if image.span is not None and image.span[1] <= end],
        "extra_fields": {
            "reward_extra_info": dict(info),
            "min_global_steps": min(known),
            "max_global_steps": max(known),
            "turn_scores": [given for given in sample.turn_rewards if given is not None],
            "tool_rewards": [],
            "outrider": about,
        },
    }
