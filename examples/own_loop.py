"""Trains a policy with plain PyTorch on rollouts of a running service: a training loop to start from.

    outrider serve --engine embedded=src/outrider/lab/demo/policy --renderer template:qwen3
    python examples/own_loop.py src/outrider/lab/demo/policy --steps 20

The loop is interrupted with Ctrl-C, and continues from its checkpoint when it is started again. For a task of your own,
change `task`. Needs: pip install '.[train]'.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from outrider import Client
from outrider.client.sampling import Batch, DynamicSampler, SamplerState, group_advantages, rewards_of
from outrider.lab.demo.task import group_spec, make_task
from outrider.trainers.weight_publishing import PolicyWeights

SAMPLES = 8


def task(number: int) -> Mapping[str, Any]:
    """Return the task of prompt `number`. The same number always gives the same task."""
    body: dict[str, Any] = group_spec(make_task(random.Random(f"own loop {number}")), SAMPLES)["task"]
    return body


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the clipped policy-gradient loss. Each rollout has the same weight, whatever its numbers of rows and
    tokens."""
    losses = []
    for group in batch.groups:
        results = [session.result for session in group.sessions if session.result is not None]
        rewards = {result.session_id: result.verdict.reward for result in results if result.verdict is not None}
        advantages = dict(zip(rewards, group_advantages(list(rewards.values())), strict=True))
        for session, advantage in advantages.items():
            terms = []
            for row in group.samples or ():
                if row.session_id != session or row.reward is None:
                    continue
                ids = torch.tensor(row.ids, dtype=torch.long)[None]
                logits = model(input_ids=ids).logits[0, :-1]
                new = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
                # The ratio is against the log-probabilities with which the tokens were sampled.
                ratio = (new - torch.tensor(row.logprobs[1:], dtype=new.dtype)).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                terms.append(gain[torch.tensor(row.loss_mask[1:], dtype=torch.bool)])
            if terms:
                losses.append(-torch.cat(terms).mean())
    return torch.stack(losses).mean()


async def state_of(sampler: DynamicSampler) -> SamplerState:
    """Return the sampler's state. This is a coroutine so that `client.run` reads the state on the sampler's event loop,
    where no group ends meanwhile."""
    return sampler.state()


def train(client: Client, folder: str, checkpoint: Path, *, steps: int, groups: int = 4) -> list[float]:
    """Train until `steps` steps are done, including the steps before the checkpoint. Returns the mean reward of each
    step's batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    means: list[float] = []
    state = None
    with PolicyWeights(client, model=folder) as weights:
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            means = saved["means"]
            state = msgspec.json.decode(saved["sampler"], type=SamplerState)
            weights.begin_above(state.version)
        sampler = DynamicSampler(client.asynchronous, task, n=SAMPLES, target=groups, max_age=1, state=state)
        with client.open(sampler):
            while len(means) < steps:
                version = weights.publish(model.named_parameters())  # the engines serve it when this returns
                client.run(sampler.set_version(version))
                batch = client.run(sampler.batch())
                assert batch is not None  # `task` has no last number
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                means.append(fmean(reward for group in batch.groups for reward in rewards_of(group)))
                print(
                    f"step {len(means)}: version {version}, mean reward {means[-1]:.2f},"
                    f" waited {batch.waited:.1f} s, of these {batch.held:.1f} s for slow groups"
                )
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "means": means}
                saved["sampler"] = msgspec.json.encode(client.run(state_of(sampler)))
                torch.save(saved, f"{checkpoint}.new")
                os.replace(f"{checkpoint}.new", checkpoint)  # a crash leaves the old checkpoint or the new one
            client.run(sampler.stop())
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the policy that the service serves")
    parser.add_argument("--url", default="http://127.0.0.1:8700", help="the service's address")
    parser.add_argument("--checkpoint", type=Path, default=Path("own-loop.pt"))
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    with Client(given.url) as client:
        train(client, given.model, given.checkpoint, steps=given.steps)


if __name__ == "__main__":
    main()
