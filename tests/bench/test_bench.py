"""Every benchmark runs at its smallest size, so that none stops working unnoticed. Few of the measured figures are
checked.

Slow benchmarks run in `make test-deep`, `make test-nightly` or, with the real programs, `make test-real`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from bench.batch_engine import BatchEngine
from rich.console import Console

from bench import (
    dialects,
    floods,
    gateway,
    graders,
    history,
    memory,
    pages,
    processor_time,
    rate,
    report,
    samples,
    sampling,
    sandboxes,
    scaling,
    service,
    sessions,
    sheets,
    staleness,
    starts,
    store,
    targets,
    tools,
    turns,
)
from outrider.engines.base import Chunk, EngineOptions, GenerateRequest, SamplingParams
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.sandbox.runtimes.node_host import Host
from support.postgresql import programs

ROOT = Path(__file__).parents[2]
BURN = """import time
begun = time.process_time()
while time.process_time() < begun + 0.5:
    pass
print("burnt", end="")
"""
"""A program that uses half a second of processor time."""


@pytest.mark.real
async def test_gateway_calls_through_and_past_it_are_all_answered() -> None:
    found = await gateway.measure(
        gateway.Plan(latency_rounds=1, latency_block=2, rate_rounds=1, rate_block=40, warm_requests=1)
    )

    assert all(figures["spent_ms"]["p50"] > 0 for figures in found["latency"]["streamed"]["first"].values())
    assert list(found["rate"]["whole"]) == ["direct", "relay", "proxy", "gateway"]
    assert all(figures["per_second"] > 0 for figures in found["rate"]["whole"].values())
    check_shown("gateway", found)


@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_tokens_through_a_service_are_counted_beside_those_straight_from_the_engine() -> None:
    engines = {rate.Engine("vllm", 2_000): (1, 4), rate.Engine("sglang", 2_000, event_tokens=8): (4,)}
    found = await rate.measure(rate.Plan(engines, seconds=0.5))

    assert [(point["protocol"], point["at_once"]) for point in found["points"]] == [
        ("vllm", 1),
        ("vllm", 4),
        ("sglang", 4),
    ]
    for point in found["points"]:
        assert point["ratio"] > 0
        assert all(used > 0 for used in point["through"]["us_per_token"].values())
    check_shown("rate", found)


async def test_an_engine_gives_all_requests_together_so_many_tokens_a_second() -> None:
    """A step of four requests takes as long as four steps of one request."""
    options = {"replies": [{"ids": list(range(20))}], "chunk_tokens": 2}
    engine = BatchEngine(
        ScriptedEngine(EngineOptions(name="batch", options=options)), tokens_per_second=400, event_tokens=2
    )

    async def seconds(at_once: int) -> float:
        begun = asyncio.get_running_loop().time()
        replies = await asyncio.gather(*(read(number) for number in range(at_once)))
        assert [sum(len(chunk.ids) for chunk in reply) for reply in replies] == [20] * at_once
        return asyncio.get_running_loop().time() - begun

    async def read(number: int) -> list[Chunk]:
        request = GenerateRequest(
            request_id=str(number),
            session_key=str(number),
            input_ids=np.arange(3, dtype=np.int32),
            sampling=SamplingParams(max_tokens=20),
        )
        return [chunk async for chunk in engine.generate(request)]

    alone, together = await seconds(1), await seconds(4)
    assert alone >= 10 * 2 / 400 - 0.01
    assert together >= 4 * 10 * 2 / 400 - 0.03


@pytest.mark.real
@pytest.mark.nightly
async def test_floods_are_sent_beside_calls() -> None:
    found = await floods.measure(
        floods.Plan(("chat messages", "gemini parts"), sizes=(64 << 20, 1 << 18), calm_seconds=1)
    )

    assert [flood["statuses"] for flood in found["floods"]] == [[413, 200]] * 2
    assert found["failed"] == 0
    assert found["flooded_ms"]["p99"] > 0
    check_shown("floods", found)


@pytest.mark.real
@pytest.mark.nightly
async def test_turns_grow_the_history_that_they_measure() -> None:
    found = await turns.measure([turns.Point(600, 1, 1), turns.Point(1_200, 1, 1)])

    assert [point["history_tokens"] for point in found["points"]] == [600, 1_200]
    assert all(point["own_ms"] > 0 and point["tokenizer_ms"] > 0 for point in found["points"])
    check_shown("turns", found)


@pytest.mark.real
@pytest.mark.nightly
async def test_dialects_are_measured_side_by_side() -> None:
    found = await dialects.measure(
        dialects.Plan(
            latency_rounds=1,
            latency_block=2,
            points=(turns.Point(600, 1, 1), turns.Point(2_500, 1, 1)),
            reply_tokens=100,
            reply_rounds=1,
            warm_requests=1,
        )
    )

    names = ["chat", "messages", "responses", "gemini"]
    assert list(found["calls"]["latency"]) == ["direct", *names]
    assert list(found["streams"]["dialects"]) == names
    assert all(figures["first"]["spent_ms"]["p50"] > 0 for figures in found["calls"]["latency"].values())
    short, long = (point["request_bytes"] for point in found["turns"]["points"])
    assert list(short) == [*names, "responses, by id"]
    assert all(long[name] > 1.4 * short[name] for name in names)
    assert long["responses, by id"] < 1.4 * short["responses, by id"]
    check_shown("dialects", found)


@pytest.mark.deep
async def test_memory_counts_at_least_the_ids() -> None:
    found = await memory.measure(memory.Plan(conversations=1, calls=4))

    assert found["bytes_per_call"] > 4 * found["tokens_per_call"] * 0.9
    check_shown("memory", found)


@pytest.mark.deep
async def test_sessions_end_well_and_are_timed() -> None:
    found = await sessions.measure(sessions.Plan({"memory": sessions.GROUP_SIZE}))

    assert found["runtimes"]["memory"]["per_second"] > 0
    check_shown("sessions", found)


@pytest.mark.nightly
@pytest.mark.skipif(not NamespaceRuntime.available().ok, reason="this machine cannot run namespace sandboxes")
async def test_sandboxes_start_and_answer() -> None:
    found = await sandboxes.measure(sandboxes.Plan(starts=8, calls=4, alive=2, slow_starts=1))

    assert found["kinds"]["namespace"]["calls"]["bash"]["per_second"] > 0
    assert found["alive"]["mib_each"] > 0
    check_shown("sandboxes", found)


async def test_a_process_that_has_just_gone_has_used_nothing_more() -> None:
    child = await asyncio.create_subprocess_exec("true")
    await child.wait()
    assert processor_time.ticks_of(child.pid) == sandboxes.pss_kib(child.pid) == 0
    assert processor_time.children_of(child.pid) == []
    assert processor_time.cpu_seconds() > 0


@pytest.mark.deep
@pytest.mark.skipif(not NamespaceRuntime.available().ok, reason="this machine cannot run namespace sandboxes")
async def test_processor_time_of_a_sandbox_is_counted_while_it_lives_and_when_it_has_ended(tmp_path: Path) -> None:
    async with Host(tmp_path) as host:
        sandbox = sandboxes.Yard(host).create("namespace")
        await sandbox.start()
        try:
            shell = await sandbox.open_shell("python")
            before = processor_time.cpu_seconds()
            done = await shell.run(BURN, seconds=60)
            living = processor_time.cpu_seconds()
            await shell.close()
        finally:
            await sandbox.stop()
        ended = processor_time.cpu_seconds()

    assert done.output == "burnt"
    assert [living - before, ended - before] == pytest.approx([0.5, 0.5], rel=0.2)


@pytest.mark.nightly
@pytest.mark.skipif(not NamespaceRuntime.available().ok, reason="this machine cannot run namespace sandboxes")
async def test_sessions_count_what_their_sandboxes_spend() -> None:
    ways = [f"echo {sessions.SAID}", f"python3 -c '{BURN}' && echo {sessions.SAID}"]
    plans = [sessions.Plan({"namespace": sessions.GROUP_SIZE}, command=command) for command in ways]
    idle, busy = [(await sessions.measure(plan))["runtimes"]["namespace"]["cpu_ms_each"] for plan in plans]

    assert busy - idle == pytest.approx(500, rel=0.2)


@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_tool_calls_are_answered_whichever_way_is_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    found = await tools.measure(tools.Plan(rounds=1, quick=2, slow=1))

    assert found["ways"]["process: bash"]["calls"] == found["ways"]["process: ipython"]["calls"] == 2
    check_shown("tools", found)


@pytest.mark.nightly
async def test_graders_of_each_kind_that_is_here_are_timed_beside_their_floors() -> None:
    found = await graders.measure(graders.Plan(8, 2))

    kinds, left_out = found["kinds"], found["left_out"]
    always = {"callable", "http", "judge, scripted", "command", "weighted: two commands", "code: one case"}
    assert kinds.keys() >= always
    for name, beginning in (
        ("harbor", "harbor"),
        ("math-verify", "math"),
        ("reasoning-gym", "reasoning-gym"),
        ("swebench", "swebench"),
    ):
        assert any(kind.startswith(beginning) for kind in kinds) is (name not in left_out)
    for name, by_width in kinds.items():
        for width in ("1", "32"):
            assert by_width[width]["p50_ms"] > 0
            assert (name == "callable") or by_width[width]["floor"]["p50_ms"] > 0
    check_shown("graders", found)


@pytest.mark.deep
async def test_the_sampler_is_compared_with_those_that_wait() -> None:
    found = await sampling.measure(sampling.Plan(6, 4, (0.5,), 1, 1, 0.01))

    simulated = {row["way"]: row["per_batch"] for row in found["simulated"]}
    assert simulated["asynchronous, 3 batches running"] < simulated["synchronous, waves of 3 batches"]
    assert [row["way"] for row in found["real"]] == [way.name for way in sampling.WAYS]
    check_shown("sampling", found)


@pytest.mark.deep
def test_bounds_on_age_are_kept_and_cost_what_the_page_states() -> None:
    found = staleness.measure(staleness.Plan(16, 8))

    rows = {row["way"]: row for row in found["bounded"]}
    for way in staleness.BOUNDED:
        if way.max_age is not None and way.overdue == "wait":
            assert rows[way.name]["oldest"] <= way.max_age
            assert rows[way.name]["overdue"] == 0
    waves = rows["synchronous, waves of 3 batches"]["per_batch"]
    late = rows["age 1, slow groups trained late"]
    assert late["per_batch"] < waves / 2
    assert late["trained"] > 0.4
    means = {row["way"]: row for row in found["bias"]}
    bias = {name: row["wrong"] - row["right"] for name, row in means.items()}
    assert bias["3 batches running, surplus stopped"] > 0.02 > bias["age 1, slow groups awaited"]
    check_shown("staleness", found)


@pytest.mark.deep
async def test_a_stream_of_samples_is_cheaper_than_json() -> None:
    found = await samples.measure(samples.Plan(2, 4, 1))

    stream, plain = found["stream"], found["json"]
    assert stream["service_ms"] < plain["service_ms"] / 2
    assert stream["reader_ms"] < plain["reader_ms"] / 5
    assert stream["bytes"] < 250_000 < plain["bytes"]
    assert found["files"]["arrow"]["ms"] < found["files"]["parquet"]["ms"]
    check_shown("samples", found)


@pytest.mark.nightly
async def test_a_killed_service_has_its_sessions_running_again() -> None:
    found = await service.measure(service.Plan(finished=16, live=16, submitted=8, pages=1))
    assert found["stores"].keys() == {"SQLite"} | ({"PostgreSQL"} if programs() else set())
    for figures in found["stores"].values():
        assert figures["after_kill"]["running_seconds"] > figures["after_kill"]["ready_seconds"]
    check_shown("service", found)


@pytest.mark.nightly
async def test_sessions_in_two_processes_are_counted() -> None:
    found = await scaling.measure(scaling.Plan(processes=(1, 2), waves=1), seconds=0.01)

    assert [point["processes"] for point in found["points"]] == [1, 2]
    assert found["points"][0]["efficiency"] == 1.0
    assert found["points"][1]["sessions_per_second"] > 0
    check_shown("scaling", found)


async def test_history_is_written_and_removed() -> None:
    found = await history.measure(history.Plan(sessions=80, rounds=2))

    assert all(figures["full_p50_ms"] > 0 for figures in found["operations"].values())
    assert found["removal"]["sessions_per_second"] > 0
    check_shown("history", found)


@pytest.mark.deep
async def test_the_store_takes_turns() -> None:
    found = await store.measure(store.Plan(lone_turns=2, turns_each=1, groups=2, queue_groups=1))

    for figures in found["stores"].values():
        assert figures["queue"]["sessions"] == store.QUEUE_GROUP_SIZE
    check_shown("store", found)


@pytest.mark.nightly
def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench", "store", "--quick", "--json", str(file)]

    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout

    written = orjson.loads(file.read_bytes())
    assert "\nStore " in shown
    assert written["quick"] is True
    assert list(written["results"]) == ["store"]
    assert str(ROOT) not in file.read_text()


def check_shown(name: str, found: dict[str, Any]) -> None:
    """Check that the tables of a benchmark's results can be made, printed, and written as Markdown."""
    made = report.Report(
        at=report.now(),
        machine=report.machine(),
        load=(0.0, 0.0),
        seconds={name: 1.0},
        quick=True,
        results={name: found},
    )
    console = Console(record=True, quiet=True, width=200)
    report.show(made, console)
    assert all(sheet.rows for sheet in sheets.sheets(made.results))
    assert "| " in report.markdown(made)


