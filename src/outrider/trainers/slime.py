"""The bridge to slime and its fork miles: rollout functions that run sessions of an Outrider service.

    --rollout-function-path outrider.trainers.slime.generate_rollout
    --rollout-function-path outrider.trainers.slime.generate_rollout_async   groups continue between the rollouts
    --custom-generate-function-path outrider.trainers.slime.custom_generate  slime's own loop, a session for each sample
    --custom-reward-post-process-path outrider.trainers.slime.post_process_rewards

The bridge is written for slime of August 2026 (`slime/rollout/sglang_rollout.py`, `slime/ray/rollout.py`) and miles of
the same month (`miles/rollout/base_types.py`). miles calls the functions with slime's arguments. Neither package is
imported before a function is called. Invariants:

- The samples of slime's data source are copied, never changed.
- In the rollout functions, the n samples of a prompt come from one group of the service.
- The tokens, mask and log-probabilities of a sample are aligned, and equal those of the service's row.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import importlib
import logging
import sys
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from statistics import fmean, stdev
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

from pydantic import NonNegativeInt

from outrider.client.client import AsyncClient, Client, patiently
from outrider.client.sampling import Batch, Choice, DynamicSampler, rewards_of
from outrider.errors import EngineError, InvalidField, OutriderError, ServiceError
from outrider.lifecycle import StopReason
from outrider.schemas import GroupView
from outrider.spec import EVALUATION_LABEL
from outrider.tokens.rendering.image_grids import Grid
from outrider.trainers.pictures import image_in_grid, readable_end
from outrider.trainers.polar_settings import refuse_polar_settings
from outrider.trainers.shared_client import FIRST_PATIENCE, run_group, shared_client
from outrider.trainers.shared_settings import (
    BridgeSettings,
    group_of,
    read_settings,
    refuse_images,
    refuse_min_usable,
    task_for,
)
from outrider.trainers.trajectories import Trajectory, chosen_metrics, trajectories_of
from outrider.trajectory import SampleImage

log = logging.getLogger("outrider.slime")

VARIABLE = "OUTRIDER_SLIME"
POST_PROCESS = "outrider.trainers.slime.post_process_rewards"
LEAVE_SECONDS = 10.0
IMAGE_INPUTS = ("pixel_values", "image_grid_thw")
"""The entries of a sample's `multimodal_train_inputs`. slime passes them to the model's forward method."""
NUMBER = "slime.prompt"
"""The name of the task label whose value is the number of the task's prompt in `_Prompts`."""
NORMALISED = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "rloo"})
"""The advantage estimators for which slime normalises rewards."""
SCALED = frozenset({"grpo", "gspo", "cispo"})
"""The estimators of NORMALISED for which slime also divides the rewards by their standard deviation, if
`grpo_std_normalization` is set."""
UNSUPPORTED: Mapping[str, str] = {
    "use_rollout_routing_replay": "the routed experts of tokens are not recorded",
    "use_rollout_indexer_replay": "the indexer's choices are not recorded",
    "multi_lora": "the service has one policy, not one for each adapter",
    "apply_chat_template": "the agents get the prompt, not a rendered text: unset --apply-chat-template",
    "group_rm": "the reward is that of the task's evaluator: unset --group-rm",
}
"""Options of slime and miles that no function of this module supports, each with the reason."""
OWN_LOOP_ONLY: Mapping[str, str] = {
    "rollout_all_samples_process_path": "samples of groups that were filtered out are not fetched",
}
"""Options that work only in slime's own rollout loop, with `custom_generate`, each with the reason."""

SlimeSample = Any
"""slime's class `Sample`, which is not Outrider's `Sample`."""


