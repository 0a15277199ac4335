"""ProRL Agent's interface over HTTP, with a strict client: jobs, cancellations, lost connections, engines, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from outrider.client.client import AsyncClient
from outrider.config import LanesConfig, ProrlConfig, ProrlHandlerConfig
from outrider.errors import InvalidField
from outrider.schemas import Artifact, ArtifactList
from outrider.store.artifacts import PATCH
from support.prorl import Declined
from support.service import call, running_service, say
from support.waiting import until

from .prorl_world import instance, prorl_service

HANG = 3600.0


async def test_a_job_from_start_to_stop(tmp_path: Path) -> None:
    async with prorl_service(tmp_path) as (_, client):
        with pytest.raises(Declined, match=r"503: .*not running"):
            await client.process(instance())
        for path in ("stop", "status"):
            with pytest.raises(Declined, match="503"):
                await getattr(client, path)()
        with pytest.raises(Declined, match="503"):
            await client.cancel("any")
        assert await client.start() == "started"
        with pytest.raises(Declined, match=r"400: .*already running"):
            await client.start()
        result = await client.process(instance(7, reward=0.5))
        assert (result.instance_id, result.trajectory_id) == ("i7", 7)
        assert (result.success, result.finish, result.resolved, result.filter) == (True, True, False, False)
        assert (result.error, result.critical_error, result.git_patch) == (None, None, "")
        assert result.report is not None
        assert (result.report["reward"], result.report["rows"]) == (0.5, 1)
        assert [message.role for message in result.messages] == ["user", "assistant"]
        assert (result.messages[0].content, result.messages[1].content) == ("Question 7.", "hello")
        assert result.messages[1].token_ids
        assert result.end_properly
        timing = result.timing
        assert timing.counted_elapsed == timing.init_time + timing.run_time + timing.eval_time
        assert (timing.init, timing.run, timing.eval) == (timing.init_time, timing.run_time, timing.eval_time)
        assert (timing.others, timing.timeout, timing.timeout_triggered) == (timing.others_time, False, False)
        assert await client.stop() == "stopped; 0 jobs were cancelled"
        with pytest.raises(Declined, match="503"):
            await client.process(instance(7))
        assert await client.start() == "started"


async def test_rows_equal_those_of_the_native_api(tmp_path: Path) -> None:
    replies = [call("echo one"), call("echo two"), say("done")]
    async with prorl_service(tmp_path, replies=replies) as (_, client), AsyncClient(client.url) as native:
        await client.start()
        result = await client.process(instance(source="tools"))
        [group] = (await native.results(samples=True)).groups
    [sample] = group.samples or ()
    replied = [message for message in result.messages if message.role == "assistant"]
    assert len(replied) == 3
    last = replied[-1]
    assert (last.input_ids or []) + last.token_ids == sample.ids.tolist()
    for message, (start, end) in zip(replied, sample.turn_spans, strict=True):
        assert message.input_ids == sample.ids[:start].tolist()
        assert message.token_ids == sample.ids[start:end].tolist()
        assert message.logprobs == sample.logprobs[start:end].tolist()
        assert sample.loss_mask[start:end].all()
    assert replied[0].tool_calls is not None
    assert (replied[0].tool_calls[0].name, replied[0].tool_calls[0].arguments) == ("bash", {"command": "echo one"})
    assert [tool["function"]["name"] for tool in result.tools] == ["bash", "python"]
    assert (result.resolved, sample.reward) == (True, 1.0)
    assert [message.role for message in result.messages if message.token_ids == []] == ["user", "tool", "tool"]


async def test_a_lost_connection_loses_no_job(tmp_path: Path) -> None:
    async with prorl_service(tmp_path) as (service, client):
        await client.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.process(instance(seconds=0.6), job_id="j1")
        assert (await client.status()).pending_jobs == 1
        result, again = await asyncio.gather(*(client.process(instance(seconds=0.6), job_id="j1") for _ in range(2)))
        assert result == again == await client.process(instance(seconds=0.6), job_id="j1")
        assert len(await service.store.groups()) == 1
        with pytest.raises(Declined, match=r"409: .*another request"):
            await client.process(instance(1), job_id="j1")
        await asyncio.gather(*(client.process(instance(2)) for _ in range(2)))  # without an id, these are two jobs
        assert len(await service.store.groups()) == 3


async def test_a_stored_result_needs_no_started_server(tmp_path: Path) -> None:
    """After a restart, a server whose jobs have all ended is not started, but still returns the results of these
    jobs."""
    async with prorl_service(tmp_path) as (_, client):
        await client.start()
        first = await client.process(instance(), job_id="j1")
        await client.stop()
        assert await client.process(instance(), job_id="j1") == first
    async with prorl_service(tmp_path) as (service, client):
        assert await client.process(instance(), job_id="j1") == first
        with pytest.raises(Declined, match=r"409: .*another request"):
            await client.process(instance(1), job_id="j1")
        with pytest.raises(Declined, match=r"503: .*not running"):
            await client.process(instance(), job_id="j2")
        assert len(await service.store.groups()) == 1


async def test_the_same_job_at_once_is_one_job(tmp_path: Path) -> None:
    async with prorl_service(tmp_path) as (service, client):
        await client.start()
        results = await asyncio.gather(*(client.process(instance(), job_id="one") for _ in range(8)))
        assert all(result == results[0] for result in results)
        assert len(await service.store.groups()) == 1


@pytest.mark.parametrize(("source", "stage"), [("coin", "init"), ("hanging", "run")])
async def test_a_cancelled_job_ends_with_a_whole_result(tmp_path: Path, source: str, stage: str) -> None:
    async with prorl_service(tmp_path) as (service, client), asyncio.TaskGroup() as tasks:
        await client.start()
        asked = instance(source=source, seconds=HANG if source == "coin" else 0.0)
        waiting = tasks.create_task(client.process(asked, job_id="j1"))

        async def runs() -> bool:
            if (await client.status()).run == 0:
                return False
            [session] = await service.store.sessions((await service.store.groups())[0].id)
            return source == "coin" or bool(await service.store.turns(session.id))

        await until(runs)
        assert await client.cancel("j1") == "job j1 is cancelled"
        result = await waiting
        assert (result.success, result.finish, result.resolved, result.filter) == (False, False, None, True)
        assert (result.critical_error, result.error, result.report) == (stage, "cancelled", None)
        assert [message.role for message in result.messages] == ([] if stage == "init" else ["user", "assistant"])
        assert await client.cancel("j1") == "job j1 had already ended"
        with pytest.raises(Declined, match=r"404: .*no job 'unknown'"):
            await client.cancel("unknown")
        assert (await client.status()).jobs == 0


async def test_a_stop_cancels_the_jobs_under_way(tmp_path: Path) -> None:
    async with prorl_service(tmp_path, lanes=LanesConfig(run=2)) as (_, client), asyncio.TaskGroup() as tasks:
        await client.start()
        waiting = [tasks.create_task(client.process(instance(n, seconds=HANG))) for n in range(6)]

        async def all_there() -> bool:
            return (await client.status()).pending_jobs == 6

        await until(all_there)
        assert await client.stop() == "stopped; 6 jobs were cancelled"
        results = await asyncio.gather(*waiting)
        assert {result.error for result in results} == {"cancelled"}
        assert {result.resolved for result in results} == {None}


async def test_a_failure_is_never_a_reward(tmp_path: Path) -> None:
    async with prorl_service(tmp_path) as (_, client):
        await client.start()
        result = await client.process(instance(source="failing"))
        assert (result.success, result.resolved, result.report, result.filter) == (False, None, None, True)
        assert result.critical_error == "eval"
        assert "evaluator" in (result.error or "")
        assert result.messages[-1].token_ids  # the sampled tokens are delivered even so


async def test_a_diff_that_was_carried_is_the_patch(tmp_path: Path) -> None:
    async with prorl_service(tmp_path) as (service, client):
        await client.start()
        assert (await client.process(instance(), job_id="j1")).git_patch == ""
        [session] = await service.store.sessions((await service.store.groups())[0].id)
        data = b"diff --git a/x b/x\n"
        digest = service.artifacts.put(session.id, 1, data)
        artifact = Artifact(path=PATCH, size=len(data), sha256=digest)
        service.artifacts.index(ArtifactList(session_id=session.id, attempt=1, artifacts=(artifact,), left_out=()))
        assert (await client.process(instance(), job_id="j1")).git_patch == data.decode()
        service.artifacts.file(session.id, PATCH).unlink()
        lost = await client.process(instance(), job_id="j1")
        assert (lost.critical_error, lost.success, lost.resolved, lost.filter) == ("final_result", False, None, True)
        assert "diff cannot be read" in (lost.error or "")


async def test_a_wait_has_a_bound_of_the_operator(tmp_path: Path) -> None:
    async with prorl_service(tmp_path, wait_seconds=0.2) as (_, client):
        await client.start()
        with pytest.raises(Declined, match=r"504: job j1 is still under way .*job_id j1"):
            await client.process(instance(seconds=0.6), job_id="j1")

        async def ended() -> bool:
            return (await client.status()).jobs == 0

        await until(ended)
        assert (await client.process(instance(seconds=0.6), job_id="j1")).resolved


@pytest.mark.deep
async def test_jobs_outlive_the_service(tmp_path: Path) -> None:
    async with prorl_service(tmp_path) as (_, client):
        await client.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.process(instance(seconds=2.0), job_id="j1")
    async with prorl_service(tmp_path) as (_, client):  # started, because a job is under way
        assert (await client.process(instance(seconds=2.0), job_id="j1")).resolved
    async with prorl_service(tmp_path) as (_, client):
        with pytest.raises(Declined, match="503"):
            await client.status()
        await client.start()
        assert (await client.process(instance(seconds=2.0), job_id="j1")).resolved


async def test_sampling_parameters_reach_the_engine(tmp_path: Path) -> None:
    async with prorl_service(tmp_path) as (service, client):
        await client.start()
        given = {
            "temperature": 1,
            "top_k": 20,
            "min_p": 0.1,
            "seed": 5,
            "repetition_penalty": 1.1,
            "max_tokens": 9,
            "max_output_tokens": 7,
            "max_iterations": 3,
            "enable_thinking": False,
            "model": "openai/x",
            "api_key": "unused",
            "log_completions": True,
            "modify_params": False,
            "max_model_len": 32768,
            "token_level_generation": True,
            "custom_tokenizer": "x",
            "top_p": 0.8,
            "native_tool_calling": True,
            "enable_vision": False,
            "strict_loop_detector": True,
        }
        await client.process(instance(), given)
        [group] = await service.store.groups()
        spec = (await service.store.spec(group.id)).decode()
        [session] = await service.store.sessions(group.id)
        [turn] = await service.store.turns(session.id)
    wanted = {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    assert {name: turn.sampling[name] for name in wanted} == wanted
    assert turn.sampling["max_tokens"] == 7
    assert '"turns":3' in spec
    assert '"seed":5' in spec
    assert "unused" not in spec


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"sampling_params": {"temprature": 1}}, 422, "sampling_params.temprature"),
    ({"sampling_params": {"temperature": "1"}}, 422, "temperature"),
    ({"sampling_params": {"temperature": -1}}, 422, "temperature"),
    ({"sampling_params": {"native_tool_calling": False}}, 422, "ProRL's own agent"),
    ({"sampling_params": {"ensure_thinking_end_properly": True}}, 422, "ProRL's own agent"),
    ({"sampling_params": {"enable_a11y_tree": True}}, 422, "ProRL's own agent"),
    ({"sampling_params": {"max_model_len": 16}}, 422, "less than the model's context of 32768"),
    ({"sampling_params": []}, 422, "sampling_params"),
    ({"sampling_params": None}, 422, "sampling_params"),
    (
        {"instance": {"trajectory_id": 1, "instance_id": "x", "data_source": "unknown"}},
        400,
        "coin, swebench, deepcoder",
    ),
    ({"instance": {"trajectory_id": 1, "instance_id": "x", "data_source": "coin"}}, 422, "no column 'question'"),
    ({"instance": {"instance_id": "x", "data_source": "coin"}}, 422, "trajectory_id"),
    ({"instance": {"trajectory_id": 1, "data_source": "coin"}}, 422, "instance_id"),
    ({"instance": {"trajectory_id": True, "instance_id": "x"}}, 422, "trajectory_id"),
    ({"job_id": ""}, 422, "job_id"),
    ({"job_id": 7}, 422, "job_id"),
    ({"other": 1}, 422, "other"),
]


async def test_what_cannot_be_translated_is_refused_by_name(tmp_path: Path) -> None:
    async with prorl_service(tmp_path) as (service, client):
        await client.start()
        for change, status, words in REFUSED:
            body = {"instance": instance(), "sampling_params": {}} | change
            found, content = await client.send("POST", "/process", body)
            assert found == status, (change, content)
            assert words in content.decode(), (change, content)
        for path in ("/process", "/cancel", "/add_llm_server"):
            bodies: list[Any] = [{}, [], "x", 1]
            for wrong in bodies:
                assert (await client.send("POST", path, wrong))[0] == 422
            async with aiohttp.request("POST", client.url + path, data=b"{") as reply:
                assert (reply.status, list(await reply.json())) == (422, ["detail"])
        assert await service.store.groups() == []


async def test_an_id_is_made_of_the_extra_info(tmp_path: Path) -> None:
    async with prorl_service(tmp_path) as (_, client):
        await client.start()
        asked = instance() | {"data_source": "deepcoder-x", "extra_info": '{"name": "n", "split": "train", "index": 4}'}
        del asked["instance_id"]
        asked["reward_model"] = '{"ground_truth": 1.0}'
        result = await client.process(asked)
        assert (result.instance_id, result.resolved) == ("deepcoder-x_n_train_4", True)
        del asked["data_source"]  # the default is swebench, which the same handler takes
        asked["extra_info"] = {"name": "n", "split": "train", "index": 4}
        assert (await client.process(asked)).instance_id == "swebench_n_train_4"


async def test_rows_of_a_public_data_set(tmp_path: Path) -> None:
    async with prorl_service(tmp_path, replies=[say("It is \\boxed{42}.")]) as (_, client):
        await client.start()
        row = {
            "data_source": "maths",
            "instance_id": "m",
            "trajectory_id": "a",
            "ability": "math",
            "prompt": [{"role": "user", "content": "How much is 6 times 7?"}],
            "reward_model": {"style": "rule", "ground_truth": "42"},
        }
        result = await client.process(row)
        assert (result.resolved, result.trajectory_id) == (True, "a")
        result = await client.process(row | {"reward_model": {"ground_truth": "43"}})
        assert (result.success, result.resolved) == (True, False)
        with pytest.raises(Declined, match=r"422: .*reward_model\.ground_truth"):
            await client.process(row | {"reward_model": {}})


async def test_wrong_handlers_stop_the_start(tmp_path: Path) -> None:
    file = tmp_path / "coin.toml"
    file.write_text("instruction = 'x'")
    good = ProrlHandlerConfig(task=file)
    for handlers, words in (
        ({"a": good.model_copy(update={"task": tmp_path / "none.toml"})}, "none.toml"),
        ({"a": good.model_copy(update={"rows": "nothing"})}, "no kind of rows 'nothing'"),
        ({"a": good.model_copy(update={"ignored": ("temperature",)})}, "'temperature' is not"),
        ({"a": good, "b": good.model_copy(update={"data_sources": ("a",)})}, "both take 'a'"),
    ):
        with pytest.raises(InvalidField, match=words):
            async with running_service(tmp_path=tmp_path, compat=("prorl",), prorl=ProrlConfig(handlers=handlers)):
                pass
