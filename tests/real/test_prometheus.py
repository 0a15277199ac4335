"""A real Prometheus scrapes a real, working service: all queries of the dashboard return data, and each fault fires
its own alert and no unrelated one. The flag `-s` prints the values."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from cli.test_serve import flags
from cli.world import program
from deploy.monitoring import ALERTS, SCRAPING, alerts, panel_queries
from outrider.client.client import AsyncClient
from outrider.schemas import GroupView
from support.ports import free_port
from support.service import call, say

pytestmark = pytest.mark.real

ADMIN = "an-admins-token-of-32-characters"
PROCESSES = 2
ROUNDS = 12
ASKING = """python3 - <<'PYTHON'
import json, os, random, urllib.request
def ask(path, key, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key, "x-api-key": key}
    request = urllib.request.Request(path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
messages = [{"role": "user", "content": "say something"}]
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
reply = ask(url + "/chat/completions", key, {"model": "m", "messages": messages})["choices"][0]["message"]
messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "again"}]
ask(url + "/chat/completions", key, {"model": "m", "messages": messages})
ask(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", key, {"model": "m", "max_tokens": 99, "messages": messages[:1]})
open("reward", "w").write("y" * random.randrange(2))
PYTHON
"""
"""An agent that makes calls in two dialects, and succeeds in half of its runs, at random."""


def task(command: str, **fields: Any) -> dict[str, Any]:
    return {
        "instruction": "x",
        "harness": {"command": ["bash", "-c", command]},
        "runtime": {"kind": "process"},
        "evaluator": {"kind": "command", "run": "test -s reward"},
        "max_attempts": 1,
    } | fields


WORK = task(ASKING)
TOOLS = task("", harness={"agent": "tools"}, runtime={"kind": "memory"}, evaluator={"kind": "command", "run": "true"})
SLOW = task(f"{ASKING} sleep 60", limits={"agent_seconds": 5})
BROKEN = task("true", runtime={"kind": "process", "prepare": [{"run": "false"}]})
CUT_SHORT = TOOLS | {"sampling": {"max_tokens": 1}}


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    if missing := [name for name in ("prometheus", "promtool") if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (.ci/prometheus gets them)")


def promtool(*words: str | Path) -> str:
    done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_rules_and_the_example_are_valid(tmp_path: Path) -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", ALERTS)
    token = tmp_path / "outrider.token"
    token.write_text("t")
    shutil.copy(ALERTS, tmp_path)
    config = tmp_path / "prometheus.yml"
    config.write_text(SCRAPING.read_text().replace("/etc/prometheus/outrider.token", str(token)))
    assert "is valid prometheus config file" in promtool("check", "config", config)


def rising(step: float) -> str:
    """Return the values of a counter that rises by `step` per minute, for two hours."""
    return f"0+{step:g}x120"


def constant(value: float) -> str:
    return f"{value:g}x120"


def ended(reason: str, step: float) -> tuple[str, str]:
    return f'outrider_sessions_ended_total{{instance="i", reason="{reason}"}}', rising(step)


def series(name: str, values: str, **labels: str) -> tuple[str, str]:
    return (
        f"{name}{{{', '.join(f'{key}={json.dumps(value)}' for key, value in {'instance': 'i', **labels}.items())}}}",
        values,
    )


def buckets(name: str, bounds: dict[str, float], **labels: str) -> list[tuple[str, str]]:
    return [series(f"{name}_bucket", rising(step), le=bound, **labels) for bound, step in bounds.items()]


SOUND = [
    series("up", constant(1), job="outrider"),
    series("outrider_info", constant(1), version="1"),
    series("outrider_failing_chores", constant(0)),
    *buckets("outrider_store_transaction_seconds", {"0.01": 100, "1.0": 100, "+Inf": 100}),
    series("outrider_node_stall_seconds_total", rising(1), node="n"),
    ended("completed", 100),
    ended("error", 5),
    ended("agent_timeout", 5),
    series("outrider_queue_oldest_seconds", constant(3000)),
    series("outrider_lane_served_total", rising(1), node="n", lane="init"),
    series("outrider_sessions", constant(800), state="queued"),
    series("outrider_queue_limit_sessions", constant(1000)),
    series("outrider_sandbox_start_failures_total", rising(1), runtime="process"),
    series("outrider_sandbox_start_seconds_count", rising(100), runtime="process"),
    series("outrider_engine_up", constant(1), engine="a"),
    series("outrider_engine_up", constant(1), engine="b"),
    series("outrider_engine_failures_total", "0+0x30 1+0x90", engine="a"),
    series("outrider_engine_suspect", constant(0), engine="a"),
    series("outrider_engine_in_flight", constant(60), engine="a"),
    series("outrider_engine_in_flight", constant(40), engine="b"),
    series("outrider_engine_cached_prompt_tokens_total", rising(600_000), engine="a"),
    series("outrider_engine_reported_prompt_tokens_total", rising(1_000_000), engine="a"),
    *buckets("outrider_model_call_first_token_seconds", {"1.0": 90, "60.0": 100, "+Inf": 100}, dialect="chat"),
    series("outrider_policy_paused", "0x20 1x5 0x95"),
    series("outrider_groups_done_total", rising(5), reward_spread="zero"),
    series("outrider_groups_done_total", rising(5), reward_spread="some"),
    series("outrider_groups_done_total", rising(50), reward_spread="unknown"),
    series("outrider_delivered_staleness_versions_sum", rising(20)),
    series("outrider_delivered_staleness_versions_count", rising(10)),
    series("outrider_session_tokens_total", rising(10_000), training="trained"),
    series("outrider_session_tokens_total", rising(100), training="dropped"),
    series("outrider_model_calls_total", rising(100), model="policy", finish="stop"),
    series("outrider_model_calls_total", rising(10), model="policy", finish="length"),
    series("outrider_model_calls_total", rising(900), model="frozen", finish="length"),
    series("outrider_drift_tokens_total", constant(0)),
    series("outrider_callbacks", constant(0), state="given_up"),
    series("outrider_callbacks", constant(20), state="pending"),
]
"""The time series of a healthy, busy service. No alert fires."""

FAULTS: dict[str, list[tuple[str, str]]] = {
    "OutriderDown": [series("up", constant(0), job="outrider")],
    "OutriderChoresFail": [series("outrider_failing_chores", constant(1))],
    "OutriderStoreSlow": buckets("outrider_store_transaction_seconds", {"0.01": 1, "1.0": 100, "+Inf": 100}),
    "OutriderEventLoopStalls": [series("outrider_node_stall_seconds_total", rising(10), node="n")],
    "OutriderSessionsFail": [ended("error", 50)],
    "OutriderSessionsTimeOut": [ended("agent_timeout", 50)],
    "OutriderQueueStands": [series("outrider_lane_served_total", constant(7), node="n", lane="init")],
    "OutriderQueueFull": [series("outrider_sessions", constant(950), state="queued")],
    "OutriderSandboxesFail": [series("outrider_sandbox_start_failures_total", rising(50), runtime="process")],
    "OutriderNoEngine": [series("outrider_engine_up", constant(0), engine=engine) for engine in "ab"],
    "OutriderEngineDown": [series("outrider_engine_up", constant(0), engine="a")],
    "OutriderEngineFails": [series("outrider_engine_failures_total", rising(2), engine="a")],
    "OutriderEngineSuspect": [series("outrider_engine_suspect", constant(1), engine="a")],
    "OutriderEnginesUnbalanced": [
        series("outrider_engine_in_flight", constant(0), engine=engine) for engine in "bcdef"
    ],
    "OutriderCacheMisses": [series("outrider_engine_cached_prompt_tokens_total", rising(60_000), engine="a")],
    "OutriderCallsSlow": buckets(
        "outrider_model_call_first_token_seconds", {"1.0": 1, "60.0": 10, "+Inf": 100, "120.0": 100}, dialect="chat"
    ),
    "OutriderPolicyPaused": [series("outrider_policy_paused", constant(1))],
    "OutriderNoRewardSpread": [series("outrider_groups_done_total", rising(500), reward_spread="zero")],
    "OutriderStale": [series("outrider_delivered_staleness_versions_sum", rising(200))],
    "OutriderTokensDropped": [series("outrider_session_tokens_total", rising(10_000), training="dropped")],
    "OutriderTruncated": [series("outrider_model_calls_total", rising(100), model="policy", finish="length")],
    "OutriderDrift": [series("outrider_drift_tokens_total", rising(1))],
    "OutriderCallbacksGivenUp": [series("outrider_callbacks", constant(1), state="given_up")],
    "OutriderCallbacksWait": [series("outrider_callbacks", constant(200), state="pending")],
}
"""For each alert, the time series of its fault, which replace those of SOUND."""

ALSO = {"OutriderNoEngine": {"OutriderEngineDown"}}
"""Further alerts that fire for an alert's fault."""


def fired_by(fault: str | None, tmp_path: Path) -> set[str]:
    """Return the alerts that fire after 110 minutes. promtool evaluates the rules. It expects no alert, and therefore
    prints each one that fires."""
    found = dict(SOUND) | dict(FAULTS.get(fault or "", ()))
    given = [{"series": name, "values": values} for name, values in found.items()]
    expected = [{"eval_time": "110m", "alertname": name, "exp_alerts": []} for name in alerts()]
    case = {"interval": "1m", "input_series": given, "alert_rule_test": expected}
    file = tmp_path / "case.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [case]}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    fired = set(re.findall(r"alertname: ?(\w+)", done.stdout + done.stderr))
    assert (done.returncode == 0) == (not fired), done.stdout + done.stderr
    return fired


def test_no_alert_fires_for_a_sound_service(tmp_path: Path) -> None:
    assert fired_by(None, tmp_path) == set()


@pytest.mark.parametrize("fault", FAULTS)
def test_an_alert_fires_for_its_fault_and_no_other(fault: str, tmp_path: Path) -> None:
    assert FAULTS.keys() == alerts().keys()
    assert fired_by(fault, tmp_path) == {fault} | ALSO.get(fault, set())


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self._http = http

    async def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and values of a query's present result. Fails for an invalid query."""
        async with self._http.get(f"{self.url}/api/v1/query", params={"query": expr}) as reply:
            answer = await reply.json()
        assert answer["status"] == "success", (expr, answer)
        result = answer["data"]["result"]
        assert answer["data"]["resultType"] == "vector"
        return [(each["metric"], float(each["value"][1])) for each in result]

    async def until(self, expr: str, seconds: float = 60.0) -> list[tuple[dict[str, str], float]]:
        """Poll a query until its result is not empty. Returns the result."""
        async with asyncio.timeout(seconds):
            while not (found := await self.query(expr)):  # noqa: ASYNC110  # Prometheus sends no notifications
                await asyncio.sleep(0.3)
            return found


@asynccontextmanager
async def scraping(service: str, token: str, folder: Path) -> AsyncIterator[Prometheus]:
    """Run Prometheus with the example's settings, except for the service's address, the token's path and the
    intervals."""
    port = free_port()
    await asyncio.to_thread(folder.mkdir)
    (folder / "token").write_text(token)
    shutil.copy(ALERTS, folder)
    settings = yaml.safe_load(SCRAPING.read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = settings["scrape_configs"]
    job["authorization"]["credentials_file"] = str(folder / "token")
    job["static_configs"] = [{"targets": [service.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
    try:
        async with aiohttp.ClientSession() as http:
            found = Prometheus(f"http://127.0.0.1:{port}", http)
            async with asyncio.timeout(60):
                while True:
                    assert process.returncode is None, (folder / "log").read_text()
                    with suppress(aiohttp.ClientError):
                        async with http.get(f"{found.url}/-/ready") as reply:
                            if reply.status == 200:
                                break
                    await asyncio.sleep(0.2)
            yield found
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Run a service with nodes in separate processes. Yields its URL and its process."""
    await asyncio.to_thread(folder.mkdir)
    replies = [say("hello there, this is a reply"), call("true"), say("done")]
    process = await program(
        "serve",
        *flags(folder, replies),
        *("--processes", str(PROCESSES), "--token", ADMIN),
        env={**os.environ, "OUTRIDER_LANES__RUN": "8"},
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    try:
        assert line.startswith("outrider is ready at "), (await process.communicate())[1].decode()
        yield line.split()[-1], process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


async def test_a_service_at_work_has_data_for_every_query(tmp_path: Path) -> None:
    async with serving(tmp_path / "service") as (url, process), AsyncClient(url, token=ADMIN) as client:
        token = (await client.create_token("prometheus", "read", tenant="operator")).text
        async with scraping(url, token, tmp_path / "prometheus") as prometheus:
            await prometheus.until("outrider_info")

            async def work(given: dict[str, Any], n: int) -> GroupView:
                group = await client.submit({"task": given, "n": n})
                return (await client.wait([group.id]))[0]

            for _ in range(ROUNDS):  # a round each second, so that the rates have several scrapes
                await asyncio.gather(work(WORK, 4), work(TOOLS, 2), asyncio.sleep(1))
            queries = list(panel_queries())
            assert len(queries) > 70
            for query in queries:
                found = await prometheus.query(query.at())
                numbers = [value for _, value in found if not math.isnan(value)]
                print(f"{query.panel}: {len(found)} series, {numbers[:4]}")
                assert numbers, (query, found)
            for query in queries:  # the dashboard's variable for the service selects only this service
                assert not await prometheus.query(query.at(instance="another")) or "vector(0)" in query.expr, query
            await _numbers_agree(prometheus, client)
            for name, rule in alerts().items():
                found = await prometheus.query(rule["expr"])
                print(f"{name}: {found}")
            quiet = {"OutriderDown", "OutriderNoEngine", "OutriderEngineDown", "OutriderSessionsFail", "OutriderDrift"}
            for name in quiet | {"OutriderSessionsTimeOut", "OutriderSandboxesFail", "OutriderPolicyPaused"}:
                assert not await prometheus.query(alerts()[name]["expr"]), name

            for given, n, names in (
                (SLOW, 50, ["OutriderSessionsTimeOut"]),
                (BROKEN, 60, ["OutriderSessionsFail", "OutriderSandboxesFail"]),
                (CUT_SHORT, 300, ["OutriderTruncated"]),
            ):
                group = await work(given, n)
                print(Counter(session.result.stop_reason.value for session in group.sessions))
                for name in names:
                    print(f"{name}: {await prometheus.until(alerts()[name]['expr'])}")
            await client.pause_policy()
            await prometheus.until(alerts()["OutriderPolicyPaused"]["expr"])
            await client.resume_policy()
            await client.remove_engine((await client.engines())[0].name)
            await prometheus.until(alerts()["OutriderNoEngine"]["expr"])
            process.terminate()
            await process.communicate()
            await prometheus.until(alerts()["OutriderDown"]["expr"])
            rules = await _rules(prometheus)
            assert rules.keys() == alerts().keys()
            assert {rule["health"] for rule in rules.values()} == {"ok"}
            for _ in range(60):  # until Prometheus evaluates its rules the next time
                if (await _rules(prometheus))["OutriderDown"]["state"] != "inactive":
                    break
                await asyncio.sleep(1)
            else:
                raise AssertionError


async def _rules(prometheus: Prometheus) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.get(f"{prometheus.url}/api/v1/rules") as reply:
        groups = (await reply.json())["data"]["groups"]
    return {rule["name"]: rule for group in groups for rule in group["rules"]}


async def _numbers_agree(prometheus: Prometheus, client: AsyncClient) -> None:
    """Check that one scrape has the figures of all processes, and that they equal the service's own figures."""
    status = await client.status()
    done = status.sessions["done"]
    await prometheus.until(f'outrider_sessions{{state="done"}} == {done}')
    for expr, value in {
        "sum(outrider_sessions_ended_total)": done,
        "sum(outrider_sandbox_start_seconds_count)": done,
        'sum(outrider_lane_served_total{lane="run"})': done,
        "sum(outrider_sampled_tokens_total)": status.engines[0].generated_tokens,
    }.items():
        await prometheus.until(f"{expr} == {value}")
    assert len(await prometheus.query("outrider_node_sessions")) == PROCESSES
    served = await prometheus.query('outrider_lane_served_total{lane="run"}')
    assert all(value for _, value in served)
