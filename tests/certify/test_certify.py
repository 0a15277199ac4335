"""Certification of the small program in agent.py, with the habits of real clients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.harnesses.install import installation
from outrider.harnesses.presets import load_preset
from outrider.lab.certify.judge import Certificate, Subject
from outrider.lab.certify.rows import LONG, ROWS
from outrider.lab.certify.run import certify
from outrider.lab.certify.subagent_trial import ALONE, HELPLESS, IDLE, KNOWN, NOTHING, OPEN, STARTS
from outrider.plugins import resolve
from outrider.spec import HarnessSpec, PrepareCommand, RuntimeSpec
from support.environments import environment, program

AGENT = Path(__file__).with_name("agent.py")


async def certified(
    *habits: str, rows: tuple[str, ...] = (), dialect: str = "chat", seconds: float = 30
) -> Certificate:
    command = [sys.executable, str(AGENT), "{base_url}", "{instruction}", *habits]
    runtime = RuntimeSpec(kind="process")
    subject = Subject(name="own", harness=HarnessSpec(command=command), runtime=runtime, dialect=dialect)
    asked = [row for row in ROWS if not rows or row.name in rows]
    return await certify(subject, asked, agent_seconds=seconds)


@pytest.mark.deep
@pytest.mark.parametrize("habits", [("streamed",), ("respaced", "trimmed")], ids="+".join)
async def test_an_honest_program_passes_every_row_that_applies(habits: tuple[str, ...]) -> None:
    certificate = await certified(*habits)
    assert [row.row for row in certificate.rows] == [row.name for row in ROWS]
    verdicts = {row.row: row for row in certificate.rows}
    assert certificate.ok
    assert verdicts["sub-agent"].verdict == verdicts["image"].verdict == "not tried"
    assert verdicts["streaming"].verdict == ("holds" if "streamed" in habits else "not tried")
    for row in certificate.rows:
        if row.required:
            assert (row.verdict, row.reason) == ("holds", ""), row
            assert row.sampled_tokens == row.trained_tokens > 0
            assert row.branches == {"main": 1}, "an echoed history is one row, however it is written"


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["namespace", "process-landlock", "process"])
async def test_an_agent_in_its_own_environment_is_certified(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is found by its name alone, and imports a module of its environment."""
    if not (can := resolve("runtime", kind).available()).ok:
        pytest.skip(can.detail)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    (environment(tmp_path / "env") / "own_agent.py").write_text(AGENT.read_text())
    program(tmp_path / "env/bin/own-agent", tmp_path / "env/bin/python", "import own_agent")
    harness = HarnessSpec(command=["own-agent", "{base_url}", "{instruction}"], venv=str(tmp_path / "env"))
    subject = Subject(name="own", harness=harness, runtime=RuntimeSpec(kind=kind))
    [row] = (await certify(subject, ROWS[:1], agent_seconds=30)).rows
    assert (row.verdict, row.reason) == ("holds", "")


async def test_a_program_that_the_sandbox_does_not_have_is_said_how_to_show(tmp_path: Path) -> None:
    if not (can := resolve("runtime", "namespace").available()).ok:
        pytest.skip(can.detail)
    environment(tmp_path / "env")
    program(tmp_path / "env/bin/own-agent", tmp_path / "env/bin/python", "import own_agent")
    harness = HarnessSpec(command=[str(tmp_path / "env/bin/own-agent")])
    subject = Subject(name="own", harness=harness, runtime=RuntimeSpec(kind="namespace"))
    [row] = (await certify(subject, ROWS[:1], agent_seconds=30)).rows
    assert row.verdict == "does not hold"
    assert "own-agent is not in the sandbox" in row.reason
    assert "venv below [harness]" in row.reason
    assert f'mounts = [{{source = "{tmp_path}/env/bin"}}]' in row.reason


async def test_a_history_that_comes_back_changed_is_exact_and_said_so() -> None:
    [row] = (await certified("forgetful", rows=("three-turns",))).rows
    assert row.verdict == "holds"
    assert sum(row.forks.values()) == 1
    assert "forked: " in row.reason
    assert sum(row.branches.values()) == 2


async def test_a_program_that_ends_with_an_error_fails_with_its_log() -> None:
    certificate = await certified("quits", rows=("three-turns",))
    [row] = certificate.rows
    assert not certificate.ok
    assert row.verdict == "does not hold"
    assert "exited with code 3" in row.reason


@pytest.mark.deep
async def test_a_call_that_is_not_run_fails_the_row() -> None:
    certificate = await certified("lazy", rows=("three-turns", "parallel-calls"))
    assert [row.verdict for row in certificate.rows] == ["holds", "does not hold"]
    assert "not all carried out" in certificate.rows[1].reason


@pytest.mark.deep
async def test_tools_that_write_and_read_files_do_instead_of_a_shell() -> None:
    certificate = await certified("files", rows=("three-turns", "long-output", "parallel-calls", "tool-error"))
    assert certificate.ok
    assert [(row.verdict, row.reason) for row in certificate.rows] == [("holds", "")] * 4


def test_a_long_result_is_as_long_as_its_row_says() -> None:
    [row] = (row for row in ROWS if row.name == "long-output")
    assert f"a result of {len(LONG.encode()) / 1000:.0f} kB" in row.what


