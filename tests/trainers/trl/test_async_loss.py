"""The weights of rollouts in the loss of AsyncGRPOTrainer: TRL's own dataset, packing, collation and loss."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outrider.errors import InvalidField
from outrider.trainers.trl import AsyncLossPerRollout, RolloutWorker, async_row_class
from outrider.trainers.weight_publishing import PolicyWeights
from support.later import torch

from .test_rows import even, group, sample, task
from .world import simulated

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore")]

ROWS = [("p", 0, 1.0, [3, 1, 4, 1, 5, 2, 6]), ("p", 1, 0.0, [2]), ("q", 0, 0.0, [3]), ("q", 1, 1.0, [1, 4])]
"""Two prompts with two rollouts each: prompt, rollout, reward, and the trained tokens of each of the rollout's rows."""
ROWS_IN_ALL = 11


def queued(worker: RolloutWorker, prompt: str) -> list[Any]:
    """Return the rows that the worker makes of a prompt's group. Each row has a token of context before its last
    token."""
    samples = []
    for _, index, reward, lengths in (each for each in ROWS if each[0] == prompt):
        for row, length in enumerate(lengths):
            mask = [0, 0] + [1] * (length - 1) + [0, 1]
            ids = [ord(prompt), *range(1000 * index + 100 * row, 1000 * index + 100 * row + len(mask) - 1)]
            logprobs, versions = [-0.5 * one for one in mask], [3 if one else -1 for one in mask]
            columns: dict[str, Any] = {"ids": ids, "loss_mask": mask, "logprobs": logprobs, "versions": versions}
            samples.append(sample(index, row, reward=reward, **columns))
    rewards: list[float | None] = [reward for each, _, reward, _ in ROWS if each == prompt]
    return list(worker._rows(group(rewards, samples), ord(prompt)))


def trainer_for(kind: Any, worker: RolloutWorker, rows: int) -> Any:
    """Return TRL's trainer without its model, with micro-batches of `rows` rows."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    trainer = object.__new__(kind)
    trainer.accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    trainer.args = SimpleNamespace(
        heartbeat_stale_after_s=60.0, max_staleness=9, report_to=[], token_budget=0, per_device_train_batch_size=rows
    )
    trainer.rollout_worker, trainer.rollout_queue, trainer.model_version = worker, worker.rollout_buffer, 3
    trainer.processing_class = SimpleNamespace(pad_token_id=0)
    trainer._metrics, trainer._trained_groups = {"train": defaultdict(list)}, set()
    trainer.aux_loss_enabled, trainer.current_gradient_accumulation_steps = False, 1
    trainer.epsilon_low = trainer.epsilon_high = 0.2
    for name in ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s"):
        setattr(trainer, f"_step_{name}", 0.0)
    return trainer


def pulls(kind: Any, folder: Path, rows: int = ROWS_IN_ALL) -> list[list[float]]:
    """Return d loss / d log p of the trained tokens of each row in the first micro-batch, in the order of packing."""
    with simulated(even) as client, PolicyWeights(client, folder) as weights:
        worker = RolloutWorker(client, task, weights, n=2, groups_per_version=2)
        for _ in range(2):  # the loader reads a micro-batch ahead
            for prompt in ("p", "q"):
                for row in queued(worker, prompt):
                    worker.rollout_buffer.put(row)
        trainer = trainer_for(kind, worker, rows)
        batch = next(iter(trainer.get_train_dataloader()))
    log_probs = torch.zeros(batch["input_ids"].shape[1])
    log_probs[batch["token_index"][0]] = batch["old_log_probs"][0]
    log_probs.requires_grad_()

    def model(**inputs: Any) -> Any:
        return SimpleNamespace(log_probs=log_probs, entropy=torch.zeros_like(log_probs))

    trainer.compute_loss(model, batch).backward()
    assert log_probs.grad is not None
    found: list[list[float]] = [[] for _ in range(int(batch["segment_id"].max()) + 1)]
    for at, row in zip(batch["token_index"][0].tolist(), batch["segment_id"][0].tolist(), strict=True):
        found[row].append(float(log_probs.grad[at]))
    return found


def test_each_rollout_has_the_same_weight(tmp_path: Path) -> None:
    """The expected numbers are computed by hand: rewards of 1 and 0 give advantages of 1 and -1, apart from the 1e-4
    that is added to the standard deviation, and the weight of a token is 1 / (R T)."""
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    class Trainer(AsyncLossPerRollout, AsyncGRPOTrainer):  # type: ignore[misc]
        pass

    one = 0.5 / (0.5 + 1e-4)
    first = [[-one / 4 / 22] * length for length in (3, 1, 4, 1, 5, 2, 6)]
    both = [*first, [one / 4 / 2] * 2, [one / 4 / 3] * 3, [-one / 4 / 5], [-one / 4 / 5] * 4]
    given = pulls(Trainer, tmp_path / "both")
    assert sorted(map(len, given)) == sorted(map(len, both))
    for row, by_hand in zip(sorted(given), sorted(both), strict=True):
        assert row == pytest.approx(by_hand, rel=1e-4)
    # A micro-batch with the first three rows has 8 of the 22 tokens of one rollout, and takes the mean over these 8.
    part = pulls(Trainer, tmp_path / "part", rows=3)
    assert part == [pytest.approx([-one / 8] * length, rel=1e-4) for length in (3, 1, 4)]


def test_trls_own_loss_weighs_tokens(tmp_path: Path) -> None:
    """TRL's own loss weighs tokens and not rollouts, so the worker requires a trainer with `AsyncLossPerRollout`."""
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    pulled = sum(map(sum, pulls(AsyncGRPOTrainer, tmp_path, rows=8)))
    one = 0.5 / (0.5 + 1e-4)
    assert pulled == pytest.approx(one * (2 - 22) / 24, rel=1e-4)


