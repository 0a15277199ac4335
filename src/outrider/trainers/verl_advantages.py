"""Advantage estimators for verl's V1 trainer, and a check that verl's configuration fits them. In a group's mean
reward, each rollout counts once, no matter how many rows it has.

The module does not import verl. The manager of `outrider.trainers.verl` registers the estimators. Of the columns that
verl passes to an estimator, only `uid` can identify a rollout. So the manager's workers put the key
`{uid}_{session}_{row}` into this column. The row with the highest number is the main conversation's.

Invariant: if verl uses the loss aggregation AGGREGATION, each token has the weight that docs/trainers/weights.md
prescribes. This holds for the mean over verl's mini-batches, not for each mini-batch alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from outrider.errors import InvalidField
from outrider.trainers.verl_rows import SETTINGS, VerlSettings

AGGREGATION = "seq-mean-token-mean"
"""The loss aggregation that the estimators need. It divides by a row's trained tokens, and by the configured number of
rows in a mini-batch. Neither number depends on which rows share a mini-batch or micro-batch."""
SCALABLE_LOSSES = frozenset({"vanilla", "gspo", "cispo", "sapo", "gpg", "dppo_tv", "dppo_kl"})
"""verl's policy losses that use the configured aggregation, and that grow by the same factor when the advantages are
multiplied by a positive number."""
EPSILON = 1e-6
"""A small number that is added to a standard deviation before a division by it, as in verl's GRPO."""

Share = Callable[[Any, Any, int], Any]
"""A function that computes each row's share of the total weight. Its arguments are the trained tokens of each row, the
trained tokens of each row's rollout, and the number of rollouts."""


def estimate(
    share: Share, *, token_level_rewards: Any, response_mask: Any, index: Sequence[str], config: Any, **_: Any
) -> Any:
    """Return verl's pair (advantages, returns): the advantages with and without the weights of the rows.

    `token_level_rewards`, `response_mask` and the results are tensors [rows, response length]. `index` has the rows'
    keys. Raises InvalidField if a row with trained tokens has no key.
    """
    with torch.no_grad():
        trained = response_mask.sum(-1)
        keys = [_key(str(key), int(count)) for key, count in zip(index, trained, strict=True)]
        advantage = _advantages(token_level_rewards.sum(-1), keys, config)[:, None] * response_mask
        tokens: Counter[tuple[str, str]] = Counter()
        for key, count in zip(keys, trained.tolist(), strict=True):
            if key is not None and count:
                tokens[key[:2]] += count
        of_rollout = torch.tensor([tokens[key[:2]] if key else 0 for key in keys], device=trained.device).clamp(min=1)
        # AGGREGATION divides by the number of rows, including padding. The factor `len(keys)` cancels this division.
        factor = len(keys) * share(trained, of_rollout, len(tokens))
        return advantage * factor[:, None], advantage


ESTIMATORS: Mapping[str, Callable[..., Any]] = {
    "outrider_rollout": partial(estimate, lambda trained, of_rollout, rollouts: trained / (rollouts * of_rollout)),
    "outrider_row": partial(estimate, lambda trained, of_rollout, rollouts: (trained > 0) / (trained > 0).sum()),
    "outrider_token": partial(estimate, lambda trained, of_rollout, rollouts: trained / trained.sum()),
}
"""The estimators by their names in `algorithm.adv_estimator`. The name says what has equal weight: rollouts, rows or
tokens."""


