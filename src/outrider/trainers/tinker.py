"""The bridge to tinker-cookbook (0.6.1): a rollout strategy that runs the groups of `tinker_cookbook.rl.train` as
groups of an Outrider service.

    Config(
        dataset_builder=TaskDatasetBuilder(data="rows.jsonl", groups_per_batch=8, group_size=8),
        rollout_error_tolerance=ServiceRollouts({"task": {...}}),
        ...,
    )

The service samples with the sampling client that the cookbook gives for each group (`tinker_sampling`). Invariants:

- A session is one trajectory, no matter how many rows it has.
- The actions of a trajectory have the tokens and the log-probabilities of the service's rows.
- A session that cannot be trained on gives no trajectory.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

try:
    import chz
    import tinker
    import torch
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.exceptions import AllTrajectoriesFailedError
    from tinker_cookbook.rl.data_processing import compute_advantages
    from tinker_cookbook.rl.rollout_strategy import RolloutResult, RolloutStrategy
    from tinker_cookbook.rl.types import (
        STOP_METRIC_PREFIX,
        Env,
        EnvGroupBuilder,
        RLDataset,
        RLDatasetBuilder,
        RolloutError,
        TrajectoryGroup,
        Transition,
    )
    from tinker_cookbook.rl.types import StopReason as CookbookStop
    from tinker_cookbook.rl.types import Trajectory as CookbookTrajectory
except ImportError as error:
    from outrider.environment import install_command

    raise ImportError(
        f"outrider.trainers.tinker needs tinker-cookbook 0.6 ({install_command('tinker')}): {error}"
    ) from error

from outrider.client.client import patiently
from outrider.errors import InvalidField, OutriderError
from outrider.lifecycle import StopReason
from outrider.schemas import GroupView
from outrider.spec import EVALUATION_LABEL, Name
from outrider.tasks.datasets import read_rows
from outrider.trainers.exports import spans_of
from outrider.trainers.shared_client import FIRST_PATIENCE, SharedClient, shared_client
from outrider.trainers.shared_settings import BridgeSettings, group_of, read_settings, task_for
from outrider.trainers.tinker_sampling import SampledSequences, TinkerSampler
from outrider.trainers.trajectories import TrainingRow, Trajectory, chosen_metrics, trajectories_of

log = logging.getLogger("outrider.tinker")

VARIABLE = "OUTRIDER_TINKER"
FAILED_IN_A_ROW = 16
"""After this many consecutive training groups with too few usable sessions, the error of a session is raised, because
the cause probably affects all groups."""
STOPS: Mapping[StopReason, CookbookStop] = {
    StopReason.COMPLETED: CookbookStop.COMPLETED,
    StopReason.MAX_TURNS: CookbookStop.MAX_TURNS,
    StopReason.MAX_TOKENS: CookbookStop.MAX_TOKENS,
    StopReason.CONTEXT_OVERFLOW: CookbookStop.CONTEXT_OVERFLOW,
    StopReason.AGENT_TIMEOUT: CookbookStop.ROLLOUT_TIMEOUT,
}
"""The cookbook's names for Outrider's stop reasons. A stop reason that is not in this table keeps Outrider's name."""


class TinkerSettings(BridgeSettings):
    """The settings that all bridges share, and these:

    relay: the name of the service's relay engine. The cookbook's sampling clients answer the calls to this engine. None
        if the service has its own engines.
    complete: with "all", a group is used only if all its sessions can be trained on. With "any", two such sessions are
        enough. In an evaluation, one such session is enough.
    """

    relay: Name | None = "tinker"
    complete: Literal["all", "any"] = "all"


class TaskGroup(EnvGroupBuilder):  # type: ignore[misc]  # mypy does not check the cookbook
    """A group of `n` sessions for one row of a dataset. `ServiceRollouts` runs it."""

    def __init__(self, row: Mapping[str, Any], n: int, *, evaluating: bool = False, prompt_key: str = "prompt") -> None:
        self.row = row
        self.n = n
        self.evaluating = evaluating
        self.prompt_key = prompt_key

    async def make_envs(self) -> Sequence[Env]:
        """Raise InvalidField: the sessions run in the service, so the trainer has no environments."""
        raise InvalidField(
            "a TaskGroup needs the rollout strategy ServiceRollouts",
            field="rollout_error_tolerance",
            hint="Config(rollout_error_tolerance=ServiceRollouts(settings))",
        )

    async def compute_group_rewards(
        self, trajectory_group: list[CookbookTrajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, dict[str, float]]]:
        return [(rollout.reward, rollout.metrics) for rollout in env_group]

    def logging_tags(self) -> list[str]:
        tag = self.row.get("data_source")
        return [tag] if isinstance(tag, str) else []


