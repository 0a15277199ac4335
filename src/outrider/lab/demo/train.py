"""Trains the demo's policy on its task. The service runs in a separate process, and TRL's GRPO trainer in this one.
They communicate over HTTP.

Invariant: when `train` returns, the service has ended, and only the trained weights are left on disk.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from outrider.client.client import AsyncClient, Client
from outrider.client.pass_rate import evaluate
from outrider.config import Config, LanesConfig, ModelConfig
from outrider.environment import install_command
from outrider.errors import InvalidField
from outrider.lab.demo.dialogue import RENDERER, Script, encode
from outrider.lab.demo.service_process import service_process
from outrider.lab.demo.task import ZONES, group_spec, make_task
from outrider.lifecycle import StopReason
from outrider.spec import EngineSpec
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trainers.trl import Rollouts, ServiceLogprobs, StepStats, service_reward, steps_dataset
from outrider.trainers.weight_publishing import PolicyWeights

GROUPS, SAMPLES = 8, 8
"""Number of groups in a training step, and number of sessions in a group."""
INFLIGHT = 8
"""Maximum number of concurrent groups. This number of groups fills the run lane (the slots for running agents). With
more groups, some would be too old for the next batch."""
MAX_AGE = 1
LEARNING_RATE, LAST_LEARNING_RATE = 5e-4, 1e-4
"""The learning rates at the beginning and at the end. At 1e-3, a policy may forget the syntax of tool calls within one
or two steps, and then never gets a reward again."""
MAX_STEPS = 48
"""Maximum number of training steps. With a time limit instead, a busy machine would end the training too early."""
PASSES = 2
"""Optimizer steps over each batch."""
GUESSES, GUESS_RATE = (2, 16), 2e-4
"""Settings of a short first training, in which the model learns to guess without reading the file: the number of
batches, the dialogues per batch, and the learning rate."""
SOLVED, SOLVED_STEPS = 0.93, 3
"""Training ends when the mean reward of the last SOLVED_STEPS steps is at least SOLVED. Groups that were not trained on
also count for this mean."""
EPISODES = 128
"""Number of episodes, of one session each, that measure the reward before and after the training. The policy is not
trained on these episodes."""
LANES = LanesConfig(init=8, run=48, eval=8)
SLOTS = 48
"""Number of sequences that the engine processes at once: one for each running agent."""
STARTS_BELOW, ENDS_ABOVE, LARGEST_GAP = 0.3, 0.85, 1e-4

PAGE = 500
LOOK_EVERY = 0.25
"""Seconds between two polls that count the free slots of the run lane."""


class TrainStep(msgspec.Struct, frozen=True, kw_only=True):
    """A training step. `idle` is the mean fraction of the run lane's slots that were free since the previous step.
    `seconds` is the time since the training began."""

    stats: StepStats
    idle: float
    seconds: float


class SeedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of training with one seed.

    - `first_reward`, `last_reward`: the mean reward over EPISODES new episodes before and after the training.
      `last_reward` is None if the training was ended early.
    - `errors`, `drift_tokens`: totals over all sessions.
    - `policy`: the folder of the trained weights.
    """

    seed: int
    first_reward: float
    last_reward: float | None
    seconds: float
    steps: tuple[TrainStep, ...]
    sessions: int
    errors: int
    drift_tokens: int
    max_logprob_gap: float
    compared_tokens: int
    policy: str


