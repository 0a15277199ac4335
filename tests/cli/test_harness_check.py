"""`outrider harness check`: its refusals, its output and its exit code."""

from __future__ import annotations

import shlex
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.world import Cli
from outrider.cli.harness_check import print_certificate
from outrider.cli.progress import row_progress
from outrider.cli.terminal import Terminal
from outrider.lab.certify.judge import Certificate, RowVerdict

AGENT = Path(__file__).parent.parent / "certify" / "agent.py"


def own(*habits: str) -> str:
    return shlex.join([sys.executable, str(AGENT), "{base_url}", "{instruction}", *habits])


def check(cli: Cli, *words: str, habits: tuple[str, ...] = ()) -> Any:
    return cli.run("harness", "check", "--command", own(*habits), "--runtime", "process", *words)


@pytest.mark.deep
def test_a_program_of_ones_own_is_certified(cli: Cli) -> None:
    ran = check(cli, "--dialect", "chat", "--row", "three-turns", "--row", "sub-agent", "--json")
    assert ran.code == 0
    certificate = ran.document
    assert certificate["ok"]
    assert certificate["runtime"] == "process"
    assert [(row["row"], row["verdict"]) for row in certificate["rows"]] == [
        ("three-turns", "holds"),
        ("sub-agent", "not tried"),
    ]
    assert "three-turns: holds" in ran.err


@pytest.mark.deep
def test_a_row_that_does_not_hold_makes_it_end_with_1(cli: Cli) -> None:
    ran = check(cli, "--row", "three-turns", "--row", "parallel-calls", habits=("lazy",))
    assert ran.code == 1
    lines = [line.split(maxsplit=1) for line in ran.out.splitlines()]
    shown = [" ".join(line) for line in lines if line[:1] in (["three-turns"], ["parallel-calls"])]
    assert shown[0].startswith("three-turns holds")
    assert shown[1].startswith("parallel-calls does not hold")
    assert "not all carried out" in shown[2]
    assert "does not hold. 1 of 2 rows hold, 1 does not hold" in ran.out


def test_what_could_not_be_tried_makes_it_end_with_1(cli: Cli) -> None:
    ran = check(cli, "--row", "three-turns", habits=("toolless",))
    assert ran.code == 1
    assert "Offered: none" in ran.out
    assert "0 of 1 rows hold, 1 not tried (what must be tried: three-turns)" in ran.out


def test_a_task_is_certified_with_all_that_it_says_of_its_sandbox(cli: Cli, tmp_path: Path) -> None:
    """The agent, its settings and a variable of its sandbox come from the task alone."""
    (tmp_path / "agent.py").write_text(AGENT.read_text())
    task = tmp_path / "mine.toml"
    task.write_text(
        f"""
        instruction = "ignored"
        [harness]
        command = ["bash", "-c", '{sys.executable} agent.py "$(cat "$HOME/url")" "$0" $HABIT', "{{instruction}}"]
        files = {{ url = "{{base_url}}" }}
        [runtime]
        kind = "process"
        env = {{ HABIT = "streamed" }}
        prepare = [{{ upload = "agent.py", to = "agent.py" }}]
        [evaluator]
        run = "false"
        """
    )
    template = tmp_path / "mine-of-rows.toml"
    template.write_text(f'{task.read_text()}\n[rows]\nfile = "rows.jsonl"\n')
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    ran = cli.run("harness", "check", "--task", template, "--row", "streaming", "--json")
    certificate = ran.document
    assert (ran.code, certificate["harness"], certificate["runtime"]) == (0, "mine-of-rows", "process")
    assert [(row["row"], row["verdict"]) for row in certificate["rows"]] == [("streaming", "holds")]


def test_the_certificate_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """No line is longer than 80 columns and no text is cut, however long the reasons are."""
    reason = "none of its tools could do it. Offered: " + "; ".join(f"tool_number_{n}(path: string)" for n in range(30))
    rows = (
        RowVerdict(row="malformed-call", what="w", verdict="does not hold", reason="x" * 300, turns=99999),
        RowVerdict(row="three-turns", what="w", verdict="not tried", reason=reason),
        RowVerdict(
            row="sub-agent", what="w", verdict="holds", turns=12, sampled_tokens=10**9, drift_tokens=10**6, seconds=1e5
        ),
    )
    terminal = Terminal()
    terminal.out = Console(width=80, highlight=False, markup=False, emoji=False)
    made = Certificate(harness="h" * 60, dialect=None, runtime="namespace", ok=False, rows=rows, seconds=1.0)
    print_certificate(terminal, made)
    written = capsys.readouterr().out
    assert max(map(len, written.splitlines())) <= 80
    assert written.count("x") >= 300
    shown = "".join(written.split())
    assert "".join(reason.split()) in shown
    assert "1000000000" in shown


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_and_verdicts_anywhere(on_a_terminal: bool) -> None:
    terminal, written = Terminal(), StringIO()
    terminal.err = Console(file=written, width=80, force_terminal=on_a_terminal)
    with row_progress(terminal, 3) as watch:
        watch(RowVerdict(row="three-turns", what="w", verdict="holds"))
    assert "three-turns: holds" in written.getvalue()
    assert ("1/3" in written.getvalue()) is on_a_terminal


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "give a preset, a --command or a --task"),
        (["pi", "--command", "x"], "give a preset, a --command or a --task"),
        (["pi", "--venv", "x"], "is for a --command"),
        (["--task", "nothing.toml"], "cannot read nothing.toml"),
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