def test_a_trainer_that_weighs_tokens_is_refused(tmp_path: Path) -> None:
    class Bare:
        def __init__(self, rollout_worker: Any) -> None:
            self.rollout_worker = rollout_worker

    class Weighing(AsyncLossPerRollout, Bare):
        pass

    with simulated(even) as client, PolicyWeights(client, tmp_path) as weights:
        worker = RolloutWorker(client, task, weights, n=2, groups_per_version=2)
        with pytest.raises(InvalidField, match="many rollouts") as raised:
            worker.start()
        assert "AsyncLossPerRollout" in (raised.value.hint or "")
        Weighing(worker)
        Weighing(None)  # all processes but the first have no worker
        worker.start()
        worker.stop()


class Row:
    pass


def module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    return made


def modules_of(trainer: type, **places: Any) -> dict[str, ModuleType | None]:
    """Return the modules of TRL 1.18 according to its release notes: the trainer is in `trl`, the rest is in
    `trl.trainer.async_grpo_trainer`, and the modules of `trl.experimental.async_grpo` are gone (None makes an import
    fail)."""
    return {
        "trl": module("trl", __version__="1.18.0", AsyncGRPOTrainer=trainer),
        "trl.trainer": module("trl.trainer"),
        "trl.trainer.async_grpo_trainer": module("trl.trainer.async_grpo_trainer", **places),
        "trl.experimental.async_grpo.async_rollout_worker": None,
    }


def test_a_trl_without_a_place_for_the_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class AsyncGRPOTrainer:
        def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None) -> None: ...

    for name, stand_in in modules_of(AsyncGRPOTrainer, RolloutSample=Row).items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    with pytest.raises(InvalidField, match=r"TRL 1\.18\.0 takes no rollout_worker and no weight_transfer") as raised:
        async_row_class()
    assert "TRL 1.16" in (raised.value.hint or "")
    assert "GRPOTrainer with Rollouts" in (raised.value.hint or "")


def test_the_place_decides_and_not_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class AsyncGRPOTrainer:
        def __init__(self, model: Any, rollout_worker: Any = None, weight_transfer: Any = None) -> None: ...

    for name, stand_in in modules_of(AsyncGRPOTrainer, RolloutSample=Row).items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    assert async_row_class() is Row
    monkeypatch.setitem(sys.modules, "trl.trainer.async_grpo_trainer", module("elsewhere"))
    with pytest.raises(InvalidField, match="has no RolloutSample"):
        async_row_class()
