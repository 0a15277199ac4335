"""The bridge to TRL without TRL: the rows of a batch, the publication of weights, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from bench.simulated_service import Played, SimulatedService

from outrider.client.sampling import Counts, SamplerState
from outrider.errors import EngineError, InvalidField, ServiceError
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.schemas import GroupView, PolicyStatus, SessionView
from outrider.spec import EVALUATION_LABEL
from outrider.trainers.trl import REWARD_COLUMN, Rollouts, rows_of, sampler_state, service_reward
from outrider.trainers.weight_publishing import PolicyWeights
from outrider.trajectory import BranchKind, LogprobKind, Sample, SessionResult, TokenMode, Verdict
from support.later import torch
from support.samples import changed_sample, make_sample

from .world import BareTrainer, Trainer, simulated


def parameters() -> dict[str, Any]:
    return {"model.norm.weight": torch.ones(3)}


def task(number: int) -> dict[str, Any]:
    return {"number": number}


def even(task: Mapping[str, Any], index: int, version: int) -> Played:
    """Return the result of a sample. All samples of every third prompt have the same reward, so the prompt teaches
    nothing."""
    return Played(0.001, float(index % 2 and task["number"] % 3 != 1))


def sample(index: int, row: int = 0, **changed: Any) -> Sample:
    """Return a sample with two ids of context and two sampled ids, which have one id of context between them."""
    made = make_sample(
        group_id="g",
        session_id=f"g-{index}",
        attempt=1,
        sample_index=index,
        row=row,
        rows=1,
        kind=BranchKind.MAIN,
        turns=(0,),
        ids=[10, 11, 20 + row, 12, 30 + row],
        loss_mask=[0, 0, 1, 0, 1],
        logprobs=[0.0, 0.0, -0.5, 0.0, -0.25],
        versions=[-1, -1, 3, -1, 4],
        prompt_length=2,
        reward=1.0,
        mode=TokenMode.TOKENS,
        logprob_kind=LogprobKind.RAW,
        stop_reason=StopReason.COMPLETED,
        min_version=3,
        max_version=4,
    )
    return changed_sample(made, **changed)


def group(rewards: list[float | None], samples: list[Sample]) -> GroupView:
    def session(index: int, reward: float | None) -> SessionView:
        result = SessionResult(
            session_id=f"g-{index}",
            group_id="g",
            sample_index=index,
            attempt=1,
            stop_reason=StopReason.COMPLETED,
            verdict=None if reward is None else Verdict(reward=reward),
        )
        return SessionView(
            id=f"g-{index}",
            group_id="g",
            sample_index=index,
            state=SessionState.DONE,
            attempt=1,
            node=None,
            created=0.0,
            updated=0.0,
            last_error=None,
            result=result,
        )

    return GroupView(
        id="g",
        state=GroupState.DONE,
        cancelled=False,
        n=len(rewards),
        priority=0,
        created=0.0,
        finished=1.0,
        cursor=1,
        labels={},
        sessions=tuple(session(index, reward) for index, reward in enumerate(rewards)),
        samples=tuple(samples),
    )


def test_a_row_is_split_behind_its_prompt() -> None:
    [row, _] = rows_of(group([1.0, 0.0], [sample(0), sample(1, reward=0.0)])).rows
    assert (row.prompt_ids, row.completion_ids, row.mask) == ([10, 11], [20, 12, 30], [1, 0, 1])
    assert (row.logprobs, row.versions, row.reward) == ([-0.5, 0.0, -0.25], [3, -1, 4], 1.0)


def test_a_session_has_one_row_and_the_others_are_left_out_by_name() -> None:
    context_only = sample(0, 0, loss_mask=[0] * 5)
    found = rows_of(group([1.0, 0.0], [context_only, sample(0, 1), sample(0, 2), sample(1, reward=0.0)]))
    assert [row.completion_ids[0] for row in found.rows] == [21, 20]
    assert [each.sample.row for each in found.left_out] == [2]


@pytest.mark.parametrize(("reward", "samples"), [(None, []), (0.5, []), (0.5, [sample(1, reward=None)])])
def test_a_session_without_a_row_gets_one_that_trains_nothing(reward: float | None, samples: list[Sample]) -> None:
    found = rows_of(group([1.0, reward, 0.0], [sample(0), *samples, sample(2, reward=0.0)]))
    empty = found.rows[1]
    assert (empty.prompt_ids, empty.mask, empty.logprobs, empty.versions) == ([10, 11], [0], [0.0], [-1])
    assert (len(empty.completion_ids), empty.reward) == (1, reward)
    assert [row.reward for row in found.rows] == [1.0, reward, 0.0]


def test_a_group_that_cannot_be_trained_on_is_refused() -> None:
    with pytest.raises(EngineError, match="no token to train on"):
        rows_of(group([1.0, 0.0], []))
    with pytest.raises(EngineError, match="no log-probabilities"):
        rows_of(group([1.0, 0.0], [sample(0, logprob_kind=LogprobKind.NONE)]))


def test_every_batch_is_full_of_groups_that_teach_something(tmp_path: Path) -> None:
    trainer = Trainer(parameters())
    with (
        simulated(even, version=7) as client,
        PolicyWeights(client, tmp_path, keep=2) as weights,
        Rollouts(client, task, weights) as rollouts,
    ):
        for step in range(4):
            trainer.state.global_step = step
            made = rollouts(["ignored"] * 12, trainer)
            assert {len(column) for column in made.values()} == {12}
            rewards = [reward or 0.0 for reward in service_reward(outrider_reward=made[REWARD_COLUMN])]
            assert [sum(rewards[start : start + 4]) for start in (0, 4, 8)] == [2.0, 2.0, 2.0]
            assert set(made["prompt_ids"][0] + made["completion_ids"][0]) == {1, 2}
        versions = [stats.version for stats in rollouts.history]
        last = rollouts.history[-1]
        dropped = sum(stats.groups.uninformative for stats in rollouts.history)
    assert versions == [8, 9, 10, 11]
    assert dropped >= 3
    assert (last.kept_reward, last.spread > 0, last.errors, last.left_out_rows) == (0.5, True, 0, 0)
    assert last.staleness_max <= 1
    assert last.reward <= 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-10", "version-11"]


def test_rows_are_left_out_only_where_that_was_chosen_and_counted() -> None:
    """A session has two rows, and a batch of GRPOTrainer has room for one of them."""
    view = group([1.0, 0.0], [sample(0), sample(0, 1), sample(1, reward=0.0)])

    class Given(Rollouts):
        def __init__(self, **options: Any) -> None:
            super().__init__(None, task, SimpleNamespace(version=4), **options)  # type: ignore[arg-type]
            self._published_at = 0

        def _next_batch(self, n: int, target: int) -> Any:
            return SimpleNamespace(groups=[view], counts=Counts(), waited=0.0, held=0.0)

    trainer = Trainer(parameters(), n=2)
    with pytest.raises(InvalidField, match="1 rows of the batch, with 2 trained tokens") as raised:
        Given()([""] * 2, trainer)
    assert 'rows="main"' in (raised.value.hint or "")
    rollouts = Given(rows="main")
    assert len(rollouts([""] * 2, trainer)["completion_ids"]) == 2
    metrics = rollouts.history[0].metrics()
    assert (metrics["outrider/left_out_rows"], metrics["outrider/left_out_tokens"]) == (1.0, 2.0)


def test_weights_are_published_once_for_a_step(tmp_path: Path) -> None:
    trainer = Trainer(parameters())
    with (
        simulated(even) as client,
        PolicyWeights(client, tmp_path, mode="abort") as weights,
        Rollouts(client, task, weights) as rollouts,
    ):
        for _ in range(3):
            rollouts([""] * 4, trainer)
        assert client.loads == [(1, "abort", str(tmp_path / "version-1"))]  # type: ignore[attr-defined]
        assert torch.equal(weights.read(1)["model.norm.weight"], torch.ones(3))  # type: ignore[index]
        assert weights.read(2) is None


def test_a_checkpoints_sampler_goes_on_where_it_was(tmp_path: Path) -> None:
    trainer = Trainer(parameters())
    seen: list[int] = []

    def noting(task: Mapping[str, Any], index: int, version: int) -> Played:
        seen.append(task["number"])
        return even(task, index, version)

    with simulated(noting) as client, PolicyWeights(client, tmp_path / "weights") as weights:
        with Rollouts(client, task, weights, inflight=1) as rollouts:
            rollouts([""] * 4, trainer)
            state = rollouts.state()
        assert state is not None
        (tmp_path / "outrider_sampler.json").write_bytes(msgspec.json.encode(state))
        with Rollouts(client, task, weights, inflight=1, state=sampler_state(tmp_path)) as rollouts:
            before = max(seen)
            trainer.state.global_step = 1
            rollouts([""] * 4, trainer)
    assert min(seen[4:]) > 0
    assert max(seen) > before
    with pytest.raises(InvalidField, match="no sampler's state"):
        sampler_state(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("trainer", "rows", "complaint"),
    [
        (lambda: BareTrainer(parameters()), 4, "ServiceLogprobs"),
        (lambda: Trainer(parameters(), processes=2), 4, "2 processes"),
        (lambda: Trainer(parameters()), 6, "multiple of num_generations, 4"),
        (lambda: Trainer({"base_model.model.norm.lora_A": torch.ones(1)}), 4, "adapter"),
    ],
)
def test_a_trainer_that_would_train_on_something_else_is_refused(
    trainer: Callable[[], BareTrainer], rows: int, complaint: str, tmp_path: Path
) -> None:
    with (
        simulated(even) as client,
        PolicyWeights(client, tmp_path) as weights,
        Rollouts(client, task, weights) as rollouts,
        pytest.raises(InvalidField) as raised,
    ):
        rollouts([""] * rows, trainer())
    assert complaint in f"{raised.value.message} {raised.value.hint}"


def test_vllm_inside_the_trainer_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(parameters())
    trainer.use_vllm = True
    with (
        simulated(even) as client,
        PolicyWeights(client, tmp_path) as weights,
        Rollouts(client, task, weights) as rollouts,
        pytest.raises(InvalidField, match="the service generates"),
    ):
        rollouts([""] * 4, trainer)


def test_tasks_that_are_used_up_are_said_to_be(tmp_path: Path) -> None:
    def three(number: int) -> dict[str, Any]:
        if number >= 3:
            raise IndexError
        return task(number)

    with (
        simulated(even) as client,
        PolicyWeights(client, tmp_path) as weights,
        Rollouts(client, three, weights) as rollouts,
        pytest.raises(ServiceError, match="2 of 3 groups are left"),
    ):
        rollouts([""] * 12, Trainer(parameters()))


def test_an_evaluation_has_tasks_of_its_own_and_no_filter(tmp_path: Path) -> None:
    trainer = Trainer(parameters())
    trainer.model.training = False
    with simulated(even) as client, PolicyWeights(client, tmp_path) as weights:
        with Rollouts(client, task, weights) as rollouts, pytest.raises(InvalidField, match="no tasks for it"):
            rollouts([""] * 4, trainer)
        with Rollouts(client, task, weights, eval_tasks=[task(1)]) as rollouts:
            made = rollouts([""] * 4, trainer)
            assert rollouts.history == []
    assert made[REWARD_COLUMN] == [0.0] * 4


@pytest.mark.parametrize(("priority", "above"), [(0, 1), (2, 3), (-5, -4), (1000, 1000)])
def test_an_evaluation_runs_ahead_of_the_trainings_groups(tmp_path: Path, priority: int, above: int) -> None:
    trainer = Trainer(parameters())
    with (
        simulated(even) as client,
        PolicyWeights(client, tmp_path) as weights,
        Rollouts(client, task, weights, eval_tasks=[task(1)], priority=priority) as rollouts,
    ):
        rollouts([""] * 4, trainer)
        trainer.model.training = False
        rollouts([""] * 4, trainer)
    service = cast(SimulatedService, client.asynchronous)
    evaluating = [EVALUATION_LABEL in group["task"].get("labels", {}) for group in service.submitted]
    found = {(each, group["priority"]) for each, group in zip(evaluating, service.submitted, strict=True)}
    assert found == {(False, priority), (True, above)}


def test_an_evaluation_of_several_batches_goes_through_the_tasks(tmp_path: Path) -> None:
    trainer = Trainer(parameters())
    trainer.model.training = False
    asked: list[int] = []

    def noted(number: int) -> dict[str, Any]:
        asked.append(number)
        return task(number)

    with (
        simulated(even) as client,
        PolicyWeights(client, tmp_path) as weights,
        Rollouts(client, task, weights, eval_tasks=noted) as rollouts,
    ):
        for _ in range(3):
            rollouts([""] * 8, trainer)
        assert sorted(asked) == list(range(6))
        trainer.state.global_step = 7  # the next evaluation begins with the first task
        rollouts([""] * 8, trainer)
    assert sorted(asked[6:]) == [0, 1]


def test_a_trainer_goes_on_with_a_service_that_begins_anew(tmp_path: Path) -> None:
    """The service has lost its data, so it counts versions from 0 again. The checkpoint's groups have versions up to
    57."""
    state = SamplerState(run="r", next=40, pending=(), version=57, batches=20)
    with (
        simulated(even) as client,
        PolicyWeights(client, tmp_path) as weights,
        Rollouts(client, task, weights, state=state) as rollouts,
    ):
        rollouts([""] * 8, Trainer(parameters()))
        assert weights.version == 58
        assert rollouts.history[0].staleness_max == 0


def test_folders_of_an_earlier_run_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "version-1").mkdir()
    (tmp_path / "version-4").mkdir()
    (tmp_path / "version-x").mkdir()
    with simulated(even) as client, PolicyWeights(client, tmp_path) as weights:
        assert [weights.publish(parameters().items()) for _ in range(2)] == [5, 6]


def test_weights_that_cannot_be_written_leave_nothing_behind(tmp_path: Path) -> None:
    shared = torch.ones(3)
    with simulated(even) as client, PolicyWeights(client, tmp_path) as weights:
        with pytest.raises(RuntimeError, match="share memory"):
            weights.publish([("one", shared), ("two", shared)])
        assert (weights.version, list(tmp_path.iterdir()), client.policy().version) == (-1, [], 0)
        assert weights.publish(parameters().items()) == 1


class Failing:
    """A service that loses the connection of each update: after it has set the version if `accepts` is true, else
    before."""

    def __init__(self) -> None:
        self.version, self.accepts = 0, False

    def policy(self) -> PolicyStatus:
        return PolicyStatus(version=self.version, paused=None, engines=())

    def update_policy(self, version: int, **_: Any) -> PolicyStatus:
        self.version = version if self.accepts else self.version
        raise ServiceError("the connection was lost")


def test_failed_publications_do_not_fill_the_disk(tmp_path: Path) -> None:
    client = Failing()
    with PolicyWeights(client, tmp_path, keep=2) as weights:
        for client.accepts in (True, False, False, True, True, False):
            with pytest.raises(ServiceError):
                weights.publish(parameters().items())
        assert client.version == 5
        assert sorted(path.name for path in tmp_path.iterdir()) == ["version-4", "version-5", "version-6"]
        assert [weights.read(version) is None for version in (4, 5)] == [False, False]


def test_versions_never_go_back_and_configuration_goes_along(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text(name)
    with simulated(even, version=41) as client, PolicyWeights(client, model=model, keep=1) as weights:
        assert [weights.publish(parameters().items()) for _ in range(2)] == [42, 43]
        folder = weights.folder(43)
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert (folder / "model.safetensors").read_bytes() != b"model.safetensors"
        assert not weights.folder(42).exists()
    assert not folder.exists()
    with pytest.raises(InvalidField, match="at least 1"):
        PolicyWeights(client, keep=0)
