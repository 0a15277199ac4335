"""The executor inside OpenRLHF 0.11.2: its rollout actor, experiences, dynamic filter, advantages and policy loss."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from openrlhf.models.loss import PolicyLoss
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.agent import AgentExecutorBase
from openrlhf.utils.loss_utils import iter_grad_accum_global_norm

from outrider.errors import HarnessError
from outrider.service.service import Service
from outrider.spec import EngineSpec
from outrider.trainers.openrlhf import VARIABLE
from support.scribe import scribe_task
from support.service import running_service, say
from trainers.test_openrlhf import VLLM_PARAMS

pytestmark = pytest.mark.trainers

EXAMPLE = Path(__file__).parents[3] / "examples" / "openrlhf" / "agent.py"
MAX_LENGTH = 512


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the environment of the example's agent."""

    def set_settings(url: str, task: dict[str, Any], **more: Any) -> None:
        monkeypatch.setenv(VARIABLE, json.dumps({"url": url, "task": task, "metrics": ["number"], **more}))

    return set_settings


def rollout_actor() -> Any:
    """Return OpenRLHF's Ray actor without Ray and vLLM, with the executor of the example's file."""
    actor = object.__new__(vllm_engine.RolloutRayActor.__ray_metadata__.modified_class)
    actor.executor = vllm_engine._load_agent_executor(str(EXAMPLE))
    return actor


