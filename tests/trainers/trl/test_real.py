"""The bridge with the real TRL: both of its GRPO trainers train the demo's policy on a real service."""

from __future__ import annotations

import random
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.client.client import Client
from outrider.lab.demo.dialogue import POLICY
from outrider.lab.demo.task import group_spec, make_task
from outrider.sandbox.runtimes.default_runtime import default_runtime
from outrider.trainers.trl import (
    AsyncLossPerRollout,
    Rollouts,
    RolloutWorker,
    ServiceLogprobs,
    ServiceWeights,
    service_reward,
    steps_dataset,
)
from outrider.trainers.weight_publishing import PolicyWeights

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.timeout(300),
    # Warnings of TRL, transformers and torch are not ours.
    pytest.mark.filterwarnings("ignore"),
]
SAMPLES = 4


def task(number: int) -> Mapping[str, Any]:
    spec = group_spec(make_task(random.Random(f"test {number}")), SAMPLES, runtime=default_runtime()[0])
    body: Mapping[str, Any] = spec["task"]
    return body


def load() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)


def test_grpo_trainer_trains_with_the_samplers_logprobs(client: Client, tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    outputs: list[dict[str, Any]] = []

    class Trainer(ServiceLogprobs, GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            outputs.append(super()._generate_and_score_completions(inputs))
            return outputs[-1]

    model = load()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    arguments = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=3 * SAMPLES,
        num_generations=SAMPLES,
        max_steps=2,
        learning_rate=1e-3,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
    )
    with (
        PolicyWeights(client, model=POLICY, keep=4) as weights,
        Rollouts(client, task, weights, inflight=4, max_age=2, measure=True) as rollouts,
    ):
        trainer = Trainer(
            model,
            reward_funcs=service_reward,
            args=arguments,
            train_dataset=steps_dataset(6),
            processing_class=AutoTokenizer.from_pretrained(POLICY),
            rollout_func=rollouts,
        )
        trainer.train()
    assert [stats.version for stats in rollouts.history] == [1, 2]
    assert client.policy().version == 2
    moved = [float((old - new).abs().max()) for old, new in zip(before, model.parameters(), strict=True)]
    assert min(moved) > 0
    for stats, output in zip(rollouts.history, outputs, strict=True):
        assert stats.kept_reward > 0
        assert stats.drift_tokens == stats.errors == 0
        assert stats.logprob_gap is not None
        assert stats.logprob_gap <= 2e-5
        assert stats.compared_tokens == int(output["tool_mask"][output["completion_mask"] == 1].sum())
        assert torch.equal(output["old_per_token_logps"], output["sampling_per_token_logps"])
        # Groups with equal rewards are not in the batch, so some advantage is not 0.
        assert bool((output["advantages"] != 0).any())
    # Padding before the prompt changes no log-probability, not even by a rounding of the positions' angles, which
    # would be a difference of 3e-5 and more.
    output = outputs[-1]
    rows = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    padding = torch.zeros(len(rows), 500, dtype=rows.dtype)
    width = output["completion_ids"].size(1)
    with torch.no_grad():
        alone, *_ = trainer._get_per_token_logps_and_entropies(model, rows, mask, width)
        wider = torch.cat([padding, rows], dim=1), torch.cat([padding.to(mask.dtype), mask], dim=1)
        behind, *_ = trainer._get_per_token_logps_and_entropies(model, *wider, width)
    assert float((alone - behind).abs()[output["completion_mask"] == 1].max()) < 1e-5
    logged = [entry for entry in trainer.state.log_history if "outrider/logprob_gap" in entry]
    assert len(logged) == 2
    assert (tmp_path / "out" / "checkpoint-2" / "outrider_sampler.json").is_file()


def test_the_ratio_is_against_what_the_tokens_were_sampled_with(client: Client, tmp_path: Path) -> None:
    """The given log-probabilities are those of a tenth of each token's probability, so every ratio is 10. Tokens with a
    positive advantage are clipped, the others are not."""
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    class Trainer(ServiceLogprobs, GRPOTrainer):  # type: ignore[misc]
        pass

    class Skewed(Rollouts):
        def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
            made = super().__call__(prompts, trainer)
            made["logprobs"] = [[value - 2.302585 for value in row] for row in made["logprobs"]]
            return made

    arguments = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2 * SAMPLES,
        num_generations=SAMPLES,
        max_steps=1,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
    )
    with PolicyWeights(client) as weights, Skewed(client, task, weights, inflight=4) as rollouts:
        trainer = Trainer(
            load(),
            reward_funcs=service_reward,
            args=arguments,
            train_dataset=steps_dataset(2),
            processing_class=AutoTokenizer.from_pretrained(POLICY),
            rollout_func=rollouts,
        )
        trainer.train()
    [entry] = [entry for entry in trainer.state.log_history if "clip_ratio/high_mean" in entry]
    assert 0.05 < entry["clip_ratio/high_mean"] < 1.0


def test_the_example_runs(client: Client, tmp_path: Path) -> None:
    if not (can := default_runtime()[1]).ok:
        pytest.skip(f"its sessions run in namespace sandboxes, and here {can.detail}")
    example = Path(__file__).parents[3] / "examples" / "trl_grpo.py"
    ran = subprocess.run(
        [
            *(sys.executable, str(example), str(POLICY), "--url", client.asynchronous.url),
            *("--groups", "2", "--steps", "1", "--out", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "step   0  reward" in ran.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


def attention_on_cpu(
    q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, longest_q: int, longest_k: int, **options: Any
) -> Any:
    """Compute in plain torch the attention for which TRL calls FlashAttention 3's `flash_attn_varlen_func`."""
    import torch

    outputs, repeats = [], q.shape[1] // k.shape[1]
    for one in range(len(starts_q) - 1):
        queries = q[starts_q[one] : starts_q[one + 1]].transpose(0, 1)
        keys, values = (
            x[starts_k[one] : starts_k[one + 1]].transpose(0, 1).repeat_interleave(repeats, 0) for x in (k, v)
        )
        seen = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - queries.shape[1])
        scale = options.get("softmax_scale")
        made = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)
        outputs.append(made.transpose(0, 1))
    return torch.cat(outputs, 0)


def test_async_grpo_trainer_trains(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    class Trainer(AsyncLossPerRollout, AsyncGRPOTrainer):  # type: ignore[misc]
        pass

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *given, **named: None)
    monkeypatch.setattr(packing, "_flash_attn", lambda: types.SimpleNamespace(flash_attn_varlen_func=attention_on_cpu))
    torch.set_num_threads(1)
    arguments = AsyncGRPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        dtype="float32",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_steps=3,
        learning_rate=1e-3,
        gradient_checkpointing=False,
        token_budget=0,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
    )
    with PolicyWeights(client, model=POLICY) as weights:
        worker = RolloutWorker(client, task, weights, n=SAMPLES, groups_per_version=2, inflight=4, buffered=16)
        trainer = Trainer(
            model=str(POLICY),
            reward_funcs=service_reward,
            args=arguments,
            train_dataset=steps_dataset(1),
            rollout_worker=worker,
            weight_transfer=ServiceWeights(weights),
        )
        trainer.train()
        assert weights.version == trainer.model_version == 4  # before the first step, and after each
        assert client.policy().version == 4
        served = weights.read(4)
    original = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    assert served is not None
    for name, parameter in original.named_parameters():
        assert float((served[name] - parameter).abs().max()) > 0, name
    worker.check_health(0.0)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
