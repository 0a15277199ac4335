"""`GET /metrics` and `GET /v1/rates`: their values for real sessions, their formats, and who may read them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from outrider.api.gateway import Gateway
from outrider.client.client import AsyncClient
from outrider.counts import CallFailures
from outrider.engines.base import EngineOptions
from outrider.errors import Forbidden
from outrider.lab.fakes.engine_servers.app import serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.schemas import RateList
from outrider.service.metrics import FAMILIES, ServiceMetrics
from outrider.service.metrics_counts import CountLimits, ServiceCounts
from outrider.service.service import Service
from sessions.world import a_world
from support.service import call, running_service, say

from .test_gateway import CHAT, HELLO, OneSession

TASK = {
    "instruction": "say hello",
    "harness": {"agent": "tools"},
    "runtime": {"kind": "memory"},
    "evaluator": {"kind": "command", "run": "true"},
}
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
ADMIN = "an-admins-token-of-32-characters"


class Scrape:
    """The samples of a scrape."""

    def __init__(self, families: list[Metric]) -> None:
        self.families = {family.name: family for family in families}

    def of(self, name: str, **labels: str) -> float:
        """Return the value of the sample with this full name."""
        found = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and sample.labels == labels
        ]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def labels(self, name: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in self.families[name].samples}


async def scraped(url: str, *, token: str | None = None, accept: str | None = None) -> Scrape:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    headers |= {"Accept": accept} if accept else {}
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics", headers=headers) as reply:
        text = await reply.text()
        assert reply.status == 200, text
        kind = reply.headers["Content-Type"]
    if accept is None:
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
        return Scrape(list(prometheus(text)))
    assert kind.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert text.endswith("# EOF\n")
    return Scrape(list(openmetrics(text)))  # type: ignore[no-untyped-call]


async def ran(url: str, *, n: int = 2, token: str | None = None, **task: Any) -> None:
    async with AsyncClient(url, token=token) as client:
        group = await client.submit({"task": TASK | task, "n": n})
        await client.wait([group.id])


@pytest.mark.parametrize("accept", [None, OPENMETRICS])
async def test_what_sessions_have_done_is_there(tmp_path: Path, accept: str | None) -> None:
    async with running_service(tmp_path=tmp_path, replies=[call("true"), say("hello")] * 2) as (_, url):
        await ran(url)
        got = await scraped(url, accept=accept)
    assert got.of("outrider_sessions", state="done") == 2
    assert got.of("outrider_sessions_ended_total", reason="completed") == 2
    assert got.of("outrider_session_turns_sum") == 4
    assert got.of("outrider_session_turns_bucket", le="2.0") == 2
    assert got.of("outrider_samples_total") == 2
    assert got.of("outrider_groups_done_total", reward_spread="zero") == 1
    assert got.of("outrider_trained_sessions_total", versions="one") == 2
    assert got.of("outrider_delivered_staleness_versions_bucket", le="0.0") == 2
    assert got.of("outrider_model_calls_total", model="policy", finish="stop") == 4
    assert got.of("outrider_model_call_seconds_count", dialect="inprocess") == 4
    tokens = got.of("outrider_sampled_tokens_total", model="policy")
    assert tokens == got.of("outrider_session_tokens_total", training="trained") > 0
    assert tokens == got.of("outrider_engine_generated_tokens_total", engine="scripted")
    assert got.of("outrider_engine_calls_total", engine="scripted") == 4
    assert got.of("outrider_first_prompt_shared_tokens_total") == got.of("outrider_first_prompt_tokens_total") / 2 > 0
    assert got.of("outrider_sandbox_start_seconds_count", runtime="memory") == 2
    assert got.of("outrider_lane_served_total", node="local", lane="run") == 2
    assert got.of("outrider_store_transaction_seconds_count") >= 4
    assert got.of("outrider_engine_up", engine="scripted") == 1
    assert got.of("outrider_policy_version") == 0
    assert got.of("process_resident_memory_bytes") > 1 << 20


async def test_every_family_is_there_and_no_other(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        await ran(url, n=1)
        got = await scraped(url, accept=OPENMETRICS)
    ours = {name: family for name, family in got.families.items() if not name.startswith("process_")}
    assert ours.keys() == {family.name for family in FAMILIES}
    for family in FAMILIES:
        found = ours[family.name]
        assert (found.type, found.documentation) == (family.kind, family.help)
        assert found.samples, family.name
        for sample in found.samples:
            assert sample.labels.keys() - {"le"} == set(family.labels)


def test_names_follow_the_conventions_of_prometheus() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.name.startswith("outrider_")
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert "_ms" not in family.name
        assert family.help.endswith(".")
        assert not {"session", "group", "tenant", "user", "run", "id", "token"} & set(family.labels)


async def test_failed_calls_and_timeouts_are_apart_from_other_errors(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        async with aiohttp.ClientSession(url) as http:
            reply = await http.post("/v1/chat/completions", json={}, headers={"Authorization": "Bearer no-key"})
            assert reply.status == 401
            reply = await http.post("/s/no-key/v1/messages", json={})
            assert reply.status == 401
            reply = await http.get("/s/no-key/nowhere")
            assert reply.status == 404
        got = await scraped(url)
    assert got.of("outrider_model_call_failures_total", dialect="chat", code="unauthorized") == 1
    assert got.of("outrider_model_call_failures_total", dialect="messages", code="unauthorized") == 1
    assert got.of("outrider_model_call_failures_total", dialect="chat", code="not_found") == 1
    assert got.of("outrider_sessions_ended_total", reason="agent_timeout") == 0
    assert got.of("outrider_session_errors_total", boundary="engine", code="engine_silent") == 0


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 503)])
async def test_a_call_whose_engine_fails_is_counted_also_in_the_middle_of_its_stream(
    tmp_path: Path, stream: bool, status: int
) -> None:
    failures = CallFailures()
    script = {"reply": "some words here<|im_end|>", "fail": "unavailable", "after": 2}
    async with (
        a_world(tmp_path, (script, "fine<|im_end|>")) as world,
        serving(Gateway(OneSession(world.models), failures=failures)) as url,
        aiohttp.ClientSession(url) as http,
    ):
        async with http.post(CHAT, json={**HELLO, "stream": stream}) as reply:
            await reply.read()
            assert reply.status == status
        async with http.post(CHAT, json={**HELLO, "stream": stream}) as reply:
            await reply.read()
            assert reply.status == 200
    assert failures.read() == {"chat": {"engine_unavailable": 1}}


async def test_engines_beyond_the_bound_are_added_up(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, _):
        for number in range(5):
            options = EngineOptions(
                name=f"more-{number}", tokenizer=service.config.model.tokenizer, options={"replies": [say("x")]}
            )
            await service.pool.add_engine(ScriptedEngine(options))
        counts = ServiceCounts(
            ("chat",), has_engine=lambda name: True, policy_version=lambda: 0, limits=CountLimits(named=2)
        )
        values = await ServiceMetrics(dataclasses.replace(service.metrics._sources, counts=counts)).read()
    up = {value.labels: value.value for value in values if value.family == "outrider_engine_up"}
    assert up == {("scripted",): 1, ("more-0",): 1, ("other",): 4}
    assert ("other",) not in {value.labels for value in values if value.family == "outrider_engine_policy_version"}
    assert ("other",) in {value.labels for value in values if value.family == "outrider_engine_calls"}


async def test_a_read_token_of_the_operators_tenant_may_scrape_and_no_other(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, token=ADMIN) as (_, url):
        async with aiohttp.ClientSession(url) as http:
            for path in ("/metrics", "/v1/rates"):
                assert (await http.get(path)).status == 401
        async with AsyncClient(url, token=ADMIN) as root:
            prometheus = (await root.create_token("prometheus", "read", tenant="operator")).text
            alice = (await root.create_token("alice", "submit")).text
            node = (await root.create_token("machine", "node")).text
        assert (await scraped(url, token=ADMIN)).of("outrider_sessions", state="done") == 0
        assert (await scraped(url, token=prometheus)).of("outrider_sessions", state="done") == 0
        for path in ("/metrics", "/v1/rates"):
            for token, hint in ((alice, "--role read --tenant operator"), (node, "--role read")):
                status, record = await _asked(url, path, token)
                assert (status, record["code"]) == (403, "forbidden")
                assert hint in record["hint"]
        async with AsyncClient(url, token=alice) as client:
            with pytest.raises(Forbidden, match="is about all tenants"):
                await client.rates()


async def _asked(url: str, path: str, token: str) -> tuple[int, Mapping[str, Any]]:
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {token}"}) as http:
        reply = await http.get(path)
        return reply.status, msgspec.json.decode(await reply.read())


async def test_the_rates_of_the_last_hour(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[call("true"), say("hello")] * 2) as (service, url):
        await first_point(service)
        await ran(url)
        await service.rates.take()
        async with AsyncClient(url) as client:
            rates = await client.rates()
    assert isinstance(rates, RateList)
    assert rates.step_seconds == 5.0
    assert rates.points[-1].at <= rates.now
    total = {name: sum(getattr(point, name) for point in rates.points) for name in ("calls", "groups_done")}
    assert total == {"calls": 4, "groups_done": 1}
    assert rates.points[-1].sessions_done == 2
    assert (rates.points[-1].queued, rates.points[-1].running) == (0, 0)


async def first_point(service: Service) -> None:
    """Return when the service has taken its first point, at its start."""
    while not service.rates.view().points:  # noqa: ASYNC110  # there is no event
        await asyncio.sleep(0.01)


async def test_scrapes_at_once_are_all_answered(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        found = await asyncio.gather(*(scraped(url) for _ in range(8)))
    assert {got.of("outrider_sessions", state="done") for got in found} == {0.0}
