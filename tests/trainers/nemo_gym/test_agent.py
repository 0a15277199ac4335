"""The agent server behind NeMo Gym 0.7's own client: replies, statuses, clients that leave, many rows at once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientResponseError
from nemo_gym.base_resources_server import BaseVerifyResponse
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseOutputMessageForTraining
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper

from outrider.client.client import AsyncClient
from outrider.sessions.calls.limits import MAX_BODY
from support.scribe import Scribe, scribe_task
from support.service import running_service, say, scripted_engine
from trainers.gym_world import AGENT, gym_row, message_log
from trainers.nemo_gym.world import running_gym

pytestmark = pytest.mark.trainers


async def test_rows_become_replies_token_for_token(tmp_path: Path) -> None:
    task = scribe_task("gym rows", rewards=[0, 1])
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two")]) as (service, url):
        async with running_gym({"url": url, "metrics": ["number"]}) as gym:
            results = await gym.collect([gym_row(task, number) for number in range(2)])
        page = await service.results(after=0, wait=0, limit=100, samples=True)
    by_session = {sample.session_id: sample for group in page.groups for sample in group.samples or ()}
    for number, result in enumerate(results):
        sample = by_session[result["response"]["id"]]
        ids = [token for _, ids, _ in message_log(result) for token in ids]
        assert ids == sample.ids[: len(ids)].tolist()
        assert (result["_rowidx"], result["reward"]) == (number, sample.reward)
        assert result["number"] == sample.metrics["number"]
        checked = BaseVerifyResponse.model_validate(result)  # the reply that other agents of NeMo Gym declare
        assert all(isinstance(item, NeMoGymResponseOutputMessageForTraining) for item in checked.response.output)


async def test_rollouts_are_collected_and_their_metrics_aggregated(tmp_path: Path) -> None:
    """Runs all of `gym eval run --no-serve`: repeats, files of results, `/aggregate_metrics`."""
    rows = [gym_row(scribe_task(f"gym collected {number}", rewards=[number])) for number in range(2)]
    for row in rows:
        del row["_rowidx"]
    given, made = tmp_path / "rows.jsonl", tmp_path / "out" / "rollouts.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made.parent.mkdir()
    config = RolloutCollectionConfig(
        input_jsonl_fpath=str(given),
        output_jsonl_fpath=str(made),
        num_repeats=3,
        num_repeats_add_seed=True,
        responses_create_params={"temperature": 0.25},
        upload_rollouts_to_wandb=False,
    )
    async with (
        running_service(tmp_path=tmp_path) as (_, url),
        AsyncClient(url) as client,
        running_gym({"url": url}),
    ):
        [first, *_] = await RolloutCollectionHelper().run_from_config(config)
        turns = await client.turns(first["response"]["id"])
    assert turns[0].sampling["temperature"] == 0.25
    results = [json.loads(line) for line in made.read_text().splitlines()]
    assert Counter((result["_ng_task_index"], result["reward"]) for result in results) == {(0, 0.0): 3, (1, 1.0): 3}
    [metrics] = json.loads(made.with_name("rollouts_aggregate_metrics.json").read_text())
    assert metrics["agent_ref"] == {"name": AGENT}
    assert metrics["key_metrics"]["mean/reward"] == 0.5
    assert metrics["agent_metrics"]["mean/outrider_turns"] == 2.0
    assert [group["mean/reward"] for group in metrics["group_level_metrics"]] == [0.0, 1.0]


async def test_statuses_say_whether_another_try_may_help(tmp_path: Path) -> None:
    """NeMo RL treats 408, 429, and 500 upwards as failures of the infrastructure, and retries the row."""
    bodies = {
        json.dumps(gym_row(scribe_task("gym ill", fails=[0]))).encode(): (500, "the scribe fell ill"),
        json.dumps(gym_row(scribe_task("gym forks", rewrites=[0]))).encode(): (422, "2 rows that train"),
        json.dumps(gym_row(scribe_task("gym odd") | {"colour": "red"})).encode(): (422, "colour"),
        b'{"responses_create_params": {"input": "x"}, "task"': (422, "the row is not JSON"),
        b'"' + b"x" * MAX_BODY + b'"': (413, "a task may have"),
    }
    async with (
        running_service(tmp_path=tmp_path) as (_, url),
        running_gym({"url": url}) as gym,
        aiohttp.ClientSession() as session,
    ):
        for body, (status, reason) in bodies.items():
            async with session.post(f"{gym.url}/run", data=body) as reply:
                assert (reply.status, reason in await reply.text()) == (status, True)
        with pytest.raises(ClientResponseError) as failed:
            await gym.collect([gym_row(scribe_task("gym ill again", fails=[0]))])
    assert failed.value.status == 500
    assert b"the scribe fell ill" in failed.value.response_content  # type: ignore[attr-defined]


async def test_a_client_that_hangs_up_and_comes_again_gets_its_rollout(tmp_path: Path) -> None:
    body = json.dumps(gym_row(scribe_task("gym hangs up"))).encode()
    engine = scripted_engine(tmp_path, [{"reply": say("one"), "stall": 1}, say("two")])
    async with (
        running_service(tmp_path=tmp_path, engine=engine) as (_, url),
        running_gym({"url": url}) as gym,
        aiohttp.ClientSession() as session,
    ):

        async def post() -> dict[str, Any]:
            async with session.post(f"{gym.url}/run", data=body) as reply:
                assert reply.status == 200
                found: dict[str, Any] = await reply.json()
                return found

        first = asyncio.create_task(post())
        await engine.stalled.wait()
        first.cancel()
        await asyncio.wait([first])
        await gym.ended.wait()
        engine.release()
        reply = await post()
    assert message_log(reply)
    assert Scribe.started["gym hangs up"] == 1


async def test_two_hundred_rows_at_once(tmp_path: Path) -> None:
    rows = [gym_row(scribe_task(f"gym crowd {number}", rewards=[number]), number) for number in range(200)]
    async with running_service(tmp_path=tmp_path) as (_, url), running_gym({"url": url}) as gym:
        results = await gym.collect(rows)
    assert [result["reward"] for result in results] == [float(number) for number in range(200)]
    assert all(message_log(result) for result in results)


async def test_the_responses_route_has_no_reward(tmp_path: Path) -> None:
    params = gym_row(None)["responses_create_params"]
    async with (
        running_service(tmp_path=tmp_path) as (_, url),
        running_gym({"url": url, "task": scribe_task("gym responses")}) as gym,
        aiohttp.ClientSession() as session,
        session.post(f"{gym.url}/v1/responses", json=params) as reply,
    ):
        response = NeMoGymResponse.model_validate(await reply.json())
        async with session.post(f"{gym.url}/v1/responses", data=b'{"input": "x"}, "task": {}') as refused:
            assert (refused.status, "not JSON" in await refused.text()) == (422, True)
    assert len(response.output) == 2