class FinishedRollout(Env):  # type: ignore[misc]  # mypy does not check the cookbook
    """The reward and the metrics of a finished session. This is an `Env` because the cookbook passes environments to
    `compute_group_rewards`."""

    def __init__(self, reward: float, metrics: dict[str, float]) -> None:
        self.reward = reward
        self.metrics = metrics

    async def initial_observation(self) -> Any:
        raise NotImplementedError("the session has ended")

    async def step(self, action: list[int], *, extra: Any = None) -> Any:
        raise NotImplementedError("the session has ended")


class ServiceRollouts(RolloutStrategy):  # type: ignore[misc]  # mypy does not check the cookbook
    """The rollout strategy, to be set as `Config.rollout_error_tolerance`. `settings` are TinkerSettings, overridden by
    $OUTRIDER_TINKER. Raises InvalidField for wrong settings.

    The temperature and the maximum tokens of a model call come from the cookbook.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        # The attribute is private because the cookbook logs public attributes, and the settings contain the service's
        # token.
        self._settings = read_settings(TinkerSettings, settings, source="settings", variable=VARIABLE)
        fewest = self._settings.min_usable
        if fewest is not None and (self._settings.complete == "all" or fewest < 2):
            raise InvalidField(
                f"min_usable is {fewest} and complete is {self._settings.complete!r}: the sessions that the service"
                " then stops would make every group unusable",
                field="min_usable",
                hint='set complete to "any" and min_usable to at least 2',
            )
        self._sampler: TinkerSampler | None = None
        self._failed_in_a_row = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sampler": None}

    @property
    def catches_group_errors(self) -> bool:
        return False

    async def execute(self, env_group_builder: EnvGroupBuilder, policy: Any) -> RolloutResult:
        """Run a group and return its trajectories.

        If fewer sessions can be trained on than the setting `complete` requires, raises AllTrajectoriesFailedError, and
        the cookbook skips the group. After FAILED_IN_A_ROW consecutive training groups of this kind, raises the error
        of a session instead. Raises InvalidField for a row that cannot be converted to a task, and ServiceError if the
        service cannot be reached."""
        builder = env_group_builder
        if not isinstance(builder, TaskGroup):
            raise InvalidField(
                f"ServiceRollouts runs TaskGroups, not a {type(builder).__name__}",
                field="dataset_builder",
                hint="use TaskDatasetBuilder, or an RLDataset whose batches are TaskGroups",
            )
        settings = self._settings
        task = task_for(
            settings,
            builder.row,
            prompt=builder.row.get(builder.prompt_key),
            sampling={name: getattr(policy, name, None) for name in ("temperature", "max_tokens")},
            labels={EVALUATION_LABEL: "tinker" if builder.evaluating else None},
        )
        group = group_of(settings, task, n=builder.n, evaluating=builder.evaluating)
        sequences: Mapping[str, SampledSequences] | None = None
        async with shared_client(settings.url, settings.token) as client:
            if settings.relay is None:
                view = await client.run(group)
            else:
                sampler = await self._attached(client, settings.relay)
                with sampler.group(_sampling_client(policy)) as sampled:
                    view = await client.run(group, submitted=sampled.announce)
                    sequences = sampled.sessions
        return self._result(view, sequences, evaluating=builder.evaluating)

    def close(self) -> None:
        """Detach the trainer's sampling clients from the service. This also happens when the process exits."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    async def _attached(self, client: SharedClient, relay: str) -> TinkerSampler:
        if multiprocessing.parent_process() is not None:
            raise InvalidField(
                "a rollout executor runs in other processes, whose sampling clients have no common version",
                field="rollout_executor",
                hint="leave the rollout executor out: the sessions run in the service, not in the trainer",
            )
        sampler = self._sampler
        if sampler is None:
            version = (await patiently(client.client.policy, FIRST_PATIENCE)).version
            # Another group may have opened the sampler meanwhile, and `close` ends only one use of it.
            if self._sampler is None:
                self._sampler = TinkerSampler.open(self._settings.url, self._settings.token, relay, version=version)
            sampler = self._sampler
        await sampler.attach()
        return sampler

    def _result(
        self, view: GroupView, sequences: Mapping[str, SampledSequences] | None, *, evaluating: bool
    ) -> RolloutResult:
        trajectories: list[CookbookTrajectory] = []
        rollouts: list[FinishedRollout] = []
        errors: list[OutriderError] = []
        # An evaluation uses only the reward of the main conversation's row, so it needs no other row.
        settings = self._settings.model_copy(update={"rows": "main"}) if evaluating else self._settings
        for trajectory in trajectories_of(view, settings, logprobs=not evaluating):
            if trajectory.error is not None:
                errors.append(trajectory.error)
                continue
            own = None if sequences is None else sequences.get(trajectory.session.id, SampledSequences())
            trajectories.append(trajectory_of(trajectory, own))
            rollouts.append(FinishedRollout(trajectory.rows[0].reward, _metrics_of(trajectory, settings)))
        fewest = 1 if evaluating else min(2, view.n)
        least = view.n if self._settings.complete == "all" else fewest
        if len(trajectories) < least:
            if not evaluating:
                self._failed_in_a_row += 1
                if self._failed_in_a_row >= FAILED_IN_A_ROW:
                    raise errors[0]
            raise AllTrajectoriesFailedError(
                f"{len(errors)} of {view.n} sessions of group {view.id} cannot be trained on: {errors[0].message}"
            ) from errors[0]
        if not evaluating:
            self._failed_in_a_row = 0
        failures = [RolloutError(error_type=type(error).__name__, error_message=error.message) for error in errors]
        return RolloutResult(trajectories=trajectories, envs=rollouts, errors=failures)


