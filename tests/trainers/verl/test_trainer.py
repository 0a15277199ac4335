"""verl 0.9.1 itself: its Ray workers, TransferQueue and replay buffer take rollouts of a live service, and its
advantage and policy loss train a model on them."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import ray
import torch
import transfer_queue as tq
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.experimental.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu

from outrider.client.client import AsyncClient
from outrider.errors import InvalidField
from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.trainers.verl import OutriderAgentLoopManager, RemoteAgentLoop, start_service
from trainers.verl import world

pytestmark = [pytest.mark.trainers, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

STEP = 12
TWO_WORKERS = ["actor_rollout_ref.rollout.agent.num_workers=2"]
"""Each worker imports verl, which takes ten seconds and more."""
GRPO = "algorithm.adv_estimator=grpo"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # TransferQueue starts 8 storage actors, and waits for ever if Ray has too few (logical) processors.
    tests = Path(__file__).parents[2]
    workers = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{tests}:{tests.parent / 'src'}"}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # a short path, for sockets
        ray.init(
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": workers},
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory, model: Path, cluster: None) -> AsyncIterator[str]:
    async with world.service(tmp_path_factory.mktemp("service"), model) as (_, url):
        yield url


@pytest.fixture(scope="module")
def queue(cluster: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    tq.init(world.verl_config(tmp_path_factory.mktemp("queue"), model, {}).transfer_queue)
    yield
    tq.close()


def objects(values: list[Any]) -> Any:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def prompts_v0(tasks: list[str], n: int) -> DataProto:
    rows = [(f"u{number}", task) for number, task in enumerate(tasks) for _ in range(n)]
    return DataProto.from_single_dict(
        {
            "dummy_tensor": torch.zeros((len(rows), 1), dtype=torch.uint8),
            "raw_prompt": objects([[{"role": "user", "content": "unused"}] for _ in rows]),
            "uid": objects([uid for uid, _ in rows]),
            "index": objects([int(uid[1:]) for uid, _ in rows]),
            "task": objects([task for _, task in rows]),
        },
        meta_info={"global_steps": STEP},
    )


def prompts_v1(tasks: dict[str, str], *, validate: bool = False) -> Any:
    uids = list(tasks)
    batch = tu.get_tensordict(
        {
            "uid": uids,
            "raw_prompt": [[{"role": "user", "content": "unused"}] for _ in uids],
            "index": list(range(len(uids))),
            "task": list(tasks.values()),
        },
        {"global_steps": STEP} | ({"validate": True} if validate else {}),
    )
    tags = [{"is_prompt": True, "status": "pending", "global_steps": STEP} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id="val" if validate else "train", tags=tags)
    return batch


def buffer(refilled: list[int], manager: Any, spare: Iterator[tuple[str, str]], **changes: Any) -> ReplayBufferAsync:
    """Return verl's replay buffer, whose refills are taken from `spare`."""

    def refill(count: int) -> None:
        refilled.append(count)
        manager.generate_sequences(prompts_v1(dict(next(spare) for _ in range(count))))

    settings: dict[str, Any] = {
        "trainer_mode": "separate_async",
        "trainer_config": {},
        "max_off_policy_threshold": 8,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": {},
        "poll_interval": 0.2,
        "refill_fn": refill,
        "filter_groups_metric": "heads",
        "train_batch_size": 2,
        "gen_batch_size": 1,
    }
    return ReplayBufferAsync(**settings | changes)


def check_rows(rows: Any, prompts: Any, responses: Any, mask: Any, logprobs: Any) -> None:
    """Check that each row has the log-probabilities of the scripted engine, and a token that trains. The
    log-probabilities are a function of id and place, so a changed id or place is found."""
    for row in rows:
        prompt, response = prompts[row].tolist(), responses[row].tolist()
        expected = [
            scripted_logprob(len(prompt) + place, token) if trained else 0.0
            for place, (token, trained) in enumerate(zip(response, mask[row].tolist(), strict=True))
        ]
        assert logprobs[row].tolist() == pytest.approx(expected, abs=1e-6)
        assert sum(mask[row].tolist()) > 0