class SlimeSettings(BridgeSettings):
    """The settings that all bridges share, and those below. The settings are read from the mapping `outrider` in the
    file of slime's `--custom-config-path`. The JSON in $OUTRIDER_SLIME overrides them.

    logprobs: whether samples have `rollout_log_probs`.
    complete: with "all", a group is used only if all its samples were graded. With "any", two graded samples are
        enough, and ungraded samples get `remove_sample`.
    max_age: the maximum age of a trained token, for `generate_rollout_async`. The age is the number of policy versions
        by which the token is older than the engines' version. With None, miles' `--max-weight-staleness` is used.
    on_failure: what `custom_generate` does with a session that cannot be trained on. "raise" raises the error. "abort"
        returns the sample as ABORTED, and slime's fully asynchronous rollout then repeats the sample. "remove" returns
        the sample as FAILED with `remove_sample`.
    """

    logprobs: bool = True
    complete: Literal["all", "any"] = "all"
    max_age: NonNegativeInt | None = None
    on_failure: Literal["raise", "abort", "remove"] = "raise"


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Run one training rollout, and return `rollout_batch_size` groups. slime calls this function for
    `--rollout-function-path`.

    A group that does not pass the filter in `--dynamic-sampling-filter-path` is replaced at once. When the batch is
    full, the running groups are cancelled, and the prompts of all groups outside the batch go back to the data source.
    This biases the batches against slow rollouts. `generate_rollout_async` has no such bias.

    With `--partial-rollout`, the running groups are paused instead of cancelled. They continue in the next rollout with
    the new weights. A paused group keeps its tokens, and the pause does not count against its agents' time limits.

    With `evaluation`, run the evaluation sets instead of training groups.
    """
    bridge = _Bridge.of(args, data_source)
    if getattr(args, "partial_rollout", False):
        with bridge.policy_runs():
            return generate_rollout_async(args, rollout_id, data_source, evaluation)
    if evaluation:
        return generate_rollout_async(args, rollout_id, data_source, evaluation)
    prompts = _Prompts(args, bridge.settings, data_source)
    with bridge.client.open(_sampler(bridge, prompts, surplus="cancel", max_age=None)) as sampler:
        batch = bridge.client.run(sampler.batch())
        bridge.client.run(sampler.stop())
        unfinished = bridge.client.run(_unfinished(prompts, sampler))
    if unfinished:
        data_source.add_samples(unfinished)
    return _train_output(args, bridge, prompts, batch)


def generate_rollout_async(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return groups like `generate_rollout`, but let unfinished groups continue while slime trains. A later rollout
    returns these groups.

    With `max_age`, no more groups run than slime can train on before the groups are too old. A full batch is returned
    only when each running group can still be used in a later batch. Until then, the batch is held back, and the groups
    that would become too old are awaited."""
    bridge = _Bridge.of(args, data_source)
    if evaluation:
        return bridge.client.run(_evaluate(args, bridge.settings))
    max_age = max_age_of(args, bridge.settings)
    if bridge.resident is None:
        prompts = _Prompts(args, bridge.settings, data_source)
        opening = _sampler(bridge, prompts, surplus="carry", max_age=max_age)
        bridge.resident = prompts, bridge.opened.enter_context(bridge.client.open(opening))
        bridge.opened.callback(bridge.leave)
    prompts, sampler = bridge.resident
    if max_age is not None:
        policy = bridge.client.policy()
        versions = [sampler.version, policy.version, *(engine.version for engine in policy.engines)]
        bridge.client.run(sampler.set_version(max(versions)))
    batch = bridge.client.run(sampler.batch())
    output = _train_output(args, bridge, prompts, batch)
    bridge.client.run(_forget_used(prompts, sampler))
    return output


