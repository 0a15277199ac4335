"""The rollout worker for AsyncGRPOTrainer on a simulated service: which rows it queues, and how it fails."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from bench.simulated_service import Played, SimulatedService

from outrider.errors import EngineError, ServiceError, ServiceUnusable
from outrider.schemas import GroupView
from outrider.trainers.trl import RolloutWorker
from outrider.trainers.weight_publishing import PolicyWeights
from outrider.trajectory import LogprobKind
from support.waiting import until

from .test_rows import even, group, parameters, sample, task
from .world import simulated

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore")]


def test_every_row_that_trains_has_the_advantage_of_its_session(tmp_path: Path) -> None:
    rows = [sample(0), sample(0, 1), sample(1, reward=0.0), sample(3, reward=0.5)]
    with simulated(even) as client, PolicyWeights(client, tmp_path) as weights:
        worker = RolloutWorker(client, task, weights, n=4, groups_per_version=4, advantages="mean")
        made = list(worker._rows(group([1.0, 0.0, None, 0.5], rows), 7))
    assert [row.advantage for row in made] == [0.5, 0.5, -0.5, 0.0]
    assert [row.metrics["reward"] for row in made] == [1.0, 1.0, 0.0, 0.5]
    assert {row.group_id for row in made} == {7}
    assert made[1].input_ids.tolist() == [10, 11, 21, 12, 31]
    assert made[1].completion_mask.tolist() == [0, 0, 1, 0, 1]
    assert made[1].old_log_probs.tolist() == [0.0, 0.0, -0.5, 0.0, -0.25]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("mean", [0.5, 1.5, -0.5]), ("leave_one_out", [1.0, 2.0, -1.0]), ("grpo", [1.0, 3.0, -1.0])],
)
def test_a_row_with_a_reward_of_its_own_is_compared_with_the_rollouts(
    tmp_path: Path, kind: Any, expected: list[float]
) -> None:
    """Rollout 0 has reward 1, and its second row 2; rollout 1 has reward 0. The mean over the rollouts is 0.5."""
    rows = [sample(0), sample(0, 1, reward=2.0), sample(1, reward=0.0)]
    with simulated(even) as client, PolicyWeights(client, tmp_path) as weights:
        worker = RolloutWorker(client, task, weights, n=2, groups_per_version=4, advantages=kind)
        made = list(worker._rows(group([1.0, 0.0], rows), 7))
        [alone] = worker._rows(group([1.0, None], rows[:1]), 7)
    assert [row.advantage for row in made] == pytest.approx(expected, rel=1e-3)
    assert alone.advantage == 0.0


def test_rows_carry_the_trainers_versions(tmp_path: Path) -> None:
    with simulated(even, version=40) as client, PolicyWeights(client, tmp_path) as weights:
        worker = RolloutWorker(client, task, weights, n=4, groups_per_version=4, inflight=2, buffered=8)
        weights.publish(parameters().items())
        worker.update_model_version(1)
        worker.weigh_rollouts()
        worker.start()
        rows = [worker.rollout_buffer.get(timeout=30) for _ in range(12)]
        worker.check_health(30.0)
        weights.publish(parameters().items())
        worker.update_model_version(2)
        while (row := worker.rollout_buffer.get(timeout=30)).model_version == 1:
            rows.append(row)
        worker.stop()
        worker.stop()
    assert {each.model_version for each in rows} == {1}
    assert row.model_version == 2
    assert sum(each.advantage for each in rows[:4]) == pytest.approx(0.0)
    assert worker.state().next >= 3


def check_until_it_fails(worker: RolloutWorker) -> None:
    """Check the worker's health until the check raises an error, as the trainer does while its queue is empty."""
    while True:
        worker.check_health(60.0)
        with suppress(queue.Empty):
            worker.rollout_buffer.get(timeout=0.01)


def test_what_ends_the_worker_is_raised(tmp_path: Path) -> None:
    def fails(task: Mapping[str, Any], index: int, version: int) -> Played:
        return Played(0.001, None)

    with simulated(fails) as client, PolicyWeights(client, tmp_path) as weights:
        worker = RolloutWorker(client, task, weights, n=2, groups_per_version=4)
        worker.weigh_rollouts()
        worker.start()
        with pytest.raises(ServiceError, match="prompts in a row have failed"):
            check_until_it_fails(worker)
        worker.stop()


def test_tasks_that_cannot_be_made_end_the_worker(tmp_path: Path) -> None:
    with simulated(even) as client, PolicyWeights(client, tmp_path) as weights:
        worker = RolloutWorker(client, lambda number: task(1 // number), weights, n=2, groups_per_version=4)
        worker.weigh_rollouts()
        worker.start()
        with pytest.raises(ZeroDivisionError):
            check_until_it_fails(worker)
        worker.stop()


def test_a_worker_from_which_nothing_comes_is_not_healthy(tmp_path: Path) -> None:
    def slow(task: Mapping[str, Any], index: int, version: int) -> Played:
        return Played(3600.0, 1.0)

    with simulated(slow) as client, PolicyWeights(client, tmp_path) as weights:
        worker = RolloutWorker(client, task, weights, n=2, groups_per_version=4)
        worker.weigh_rollouts()
        worker.check_health(0.0)  # the worker has not begun
        worker.start()
        worker.check_health(60.0)
        with pytest.raises(ServiceError, match="no group was done"):
            worker.check_health(0.0)
        worker.stop()


def test_a_worker_that_waited_for_the_trainer_is_healthy(tmp_path: Path) -> None:
    """With `max_age=0` no group runs while the trainer trains, no matter how long a step takes."""

    def slow(task: Mapping[str, Any], index: int, version: int) -> Played:
        return Played(3600.0, 1.0)

    with simulated(slow) as client, PolicyWeights(client, tmp_path) as weights:
        worker = RolloutWorker(client, task, weights, n=2, groups_per_version=1, max_age=0)
        worker.weigh_rollouts()
        worker.start()
        worker._last_row -= 400.0  # the trainer's step took this long
        weights.publish(parameters().items())
        worker.update_model_version(1)
        worker.check_health(300.0)
        worker.stop()


def test_the_error_of_a_worker_that_cannot_cancel_its_groups_is_the_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(task: Mapping[str, Any], index: int, version: int) -> Played:
        return Played(3600.0, 1.0)

    async def gone(service: SimulatedService, group_id: str) -> GroupView:
        raise ServiceUnusable("the token has expired")

    monkeypatch.setattr(SimulatedService, "cancel", gone)
    with simulated(slow) as client, PolicyWeights(client, tmp_path) as weights:
        worker = RolloutWorker(client, task, weights, n=2, groups_per_version=1)
        worker.weigh_rollouts()
        worker.start()
        asyncio.run(until(lambda: any(prompt.version is not None for prompt in worker.state().pending)))
        with pytest.raises(ServiceUnusable, match="the token has expired"):
            worker.stop()


def test_a_group_that_cannot_be_trained_on_is_no_silence(tmp_path: Path) -> None:
    rows = [sample(index, logprob_kind=LogprobKind.NONE) for index in range(2)]
    with simulated(even) as client, PolicyWeights(client, tmp_path) as weights:
        worker = RolloutWorker(client, task, weights, n=2, groups_per_version=4)
        with pytest.raises(EngineError, match="no log-probabilities"):
            list(worker._rows(group([1.0, 0.0], rows), 7))