def check_weights(config: Any, settings: VerlSettings) -> None:
    """Raise InvalidField if verl would count rows as rollouts, or would not apply the weights of the chosen estimator.
    `config` is verl's whole configuration."""
    name = config.algorithm.adv_estimator
    actor = config.actor_rollout_ref.actor
    if name not in ESTIMATORS:
        if settings.rows == "all":
            raise InvalidField(
                f"sessions may have several rows, and with algorithm.adv_estimator={name} verl counts each row as a"
                " rollout",
                field="algorithm.adv_estimator",
                hint=f"set algorithm.adv_estimator=outrider_rollout and"
                f" actor_rollout_ref.actor.loss_agg_mode={AGGREGATION}; or {SETTINGS}.rows=main, to train the main"
                " conversation's row only",
            )
        return
    wrong: list[tuple[str, Any, str]] = []
    if actor.loss_agg_mode != AGGREGATION:
        wrong.append(("actor_rollout_ref.actor.loss_agg_mode", actor.loss_agg_mode, f"set it to {AGGREGATION}"))
    mode = actor.policy_loss.get("loss_mode", "vanilla")
    if mode not in SCALABLE_LOSSES:
        hint = f"set it to one of {', '.join(sorted(SCALABLE_LOSSES))}"
        wrong.append(("actor_rollout_ref.actor.policy_loss.loss_mode", mode, hint))
    if config.actor_rollout_ref.rollout.n < 2:
        hint = "set it to 2 or more: the advantage is relative to the group's other rollouts"
        wrong.append(("actor_rollout_ref.rollout.n", config.actor_rollout_ref.rollout.n, hint))
    for field, value, hint in wrong:
        raise InvalidField(f"{field} is {value}, with algorithm.adv_estimator={name}", field=field, hint=hint)


def check_loop(settings: VerlSettings) -> None:
    """Raise InvalidField if the setting `rows` is "all" for an agent loop in the V1 trainer. There, the setting must be
    "main", because no estimator can weight the rows."""
    if settings.rows == "all":
        raise InvalidField(
            "sessions may have several rows, and verl's V1 trainer would count each row as a rollout",
            field=f"{SETTINGS}.rows",
            hint=f"set {SETTINGS}.rows=main, or use outrider.trainers.verl.OutriderAgentLoopManager",
        )


def _advantages(scores: Any, keys: Sequence[tuple[str, str, int] | None], config: Any) -> Any:
    """Return the advantage of each row: its reward minus the mean reward of its group's rollouts. The reward of a
    rollout is the reward of its main row. If `norm_adv_by_std_in_grpo` is true (the default), the result is divided by
    the standard deviation of the rollouts' rewards.

    With this division, the advantages are 0 if all rollouts of the group have the same reward. This rule matters for a
    row whose reward differs from its rollout's reward. Without the rule, the difference would be divided by EPSILON
    alone."""
    main: dict[str, dict[str, tuple[int, int]]] = {}
    for place, key in enumerate(keys):
        if key is not None:
            uid, session, row = key
            of_group = main.setdefault(uid, {})
            of_group[session] = max(of_group.get(session, (-1, -1)), (row, place))
    by_std = config is None or config.get("norm_adv_by_std_in_grpo", True)
    advantage = torch.zeros_like(scores)
    rewards = {uid: scores[[place for _, place in of_group.values()]] for uid, of_group in main.items()}
    for place, key in enumerate(keys):
        if key is None or len(rewards[key[0]]) < 2:  # a single rollout has no group to be compared with
            continue
        of_group = rewards[key[0]]
        if not by_std:
            advantage[place] = scores[place] - of_group.mean()
        elif of_group.min() != of_group.max():  # equal rewards may have a deviation of 1e-8, by rounding
            advantage[place] = (scores[place] - of_group.mean()) / (of_group.std() + EPSILON)
    return advantage


def _key(key: str, trained: int) -> tuple[str, str, int] | None:
    """Return the parts of a row's key, or None for a row that verl has added to fill a mini-batch. Raises InvalidField
    if a row with trained tokens has no key."""
    parts = key.rsplit("_", 2)
    if len(parts) == 3:
        return parts[0], parts[1], int(parts[2])
    if trained:
        raise InvalidField(
            f"the rows of prompt {key!r} do not name their sessions, which only Outrider's manager has them do",
            field="algorithm.adv_estimator",
            hint="set +actor_rollout_ref.rollout.agent.agent_loop_manager_class="
            "outrider.trainers.verl.OutriderAgentLoopManager",
        )
    return None