async def responses(actor: Any, prompt: str, n: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = await actor.generate_responses(
        prompt=prompt,
        label="42",
        sampling_params=SimpleNamespace(**VLLM_PARAMS),
        max_length=MAX_LENGTH,
        hf_tokenizer=None,
        num_samples=n,
    )
    return found


def experiences_of(found: list[dict[str, Any]]) -> list[Experience]:
    generator = object.__new__(SamplesGenerator)
    return [generator._process_response_into_experience(response, max_len=MAX_LENGTH) for response in found]


async def test_responses_become_experiences_token_for_token(tmp_path: Path, settings: Any) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two and more")]) as (service, url):
        settings(url, scribe_task("openrlhf real", rewards=[0, 1], rewrites=[1]), rows="main")
        actor = rollout_actor()
        assert isinstance(actor.executor, AgentExecutorBase)
        found = await responses(actor, "say hello", 2)
        rows = await first_rows(service)
    experiences = experiences_of(found)
    for experience in experiences:
        row = rows[int(experience.info["number"].item())]
        assert experience.sequences[0].tolist() == row.ids.tolist()
        assert experience.action_mask[0].tolist() == row.loss_mask[1:].tolist()
        expected = torch.tensor(row.logprobs[1:])
        torch.testing.assert_close(experience.rollout_log_probs[0].double(), expected.double())
        assert experience.rewards.tolist() == experience.scores.tolist() == [row.reward]
        assert not experience.truncated.item()
    batch = make_experience_batch([one for each in experiences for one in split_experience_batch(each)])
    assert batch.action_mask.shape == batch.rollout_log_probs.shape
    assert sorted(map(float, batch.info["outrider_rows_left_out"])) == [0.0, 1.0]


async def first_rows(service: Service) -> dict[int, Any]:
    """Return the row of the main conversation of each session, by the metric `number`."""
    page = await service.results(after=0, wait=0, limit=100, samples=True)
    rows = [sample for group in page.groups for sample in group.samples or () if sample.row == 0]
    return {int(row.metrics["number"]): row for row in rows}


async def test_the_dynamic_filter_replaces_prompts_by_their_scores(
    tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs `SamplesGenerator._generate_vllm`, with `ray.wait` and `ray.get` replaced."""
    async with running_service(tmp_path=tmp_path) as (_, url):
        settings(url, scribe_task("openrlhf filtered", rewards=[1, 1, 0, 1]))
        actor = rollout_actor()
        done = [await responses(actor, prompt, 2) for prompt in ("too easy", "just right")]
    monkeypatch.setattr(samples_generator.ray, "wait", lambda refs, **_: (refs[:1], refs[1:]))
    monkeypatch.setattr(samples_generator.ray, "get", lambda ref: done[ref])
    generator = object.__new__(SamplesGenerator)
    generator.args = SimpleNamespace(algo=SimpleNamespace(dynamic_filtering_range=(0, 1)))
    dispatched: list[str] = []

    def dispatch(prompts: list[str], labels: list[str], **_: Any) -> list[int]:
        dispatched.extend(prompts)
        return [len(dispatched) - 1]

    generator._dispatch_prompts_to_vllm = dispatch
    loader = iter([([None], [prompt], ["42"], [None]) for prompt in ("too easy", "just right")])
    accepted, consumed, exhausted = generator._generate_vllm(loader, 1, dynamic_filtering=True, max_len=MAX_LENGTH)
    assert (dispatched, consumed, exhausted) == (["too easy", "just right"], 2, False)
    assert [one.prompts for one in accepted] == [["just right"]] * 2
    assert sorted(one.scores.item() for one in accepted) == [0.0, 1.0]


async def test_advantages_and_a_step_of_the_policy(tmp_path: Path, settings: Any) -> None:
    replies = [{"when": "say a", "reply": say("alpha")}, {"when": "say b", "reply": say("beta")}]
    async with running_service(tmp_path=tmp_path, replies=replies) as (_, url):
        settings(url, scribe_task("openrlhf learns", rewards=[0, 1]))
        actor = rollout_actor()
        experiences = experiences_of([*await responses(actor, "say a", 1), *await responses(actor, "say b", 1)])
    for index, experience in enumerate(experiences):
        experience.index = [index]
        experience.kl = torch.zeros_like(experience.action_mask, dtype=torch.float32)
    experiences = experience_maker(n=2).compute_advantages_and_returns(experiences)
    for experience, expected in zip(experiences, (-(2**-0.5), 2**-0.5), strict=True):  # a pair's normalised rewards
        of_actions = experience.advantages[experience.action_mask.bool()]
        torch.testing.assert_close(of_actions, torch.full_like(of_actions, expected))
    vocabulary = max(int(one.sequences.max()) for one in experiences) + 1
    logits = torch.zeros(vocabulary, requires_grad=True)
    losses = [step_loss(PolicyLoss(), logits, experience) for experience in experiences]
    torch.stack(losses).sum().backward()
    before = chances_of_actions(logits, experiences)
    torch.optim.SGD([logits], lr=1.0).step()
    worse, better = (
        after - earlier for after, earlier in zip(chances_of_actions(logits, experiences), before, strict=True)
    )
    assert worse < 0 < better


@pytest.mark.parametrize(
    ("token_level", "weights"),
    [(False, [1 / 2 / 5, 1 / 2 / 2]), (True, [1 / 7, 1 / 7])],
    ids=["seq-mean-token-mean", "token-mean"],
)
def test_each_token_has_the_weight_of_the_formula(token_level: bool, weights: list[float]) -> None:
    """Two rollouts with one row each, with 5 and 2 trained tokens and the rewards 1 and 0. Each row is a micro-batch of
    one optimizer step. The expected weights are computed by hand, with the sample standard deviation.
    `--actor.loss_agg_mode` sets `token_level_loss`."""
    masks = [torch.tensor([[1, 1, 0, 1, 1, 1]]).bool(), torch.tensor([[1, 0, 1, 0, 0, 0]]).bool()]
    experiences = []
    for index, (mask, reward) in enumerate(zip(masks, (1.0, 0.0), strict=True)):
        experience = Experience(index=[index], action_mask=mask, rewards=torch.tensor([reward]), info={})
        experience.kl = torch.zeros_like(mask, dtype=torch.float32)
        experiences.append(experience)
    experiences = experience_maker(n=2).compute_advantages_and_returns(experiences)
    policies = [torch.nn.Parameter(torch.zeros(1, 6)) for _ in masks]
    step = iter_grad_accum_global_norm(experiences, SimpleNamespace(), len(masks), lambda each: each.action_mask)
    for policy, (experience, norm) in zip(policies, step, strict=True):
        loss = PolicyLoss(token_level_loss=token_level)(
            policy, policy.detach(), experience.advantages, action_mask=experience.action_mask, **norm
        )[0]
        (loss / len(masks)).backward()  # DeepSpeed divides the loss of each micro-batch by their number
    for policy, mask, weight, sign in zip(policies, masks, weights, (1, -1), strict=True):
        torch.testing.assert_close(policy.grad, -sign * 2**-0.5 * weight * mask.float(), rtol=1e-5, atol=1e-8)


def step_loss(loss_of: Any, logits: torch.Tensor, experience: Experience) -> torch.Tensor:
    chances = logits.log_softmax(-1)[experience.sequences[:, 1:]]
    loss: torch.Tensor = loss_of(
        chances, chances.detach(), experience.advantages, action_mask=experience.action_mask.bool()
    )[0]
    return loss


def chances_of_actions(logits: torch.Tensor, experiences: list[Experience]) -> list[float]:
    """Return the mean log-probability of each experience's action tokens, under a policy that does not depend on the
    context."""
    chances = logits.detach().log_softmax(-1)
    return [chances[one.sequences[:, 1:]][one.action_mask.bool()].mean().item() for one in experiences]


def experience_maker(n: int) -> Any:
    maker = object.__new__(RemoteExperienceMaker)
    advantage = SimpleNamespace(estimator="group_norm", gamma=1.0, lambd=1.0, no_std_norm=False)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=n, max_new_tokens=None),
        reward=SimpleNamespace(clip_range=(-10, 10), overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    maker.strategy = SimpleNamespace(args=args)
    maker.advantage_estimator = "group_norm"
    maker.kl_ctl = SimpleNamespace(value=0.0)
    return maker


async def test_the_actors_own_engine_generates_for_the_service(
    tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs `RolloutRayActor.generate` with an engine that returns outputs in vLLM's form."""
    monkeypatch.setattr(vllm, "SamplingParams", lambda **given: SimpleNamespace(**given), raising=False)
    monkeypatch.setattr(vllm_engine, "TokensPrompt", dict)
    asked: list[tuple[list[int], Any]] = []

    class AsyncLLM:
        async def generate(self, prompt: dict[str, Any], params: Any, request_id: Any) -> AsyncIterator[Any]:
            asked.append((prompt["prompt_token_ids"], params))
            for ids in ((5,), (5, 6)):  # each output of vLLM has all tokens so far
                logprobs = [{each: SimpleNamespace(logprob=-0.25)} for each in ids]
                reply = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=None, stop_reason=None)
                if len(ids) == 2:
                    reply.finish_reason, reply.stop_reason = "stop", 6
                yield SimpleNamespace(outputs=[reply])

    async with running_service(tmp_path=tmp_path, engines=(EngineSpec(kind="relay", name="trainer"),)) as (_, url):
        settings(url, scribe_task("openrlhf real relay"), relay="trainer")
        actor = rollout_actor()
        actor.llm, actor._mm_pad_token_ids = AsyncLLM(), None
        found = await responses(actor, "say hello", 2)
        await asyncio.to_thread(actor.executor.close)
    assert len(asked) == 4
    assert {params.temperature for _, params in asked} == {0.7}
    for experience in experiences_of(found):
        sampled = experience.sequences[0][1:][experience.action_mask[0].bool()]
        assert sampled.tolist() == [5, 6, 5, 6]
        assert experience.rollout_log_probs[0][experience.action_mask[0].bool()].tolist() == [-0.25] * 4


async def test_a_failed_session_ends_the_call_with_its_error(tmp_path: Path, settings: Any) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        settings(url, scribe_task("openrlhf real ill", fails=[0]))
        with pytest.raises(HarnessError, match="the scribe fell ill"):
            await responses(rollout_actor(), "say hello", 2)
