"""RL with tinker-cookbook, whose agents run in sandboxes of an Outrider service.

    TINKER_API_KEY=... OUTRIDER_TINKER=@settings.toml python train.py model_name=Qwen/Qwen3-8B log_path=runs/first

The service must have the model's tokenizer, and a relay engine named `tinker`:

    outrider serve --tokenizer models/Qwen3-8B --context 32768 --engine relay=tinker
"""

import asyncio
from pathlib import Path

import chz
from tinker_cookbook.rl import train

from outrider.trainers.tinker import ServiceRollouts, TaskDatasetBuilder

HERE = Path(__file__).parent


@chz.chz
class Options:
    model_name: str
    log_path: str
    data: str = str(HERE / "rows.jsonl")
    test_data: str | None = None
    groups_per_batch: int = 4
    group_size: int = 8
    max_tokens: int = 1024
    learning_rate: float = 4e-5
    lora_rank: int = 32
    num_epochs: int = 10
    # Groups whose rollouts all have the same reward teach nothing.
    remove_constant_reward_groups: bool = True
    eval_every: int = 20
    # Steps by which rollouts may be ahead of the training; None for synchronous training.
    max_steps_off_policy: int | None = None
    # Losses of asynchronous training: Tinker's own service has stable_reinforce, other servers may not.
    loss_fn: train.LossFnType = "importance_sampling"
    # The address of another server with Tinker's interface.
    base_url: str | None = None


def config_of(options: Options) -> train.Config:
    ahead = options.max_steps_off_policy
    return train.Config(
        model_name=options.model_name,
        recipe_name="outrider",
        log_path=options.log_path,
        base_url=options.base_url,
        dataset_builder=TaskDatasetBuilder(
            data=options.data,
            test_data=options.test_data,
            groups_per_batch=options.groups_per_batch,
            group_size=options.group_size,
        ),
        rollout_error_tolerance=ServiceRollouts(),
        remove_constant_reward_groups=options.remove_constant_reward_groups,
        max_tokens=options.max_tokens,
        learning_rate=options.learning_rate,
        lora_rank=options.lora_rank,
        num_epochs=options.num_epochs,
        eval_every=options.eval_every,
        loss_fn=options.loss_fn,
        async_config=None
        if ahead is None
        else train.AsyncConfig(
            max_steps_off_policy=ahead, groups_per_batch=options.groups_per_batch, loss_fn=options.loss_fn
        ),
    )


if __name__ == "__main__":
    asyncio.run(train.main(config_of(chz.entrypoint(Options))))