class SeedLine(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one seed, in the output of `outrider demo --train --json`."""

    seed: int
    first_reward: float
    last_reward: float | None
    seconds: float
    steps: int


class TrainSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `outrider demo --train --json`. `curve` is the path of the plot, or None without matplotlib.
    `interrupted` is True if Ctrl-C ended the training early."""

    seeds: tuple[SeedLine, ...]
    max_logprob_gap: float
    drift_tokens: int
    errors: int
    curve: str | None
    interrupted: bool

    @property
    def good(self) -> bool:
        return (
            all(line.first_reward < STARTS_BELOW and (line.last_reward or 0.0) > ENDS_ABOVE for line in self.seeds)
            and self.max_logprob_gap <= LARGEST_GAP
            and not (self.drift_tokens or self.errors)
        )


Watch = Callable[[TrainStep], None]


def check_installed() -> None:
    """Raise InvalidField if a package that the training needs is not installed."""
    missing = [name for name in ("torch", "trl", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidField(
            f"training needs {' and '.join(missing)}",
            field="train",
            hint=f"{install_command('train')}, or make train",
        )


def train(
    seed: int,
    policy: Path,
    runtime: str,
    out: Path,
    watch: Watch,
    stop: Callable[[], bool] = lambda: False,
    *,
    max_steps: int = MAX_STEPS,
) -> SeedRun:
    """Train the policy in the folder `policy` for at most `max_steps` steps, with sandboxes of the kind `runtime`, and
    write the trained policy to `out`.

    Calls `watch` after each step. If `stop()` returns True after a step, the training ends and the trained policy is
    not evaluated. If `stop()` returns True before the first step, nothing is written to `out`. Raises the service's
    errors, and InvalidField for a policy that cannot be trained.
    """
    began = time.monotonic()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="outrider-train-") as name:
        warnings.simplefilter("ignore")  # TRL and transformers warn about their own deprecated code
        folder = Path(name)
        config = Config(
            port=0,
            data=folder / "data",
            model=ModelConfig(tokenizer=str(policy), renderer=RENDERER, name="demo-policy"),
            lanes=LANES,
            engines=(EngineSpec(kind="embedded", model=str(policy), options={"slots": SLOTS}),),
        )
        with (
            service_process(config, folder) as url,
            Client(url) as client,
            PolicyWeights(client, folder / "weights", model=policy, keep=MAX_AGE + 2) as weights,
        ):
            model = _undertrained(policy, seed)
            weights.publish(model.named_parameters())
            episodes = [make_task(random.Random(f"fresh {seed} {number}")) for number in range(EPISODES)]
            fresh = [group_spec(episode, 1, runtime=runtime)["task"] for episode in episodes]
            first = client.run(evaluate(client.asynchronous, fresh, seed=seed))
            steps = (
                [] if stop() else _train(client, weights, model, seed, policy, runtime, folder, watch, stop, max_steps)
            )
            last = None if stop() else client.run(evaluate(client.asynchronous, fresh, seed=seed))
            totals = {"sessions": 0, "errors": 0, "drift": 0}
            after = 0
            while (page := client.results(after=after, limit=PAGE)).groups:
                for result in (session.result for group in page.groups for session in group.sessions):
                    if result is not None:
                        totals["sessions"] += 1
                        totals["errors"] += result.stop_reason is StopReason.ERROR
                        totals["drift"] += result.tokens.drift
                after = page.cursor
            if steps:
                shutil.rmtree(out, ignore_errors=True)
                shutil.copytree(weights.folder(weights.version), out)
    gaps = [step.stats.logprob_gap for step in steps if step.stats.logprob_gap is not None]
    return SeedRun(
        seed=seed,
        first_reward=first.reward.mean,
        last_reward=last.reward.mean if last is not None else None,
        seconds=time.monotonic() - began,
        steps=tuple(steps),
        sessions=totals["sessions"],
        errors=totals["errors"],
        drift_tokens=totals["drift"],
        max_logprob_gap=max(gaps, default=0.0),
        compared_tokens=sum(step.stats.compared_tokens for step in steps),
        policy=str(out),
    )


def summary(runs: Sequence[SeedRun], curve: Path | None, *, interrupted: bool = False) -> TrainSummary:
    return TrainSummary(
        seeds=tuple(
            SeedLine(
                seed=run.seed,
                first_reward=round(run.first_reward, 4),
                last_reward=round(run.last_reward, 4) if run.last_reward is not None else None,
                seconds=round(run.seconds, 1),
                steps=len(run.steps),
            )
            for run in runs
        ),
        max_logprob_gap=max(run.max_logprob_gap for run in runs),
        drift_tokens=sum(run.drift_tokens for run in runs),
        errors=sum(run.errors for run in runs),
        curve=str(curve) if curve else None,
        interrupted=interrupted,
    )


def _undertrained(policy: Path, seed: int) -> Any:
    """Return the policy's model after a short training that makes the model guess more often. This training leaves more
    for the reinforcement learning to improve, and gives each seed different weights at the start."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # Several torch threads would busy-wait for each other on shared cores, and leave no core for the engine.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    script, tokenizer = Script.load(policy), Tokenizer.load(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=GUESS_RATE, weight_decay=0.0)
    rng = random.Random(f"guesses {seed}")
    batches, dialogues = GUESSES
    for _ in range(batches):
        rows = [encode(tokenizer, script.guess(make_task(rng), rng.choice(ZONES))) for _ in range(dialogues)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
        spoken = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in rows])
        loss = model(input_ids=ids, labels=ids.masked_fill(~spoken, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def _train(
    client: Client,
    weights: PolicyWeights,
    model: Any,
    seed: int,
    policy: Path,
    runtime: str,
    folder: Path,
    watch: Watch,
    stop: Callable[[], bool],
    max_steps: int,
) -> list[TrainStep]:
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Trainer(ServiceLogprobs, GRPOTrainer):  # type: ignore[misc]  # TRL has no types here
        pass

    steps: list[TrainStep] = []
    lanes = LaneWatch(client.asynchronous)

    class Steps(TrainerCallback):  # type: ignore[misc]  # TRL has no types here
        """Reports each step, sets the learning rate, and ends the training when the task is solved or `stop()` is True.
        The learning rate falls with the step number along a cosine."""

        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **others: Any) -> None:
            share = (1 + math.cos(math.pi * state.global_step / state.max_steps)) / 2
            for parameters in optimizer.param_groups:
                parameters["lr"] = LAST_LEARNING_RATE + (LEARNING_RATE - LAST_LEARNING_RATE) * share

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step % PASSES:
                return
            steps.append(TrainStep(stats=rollouts.history[-1], idle=lanes.idle(), seconds=time.monotonic() - began))
            watch(steps[-1])
            recent = [step.stats.reward for step in steps[-SOLVED_STEPS:]]
            if stop() or (len(recent) == SOLVED_STEPS and fmean(recent) >= SOLVED):
                control.should_training_stop = True

    arguments = GRPOConfig(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        bf16=False,
        seed=seed,
        per_device_train_batch_size=GROUPS * SAMPLES,
        num_generations=SAMPLES,
        max_steps=max_steps * PASSES,
        num_iterations=PASSES,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",  # TRL keeps it constant; `Steps` changes it
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        gradient_checkpointing=False,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )

    def task(number: int) -> Mapping[str, Any]:
        spec: Mapping[str, Mapping[str, Any]] = group_spec(
            make_task(random.Random(f"train {seed} {number}")), SAMPLES, runtime=runtime
        )
        return spec["task"]

    with (
        Rollouts(client, task, weights, inflight=INFLIGHT, max_age=MAX_AGE, measure=True) as rollouts,
        client.open(lanes.looking()),
    ):
        trainer = Trainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(policy),
            reward_funcs=service_reward,
            args=arguments,
            train_dataset=steps_dataset(max_steps * GROUPS),
            rollout_func=rollouts,
            callbacks=[Steps()],
        )
        trainer.remove_callback(PrinterCallback)
        began = time.monotonic()
        trainer.train()
        rollouts.publish(trainer)  # the final evaluation and `out` need the weights of the last step
    return steps


class LaneWatch:
    """Polls the run lane (the slots for running agents), and computes the fraction of free slots."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._free: list[float] = []

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            look = tasks.create_task(self._look(), name="lanes")
            try:
                yield
            finally:
                look.cancel()

    def idle(self) -> float:
        """Return the mean fraction of slots that were free since the last call."""
        free, self._free = self._free, []
        return fmean(free) if free else 0.0

    async def _look(self) -> None:
        while True:
            status = await self._client.status()
            for node in status.nodes:
                self._free += [1 - lane.in_use / lane.size for lane in node.lanes if lane.name == "run"]
            await asyncio.sleep(LOOK_EVERY)