def trajectory_of(trajectory: Trajectory, sequences: SampledSequences | None) -> CookbookTrajectory:
    """Convert a session to a trajectory of the cookbook, with a transition for each sampled sequence, row after row.

    `sequences` are the sequences that this process sampled for the session, or None if another engine sampled. Each
    transition has the reward of its turns. The session's own reward is not included, because the cookbook takes it
    separately.

    Raises InvalidField if a trained token is in none of the `sequences`. Also raises InvalidField if the rows have
    different rewards, because the cookbook has one advantage for a trajectory.
    """
    rewards = {row.reward for row in trajectory.rows}
    if len(rewards) > 1:
        raise InvalidField(
            f"rows of session {trajectory.session.id} have the rewards {sorted(rewards)}, and the cookbook has one"
            " advantage for all tokens of a trajectory",
            field="rows",
            hint="set rows to main, to train on the main conversation only, or leave `rows` out of the verdict",
        )
    transitions = [transition for row in trajectory.rows for transition in _transitions_of(row, sequences)]
    ended = trajectory.result.stop_reason
    stop = STOPS[ended].value if ended in STOPS else ended.value
    last = transitions[-1]
    last.episode_done = True
    last.metrics[f"{STOP_METRIC_PREFIX}{stop}"] = 1.0
    transitions[0].logs["session"] = trajectory.session.id
    final = tinker.ModelInput.from_ints(trajectory.rows[-1].ids)
    return CookbookTrajectory(transitions=transitions, final_ob=final, stop_reason=stop)


def _transitions_of(row: TrainingRow, sequences: SampledSequences | None) -> list[Transition]:
    """Return a transition for each sampled sequence of a row. The observation of a transition is all ids of the row
    before the sequence. It begins with the observation and the sequence of the previous transition, so the cookbook
    combines the transitions of a row into one datum."""
    sample = row.sample
    turns = [
        (end, reward)
        for (_, end), reward in zip(sample.turn_spans, sample.turn_rewards, strict=True)
        # A turn's reward is given only in the row that trains the turn. In other rows, the turn is context.
        if reward is not None and end <= len(row.ids) and row.mask[end - 1]
    ]
    found = []
    for span in spans_of(row.mask):
        start = span.start
        while span.trained and start < span.end:
            known = None if sequences is None else sequences.find(row.ids, start, span.end)
            if known is None and sequences is not None:
                raise InvalidField(
                    f"session {sample.session_id} has tokens that were not sampled with this trainer's clients",
                    field="relay",
                    hint="is another worker attached to the relay engine? Give each training run an engine of its own",
                )
            end = known[1] if known is not None else span.end
            action = TokensWithLogprobs(
                tokens=row.ids[start:end],
                maybe_logprobs=row.logprobs[start:end],
                sequence_id=known[0].sequence_id if known is not None else None,
                prompt_cache_hit_tokens=known[0].cached_tokens if known is not None else 0,
            )
            found.append(
                Transition(
                    ob=tinker.ModelInput.from_ints(row.ids[:start]),
                    ac=action,
                    reward=sum(reward for at, reward in turns if start < at <= end),
                    episode_done=False,
                )
            )
            start = end
    return found