async def test_a_program_goes_on_after_a_look_at_an_image() -> None:
    [row] = (await certified("files", rows=("image",))).rows
    assert (row.verdict, row.reason) == ("holds", "not read by the model (turns): results.image/png (1)")
    assert row.found == "yes"


@pytest.mark.deep
async def test_a_tool_is_known_by_the_conversation_that_its_call_begins() -> None:
    """The tool has an odd name and odd parameters. Tools with likelier names are called first; one of them does not
    return in time."""
    [row] = (await certified("waits", "mirrors", "asks", "desks", rows=("sub-agent",), seconds=5)).rows
    assert row.verdict == "holds"
    assert row.branches == {"main": 1, "subagent": 1}
    assert row.tools == {
        "agent_of_person": OPEN,
        "task_mirror": NOTHING,
        "ask_around": HELPLESS,
        "zorp": STARTS,
        "run_it": KNOWN,
    }


@pytest.mark.deep
async def test_a_tool_whose_argument_comes_back_in_the_same_conversation_starts_no_sub_agent() -> None:
    certificate = await certified("mirrors", rows=("three-turns", "sub-agent"))
    [_, row] = certificate.rows
    assert certificate.ok
    assert (row.verdict, row.tools) == ("not tried", {"task_mirror": NOTHING, "run_it": KNOWN})
    assert row.reason.startswith(f"no tool started a sub-agent; {NOTHING}: task_mirror")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("habit", "name", "outcome"), [("sums", "task_summary", IDLE), ("compacts", "task_compact", ALONE)]
)
async def test_a_conversation_that_begins_with_a_mark_may_be_no_sub_agent(habit: str, name: str, outcome: str) -> None:
    [row] = (await certified(habit, rows=("sub-agent",))).rows
    assert (row.verdict, row.tools) == ("not tried", {name: outcome, "run_it": KNOWN})
    assert row.reason.startswith(f"no tool started a sub-agent; {outcome}: {name}")


@pytest.mark.deep
async def test_a_sub_agent_may_work_in_the_background_until_the_program_ends() -> None:
    """The tool that is called first ends the program."""
    [row] = (await certified("ends", "later", rows=("sub-agent",))).rows
    assert (row.verdict, row.branches) == ("holds", {"main": 1, "subagent": 1})
    assert row.tools == {"task_end": OPEN, "zorp_later": STARTS, "run_it": KNOWN}


async def test_what_a_harness_cannot_be_given_is_not_tried() -> None:
    certificate = await certified(rows=("mcp", "skill"))
    assert [(row.row, row.verdict) for row in certificate.rows] == [("mcp", "not tried"), ("skill", "not tried")]
    assert [row.reason for row in certificate.rows] == [
        "harness 'command' cannot be given MCP servers",
        "harness 'command' cannot be given skills",
    ]
    assert not certificate.ok


@pytest.mark.deep
async def test_the_agent_in_python_is_given_a_server_and_a_skill() -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    subject = Subject(name="tools", harness=HarnessSpec(agent="tools"), runtime=RuntimeSpec(kind="process"))
    rows = [row for row in ROWS if row.name in ("mcp", "skill")]
    certificate = await certify(subject, rows, agent_seconds=30)
    assert [(row.verdict, row.reason) for row in certificate.rows] == [("holds", ""), ("holds", "")]
    assert certificate.ok


async def test_a_sandbox_without_python_has_no_server_to_try() -> None:
    """The session ends before Codex is started."""
    if not (can := resolve("runtime", "namespace").available()).ok:
        pytest.skip(can.detail)
    if installation(load_preset("codex")) is None:
        pytest.skip("codex is not installed")
    harness = HarnessSpec(preset="codex", env={"PATH": "/tmp/only"})
    only = PrepareCommand(run="mkdir /tmp/only && ln -s $(command -v bash) /tmp/only/bash")
    subject = Subject(name="codex", harness=harness, runtime=RuntimeSpec(kind="namespace", prepare=[only]))
    [row] = (await certify(subject, [row for row in ROWS if row.name == "mcp"], agent_seconds=30)).rows
    assert row.verdict == "not tried"
    assert "no program 'python3'" in row.reason


async def test_a_shell_that_takes_a_list_of_words_is_a_shell() -> None:
    [row] = (await certified("argv", rows=("three-turns",))).rows
    assert (row.verdict, row.reason) == ("holds", "")


@pytest.mark.deep
async def test_a_required_row_that_cannot_be_tried_fails_the_certificate() -> None:
    certificate = await certified("toolless", rows=("three-turns", "sub-agent"))
    assert not certificate.ok
    assert [(row.verdict, row.required) for row in certificate.rows] == [("not tried", True), ("not tried", False)]
    assert "Needed: one that runs a shell command" in certificate.rows[0].reason
    assert "Offered: none" in certificate.rows[0].reason
    assert certificate.rows[0].reason.endswith("is tried by its own task on a scripted engine instead")


async def test_another_dialect_than_the_one_named_fails() -> None:
    [row] = (await certified(rows=("three-turns",), dialect="messages")).rows
    assert (row.verdict, row.reason) == ("does not hold", "it spoke chat, not messages")
