"""Groups of a service in tinker-cookbook 0.6.1: its rollouts, advantages, datums and provenance, with a stand-in for
Tinker's sampling client."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.exceptions import AllTrajectoriesFailedError
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.rollout_limits import TerminationRewardPolicy
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.train import _check_provenance
from tinker_cookbook.utils.ml_log import dump_config

from outrider.client.client import AsyncClient
from outrider.engines.base import Chunk, GenerateRequest, SamplingParams
from outrider.errors import EngineRejected, HarnessError, InvalidField, OutriderError
from outrider.relay import FunctionEngine, Worker
from outrider.spec import EngineSpec
from outrider.trainers.tinker import FAILED_IN_A_ROW, ServiceRollouts, TaskDatasetBuilder, TaskGroup
from outrider.trainers.tinker_sampling import TinkerSampler, sampling_params
from outrider.trajectory import FinishReason, LogprobKind
from support.scribe import scribe_task
from support.service import say
from trainers.tinker.world import MAX_TOKENS, rolled_out, tinker_world

pytestmark = pytest.mark.trainers


def column(datum: tinker.Datum, name: str) -> list[float]:
    found: list[float] = datum.loss_fn_inputs[name].to_torch().tolist()
    return found


async def test_datums_have_the_services_rows(tmp_path: Path) -> None:
    async with tinker_world(tmp_path) as world:
        client = world.client("one", "two", "three", "four", "five")
        task = scribe_task("tinker rows", rewards=[1, 0], rewrites=[0])
        group = await rolled_out(client, task, world.strategy(), temperature=0.7)
        samples = await world.samples()
    assert group is not None
    assert not group.rollout_errors
    assert sorted(group.get_total_rewards()) == [0.0, 1.0]
    params = [asked for _, asked in client.asked]
    assert {each.temperature for each in params} == {0.7}
    assert {each.max_tokens for each in params} == {MAX_TOKENS}
    data, places = assemble_training_data([group], compute_advantages([group]))
    assert [place["traj_idx"] for place in places] in ([0, 0, 1], [0, 1, 1])
    _check_provenance(data, "stable_reinforce")
    datums = iter(data)
    for trajectory, reward in zip(group.trajectories_G, group.get_total_rewards(), strict=True):
        assert trajectory.stop_reason == "completed"
        rows = samples[trajectory.transitions[0].logs["session"]]
        assert len(rows) == (2 if reward else 1)
        for row in rows:
            datum = next(datums)
            assert datum.model_input.to_ints() == row.ids[:-1].tolist()
            assert column(datum, "target_tokens") == row.ids[1:].tolist()
            assert column(datum, "mask") == row.loss_mask[1:].tolist()
            assert column(datum, "logprobs") == pytest.approx(row.logprobs[1:].tolist())
            assert column(datum, "advantages") == [(0.5 if reward else -0.5) * one for one in row.loss_mask[1:]]
            assert {version for version in row.versions.tolist() if version >= 0} == {1}


async def test_each_action_names_the_sequence_that_tinker_sampled(tmp_path: Path) -> None:
    """The replies have different texts, so a reply's text gives its place in the client's list."""
    texts = ["one", "two", "three", "four"]
    async with tinker_world(tmp_path) as world:
        client = world.client(*texts)
        group = await rolled_out(client, scribe_task("tinker sequences", rewards=[1, 0]), world.strategy())
    assert group is not None
    seen = {}
    for trajectory in group.trajectories_G:
        for transition in trajectory.transitions:
            action = transition.ac
            seen[action.sequence_id] = world.tokenizer.decode(action.tokens)
            number = int(action.sequence_id.removeprefix("stand-in-"))
            assert action.prompt_cache_hit_tokens == number
            assert client.asked[number][0] == transition.ob.to_ints()
    assert seen == {f"stand-in-{number}": f"{text}<|im_end|>" for number, text in enumerate(texts)}


async def test_a_cut_row_keeps_the_sequences_that_it_has(tmp_path: Path) -> None:
    async with tinker_world(tmp_path) as world:
        client = world.client("one two three four five six")
        whole = await rolled_out(client, scribe_task("tinker whole"), world.strategy(), n=1)
        assert whole is not None
        first = whole.trajectories_G[0].transitions[0]
        longest = first.ob.length + 3
        group = await rolled_out(client, scribe_task("tinker cut"), world.strategy(max_row_tokens=longest), n=1)
    assert group is not None
    [transition] = group.trajectories_G[0].transitions
    assert transition.ac.tokens == first.ac.tokens[:3]
    assert transition.ac.sequence_id == "stand-in-2"
    data, _ = assemble_training_data([group], compute_advantages([group]))
    _check_provenance(data, "stable_reinforce")


async def test_a_new_client_is_a_new_version_and_a_group_keeps_its_own(tmp_path: Path) -> None:
    async with tinker_world(tmp_path) as world:
        strategy = world.strategy()
        old, new = world.client("old", name="old"), world.client("new", name="new")
        old.held.clear()
        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(rolled_out(old, scribe_task("tinker slow"), strategy))
            await world.called(old)
            quick = await rolled_out(new, scribe_task("tinker quick"), strategy)
            old.held.set()
        evaluated = await rolled_out(old, scribe_task("tinker evaluated"), strategy, evaluating=True)
        later = await rolled_out(new, scribe_task("tinker later"), strategy)
        async with AsyncClient(world.url) as service:
            policy = await service.policy()
    versions = {}
    for name, group in {"slow": slow.result(), "quick": quick, "evaluated": evaluated, "later": later}.items():
        assert group is not None
        actions = [one.ac for trajectory in group.trajectories_G for one in trajectory.transitions]
        [client] = {action.sequence_id.partition("-")[0] for action in actions}
        [(least, most)] = {(each["outrider/version_min"], each["outrider/version_max"]) for each in group.metrics_G}
        assert least == most
        versions[name] = client, least
    assert versions == {"slow": ("old", 1), "quick": ("new", 2), "evaluated": ("old", 1), "later": ("new", 2)}
    assert [engine.version for engine in policy.engines] == [2]


async def test_versions_go_on_above_what_an_operator_has_set(tmp_path: Path) -> None:
    async with tinker_world(tmp_path) as world:
        strategy = world.strategy()
        await rolled_out(world.client(), scribe_task("tinker before"), strategy, n=1)
        async with AsyncClient(world.url) as service:
            await service.resume_policy(7)
            group = await rolled_out(world.client(), scribe_task("tinker after"), strategy, n=1)
            assert [engine.version for engine in (await service.policy()).engines] == [8]
    assert group is not None
    assert group.metrics_G[0]["outrider/version_min"] == 8


async def test_rewards_of_turns_are_added_once(tmp_path: Path) -> None:
    """The first turn is in both rows of the session, and trains in one."""
    async with tinker_world(tmp_path) as world:
        task = scribe_task("tinker turns", rewards=[1], rewrites=[0], turns={"0": 0.25, "2": 0.5})
        group = await rolled_out(world.client("one", "two", "three"), task, world.strategy(), n=1)
    assert group is not None
    [trajectory] = group.trajectories_G
    assert [transition.reward for transition in trajectory.transitions] == [0.25, 0, 0.5]
    assert group.get_total_rewards() == [1.75]


async def test_rewards_of_rows_have_no_place(tmp_path: Path) -> None:
    async with tinker_world(tmp_path) as world:
        task = scribe_task("tinker own rewards", rewards=[1], rewrites=[0, 1, 2], rows={"1": 0.5})
        client = world.client("one", "two", "three")
        with pytest.raises(InvalidField, match=r"the rewards \[0\.5, 1\.0\]"):
            await rolled_out(client, task, world.strategy(), n=1)
        group = await rolled_out(client, task, world.strategy(rows="main"), n=1)
        evaluated = await rolled_out(client, task, world.strategy(), n=1, evaluating=True)
    for each in (group, evaluated):
        assert each is not None
        assert each.get_total_rewards() == [1.0]
        assert each.metrics_G[0]["outrider/rows"] == 1


async def test_a_group_with_a_failed_session_is_skipped_unless_told_otherwise(tmp_path: Path) -> None:
    async with tinker_world(tmp_path) as world:
        client = world.client()
        task = scribe_task("tinker fails", rewards=[0, 0, 0, 1], fails=[1, 4])
        assert await rolled_out(client, task, world.strategy(), n=2) is None
        group = await rolled_out(client, task, world.strategy(complete="any", metrics=["number"]), n=3)
    assert group is not None
    [error] = group.rollout_errors
    assert error.error_type == "HarnessError"
    assert "the scribe fell ill" in error.error_message
    assert [metrics["number"] for metrics in group.metrics_G] == [2, 3]
    assert group.get_total_rewards() == [0, 1]
    assert compute_advantages([group])[0].tolist() == [-0.5, 0.5]


async def test_the_error_of_all_groups_ends_the_training(tmp_path: Path) -> None:
    async with tinker_world(tmp_path) as world:
        client, strategy = world.client(), world.strategy()
        task = scribe_task("tinker hopeless", fails=range(100))
        for _ in range(FAILED_IN_A_ROW - 1):
            assert await rolled_out(client, task, strategy, n=1) is None
        assert await rolled_out(client, task, strategy, n=1, evaluating=True) is None
        with pytest.raises(HarnessError, match="the scribe fell ill"):
            await rolled_out(client, task, strategy, n=1)


async def test_tinkers_failures_are_the_engines(tmp_path: Path) -> None:
    async with tinker_world(tmp_path) as world:
        client, strategy = world.client(), world.strategy()
        client.error = tinker.TinkerError("asleep")
        builder = TaskGroup({"prompt": "hello", "task": scribe_task("tinker down")}, 1)
        with pytest.raises(AllTrajectoriesFailedError, match="Tinker did not sample: TinkerError: asleep"):
            await do_group_rollout(builder, policy_of(client), strategy=strategy)


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), concurrent.futures.CancelledError(), RuntimeError("odd"), TimeoutError("slow")]
)
async def test_any_failure_of_a_sampling_client_ends_the_model_call(tmp_path: Path, error: Exception) -> None:
    """A call that the client itself cancels, for example because its connection ends, must not wait for ever."""
    async with tinker_world(tmp_path) as world:
        client, strategy = world.client(), world.strategy()
        client.error = error
        task = scribe_task("tinker odd") | {"limits": {"agent_seconds": 60}}
        builder = TaskGroup({"prompt": "hello", "task": task}, 1)
        async with asyncio.timeout(30):
            with pytest.raises(AllTrajectoriesFailedError):
                await do_group_rollout(builder, policy_of(client), strategy=strategy)


@pytest.mark.parametrize(("tokens", "logprobs", "sequences"), [(2, 5, 1), (5, 2, 1), (0, 0, 1), (3, 3, 0), (3, 3, 2)])
async def test_odd_replies_of_a_sampling_client_are_never_trained(
    tmp_path: Path, tokens: int, logprobs: int, sequences: int
) -> None:
    class Odd:
        async def sample(self, **_: Any) -> tinker.SampleResponse:
            sequence = tinker.SampledSequence(
                stop_reason="stop", sequence_id="odd", _tokens_list=[5] * tokens, _logprobs_list=[-0.5] * logprobs
            )
            return tinker.SampleResponse(sequences=[sequence] * sequences, prompt_cache_hit_tokens=0)

    async with tinker_world(tmp_path) as world:
        builder = TaskGroup({"prompt": "hello", "task": scribe_task(f"tinker odd reply {tokens} {logprobs}")}, 1)
        async with asyncio.timeout(30):
            with pytest.raises(AllTrajectoriesFailedError):
                await do_group_rollout(builder, policy_of(Odd()), strategy=world.strategy())


async def test_many_groups_leave_nothing_behind(tmp_path: Path) -> None:
    async with tinker_world(tmp_path) as world:
        strategy = world.strategy()
        await rolled_out(world.client(), scribe_task("tinker many"), strategy, n=1)
        before = threading.active_count()
        for _ in range(40):
            await rolled_out(world.client(), scribe_task("tinker many"), strategy, n=1)
        gc.collect()
        sampler = strategy._sampler
        assert sampler is not None
        assert threading.active_count() <= before + 8  # the pool of asyncio.to_thread
        assert (len(sampler._groups), len(sampler._by_session)) == (0, 0)
        assert len(sampler._versions) <= 2


async def test_a_trainer_whose_groups_begin_at_once_is_detached_when_it_closes(tmp_path: Path) -> None:
    async with tinker_world(tmp_path) as world:
        strategy, client = world.strategy(), world.client()
        await asyncio.gather(
            *(rolled_out(client, scribe_task("tinker at once"), strategy, n=1) for _ in range(4)),
        )
        await asyncio.to_thread(strategy.close)
        assert TinkerSampler._open == {}


def test_a_group_that_could_never_be_used_is_refused() -> None:
    for odd in ({"min_usable": 2}, {"min_usable": 1, "complete": "any"}):
        with pytest.raises(InvalidField, match="would make every group unusable"):
            ServiceRollouts(odd)
    ServiceRollouts({"min_usable": 2, "complete": "any"})


def policy_of(client: Any) -> TinkerTokenCompleter:
    return TinkerTokenCompleter(client, max_tokens=MAX_TOKENS)


async def test_a_cancelled_group_is_cancelled_in_the_service(tmp_path: Path) -> None:
    """Asynchronous training cancels the groups that run when it ends."""
    async with tinker_world(tmp_path) as world:
        client = world.client()
        client.held.clear()
        task = scribe_task("tinker cancelled")
        running = asyncio.ensure_future(rolled_out(client, task, world.strategy()))
        await world.called(client)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        page = await world.service.results(after=0, wait=20, limit=10, samples=False)
        client.held.set()
    assert [group.cancelled for group in page.groups] == [True]


async def test_sessions_of_others_are_sampled_with_the_newest_client(tmp_path: Path) -> None:
    async with tinker_world(tmp_path) as world:
        strategy = world.strategy()
        await rolled_out(world.client("first", name="first"), scribe_task("tinker own"), strategy, n=1)
        await rolled_out(newest := world.client("second", name="second"), scribe_task("tinker newer"), strategy, n=1)
        before = len(newest.asked)
        async with AsyncClient(world.url) as service:
            other = await service.submit({"task": scribe_task("tinker other") | {"instruction": "hi"}, "n": 1})
            assert (await service.group(other.id, wait=20)).finished
    assert len(newest.asked) == before + 2


async def test_without_a_relay_the_services_engine_samples(tmp_path: Path) -> None:
    engines = (EngineSpec(kind="scripted", name="scripted", options={"replies": [say("hello")]}),)
    async with tinker_world(tmp_path, engines=engines) as world:
        group = await rolled_out(None, scribe_task("tinker own engine"), world.strategy(relay=None))
    assert group is not None
    data, _ = assemble_training_data([group], compute_advantages([group]))
    with pytest.raises(ValueError, match="needs provenance"):
        _check_provenance(data, "stable_reinforce")


async def test_another_worker_of_the_relay_is_noticed(tmp_path: Path) -> None:
    """Two training runs may have the same relay engine. A session must not train with another model's tokens."""

    async def other(request: GenerateRequest) -> Chunk:
        return Chunk(ids=[5, 6], logprobs=[-1.0, -1.0], finish=FinishReason.STOP)

    async with tinker_world(tmp_path) as world:
        strategy, client = world.strategy(), world.client()
        await rolled_out(client, scribe_task("tinker alone"), strategy)
        engine = FunctionEngine(other, logprob_kind=LogprobKind.RAW, version=1)
        async with Worker(world.url, engine, engine="tinker") as worker:
            await worker.attached()

            async def crowded() -> None:
                for number in range(20):  # on a busy machine, all sessions of a group may go to one worker
                    await rolled_out(client, scribe_task(f"tinker crowded {number}"), strategy, n=8)

            with pytest.raises(InvalidField, match="not sampled with this trainer's clients"):
                await crowded()


