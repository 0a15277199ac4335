"""`outrider harness check`: what it refuses, what it prints, and its exit code."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from cli.world import Cli

AGENT = Path(__file__).parent.parent / "certify" / "agent.py"


def own(*habits: str) -> str:
    return shlex.join([sys.executable, str(AGENT), "{base_url}", "{instruction}", *habits])


def check(cli: Cli, *words: str, habits: tuple[str, ...] = ()):
    return cli.run("harness", "check", "--command", own(*habits), "--runtime", "process", *words)


def test_a_program_of_ones_own_is_certified(cli: Cli) -> None:
    ran = check(cli, "--dialect", "chat", "--row", "three-turns", "--row", "sub-agent", "--json")
    assert ran.code == 0
    certificate = ran.document
    assert certificate["ok"]
    assert certificate["runtime"] == "process"
    assert [(row["row"], row["verdict"]) for row in certificate["rows"]] == [
        ("three-turns", "ok"),
        ("sub-agent", "not applicable"),
    ]
    assert "three-turns: ok" in ran.err


def test_a_row_that_fails_makes_it_end_with_1(cli: Cli) -> None:
    ran = check(cli, "--row", "three-turns", "--row", "parallel-calls", habits=("lazy",))
    assert ran.code == 1
    shown = {line.split()[0]: line for line in ran.out.splitlines() if line.strip()}
    assert "ok" in shown["three-turns"]
    assert "failed" in shown["parallel-calls"]
    assert "not all run" in shown["parallel-calls"]
    assert "does not hold" in ran.out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "give a preset or a --command"),
        (["pi", "--command", "x"], "give a preset or a --command"),
        (["--command", "x 'y"], "cannot be read as a shell would"),
        (["--command", " "], "names no program"),
        (["--command", "x", "--dialect", "morse"], "unknown dialect 'morse'"),
        (["--command", "x", "--row", "none"], "no row 'none'"),
        (["--command", "x", "--runtime", "none"], "unknown runtime 'none'"),
        (["shell"], "needs option 'script'"),
        (["none"], "unknown preset 'none'"),
    ],
)
def test_what_cannot_be_checked_is_said(cli: Cli, words: list[str], error: str) -> None:
    ran = cli.run("harness", "check", *words)
    assert ran.code == 2
    assert error in ran.err.splitlines()[0]


def test_a_program_that_is_not_installed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    ran = cli.run("harness", "check", "opencode")
    assert ran.code == 1
    assert "is not installed on this node" in ran.err


def test_a_dialect_that_a_program_does_not_speak(cli: Cli) -> None:
    ran = cli.run("harness", "check", "openhands", "--dialect", "gemini")
    assert ran.code == 2
    assert "openhands does not speak 'gemini'" in ran.err
