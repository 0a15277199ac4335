"""The weights of rollouts in the loss of GRPOTrainer, by TRL's own advantages and loss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.client.sampling import Counts
from outrider.lab.demo.dialogue import POLICY
from outrider.trainers.trl import Rollouts, ServiceLogprobs, service_reward, steps_dataset
from support.later import torch

from .test_rows import group, sample, task

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore")]

LENGTHS = (7, 2)
"""Numbers of trained tokens in the main rows of the two rollouts. The first rollout has reward 1, the second 0. The
first rollout has another row that trains, with 5 tokens, for which a batch of GRPOTrainer has no room."""


def row(index: int, number: int, length: int) -> Any:
    """Return a row with a token of context before its last token."""
    mask = [0, 0] + [1] * (length - 1) + [0, 1]
    logprobs, versions = [-0.5 * one for one in mask], [3 if one else -1 for one in mask]
    columns = {"ids": list(range(len(mask))), "loss_mask": mask, "logprobs": logprobs, "versions": versions}
    return sample(index, number, reward=1.0 - index, **columns)


class Given(Rollouts):
    def __init__(self) -> None:
        super().__init__(None, task, SimpleNamespace(version=4), rows="main")  # type: ignore[arg-type]
        self._published_at = 0

    def _next_batch(self, n: int, target: int) -> Any:
        rows = [row(0, 0, LENGTHS[0]), row(0, 1, 5), row(1, 0, LENGTHS[1])]
        return SimpleNamespace(groups=[group([1.0, 0.0], rows)], counts=Counts(), waited=0.0, held=0.0)


def pulls(folder: Path, loss_type: str) -> list[list[float]]:
    """Return d loss / d log p of the trained tokens of the two rows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    class Trainer(ServiceLogprobs, GRPOTrainer):  # type: ignore[misc]
        log_probs: Any = None

        def _get_per_token_logps_and_entropies(self, *given: Any, **options: Any) -> Any:
            return self.log_probs, torch.zeros_like(self.log_probs), None

    arguments = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        num_generations=2,
        loss_type=loss_type,
        gradient_checkpointing=False,
        report_to=[],
    )
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32),
        reward_funcs=service_reward,
        args=arguments,
        train_dataset=steps_dataset(2),
        processing_class=AutoTokenizer.from_pretrained(POLICY),
        rollout_func=Given(),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions([{"prompt": "not used"} for _ in range(2)])
    trainer.log_probs = batch["old_per_token_logps"].clone().requires_grad_()
    trainer._compute_loss(trainer.model, batch).backward()
    trained = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert trainer.log_probs.grad is not None
    assert not trainer.log_probs.grad[~trained].any()
    return [trainer.log_probs.grad[at][trained[at]].tolist() for at in range(2)]


@pytest.mark.parametrize(("loss_type", "tokens"), [("grpo", (14, 4)), ("dapo", (9, 9))])
def test_the_weight_of_a_token(tmp_path: Path, loss_type: str, tokens: tuple[int, int]) -> None:
    """The expected numbers are computed by hand: TRL divides by the sample standard deviation, 2**-0.5, plus 1e-4. With
    `grpo` the weight of a token is 1 / (R T), and so each rollout has the same weight. With `dapo`, TRL's default, the
    weight of each token is 1 / 9."""
    one = 0.5 / (2**-0.5 + 1e-4)
    first, second = pulls(tmp_path, loss_type)
    assert first == pytest.approx([-one / tokens[0]] * LENGTHS[0], rel=1e-4)
    assert second == pytest.approx([one / tokens[1]] * LENGTHS[1], rel=1e-4)