async def test_limits_end_trajectories_as_in_the_cookbook(tmp_path: Path) -> None:
    async with tinker_world(tmp_path) as world:
        task = scribe_task("tinker limits", rewards=[1]) | {"limits": {"turns": 1}}
        builder = TaskGroup({"prompt": "hello", "task": task}, 1)
        policy = TerminationRewardPolicy(zero_reward_on_limit=True)
        group = await do_group_rollout(
            builder, policy_of(world.client()), strategy=world.strategy(), termination=policy
        )
    [trajectory] = group.trajectories_G
    assert trajectory.stop_reason == "max_turns"
    assert trajectory.transitions[-1].metrics == {"stop/max_turns": 1.0}
    assert group.get_total_rewards() == [0.0]


@pytest.mark.parametrize(
    "asked",
    [
        {"min_p": 0.1},
        {"min_tokens": 1},
        {"presence_penalty": 0.5},
        {"logit_bias": {1: 1.0}},
        {"stop": ("x",), "stop_token_ids": (3,)},
    ],
)
def test_sampling_that_tinker_does_not_have_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(EngineRejected):
        sampling_params(SamplingParams(max_tokens=1, **asked))


def test_sampling_parameters() -> None:
    made = sampling_params(SamplingParams(max_tokens=5, temperature=0.5, top_k=3, seed=7, stop_token_ids=(2, 9)))
    assert made == tinker.SamplingParams(max_tokens=5, temperature=0.5, top_k=3, top_p=1.0, seed=7, stop=[2, 9])


