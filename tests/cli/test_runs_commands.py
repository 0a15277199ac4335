"""The commands that find, compare and change many sessions, against a live service."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console

from cli.world import Cli
from outrider.cli import diff
from outrider.cli.run_filter import time_of
from outrider.client.client import AsyncClient
from outrider.errors import InvalidField
from outrider.service.run_diff import compare
from outrider.store.run_index.lists import ComparedSession
from support.service import running_service, say

TASK = {
    "instruction": "say hello",
    "harness": {"agent": "tools"},
    "runtime": {"kind": "memory"},
    "evaluator": {"kind": "command", "run": "true"},
}


@asynccontextmanager
async def a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncClient]:
    """A client of a service with a solved group `a` of two sessions, and a failed group `b`."""
    async with running_service(tmp_path=tmp_path, replies=[say("hello")]) as (_, url), AsyncClient(url) as client:
        monkeypatch.setenv("OUTRIDER_URL", url)
        groups = [
            await client.submit({"task": {**TASK, "labels": {"run": "a"}}, "n": 2}),
            await client.submit(
                {"task": {**TASK, "labels": {"run": "b"}, "evaluator": {"kind": "command", "run": "false"}}}
            ),
        ]
        await client.wait([group.id for group in groups])
        yield client


async def test_sessions_are_listed_by_a_filter(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_client(tmp_path, monkeypatch):
        ran = await cli("sessions", "--label", "run=a", "--min-reward", "1", "--since", "1h", "--json")
        assert [each["sample_index"] for each in ran.document["sessions"]] == [0, 1]
        ran = await cli("sessions", "--limit", "1")
        assert "more: the same command with --after s-" in ran.err
        after = ran.err.split()[-1]
        assert "completed" in (await cli("sessions", "--after", after)).out
        ran = await cli("sessions", "--groups", "--max-reward", "0.5")
        assert "run=b" in ran.out
        assert "run=a" not in ran.out
        assert (await cli("session", "list", "--state", "running")).code == 0
        for words, message in (
            (("--since", "soon"), "'soon' is no time"),
            (("--label", "run"), "'run' is not NAME=VALUE"),
            (("--state", "odd"), "known: queued"),
        ):
            ran = await cli("sessions", *words)
            assert ran.code == 2
            assert message in ran.err


async def test_a_query_is_shown_as_table_json_and_csv(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = "SELECT labels->>'run' AS run, count(*) AS n, avg(reward) AS reward FROM sessions GROUP BY 1 ORDER BY 1"
    async with a_client(tmp_path, monkeypatch):
        ran = await cli("query", sql)
        assert [line.split() for line in ran.out.splitlines() if "─" not in line] == [
            ["run", "n", "reward"],
            ["a", "2", "1"],
            ["b", "1", "0"],
        ]
        assert (await cli("query", sql, "--json")).document["rows"] == [["a", 2, 1.0], ["b", 1, 0.0]]
        rows = list(csv.reader(io.StringIO((await cli("query", "--csv", sql)).out)))
        assert rows == [["run", "n", "reward"], ["a", "2", "1.0"], ["b", "1", "0.0"]]
        escape = "SELECT char(27) || '[31m' AS text"
        assert "\x1b[31m" in (await cli("query", "--csv", escape)).out  # a file gets the text itself
        with monkeypatch.context() as terminal:
            terminal.setattr(Console, "is_terminal", True)
            assert (await cli("query", "--csv", escape)).out == "text\n\\x1b[31m\n"
        ran = await cli("query", "DELETE FROM sessions")
        assert ran.code == 2
        assert "error: sql: a query only reads: no view can be changed" in ran.err
        assert "--csv and --json exclude each other" in (await cli("query", sql, "--csv", "--json")).err


async def test_cancel_retry_and_pause(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_client(tmp_path, monkeypatch) as client:
        ran = await cli("queue", "pause", "--label", "run=a")
        assert "paused: 0 more sessions held" in ran.out
        ran = await cli("retry", "--label", "run=a", "--dry-run")
        assert ran.out.startswith("would submit again 2 sessions\n")
        ran = await cli("retry", "--label", "run=a")
        assert "submitted again: 2 sessions of 2 that match" in ran.out
        [held] = [each for each in await client.groups() if "outrider.retry" in each.labels]
        assert held.id in ran.err
        assert "2 sessions held" in (await cli("queue", "list")).out
        ran = await cli("cancel", "--label", "run=a", "--dry-run", "--json")
        assert (ran.document["matched"], ran.document["skipped"]) == (2, {"done": 2})
        ran = await cli("cancel", "--group", held.id)
        assert "cancelled: 2 sessions of 2 that match" in ran.out
        assert "resumed: 0 sessions released" in (await cli("queue", "resume", "--label", "run=a")).out
        assert (await cli("queue", "resume")).code != 0
        for command in ("cancel", "retry"):
            ran = await cli(command)
            assert ran.code == 2
            assert "no session is named" in ran.err
            assert (await cli(command, "--all", "--label", "run=a")).code == 2
            ran = await cli(command, "--label", "run=a", "--since", "")  # such as an unset "$SINCE"
            assert (ran.code, ran.err.splitlines()[0]) == (2, "error: --since: '' is no time")
            assert "cannot be named together" in (await cli(command, held.id, "s-1", "--dry-run")).err


async def test_two_runs_are_compared_in_80_columns(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_client(tmp_path, monkeypatch):
        found = (await cli("diff", "run=a", "run=b", "--json")).document
        assert (found["paired"], found["lost"], found["reward"]["value"]) == (1, 1, -1.0)
        ran = await cli("diff", "run=a", "run=b")
        assert "0 solved in B only, 1 in A only" in ran.out
        assert max(map(len, ran.out.splitlines())) <= 80
        assert "see `outrider sessions --groups`" in (await cli("diff", "run=a", "run=none")).err


def a_run(number: int, task: str, reward: float | None, *, error: str | None = None) -> ComparedSession:
    return ComparedSession(
        id=f"s-0019a4e2b6c1f3d2-{number}",
        group_id=f"g-0019a4e2b6c1f{number:03d}",
        task=task,
        created=float(number),
        sample_index=0,
        state="done",
        stop_reason="error" if error else "completed",
        error_code=error,
        reward=reward,
        turns=12_345,
        tokens_sampled=123_456_789,
        tokens_trained=123_456_789,
        seconds=86_400.0,
        model_seconds=86_399.0,
    )


def test_a_large_comparison_fits_80_columns_and_has_every_figure() -> None:
    a = [a_run(n, f"task {n % 40}", float(n % 3 == 0)) for n in range(320)]
    b = [a_run(n, f"task {n % 50}", float(n % 2 == 0)) for n in range(320)]
    b += [a_run(900 + n, "task 1", None, error="an_error_with_an_unusually_long_code") for n in range(9)]
    found = compare(a, b, names=("x" * 100, "run=b"), passed=1.0)
    assert found.paired == 40
    assert found.b.failures == {"an_error_with_an_unusually_long_code": 9}
    assert sorted(found.pass_at) == [1, 2, 4]  # no task has eight samples in b
    assert sorted(found.a.pass_at) == [1, 2, 4, 8]
    # 40 tasks of 8 samples each, of which 2 or 3 are solved, against tasks that are solved always or never.
    assert found.a.reward is not None
    assert found.a.reward.value == pytest.approx(sum(n % 3 == 0 for n in range(320)) / 320)
    assert found.a.pass_at[8].value == 1.0
    assert found.b.pass_at[1].value == found.b.pass_at[4].value == 0.5
    out = io.StringIO()
    console = Console(file=out, width=80)
    for each in diff._shown(found):
        console.print(each, soft_wrap=isinstance(each, str))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "pass@8" in out.getvalue()


def test_flips_that_are_not_shown_are_announced() -> None:
    a = [a_run(n, f"task {n}", 1.0) for n in range(8)]
    b = [a_run(10 + n, f"task {n}", 0.0) for n in range(8)]
    lines = [each for each in diff._shown(compare(a, b, names=("a", "b"))) if isinstance(each, str)]
    assert "0 solved in B only, 8 in A only (a reward of 1 or more):" in lines
    assert lines[-1] == "more with --json"  # only five of the eight are in the table


def test_runs_without_a_common_task_are_independent_sets() -> None:
    a = [a_run(n, f"a{n}", 1.0) for n in range(4)]
    b = [a_run(n, f"b{n}", 0.0) for n in range(4)]
    found = compare(a, b, names=("a", "b"))
    assert (found.paired, found.flips) == (0, ())
    assert found.reward is not None
    assert (found.reward.value, found.reward.low, found.reward.high) == (-1.0, -1.0, -1.0)
    ungraded = compare([a_run(0, "a", None, error="lost")], b, names=("a", "b"))
    assert (ungraded.reward, ungraded.a.reward, ungraded.pass_at) == (None, None, {})


def test_times_of_options() -> None:
    assert time_of("2h", "--since", now=10_000.0) == 2800.0
    assert time_of("1.5min", "--since", now=100.0) == 10.0
    assert time_of("1700000000", "--since") == 1.7e9
    assert time_of("2001-09-09T01:46:40+00:00", "--since") == 1e9
    for wrong in ("yesterday", "2 weeks", "-1h", ""):
        with pytest.raises(InvalidField, match="is no time"):
            time_of(wrong, "--since")
