"""A training with TRL that the test kills: `python killed_training.py URL POLICY FOLDER`.

Two steps share a batch of four groups, and each step ends with a checkpoint, so every second checkpoint comes when half
of a batch is not yet trained on. The first run prints a line in the middle of its fourth step and waits to be killed.
The program continues from the last checkpoint in FOLDER if there is one. FOLDER/log has a line for each published
version and for each step, with the rows that it trains on.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.client.client import Client
from outrider.lab.demo.task import group_spec, make_task
from outrider.trainers.trl import Rollouts, ServiceLogprobs, service_reward, steps_dataset
from outrider.trainers.weight_publishing import PolicyWeights

SAMPLES, GROUPS, STEPS, KILLED_IN = 4, 4, 6, 3
TASKS = GROUPS * STEPS // 2


def task(number: int) -> dict[str, Any]:
    if number >= TASKS:
        raise IndexError
    body: dict[str, Any] = group_spec(make_task(random.Random(f"killed {number}")), SAMPLES)["task"]
    return body | {"runtime": {"kind": "memory"}}


def key_of(ids: list[int], logprobs: Sequence[float]) -> str:
    """Return an identifier of a row, made of its ids and of the log-probabilities, as float32, of its trained
    tokens."""
    return hashlib.sha256(repr((ids, [f"{value:.5f}" for value in logprobs])).encode()).hexdigest()[:16]


def train(url: str, policy: str, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    resumed = any(folder.glob("checkpoint-*"))

    def note(**line: Any) -> None:
        with (folder / "log").open("a") as file:
            file.write(json.dumps({"resumed": resumed, **line}) + "\n")

    class Noted(Rollouts):
        def publish(self, trainer: Any) -> None:
            super().publish(trainer)
            note(version=self.weights.version)

    class Trainer(ServiceLogprobs, GRPOTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            columns = (
                "prompt_ids",
                "prompt_mask",
                "completion_ids",
                "completion_mask",
                "tool_mask",
                "old_per_token_logps",
            )
            rows = zip(*(inputs[name] for name in columns), strict=True)
            keys = [
                key_of(prompt[own == 1].tolist() + made[real == 1].tolist(), logprobs[(real * trained) == 1].tolist())
                for prompt, own, made, real, trained, logprobs in rows
            ]
            note(step=self.state.global_step, rows=keys)
            return super().compute_loss(model, inputs, *rest, **options)

    class WaitForTheEnd(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == KILLED_IN and not resumed:
                print("in the middle of a step", flush=True)
                time.sleep(300)

    arguments = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=SAMPLES * GROUPS // 2,
        steps_per_generation=2,
        num_generations=SAMPLES,
        max_steps=STEPS,
        learning_rate=1e-4,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="steps",
        save_steps=1,
    )
    with (
        Client(url) as client,
        PolicyWeights(client, folder / "weights", model=policy) as weights,
        Noted(client, task, weights, informative=lambda group: True, max_age=None) as rollouts,
    ):
        trainer = Trainer(
            AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
            reward_funcs=service_reward,
            args=arguments,
            train_dataset=steps_dataset(TASKS),
            processing_class=AutoTokenizer.from_pretrained(policy),
            rollout_func=rollouts,
            callbacks=[WaitForTheEnd()],
        )
        trainer.train(resume_from_checkpoint=resumed or None)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
