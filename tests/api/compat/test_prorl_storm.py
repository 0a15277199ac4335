"""64 concurrent jobs of ProRL with random cancellations, and random requests."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from outrider.client.client import AsyncClient
from outrider.config import LanesConfig
from outrider.schemas import GroupView

from .prorl_world import instance, prorl_service

JOBS = 64


async def storm(tmp_path: Path, jobs: int) -> None:
    rng = random.Random(1)
    lanes = LanesConfig(init=8, run=16, eval=8)
    async with prorl_service(tmp_path, lanes=lanes) as (_, client), AsyncClient(client.url) as native:
        await client.start()

        async def run(number: int) -> Any:
            return await client.process(instance(number, seconds=rng.random() / 2), job_id=f"j{number}")

        async def cancel(number: int) -> None:
            await asyncio.sleep(rng.random())
            while (await client.send("POST", "/cancel", {"job_id": f"j{number}"}))[0] == 404:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(number)) for number in range(jobs)]
            for number in rng.sample(range(jobs), jobs // 2):
                for _ in range(2):
                    tasks.create_task(cancel(number))
        results = [task.result() for task in running]
        assert (await client.status()).pending_jobs == 0
        groups: dict[str, GroupView] = {}
        after = 0
        while page := (await native.results(after=after, samples=True)):
            if not page.groups:
                break
            after = page.cursor
            groups |= {group.labels["prorl.job"]: group for group in page.groups}
        assert len(groups) == jobs
        cancelled = 0
        for number, result in enumerate(results):
            group = groups[f"j{number}"]
            [session] = group.sessions
            assert session.result is not None
            assert (result.instance_id, result.trajectory_id) == (f"i{number}", number)
            if session.result.verdict is None:
                cancelled += 1
                assert (result.error, result.resolved, result.filter) == ("cancelled", None, True)
                continue
            assert (result.resolved, result.filter, result.critical_error) == (True, False, None)
            assert group.samples is not None
            [sample] = group.samples
            last = result.messages[-1]
            assert (last.input_ids or []) + last.token_ids == sample.ids.tolist()
            assert last.logprobs == sample.logprobs[sample.prompt_length :].tolist()
        assert 0 < cancelled < jobs


@pytest.mark.deep
async def test_a_storm_of_jobs_and_cancellations(tmp_path: Path) -> None:
    await storm(tmp_path, JOBS)


NAMES = st.sampled_from(
    [
        "instance",
        "sampling_params",
        "job_id",
        "address",
        "data_source",
        "instance_id",
        "trajectory_id",
        "question",
        "extra_info",
        "reward_model",
        "temperature",
        "max_tokens",
        "model",
        "x",
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = st.recursive(
    SCALARS | st.sampled_from(["coin", "swebench"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)
WHOLE = st.fixed_dictionaries(
    {},
    optional={
        "instance": st.just(instance()) | st.dictionaries(NAMES, VALUES, max_size=6),
        "sampling_params": st.just({}) | st.dictionaries(NAMES, VALUES, max_size=4),
        "job_id": VALUES,
        "address": VALUES,
    },
)
PATHS = ("/start", "/stop", *["/process"] * 4, "/cancel", "/status", "/add_llm_server", "/clear_llm_server")
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["POST", "GET"]),
        st.sampled_from(
            ["/start", "/stop", "/process", "/process", "/process", "/cancel", "/status", "/add_llm_server"]
        )
        | st.just("/clear_llm_server"),
        WHOLE | VALUES,
    ),
    min_size=20,
    max_size=60,
)


@pytest.mark.deep
def test_made_up_requests_get_statuses_of_the_contract(tmp_path: Path) -> None:
    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(CALLS)
    def check(calls: list[tuple[str, str, Any]]) -> None:
        asyncio.run(sent(calls))

    async def sent(calls: list[tuple[str, str, Any]]) -> None:
        async with prorl_service(tmp_path) as (_, client):
            await client.send("POST", "/start")
            for method, path, body in calls:
                status, content = await client.send(method, path, body)
                assert status in (200, 400, 404, 405, 409, 413, 422, 503, 504), (method, path, body, content)

    check()
