"""Trains a policy with TRL's GRPOTrainer on the demo's task, rolled out by a running service.

    outrider serve --engine embedded=src/outrider/lab/demo/policy --renderer template:qwen3
    python examples/trl_grpo.py src/outrider/lab/demo/policy

For a task of your own, change `task`. Needs: pip install '.[train]'.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from outrider import Client
from outrider.lab.demo.task import group_spec, make_task
from outrider.trainers.trl import Rollouts, ServiceLogprobs, service_reward, steps_dataset
from outrider.trainers.weight_publishing import PolicyWeights

SAMPLES = 8


class Trainer(ServiceLogprobs, GRPOTrainer):  # type: ignore[misc]  # TRL is not type-checked here
    """GRPO, with the importance ratio against the log-probabilities that the service's engine sampled with."""


def task(number: int) -> Mapping[str, Any]:
    """Return the task of prompt `number`. The same number always gives the same task."""
    body: dict[str, Any] = group_spec(make_task(random.Random(f"example {number}")), SAMPLES)["task"]
    return body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the policy that the service serves")
    parser.add_argument("--url", default="http://127.0.0.1:8700", help="the service's address")
    parser.add_argument("--weights", help="folder that the engines can read, too (default: a temporary one)")
    parser.add_argument("--groups", type=int, default=8, help="groups of a step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default="outrider-trl", help="folder for the trained policy")
    given = parser.parse_args()
    arguments = GRPOConfig(
        output_dir=given.out,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=given.groups * SAMPLES,
        num_generations=SAMPLES,
        max_steps=given.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        loss_type="grpo",  # each rollout has the same weight
        epsilon_high=0.28,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
    )
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    with (
        Client(given.url) as client,
        PolicyWeights(client, given.weights, model=given.model) as weights,
        Rollouts(client, task, weights) as rollouts,
    ):
        trainer = Trainer(
            model=AutoModelForCausalLM.from_pretrained(given.model, dtype="float32"),
            processing_class=tokenizer,
            reward_funcs=service_reward,
            args=arguments,
            train_dataset=steps_dataset(given.steps * given.groups),
            rollout_func=rollouts,
        )
        trainer.train()
        trainer.save_model(given.out)
        for stats in rollouts.history:
            print(f"step {stats.step:3d}  reward {stats.reward:.2f}  age {stats.staleness_mean:.2f}")


if __name__ == "__main__":
    main()