async def custom_generate(
    args: Any, sample: SlimeSample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> SlimeSample | list[SlimeSample]:
    """Run a session for a sample of slime's own rollout loop. Returns a copy of the sample with tokens and reward, or a
    list of copies if the session has several rows. For an evaluation, returns only the copy for the first row, which is
    the main conversation's."""
    settings = _settings(args, UNSUPPORTED)
    if not evaluation:
        _check_normalisation(args, settings, own_loop=True)
        fans_out, hint = settings.rows != "main", "set rows to main, or use outrider.trainers.slime.generate_rollout"
        if fans_out and settings.on_failure == "abort":
            why = "on_failure is abort, and slime cannot repeat a group with a session of several rows"
            raise InvalidField(why, field="on_failure", hint=hint)
        if fans_out and getattr(args, "partial_rollout", False):
            why = "--partial-rollout is set, and slime cannot hold a group with a session of several rows"
            raise InvalidField(why, field="partial_rollout", hint=hint)
    task = _task_of(settings, sample, sampling_params, {EVALUATION_LABEL: "slime" if evaluation else None})
    group = group_of(settings, task, evaluating=evaluation)
    found = await run_group(settings, group, logprobs=settings.logprobs, images=True)
    pixels: dict[int, dict[str, Any]] = {}
    if not evaluation:  # nothing is trained on an evaluation
        async with shared_client(settings.url, settings.token) as shared:
            found, pixels = await _read_images(args, shared.client, found)
    [trajectory] = found
    if trajectory.error is not None:
        # In an evaluation, "abort" also raises the error, because slime's evaluation needs a reward for each sample.
        if settings.on_failure == "raise" or (evaluation and settings.on_failure == "abort"):
            raise trajectory.error
        if settings.on_failure == "abort":
            aborted = copy.deepcopy(sample)
            aborted.status = type(sample).Status.ABORTED
            return aborted
        return _removed(args, settings, sample, trajectory, evaluation=evaluation)
    filled = _filled(args, settings, sample, trajectory, pixels, evaluation=evaluation)
    return filled[0] if evaluation or len(filled) == 1 else filled


def post_process_rewards(args: Any, samples: Sequence[SlimeSample]) -> tuple[list[float], list[float]]:
    """Return the rewards, and the rewards normalised within each group, for slime's
    `--custom-reward-post-process-path`.

    Each rollout counts once in its group, no matter how many samples it has. A rollout with `remove_sample` does not
    count. (slime's own normalisation treats the batch as a single group, unless the batch has exactly n samples for
    each prompt.) The standard deviation divides by the number of rollouts minus 1, as in torch.

    If only one rollout of a group counts, the group's normalised rewards are 0. If the estimator divides by the
    standard deviation, the normalised rewards are also 0 when all rollouts of the group have the same reward. This rule
    matters for a row whose reward differs from its rollout's reward. Without the rule, the difference would be divided
    by 1e-6.
    """
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    if args.advantage_estimator not in NORMALISED or not args.rewards_normalization:
        return rewards, rewards
    counted: dict[Any, dict[Any, float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        if not sample.remove_sample:
            # Count only the rollout's first sample, the main conversation's. The rollout's other samples may have other
            # rewards.
            counted.setdefault(sample.group_index, {}).setdefault(_rollout_id(sample), reward)
    normalised = []
    for sample, reward in zip(samples, rewards, strict=True):
        group = list(counted.get(sample.group_index, {}).values())
        if sample.remove_sample or len(group) < 2:
            normalised.append(0.0)
            continue
        value = reward - fmean(group)
        if args.advantage_estimator in SCALED and args.grpo_std_normalization:
            spread = stdev(group)
            value = value / (spread + 1e-6) if spread else 0.0
        if args.advantage_estimator == "rloo":
            own = counted[sample.group_index][_rollout_id(sample)]
            value = reward - (sum(group) - own) / (len(group) - 1)  # minus the mean reward of the other rollouts
        normalised.append(value)
    return rewards, normalised


def close(data_source: Any) -> None:
    """Cancel those groups of a data source that still run between rollouts. They are also cancelled when the process
    exits."""
    bridge = _Bridge.open_bridges.pop(data_source, None)
    if bridge is not None:
        bridge.opened.close()


class _Bridge:
    """What the rollout functions keep between calls: the client, and whether this bridge has paused the policy.
    `resident` has the prompts and the sampler of `generate_rollout_async`; it is None before the first call of this
    function."""

    open_bridges: ClassVar[WeakKeyDictionary[Any, _Bridge]] = WeakKeyDictionary()
    """The bridges by data source. This is a class attribute, because slime imports a rollout function by name and
    passes no object of this module from one call to the next."""

    def __init__(self, settings: SlimeSettings) -> None:
        self.settings = settings
        self.opened = ExitStack()
        self.client = self.opened.enter_context(Client(settings.url, token=settings.token))
        self.resident: tuple[_Prompts, DynamicSampler] | None = None
        self._paused = False
        self.opened.callback(self._resume_policy)
        atexit.register(self.opened.close)

    @classmethod
    def of(cls, args: Any, data_source: Any, *, first_patience: float = FIRST_PATIENCE) -> _Bridge:
        bridge = cls.open_bridges.get(data_source)
        if bridge is None:
            settings = _settings(args, {**UNSUPPORTED, **OWN_LOOP_ONLY})
            _check_normalisation(args, settings)
            if settings.complete == "all":
                refuse_min_usable(settings, args.n_samples_per_prompt)
            bridge = cls(settings)
            try:  # a wrong address or token raises an error now, and not only after minutes
                bridge.client.run(patiently(bridge.client.asynchronous.status, first_patience))
            except OutriderError:
                bridge.opened.close()
                raise
            cls.open_bridges[data_source] = bridge
        return bridge

    @contextmanager
    def policy_runs(self) -> Iterator[None]:
        """Resume the policy for the block, and pause it again for slime's training."""
        self.client.resume_policy()
        try:
            yield
        finally:
            self._paused = True  # also if no reply arrives
            self.client.pause_policy("abort")

    def leave(self) -> None:
        """Cancel the groups that still run."""
        if self.resident is not None:
            self._at_the_end(self.resident[1].stop())

    def _resume_policy(self) -> None:
        """If this bridge has paused the policy, resume it for the service's other users."""
        if self._paused:
            self._at_the_end(self.client.asynchronous.resume_policy())

    def _at_the_end(self, work: Coroutine[Any, Any, object]) -> None:
        with suppress(OutriderError, TimeoutError):  # the service may have ended, and this process exits anyway
            self.client.run(asyncio.wait_for(work, LEAVE_SECONDS))


class _Prompts:
    """The prompts of a sampler, by number. A prompt is a group of slime's samples. A prompt is taken from slime's data
    source when the prompt's task is first requested."""

    def __init__(self, args: Any, settings: SlimeSettings, data_source: Any) -> None:
        self.groups: dict[int, list[SlimeSample]] = {}
        self.dropped: Counter[str] = Counter()
        self._args = args
        self._settings = settings
        self._data_source = data_source
        path = getattr(args, "dynamic_sampling_filter_path", None)
        self._filter = _load_function(path) if path else None

    def task(self, number: int) -> dict[str, Any]:
        """Return the task of the prompt `number`. DynamicSampler calls this. Raises IndexError if the data source has
        no more prompts."""
        if number not in self.groups:
            pulled = self._data_source.get_samples(1)
            if not pulled:
                raise IndexError(number)
            self.groups[number] = pulled[0]
        group = self.groups[number]
        args = self._args
        if len(group) != args.n_samples_per_prompt:
            raise InvalidField(
                f"the data source gave a group of {len(group)} samples, not {args.n_samples_per_prompt}",
                field="n_samples_per_prompt",
            )
        sampling = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
        }
        return _task_of(self._settings, group[0], sampling, {NUMBER: number})

    def is_informative(self, group: GroupView) -> Choice:
        """Return True if slime's filter keeps the group, and False if it drops the group. Returns "again" if too few of
        the group's samples were graded. The prompt is then repeated."""
        args = self._args
        if self._settings.complete == "all" and len(rewards_of(group)) < group.n:
            self.dropped["incomplete"] += 1
            return "again"
        if self._filter is None:
            return True
        shown = []
        for sample, session in zip(self.groups[int(group.labels[NUMBER])], group.sessions, strict=True):
            if session.result is not None and session.result.verdict is not None:
                seen = copy.deepcopy(sample)
                trajectory = Trajectory(session, [], None)
                seen.reward = _reward(args, self._settings, trajectory, trajectory.reward)
                seen.status = _status(sample, trajectory)
                shown.append(seen)
        verdict = self._filter(args, shown)
        keep = bool(getattr(verdict, "keep", verdict))
        # The groups that run beyond the batch size are spare. As in slime, a group with `keep_when_insufficient` is
        # kept once the number of dropped groups has reached the number of spare groups.
        if getattr(verdict, "keep_when_insufficient", False):
            keep = keep or sum(self.dropped.values()) >= _inflight(args) - args.rollout_batch_size
        if not keep:
            self.dropped[getattr(verdict, "reason", None) or "filter"] += 1
        return keep

    def forget_all_but(self, numbers: Iterable[int]) -> None:
        self.groups = {number: self.groups[number] for number in numbers if number in self.groups}


# The next two functions are coroutines so that they run on the sampler's event loop. There, no prompt is drawn and no
# group ends meanwhile.


async def _unfinished(prompts: _Prompts, sampler: DynamicSampler) -> list[list[SlimeSample]]:
    """Return the prompts that are neither delivered nor dropped."""
    return [prompts.groups[each.number] for each in sampler.state().pending]


async def _forget_used(prompts: _Prompts, sampler: DynamicSampler) -> None:
    """Forget the prompts that are delivered or dropped."""
    prompts.forget_all_but(each.number for each in sampler.state().pending)


def _sampler(
    bridge: _Bridge, prompts: _Prompts, *, surplus: Literal["carry", "cancel"], max_age: int | None
) -> DynamicSampler:
    args = prompts._args
    return DynamicSampler(
        bridge.client.asynchronous,
        prompts.task,
        n=args.n_samples_per_prompt,
        target=args.rollout_batch_size,
        inflight=_inflight(args),
        informative=prompts.is_informative,
        surplus=surplus,
        max_age=max_age,
        groups_per_version=args.rollout_batch_size * getattr(args, "update_weights_interval", 1),
        priority=bridge.settings.priority,
        min_usable=bridge.settings.min_usable,
        expires_seconds=bridge.settings.expires_seconds,
    )


def _inflight(args: Any) -> int:
    """Return the number of groups that run concurrently."""
    return int(max(args.over_sampling_batch_size or 0, args.rollout_batch_size))


def _train_output(args: Any, bridge: _Bridge, prompts: _Prompts, batch: Batch | None) -> Any:
    settings = bridge.settings
    if batch is None or len(batch.groups) < args.rollout_batch_size:
        raise ServiceError(
            f"the data source ended with {len(batch.groups) if batch else 0} groups for a rollout of"
            f" {args.rollout_batch_size}",
            hint="set --rollout-global-dataset, which begins anew at the end of the data",
        )
    data: list[list[list[SlimeSample]]] = []
    versions: list[int] = []
    errors: list[OutriderError] = []
    found = [trajectories_of(group, settings, logprobs=settings.logprobs, images=True) for group in batch.groups]
    every = [trajectory for of_group in found for trajectory in of_group]
    read, pixels = bridge.client.run(_read_images(args, bridge.client.asynchronous, every))
    readable = iter(read)
    for number, in_group in zip(batch.prompts, found, strict=True):
        of_group = []
        for sample, trajectory in zip(prompts.groups[number], islice(readable, len(in_group)), strict=True):
            if trajectory.error is None:
                of_group.append(_filled(args, settings, sample, trajectory, pixels))
                versions += [version for row in trajectory.rows for version in row.trained_versions()]
            else:
                # The session was not graded, or has no row to train on. Sessions without a row pass the filter, because
                # the filter runs before the rows are fetched.
                log.warning("a sample of the rollout does not train: %s", trajectory.error.message)
                errors.append(trajectory.error)
                of_group.append([_removed(args, settings, sample, trajectory)])
        data.append(of_group)
    if len(errors) == sum(len(of_group) for of_group in data):
        raise errors[0]
    data.sort(key=lambda of_group: of_group[0][0].index)
    fans_out = any(len(rows) > 1 for of_group in data for rows in of_group)
    # slime expects groups of samples. If any session has more than one row, slime expects groups of lists instead: one
    # list per session, with one sample per row.
    samples = data if fans_out else [[rows[0] for rows in of_group] for of_group in data]
    if path := getattr(args, "rollout_sample_filter_path", None):
        _load_function(path)(args, samples)
    dropped, prompts.dropped = prompts.dropped, Counter()
    counts = batch.counts
    metrics: dict[str, Any] = {f"rollout/dynamic_filter/drop_{reason}": number for reason, number in dropped.items()}
    metrics |= {
        f"rollout/outrider/{name}": getattr(counts, name)
        for name in ("submitted", "retried", "given_up", "stale", "stopped")
    }
    metrics |= {"rollout/outrider/waited_seconds": batch.waited, "rollout/outrider/held_seconds": batch.held}
    metrics["rollout/outrider/removed"] = len(errors)
    metrics["rollout/outrider/rows"] = sum(len(rows) for of_group in data for rows in of_group)
    if versions:
        metrics |= {"rollout/outrider/version_min": min(versions), "rollout/outrider/version_max": max(versions)}
    return _trainer_module("rollout.base_types").RolloutFnTrainOutput(samples=samples, metrics=metrics)


async def _evaluate(args: Any, settings: SlimeSettings) -> Any:
    """Run all evaluation sets concurrently. Each session has the same seed in every evaluation. Failed sessions are
    left out and counted. With `--log-passrate`, the whole group of a failed session is left out. If a set has no sample
    left, raises the set's first error."""
    main = settings.model_copy(update={"rows": "main"})
    data: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    sets = getattr(args, "eval_datasets", None) or []
    asked = [_evaluation_set(args, main, config) for config in sets]
    async with shared_client(settings.url, settings.token) as client:
        done = iter(await client.run_all(group for of_set in asked for _, group in of_set))
    key = _reward_key(args, evaluation=True)
    for config, of_set in zip(sets, asked, strict=True):
        samples: list[SlimeSample] = []
        errors: list[OutriderError] = []
        index = 0
        for (prompt, _), group in zip(of_set, done, strict=False):
            filled: list[SlimeSample] = []
            for trajectory in trajectories_of(group, main, logprobs=False, images=True):
                sample = copy.deepcopy(prompt)
                sample.index, index = index, index + 1
                if trajectory.error is None:
                    filled += _filled(args, main, sample, trajectory, {}, evaluation=True)
                else:
                    errors.append(trajectory.error)
            # For pass rates, slime assumes that each n consecutive samples belong to one prompt. So the whole group of
            # a failed session is left out.
            samples += filled if len(filled) == group.n or not getattr(args, "log_passrate", False) else []
        if not samples:
            raise errors[0]
        data[config.name] = {
            "rewards": [sample.reward[key] if key else sample.reward for sample in samples],
            "truncated": [sample.status == type(sample).Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
        metrics[f"eval/{config.name}/outrider_failed"] = len(errors)
    return _trainer_module("rollout.base_types").RolloutFnEvalOutput(data=data, metrics=metrics)


def _evaluation_set(args: Any, settings: SlimeSettings, config: Any) -> list[tuple[SlimeSample, dict[str, Any]]]:
    """Return copies of an evaluation set's prompts, each with the group to submit. Raises InvalidField for a set
    without prompts or with images, and for unsupported sampling parameters."""
    images = getattr(config, "multimodal_keys", None) or getattr(args, "multimodal_keys", None)
    refuse_images(images, f"the evaluation set {config.name!r}", field="multimodal_keys")
    dataset = _trainer_module("utils.data").Dataset(
        path=config.path,
        tokenizer=None,
        processor=None,
        max_length=None,
        prompt_key=config.input_key,
        label_key=config.label_key,
        multimodal_keys=None,
        metadata_key=config.metadata_key,
        tool_key=config.tool_key,
        apply_chat_template=False,
    )
    sampling = {"max_new_tokens": config.max_response_len, "seed": args.rollout_seed}
    for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
        sampling[name] = getattr(config, name, None)
    for name, otherwise in {
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "min_new_tokens": getattr(args, "eval_min_new_tokens", None),
    }.items():
        own = getattr(config, name, None)
        sampling[name] = otherwise if own is None else own
    made = []
    for prompt in copy.deepcopy(list(dataset.samples)):
        prompt.metadata = config.inject_metadata(prompt.metadata)
        task = _task_of(settings, prompt, sampling, {EVALUATION_LABEL: config.name})
        made.append((prompt, group_of(settings, task, n=config.n_samples_per_eval_prompt, evaluating=True)))
    if not made:
        raise InvalidField(f"the evaluation set {config.name!r} ({config.path}) has no rows", field="eval_config")
    return made


def _task_of(
    settings: SlimeSettings, sample: SlimeSample, sampling: Mapping[str, Any], labels: Mapping[str, Any]
) -> dict[str, Any]:
    refuse_images(sample.multimodal_inputs, "the prompt", field="multimodal_keys")
    row = {"prompt": sample.prompt, "label": sample.label, **(sample.metadata or {})}
    return task_for(
        settings, row, prompt=sample.prompt, sampling=sampling, labels={"slime.group": sample.group_index, **labels}
    )


async def _read_images(
    args: Any, client: AsyncClient, trajectories: Sequence[Trajectory]
) -> tuple[list[Trajectory], dict[int, dict[str, Any]]]:
    """Return the trajectories, and slime's image inputs for each row with images, by Python's `id(row)`.

    If any row has images, each row is cut before its first placeholder token that belongs to no image. A trajectory
    without a trained token before the cut gets an error. Raises InvalidField if the model's processor cannot read the
    images."""
    rows = [row for trajectory in trajectories for row in trajectory.rows]
    if not any(row.sample.images for row in rows):
        return list(trajectories), {}
    processor = _processor(_trainer(), str(args.hf_checkpoint))
    placeholders = frozenset({int(processor.image_token_id)})
    read = [_readable(trajectory, placeholders) for trajectory in trajectories]
    shown: dict[int, list[SampleImage]] = {
        id(row): [image for image in row.sample.images if image.span is not None and image.span[1] <= len(row.ids)]
        for trajectory in read
        for row in trajectory.rows
    }
    made: dict[tuple[str, Grid | None], Mapping[str, Any]] = {}
    for image in (image for images in shown.values() for image in images):
        if (image.digest, image.grid) not in made:
            data = (await patiently(partial(client.image, image.digest))).data
            into = partial(
                image_in_grid, image_processor=processor.image_processor, trainer="slime", field="hf_checkpoint"
            )
            made[image.digest, image.grid] = (await asyncio.to_thread(into, data, image.grid)).inputs
    pixels = {}
    for row, images in shown.items():
        if images:
            inputs = [made[image.digest, image.grid] for image in images]
            pixels[row] = {name: _joined([each[name] for each in inputs]) for name in IMAGE_INPUTS}
    return read, pixels


def _joined(tensors: Sequence[Any]) -> Any:
    import torch

    return torch.cat(list(tensors))


@cache
def _processor(trainer: str, path: str) -> Any:
    """Load the model's processor with slime's own function. Raises InvalidField for a model that cannot read images."""
    processor = importlib.import_module(f"{trainer}.utils.processing_utils").load_processor(
        path, trust_remote_code=True
    )
    if not (hasattr(processor, "image_processor") and hasattr(processor, "image_token_id")):
        raise InvalidField(
            f"a session has images, and the processor of --hf-checkpoint {path} makes no pixel values",
            field="hf_checkpoint",
            hint="train a model that reads images, or use tasks without images",
        )
    return processor


def _readable(trajectory: Trajectory, placeholders: frozenset[int]) -> Trajectory:
    rows = []
    for row in trajectory.rows:
        end = readable_end(row, len(row.ids), placeholders)
        cut = row.cut + sum(row.mask[end:])
        if any(row.mask[:end]):
            ids, mask, logprobs, versions = row.ids[:end], row.mask[:end], row.logprobs[:end], row.versions[:end]
            rows.append(replace(row, ids=ids, mask=mask, logprobs=logprobs, versions=versions, cut=cut))
    if trajectory.rows and not rows:
        error = EngineError(
            f"session {trajectory.session.id} has no token to train on before the placeholder of an image that the"
            " model itself has sampled"
        )
        return Trajectory(trajectory.session, [], error)
    return replace(trajectory, rows=rows)


def _filled(
    args: Any,
    settings: SlimeSettings,
    sample: SlimeSample,
    trajectory: Trajectory,
    pixels: Mapping[int, Mapping[str, Any]],
    *,
    evaluation: bool = False,
) -> list[SlimeSample]:
    """Return a copy of slime's sample for each row of a session, filled with the row's data. `pixels` has the image
    inputs of rows with images, by Python's `id(row)`."""
    made = []
    for row in trajectory.rows:
        filled = copy.deepcopy(sample)
        filled.tokens = row.ids
        if id(row) in pixels:
            filled.multimodal_train_inputs = dict(pixels[id(row)])
        filled.response_length = len(row.ids) - row.start
        filled.loss_mask = row.mask[row.start :]
        filled.rollout_log_probs = row.logprobs[row.start :] if settings.logprobs else None
        filled.weight_versions = [str(version) for version in row.trained_versions()]
        filled.reward = _reward(args, settings, trajectory, row.reward, evaluation=evaluation)
        filled.status = _status(sample, trajectory)
        filled.remove_sample = False
        filled.session_id = trajectory.session.id
        filled.rollout_id = _rollout_id(sample)
        about = {
            "group_id": trajectory.session.group_id,
            "row": row.sample.row,
            "kind": row.sample.kind.value,
            "stop_reason": trajectory.result.stop_reason.value,
            "turns": trajectory.result.turns,
            "cut_tokens": row.cut,
        }
        filled.metadata = dict(filled.metadata or {}) | {"outrider": about}
        made.append(filled)
    return made


def _removed(
    args: Any, settings: SlimeSettings, sample: SlimeSample, trajectory: Trajectory, *, evaluation: bool = False
) -> SlimeSample:
    """Return a copy of slime's sample for a session without a row. It has one response token, with mask 0. The reward
    is 0 unless the session was graded."""
    removed = copy.deepcopy(sample)
    removed.tokens = [0, 0]
    removed.response_length = 1
    removed.loss_mask = [0]
    removed.rollout_log_probs = [0.0] if settings.logprobs else None
    removed.weight_versions = []
    if trajectory.session.result is not None and trajectory.session.result.verdict is not None:
        removed.reward = _reward(args, settings, trajectory, trajectory.reward, evaluation=evaluation)
    else:
        key = _reward_key(args, evaluation=evaluation)
        removed.reward = {key: 0.0} if key else 0.0
    removed.status = type(sample).Status.FAILED
    removed.remove_sample = True
    removed.rollout_id = _rollout_id(sample)
    assert trajectory.error is not None
    removed.metadata = dict(removed.metadata or {}) | {"outrider": {"error": trajectory.error.message}}
    return removed


def _reward(
    args: Any, settings: SlimeSettings, trajectory: Trajectory, reward: float, *, evaluation: bool = False
) -> float | dict[str, float]:
    """Return the reward for slime. If slime has a reward key, return a dictionary of the reward and all metrics
    instead. slime looks up the reward key in this dictionary. Raises InvalidField if the dictionary does not have the
    key, and EvaluatorError if the verdict lacks a metric of the setting `metrics`."""
    if not (key := _reward_key(args, evaluation=evaluation)):
        # No metric is used, but in training the setting `metrics` is checked. The check leaves out evaluations, because
        # an evaluation set may have another evaluator. It also leaves out the verdict that an agent gets for breaking
        # its sandbox, because this verdict has no metrics of the evaluator.
        if not evaluation and trajectory.result.stop_reason is not StopReason.AGENT_EXCESS:
            chosen_metrics(trajectory, settings)
        return reward
    chosen = chosen_metrics(trajectory, settings)
    assert trajectory.result.verdict is not None
    named = {"reward": reward, **trajectory.result.verdict.metrics, **chosen}
    if key not in named:
        raise InvalidField(
            f"slime's reward key is {key!r}, and the verdict of session {trajectory.session.id} has only"
            f" {', '.join(sorted(named))}",
            field="reward_key",
            hint="have the evaluator give that metric, or unset --reward-key",
        )
    return named


def _reward_key(args: Any, *, evaluation: bool) -> str | None:
    key = getattr(args, "reward_key", None)
    return (getattr(args, "eval_reward_key", None) or key) if evaluation else key


def _status(sample: SlimeSample, trajectory: Trajectory) -> Any:
    status = type(sample).Status
    return status.TRUNCATED if trajectory.truncated else status.COMPLETED


def _rollout_id(sample: SlimeSample) -> Any:
    """Return the id that all samples of a rollout have in common. In older versions of slime, which do not set
    `rollout_id`, the id is the sample's index."""
    given = getattr(sample, "rollout_id", None)
    return sample.index if given is None else given


def _settings(args: Any, unsupported: Mapping[str, str]) -> SlimeSettings:
    """Read the bridge's settings from slime's arguments. Raises InvalidField for wrong settings, for a setting of
    Polar's bridge, and if an unsupported option of slime is set."""
    refuse_polar_settings(args)
    for option, why in unsupported.items():
        if getattr(args, option, None):
            raise InvalidField(f"--{option.replace('_', '-')} is set: {why}", field=option)
    if getattr(args, "rollout_top_p", 1.0) != 1.0 and _trainer() == "slime":
        raise InvalidField(
            "slime replays the ids that top-p sampling kept, and these are not recorded",
            field="rollout_top_p",
            hint="set --rollout-top-p 1.0",
        )
    return read_settings(
        SlimeSettings, getattr(args, "outrider", None), source="outrider in --custom-config-path", variable=VARIABLE
    )


def max_age_of(args: Any, settings: SlimeSettings) -> int | None:
    """Return the maximum age of tokens for `generate_rollout_async`, in policy versions. None means no maximum."""
    given: int | None = getattr(args, "max_weight_staleness", None)
    return given if settings.max_age is None else settings.max_age


def _check_normalisation(args: Any, settings: SlimeSettings, *, own_loop: bool = False) -> None:
    """Raise InvalidField if slime might normalise the rewards of a whole batch as one group, or with the reward 0 of a
    failed session. slime normalises the whole batch unless the batch has exactly n samples for each prompt, and counts
    samples with `remove_sample`. `own_loop` is True for `custom_generate`, the only function that uses `on_failure`."""
    own = getattr(args, "custom_reward_post_process_path", None) or getattr(
        args, "custom_convert_samples_to_train_data_path", None
    )
    if own or args.advantage_estimator not in NORMALISED or not args.rewards_normalization:
        return
    if settings.rows != "main" or settings.complete != "all":
        wrong = "sessions may give several rows, and slime would normalise the rewards of the batch as one group"
        instead = "set rows to main in the bridge's settings"
    elif own_loop and settings.on_failure == "remove":
        wrong = "on_failure is remove, and slime would count a failed session as a rollout with reward 0"
        instead = "set on_failure to raise"
    else:
        return
    hint = f"add --custom-reward-post-process-path {POST_PROCESS}, or {instead}"
    raise InvalidField(wrong, field="custom_reward_post_process_path", hint=hint)


def _trainer() -> str:
    """Return the name of the trainer's package, "slime" or "miles". miles is recognised by its own module `base_types`,
    because miles imports this module before it calls a rollout function."""
    return "miles" if "miles.rollout.base_types" in sys.modules else "slime"


def _trainer_module(name: str) -> Any:
    return importlib.import_module(f"{_trainer()}.{name}")


def _load_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
