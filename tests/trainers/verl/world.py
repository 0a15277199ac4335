"""For the verl tests: a service with an agent that is sometimes right, a tiny model with the same tokenizer, and verl's
own config."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from outrider.config import ModelConfig
from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role
from outrider.service.service import Service
from outrider.spec import EngineSpec
from outrider.trajectory import Verdict
from support.service import END, running_service
from support.tokenizer import SPECIAL_TOKENS, make_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REPLIES = [
    {"when": "hope for heads", "reply": f"heads it is{END}"},
    {"when": "hope for tails", "reply": f"tails then{END}"},
]
_SIDES = itertools.cycle(("heads", "tails"))


class Caller:
    """An agent that calls the model twice. Sessions hope for heads and tails by turns. Options:

    - `side`: all sessions hope for this side.
    - `rewrite`: the second call rewrites the history, which makes a second row.
    - `broken`: the agent fails, always (True) or if the session hopes for this side.
    - `process`: the evaluator rewards turns and rows.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    async def init(self, context: HarnessContext) -> None:
        pass

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        side = self._options.get("side") or next(_SIDES)
        if self._options.get("broken") in (True, side):
            raise RuntimeError("this agent is broken")
        messages = [Message(role=Role.USER, content=f"{context.task.instruction} I hope for {side}")]
        messages.append(await context.model.chat(messages))
        if self._options.get("rewrite"):
            messages[0] = msgspec.structs.replace(messages[0], content=f"Again. I hope for {side}")
        messages.append(Message(role=Role.USER, content=f"Really? I hope for {side}"))
        last = await context.model.chat(messages)
        return HarnessOutcome(answer=last.content)


def grade(outcome: Outcome) -> Verdict:
    right = float("heads it is" in (outcome.harness.answer or ""))
    if not outcome.task.harness.options.get("process"):
        return Verdict(reward=right, metrics={"heads": right})
    turns = {call.index: 0.25 for call in outcome.calls}
    rows = {call.row: -1.0 for call in outcome.calls if call.row}
    return Verdict(reward=right, metrics={"heads": right}, turns=turns, rows=rows)


def task(instruction: str, **options: Any) -> str:
    """Return a dataset row's task, as JSON."""
    return json.dumps(
        {"instruction": instruction, "harness": {"agent": "trainers.verl.world:Caller", "options": options}}
    )


BASE = {
    "runtime": {"kind": "memory"},
    "evaluator": {"kind": "callable", "path": "trainers.verl.world:grade"},
    "max_attempts": 1,
    "branches": {"main": "train", "subagent": "train", "compaction": "train", "auxiliary": "train"},
}
"""The fields that all tasks have in common: `rollout.custom.outrider.task`."""


class OwnServers(LLMServerClient):  # type: ignore[misc]  # verl has no types
    """A client of verl whose servers reply to all requests with `ids`, each id with the log-probability -0.5, at step
    9."""

    def __init__(self, config: Any, ids: Sequence[int]) -> None:
        super().__init__(config)
        self._ids = list(ids)

    async def generate(self, request_id: str, *, prompt_ids: list[int], **named: Any) -> TokenOutput:
        return TokenOutput(
            token_ids=self._ids,
            log_probs=[-0.5] * len(self._ids),
            stop_reason="completed",
            extra_fields={"global_steps": 9},
        )


PLAIN = {"runtime": {"kind": "memory"}, "evaluator": {"run": "true"}}
"""Like `BASE`, but without Python code of these tests, which a service in another process does not have."""


def plain_task(instruction: str) -> str:
    return json.dumps({"instruction": instruction, "harness": {"agent": "tools"}})


def write_model(folder: Path) -> Path:
    """Write a Qwen3 of 60,000 parameters with the test tokenizer, and return its folder."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        chat_template=TEMPLATE,
        padding_side="left",
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@asynccontextmanager
async def service(folder: Path, model: Path, **settings: Any) -> AsyncIterator[tuple[Service, str]]:
    """Run the service with the scripted engine, whose weights have version 7."""
    engine = EngineSpec(kind="scripted", name="scripted", options={"replies": REPLIES, "version": 7})
    defaults: dict[str, Any] = {"model": ModelConfig(tokenizer=str(model), renderer="qwen3"), "engines": (engine,)}
    async with running_service(tmp_path=folder, **defaults | settings) as (opened, url):
        yield opened, url


def verl_config(folder: Path, model: Path, outrider: Mapping[str, Any], overrides: Sequence[str] = ()) -> Any:
    """Return verl's PPO config with `RemoteAgentLoop` as the default loop and `outrider` as its settings."""
    loops = folder / "loops.yaml"
    loops.write_text("- name: outrider\n  _target_: outrider.trainers.verl.RemoteAgentLoop\n")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.n=4",
                "actor_rollout_ref.rollout.prompt_length=64",
                "actor_rollout_ref.rollout.response_length=128",
                "actor_rollout_ref.rollout.calculate_log_probs=True",
                "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
                "algorithm.adv_estimator=outrider_rollout",
                "actor_rollout_ref.rollout.agent.num_workers=1",
                "actor_rollout_ref.rollout.agent.default_agent_loop=outrider",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
                *overrides,
            ],
        )
    OmegaConf.set_struct(config, False)
    config.actor_rollout_ref.rollout.custom = {"outrider": {"task": BASE, **outrider}}
    return config