@pytest.mark.deep
async def test_starts_of_commands_are_measured() -> None:
    found = await starts.measure(1)
    assert list(found["commands"]) == list(starts.COMMANDS)
    assert found["python"] > 0
    check_shown("starts", found)


def test_a_floor_too_short_for_the_processors_clock_is_not_measured() -> None:
    target = targets.Target(
        name="a call", bench="gateway", most=1.7, unit="ms", of=lambda found: 1.0, floor=lambda found: 0.0
    )
    assert targets._row(target, {})[:2] == ("a call", "not measured")


@pytest.mark.deep
async def test_open_pages_are_measured() -> None:
    found = await pages.measure(pages.Plan(finished=8, pairs=3, calls=10))
    assert found["ratio"]["low"] <= found["ratio"]["median"] <= found["ratio"]["high"]
    assert found["cpu_ms_per_second"]["open"] > 0
    check_shown("pages", found)


PAGE_READS = {
    "overview": (
        'useGet<Status>("/v1/status", 2000)',
        'useGet<Rates>("/v1/rates", 5000)',
        'withQuery("/v1/sessions", { state: "running", limit: 12 }), 5000)',
        'withQuery("/v1/sessions", { limit: NEWEST }), 20000)',
        'withQuery("/v1/groups", { limit: 200 }), 20000)',
        "const NEWEST = 300",
        '(event) => event.kind.startsWith("session."), () => { status.again(); running.again() }, 1000)',
        'event.kind === "group.done" || event.kind === "session.done", () => { newest.again(); groups.again() }, 5000)',
    ),
    "lists": (
        "after, limit: 500,",
        'event.kind.startsWith("group.") || event.kind === "session.done", list.again, 1500)',
        "after, limit: 200,",
        'event.kind.startsWith("session.") || event.kind === "group.created", list.again, 1500)',
    ),
    "group": ("event.group_id === id, group.again, 400)",),
    "session": (
        "useGet<{ turns: Turn[] }>(url, live ? 1500 : 0)",
        'withQuery(path("sessions", id, "timeline"), { attempt }), live ? 1500 : 0)',
        "event.session_id === id, again, 250)",
    ),
}
"""Parts of the page's sources that `bench/page_readers.py` reproduces."""


def test_the_readers_of_pages_keep_the_rhythm_of_the_page() -> None:
    for view, parts in PAGE_READS.items():
        source = (ROOT / "page/src" / f"{view}.tsx").read_text()
        for part in parts:
            assert part in source, f"page/src/{view}.tsx has changed: change bench/page_readers.py and this table"