def advantages_per_rollout(groups: Sequence[TrajectoryGroup]) -> list[torch.Tensor]:
    """Return the cookbook's advantages (`compute_advantages`), multiplied so that all rollouts have the same weight in
    a loss that sums over tokens. The result has one tensor of shape (rollouts,) for each group.

    The factor of rollout r is N / (R * T_r), where T_r is the number of trained tokens in all its rows. All groups
    together have R rollouts and N trained tokens. So the weights of all tokens still add up to N.
    """
    tokens = [
        torch.tensor([float(sum(len(each.ac.tokens) for each in one.transitions)) for one in group.trajectories_G])
        for group in groups
    ]
    total = sum(float(each.sum()) for each in tokens)
    rollouts = sum(len(each) for each in tokens)
    return [
        advantages * total / (rollouts * counts)
        for advantages, counts in zip(compute_advantages(list(groups)), tokens, strict=True)
    ]


class TaskDataset(RLDataset):  # type: ignore[misc]  # mypy does not check the cookbook
    """A dataset whose batches have `groups_per_batch` TaskGroups, one for each row, in the order of the rows. The last
    batch may be smaller."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        groups_per_batch: int,
        group_size: int,
        evaluating: bool = False,
        prompt_key: str = "prompt",
    ) -> None:
        if not rows:
            raise InvalidField("the dataset has no rows", field="data")
        self._rows = rows
        self._groups_per_batch = groups_per_batch
        self._group_size = group_size
        self._evaluating = evaluating
        self._prompt_key = prompt_key

    def get_batch(self, index: int) -> Sequence[TaskGroup]:
        start = index * self._groups_per_batch
        return [
            TaskGroup(row, self._group_size, evaluating=self._evaluating, prompt_key=self._prompt_key)
            for row in self._rows[start : start + self._groups_per_batch]
        ]

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self._groups_per_batch)


@chz.chz
class TaskDatasetBuilder(RLDatasetBuilder):  # type: ignore[misc]  # mypy does not check the cookbook
    """Reads the datasets for `Config.dataset_builder` from files in JSON Lines, JSON or Parquet. `test_data` is the
    file for the cookbook's evaluations, with `test_group_size` sessions for each row."""

    data: str
    groups_per_batch: int
    group_size: int
    test_data: str | None = None
    test_group_size: int = 1
    prompt_key: str = "prompt"

    async def __call__(self) -> tuple[TaskDataset, TaskDataset | None]:
        rows = list(read_rows(Path(self.data)))
        per_batch, key = self.groups_per_batch, self.prompt_key
        train = TaskDataset(rows, groups_per_batch=per_batch, group_size=self.group_size, prompt_key=key)
        if self.test_data is None:
            return train, None
        tests = list(read_rows(Path(self.test_data)))
        test = TaskDataset(
            tests, groups_per_batch=per_batch, group_size=self.test_group_size, evaluating=True, prompt_key=key
        )
        return train, test


def _sampling_client(policy: Any) -> Any:
    client = getattr(policy, "sampling_client", None)
    if client is None:
        raise InvalidField(
            f"the policy is a {type(policy).__name__} without a sampling client",
            field="policy",
            hint="use the cookbook's TinkerTokenCompleter, or set relay to null and give the service an engine",
        )
    return client


def _metrics_of(trajectory: Trajectory, settings: TinkerSettings) -> dict[str, float]:
    """Return the metrics of a session. The cookbook logs their means over the trajectories of a batch."""
    versions = [version for row in trajectory.rows for version in row.trained_versions()]
    return {
        "outrider/turns": float(trajectory.result.turns),
        "outrider/rows": float(len(trajectory.rows)),
        "outrider/agent_seconds": trajectory.seconds,
        "outrider/cut_tokens": float(sum(row.cut for row in trajectory.rows)),
        "outrider/version_min": float(min(versions)),
        "outrider/version_max": float(max(versions)),
        **chosen_metrics(trajectory, settings),
    }