async def test_other_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cookbook uses other processes if its rollout executor is a process pool."""
    async with tinker_world(tmp_path) as world:
        monkeypatch.setattr("multiprocessing.parent_process", lambda: "the trainer")
        with pytest.raises(InvalidField, match="rollout executor"):
            await rolled_out(world.client(), scribe_task("tinker elsewhere"), world.strategy())


async def test_the_strategy_and_the_builder_belong_together(tmp_path: Path) -> None:
    builder = TaskGroup({"prompt": "hello"}, 2)
    with pytest.raises(InvalidField, match="needs the rollout strategy"):
        await do_group_rollout(builder, None)
    with pytest.raises(InvalidField, match="runs TaskGroups"):
        await do_group_rollout(
            type("Other", (TaskGroup.__mro__[1],), {"make_envs": None})(), None, strategy=ServiceRollouts()
        )


async def test_the_dataset_has_every_row_once(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(5)))
    (tmp_path / "test.jsonl").write_text('{"prompt": "test"}\n')
    builder = TaskDatasetBuilder(
        data=str(tmp_path / "rows.jsonl"), groups_per_batch=2, group_size=4, test_data=str(tmp_path / "test.jsonl")
    )
    train, test = await builder()
    batches = [train.get_batch(index) for index in range(len(train))]
    assert [[each.row["prompt"] for each in batch] for batch in batches] == [["0", "1"], ["2", "3"], ["4"]]
    assert {(each.n, each.evaluating) for batch in batches for each in batch} == {(4, False)}
    assert test is not None
    [[only]] = [test.get_batch(index) for index in range(len(test))]
    assert (only.n, only.evaluating) == (1, True)
    assert pickle.loads(pickle.dumps(only)).row == {"prompt": "test"}


def test_settings_are_not_logged_and_travel() -> None:
    strategy = ServiceRollouts({"url": "http://outrider:8700", "token": "secret"})
    assert "secret" not in str(dump_config(strategy))
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy._settings == strategy._settings
    with pytest.raises(OutriderError, match="unknown key 'relais'"):
        ServiceRollouts({"relais": "tinker"})


def test_a_sampler_is_shared_until_its_last_user_closes_it() -> None:
    def opened() -> TinkerSampler:
        return TinkerSampler.open("http://127.0.0.1:1", None, "shared", version=0)

    first, second = opened(), opened()
    assert first is second
    first.close()
    assert opened() is second
    second.close()
    second.close()
    third = opened()
    assert third is not second
    third.close()