def policy_step(model: Path, sequences: list[list[int]], starts: list[int], mask: Any, advantages: Any) -> list[float]:
    """Make one step of AdamW on verl's policy loss, and return the increase of the mean log-probability of each row's
    tokens."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    width = mask.shape[1]

    def logprobs() -> torch.Tensor:
        rows = []
        for ids, start in zip(sequences, starts, strict=True):
            logits = policy(torch.tensor([ids])).logits[0, start - 1 : -1]
            chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[start:])[:, None])[:, 0]
            rows.append(torch.nn.functional.pad(chosen, (0, width - len(chosen))))
        return torch.stack(rows)

    before = logprobs().detach()
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, global_batch_info={}, get=lambda name, default: default
    )
    loss, _ = core_algos.get_policy_loss_fn("vanilla")(
        old_log_prob=before, log_prob=logprobs(), advantages=advantages, response_mask=mask, config=config
    )
    loss.backward()
    optimizer.step()
    rise = (logprobs().detach() - before) * mask
    return [float(value) for value in rise.sum(1) / mask.sum(1)]


async def test_v0_workers_give_a_batch_that_trains(url: str, model: Path, tmp_path: Path) -> None:
    config = world.verl_config(
        tmp_path, model, {"url": url, "metrics": ["heads"]}, ["trainer.use_v1=False", *TWO_WORKERS]
    )
    manager = await AgentLoopManager.create(config=config, llm_client=None)
    n, tasks = 4, [world.task("Toss a coin."), world.task("Toss it high.")]
    batch = await manager.generate_sequences(prompts_v0(tasks, n))
    assert batch.batch["prompts"].shape == (8, 64)
    assert batch.batch["responses"].shape == (8, 128)
    mask, attention = batch.batch["response_mask"], batch.batch["attention_mask"]
    assert bool((mask.sum(1) < attention[:, 64:].sum(1)).all())  # the ids between the two turns do not train
    starts = attention[:, :64].sum(1).tolist()
    prompts = [row[64 - start :] for row, start in zip(batch.batch["prompts"], starts, strict=True)]
    responses = [row[: int(kept.sum())] for row, kept in zip(batch.batch["responses"], attention[:, 64:], strict=True)]
    short = [row[: len(response)] for row, response in zip(mask, responses, strict=True)]
    given = [row[: len(response)] for row, response in zip(batch.batch["rollout_log_probs"], responses, strict=True)]
    check_rows(range(8), prompts, responses, short, given)
    rewards = batch.batch["rm_scores"].sum(1)
    assert sorted(rewards.tolist()) == [0.0] * 4 + [1.0] * 4
    assert batch.non_tensor_batch["heads"].tolist() == rewards.tolist()
    assert {*batch.non_tensor_batch["min_global_steps"], *batch.non_tensor_batch["max_global_steps"]} == {7}
    async with AsyncClient(url) as client:
        for about in batch.non_tensor_batch["outrider"]:
            [sample] = await client.samples(about["session_id"])
            assert sample.labels["verl.uid"] in ("u0", "u1")

    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        batch.batch["rm_scores"], mask, batch.non_tensor_batch["uid"]
    )
    sequences = [prompt.tolist() + response.tolist() for prompt, response in zip(prompts, responses, strict=True)]
    rises = policy_step(model, sequences, starts, mask, advantages)
    for rise, reward in zip(rises, rewards.tolist(), strict=True):
        assert (rise > 0) == (reward == 1.0)


@pytest.mark.parametrize("kind", [AgentLoopManagerTQ, OutriderAgentLoopManager])
async def test_v1_rows_pass_through_the_queue_and_failed_groups_are_replaced(
    url: str, model: Path, tmp_path: Path, queue: None, kind: Any
) -> None:
    ours = kind is OutriderAgentLoopManager
    settings = {"url": url, "metrics": ["heads"], "rows": "all" if ours else "main"}
    config = world.verl_config(tmp_path, model, settings, TWO_WORKERS if ours else [*TWO_WORKERS, GRPO])
    manager = await asyncio.to_thread(kind.create, config=config, llm_client=None)
    name = kind.__name__.lower()
    tasks = {
        f"{name}a": world.task("Toss a coin.", rewrite=True),
        f"{name}b": world.task("Toss it.", broken=True),
    }
    spare = iter({f"{name}c": world.task("Toss it again.")}.items())
    await asyncio.to_thread(manager.generate_sequences, prompts_v1(tasks))
    refilled: list[int] = []
    replay = buffer(refilled, manager, spare)
    meta, metrics = await asyncio.to_thread(replay.sample, STEP, "train", 2)
    assert refilled == [1]
    assert sum(value for key, value in metrics.items() if key.endswith("rollout_failure/evicted_samples")) == 1
    uids = [key.split("_")[0] for key in meta.keys]
    rows = 2 if ours else 1
    assert (uids.count(f"{name}a"), uids.count(f"{name}b"), uids.count(f"{name}c")) == (4 * rows, 0, 4)
    for tag in meta.tags:
        assert (tag["min_global_steps"], tag["max_global_steps"], tag["global_steps"]) == (7, 7, STEP)
        assert isinstance(tag["min_global_steps"], int)

    fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "extra_fields", "uid"]
    data = tq.kv_batch_get(keys=meta.keys, partition_id="train", select_fields=fields)
    columns = [data[field].unbind() for field in fields[:5]]
    check_rows(range(len(uids)), *columns[:4])
    rewards = [float(row.sum()) for row in columns[4]]
    extra = [getattr(value, "data", value) for value in data["extra_fields"]]
    assert [one["reward_extra_info"]["heads"] for one in extra] == rewards
    for session in range(4):  # the rows of a session have one reward, and its main conversation is the last
        of_it = [place for place, key in enumerate(meta.keys) if key.startswith(f"{name}a_{session}_")]
        assert len(of_it) == rows
        assert len({rewards[place] for place in of_it}) == 1
        last = max(of_it, key=lambda place: meta.keys[place])
        assert extra[last]["outrider"]["row"] == 0

    # The trainer's own steps, from the queue and back to it: rows that fill a mini-batch of 16, the engine's
    # log-probabilities as those of the old policy, advantages.
    trainer = SimpleNamespace(config=config)
    filled = upsample_batch_to_divisible_size(meta, 16, eos_token_id=2)
    config.algorithm.rollout_correction.bypass_mode = True
    PPOTrainer._compute_old_log_prob(trainer, filled, {})
    config.algorithm.rollout_correction.bypass_mode = False
    PPOTrainer._compute_advantage(trainer, filled, {})
    assert len(filled) == 16
    assert not any(filled.tags[place].get("is_padding") for place in range(len(meta.keys)))
    columns_after = tq.kv_batch_get(keys=meta.keys, partition_id="train", select_fields=["advantages", "returns"])
    advantages, returns = (columns_after[field].unbind() for field in ("advantages", "returns"))
    of_rollout: defaultdict[str, float] = defaultdict(float)
    for key, mask, weighted, plain, reward in zip(meta.keys, columns[2], advantages, returns, rewards, strict=True):
        assert plain[mask == 1].tolist() == pytest.approx(
            [(reward - 0.5) / (math.sqrt(1 / 3) + 1e-6)] * int(mask.sum())
        )
        of_rollout[key.rpartition("_")[0]] += float((weighted / int(mask.sum()) / plain[mask == 1][0]).sum())
    if ours:
        assert list(of_rollout.values()) == pytest.approx([16 / 8] * 8, rel=1e-5)
    mask, advantages = (
        torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True).float() for column in (columns[2], advantages)
    )
    sequences = [prompt.tolist() + response.tolist() for prompt, response in zip(columns[0], columns[1], strict=True)]
    starts = [len(prompt) for prompt in columns[0]]
    rises = policy_step(model, sequences, starts, mask, advantages)
    for rise, reward in zip(rises, rewards, strict=True):
        assert (rise > 0) == (reward == 1.0)
    tq.kv_clear(keys=filled.keys, partition_id="train")


async def test_v1_has_the_rewards_of_turns_at_their_ends_and_those_of_rows(
    url: str, model: Path, tmp_path: Path, queue: None
) -> None:
    config = world.verl_config(tmp_path, model, {"url": url}, TWO_WORKERS)
    manager = await asyncio.to_thread(OutriderAgentLoopManager.create, config=config, llm_client=None)
    tasks = {"process": world.task("Toss a coin.", rewrite=True, process=True, side="heads")}
    await asyncio.to_thread(manager.generate_sequences, prompts_v1(tasks))
    replay = buffer([], manager, iter(()), train_batch_size=1, filter_groups_metric=None)
    meta, _ = await asyncio.to_thread(replay.sample, STEP, "train", 1)
    data = tq.kv_batch_get(
        keys=meta.keys, partition_id="train", select_fields=["response_mask", "rm_scores", "extra_fields"]
    )
    columns = (data["response_mask"].unbind(), data["rm_scores"].unbind(), data["extra_fields"])
    rows = []
    for mask, scores, extra in zip(*columns, strict=True):
        about = getattr(extra, "data", extra)
        assert scores[mask == 0].tolist() == [0.0] * int((mask == 0).sum())
        assert about["turn_scores"] == [0.25]  # each of the two rows trains one of the two turns
        rows.append((about["outrider"]["row"], float(scores.sum())))
    assert sorted(rows) == [(0, 1.25)] * 4 + [(1, -0.75)] * 4
    tq.kv_clear(keys=meta.keys, partition_id="train")


async def test_flat_groups_are_replaced_by_a_metric_of_the_verdict(
    url: str, model: Path, tmp_path: Path, queue: None
) -> None:
    config = world.verl_config(tmp_path, model, {"url": url, "metrics": ["heads"]})
    manager = await asyncio.to_thread(OutriderAgentLoopManager.create, config=config, llm_client=None)
    refilled: list[int] = []
    replay = buffer(refilled, manager, iter({"flatb": world.task("Toss it again.")}.items()))
    await asyncio.to_thread(manager.generate_sequences, prompts_v1({"flata": world.task("Toss.", side="heads")}))
    meta, _ = await asyncio.to_thread(replay.sample, STEP, "train", 1)
    assert refilled == [1]
    assert sorted(meta.keys) == [f"flatb_{session}_0" for session in range(4)]
    tq.kv_clear(keys=meta.keys, partition_id="train")


async def test_any_session_completes_a_group_where_the_setting_says_so(
    model: Path, tmp_path: Path, queue: None, url: str
) -> None:
    settings = {"url": url, "complete": "any", "evaluation_priority": 33}
    config = world.verl_config(tmp_path, model, settings, ["actor_rollout_ref.rollout.val_kwargs.n=2"])
    manager = await asyncio.to_thread(OutriderAgentLoopManager.create, config=config, llm_client=None)
    batch = prompts_v1({"valx": world.task("Toss.", broken="tails")}, validate=True)
    await asyncio.to_thread(manager.generate_sequences, batch)
    replay = buffer([], manager, iter(()), filter_groups_metric=None)
    meta, _ = await asyncio.to_thread(replay.sample, STEP, "val", 1)
    assert len(meta.keys) == 1
    assert meta.keys[0] in ("valx_0_0", "valx_1_0")
    async with AsyncClient(url) as client:
        newest = (await client.groups(limit=1))[0]
        assert (newest.n, newest.priority) == (2, 33)
    tq.kv_clear(keys=meta.keys, partition_id="val")


async def test_verls_own_servers_generate_through_the_relay(cluster: None, model: Path, tmp_path: Path) -> None:
    ids = AutoTokenizer.from_pretrained(model)("heads it is<|im_end|>")["input_ids"]
    async with world.service(tmp_path, model, engines=()) as (_, own):
        config = world.verl_config(tmp_path, model, {"url": own, "relay": "trainer"})
        manager = await AgentLoopManager.create(config=config, llm_client=world.OwnServers(config, ids))
        batch = await manager.generate_sequences(prompts_v0([world.task("Toss a coin.")], 4))
        async with AsyncClient(own) as client:
            [engine] = await client.engines()
            await client.remove_engine(engine.name)
            async with asyncio.timeout(60):
                while not await client.engines():  # the worker gives up, and the next call attaches the servers again
                    await ray.get_actor("outrider-relay-trainer").attach.remote()
    assert (engine.name, engine.kind) == ("trainer", "relay")
    mask = batch.batch["response_mask"].bool()
    assert batch.batch["responses"][mask].tolist() == ids * 8
    assert set(batch.batch["rollout_log_probs"][mask].tolist()) == {-0.5}
    assert {*batch.non_tensor_batch["min_global_steps"], *batch.non_tensor_batch["max_global_steps"]} == {9}


async def test_a_named_actor_runs_the_service(cluster: None, model: Path, tmp_path: Path) -> None:
    actor = await asyncio.to_thread(
        start_service,
        {
            "model": {"tokenizer": str(model), "renderer": "qwen3"},
            "engines": [{"kind": "scripted", "name": "s", "options": {"replies": world.REPLIES, "version": 7}}],
        },
        name="outrider-test",
    )
    try:
        lengths = ["actor_rollout_ref.rollout.prompt_length=512"]  # the agent describes its tools
        config = world.verl_config(tmp_path, model, {"actor": "outrider-test", "task": world.PLAIN}, lengths)
        manager = await AgentLoopManager.create(config=config, llm_client=None)
        batch = await manager.generate_sequences(prompts_v0([world.plain_task("I hope for heads")], 2))
        assert batch.batch["rm_scores"].sum(1).tolist() == [1.0, 1.0]
        missing = world.verl_config(tmp_path, model, {"actor": "nobody", "task": world.PLAIN})
        manager = await AgentLoopManager.create(config=missing, llm_client=None)
        with pytest.raises(Exception, match="this Ray job has no such actor"):
            await manager.generate_sequences(prompts_v0([world.plain_task("I hope for heads")], 2))
        service_url, _ = await actor.address.remote()
    finally:
        await actor.stop.remote()
        ray.kill(actor)
    async with AsyncClient(service_url) as client:
        with pytest.raises(Exception, match="cannot reach the service"):
            await client.status()


async def test_a_wrong_setting_ends_the_start(cluster: None, model: Path, tmp_path: Path) -> None:
    config = world.verl_config(tmp_path, model, {"complet": "any"})
    with pytest.raises(Exception, match=r"rollout\.custom\.outrider has the unknown key 'complet'"):
        await asyncio.to_thread(OutriderAgentLoopManager.create, config=config, llm_client=None)
    config = world.verl_config(tmp_path, model, {}, [GRPO])
    with pytest.raises(Exception, match="verl counts each row as a rollout"):
        await asyncio.to_thread(OutriderAgentLoopManager.create, config=config, llm_client=None)


async def test_the_loop_refuses_several_rows_in_the_v1_trainer(model: Path, tmp_path: Path) -> None:
    config = world.verl_config(tmp_path, model, {}, [GRPO])
    loop = object.__new__(RemoteAgentLoop)
    loop.config = config
    with pytest.raises(InvalidField, match="V1 trainer would count each row as a rollout"):
        await loop.run({}, session_id=0)


def test_the_models_tokenizer_is_the_services(model: Path) -> None:
    assert AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|im_end|>") == 2
