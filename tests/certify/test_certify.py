"""Certifications of a small program of our own, with the habits that clients have, in plain processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.certify.rows import ROWS
from outrider.certify.run import Certificate, Subject, certify
from outrider.spec import HarnessSpec

AGENT = Path(__file__).with_name("agent.py")


async def certified(*habits: str, rows: tuple[str, ...] = (), dialect: str = "chat") -> Certificate:
    command = [sys.executable, str(AGENT), "{base_url}", "{instruction}", *habits]
    subject = Subject(name="own", harness=HarnessSpec(command=command), dialect=dialect)
    asked = [row for row in ROWS if not rows or row.name in rows]
    return await certify(subject, asked, runtime="process", agent_seconds=30)


@pytest.mark.parametrize("habits", [("streamed",), ("respaced", "trimmed")], ids="+".join)
async def test_an_honest_program_passes_every_row_that_applies(habits: tuple[str, ...]) -> None:
    certificate = await certified(*habits)
    assert [row.row for row in certificate.rows] == [row.name for row in ROWS]
    verdicts = {row.row: row for row in certificate.rows}
    assert certificate.ok
    assert verdicts["sub-agent"].verdict == "not applicable"
    assert verdicts["streaming"].verdict == ("ok" if "streamed" in habits else "not applicable")
    for row in certificate.rows:
        if row.row not in ("sub-agent", "streaming"):
            assert (row.verdict, row.reason) == ("ok", ""), row
            assert row.sampled_tokens == row.trained_tokens > 0
            assert row.branches == {"main": 1}, "an echoed history is one row, however it is written"


async def test_a_history_that_comes_back_changed_is_exact_and_said_so() -> None:
    [row] = (await certified("forgetful", rows=("three-turns",))).rows
    assert row.verdict == "ok"
    assert sum(row.forks.values()) == 1
    assert "forked: " in row.reason
    assert sum(row.branches.values()) == 2


async def test_a_program_that_ends_with_an_error_fails_with_its_log() -> None:
    certificate = await certified("quits", rows=("three-turns",))
    [row] = certificate.rows
    assert not certificate.ok
    assert row.verdict == "failed"
    assert "exited with code 3" in row.reason


async def test_a_call_that_is_not_run_fails_the_row() -> None:
    certificate = await certified("lazy", rows=("three-turns", "parallel-calls"))
    assert [row.verdict for row in certificate.rows] == ["ok", "failed"]
    assert "not all run" in certificate.rows[1].reason


async def test_a_program_without_a_shell_cannot_be_certified_by_these_rows() -> None:
    [row] = (await certified("toolless", rows=("three-turns",))).rows
    assert row.verdict == "not applicable"
    assert "no tool that runs a command" in row.reason


async def test_another_dialect_than_the_one_named_fails() -> None:
    [row] = (await certified(rows=("three-turns",), dialect="messages")).rows
    assert (row.verdict, row.reason) == ("failed", "it spoke chat, not messages")
