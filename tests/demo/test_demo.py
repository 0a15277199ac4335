"""`outrider demo` from end to end, and the faults that its check of its own samples finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from outrider.lab.demo.dialogue import POLICY
from outrider.lab.demo.run import GROUPS, SAMPLES
from outrider.lab.demo.summary import RolloutSummary, best_session, sample_faults, tallies
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.sandbox.runtimes.default_runtime import default_runtime
from outrider.schemas import GroupView, SessionView, TurnView
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import (
    BranchKind,
    LogprobKind,
    SessionResult,
    TokenCounts,
    TokenMode,
    TurnTimings,
    Verdict,
)
from support.samples import changed_sample, make_sample

TOKENIZER = Tokenizer.load(POLICY)
SAID = "It is in jade.<|im_end|>"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The JSON line that one real demo printed, and the folder with its files."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("demo")
    program = "import sys; from outrider.cli import main; sys.exit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", program, "demo", "--json", "--out", str(folder / "out")],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    return json.loads(ran.stdout), folder / "out"


@pytest.mark.deep
def test_every_session_ends_without_error_or_drift(demo: tuple[dict[str, Any], Path]) -> None:
    line, _ = demo
    assert (line["sessions"], line["errors"], line["drift_tokens"], line["faults"]) == (GROUPS * SAMPLES, 0, 0, [])
    assert 0.0 <= line["mean_reward"] <= 1.0
    assert line["sampled_tokens"] == line["trained_tokens"] > GROUPS * SAMPLES
    assert line["runtime"] == default_runtime()[0]
    assert line["seconds"] < 150


@pytest.mark.deep
def test_the_files_hold_what_the_line_says(demo: tuple[dict[str, Any], Path]) -> None:
    line, folder = demo
    rows = [json.loads(text) for text in Path(line["samples"]).read_text().splitlines()]
    columns = pq.read_table(line["parquet"]).to_pydict()
    summary = json.loads((folder / "summary.json").read_text())
    assert sum(sum(row["loss_mask"]) for row in rows) == line["trained_tokens"]
    assert columns["ids"] == [row["ids"] for row in rows]
    assert columns["logprobs"] == [row["logprobs"] for row in rows]
    assert summary["summary"] == line
    assert [group["sessions"] for group in summary["groups"]] == [SAMPLES] * GROUPS
    assert len({group["name"] for group in summary["groups"]}) == GROUPS


def rollouts(**changed: Any) -> RolloutSummary:
    """Return a summary of one session with one turn and one sample. `changed` replaces fields of the sample."""
    context, sampled = TOKENIZER.encode("Where is rye?\n"), TOKENIZER.encode(SAID)
    mask = [0] * len(context) + [1] * len(sampled)
    sample = make_sample(
        group_id="g",
        session_id="s",
        attempt=1,
        sample_index=0,
        row=0,
        rows=1,
        kind=BranchKind.MAIN,
        turns=(0,),
        ids=context + sampled,
        loss_mask=mask,
        logprobs=[-0.5 * bit for bit in mask],
        versions=[bit - 1 for bit in mask],
        prompt_length=len(context),
        reward=1.0,
        mode=TokenMode.TOKENS,
        logprob_kind=LogprobKind.RAW,
        stop_reason=StopReason.COMPLETED,
        min_version=0,
        max_version=0,
    )
    group = GroupView(
        id="g",
        state=GroupState.DONE,
        cancelled=False,
        n=1,
        priority=0,
        created=0.0,
        finished=1.0,
        cursor=1,
        labels={"item": "rye"},
        sessions=(_session(len(sampled)),),
        samples=(changed_sample(sample, **changed),),
    )
    return RolloutSummary(groups=(group,), turns={"s": (_turn(len(context), len(sampled)),)}, seconds=1.0)


def _session(tokens: int) -> SessionView:
    result = SessionResult(
        session_id="s",
        group_id="g",
        sample_index=0,
        attempt=1,
        stop_reason=StopReason.COMPLETED,
        verdict=Verdict(reward=1.0),
        turns=1,
        tokens=TokenCounts(sampled=tokens, trained=tokens),
    )
    return SessionView(
        id="s",
        group_id="g",
        sample_index=0,
        state=SessionState.DONE,
        attempt=1,
        node=None,
        created=0.0,
        updated=1.0,
        last_error=None,
        result=result,
    )


def _turn(prompt: int, output: int) -> TurnView:
    return TurnView(
        index=0,
        parent=None,
        join="root",
        cause=None,
        forked_from=None,
        prompt_tokens=prompt,
        output_tokens=output,
        context="Where is rye?\n",
        sampled=SAID,
        finish="stop",
        mode="tokens",
        dialect="chat",
        engine="embedded-0",
        tool_calls=0,
        malformed_calls=0,
        cached_tokens=None,
        drift_tokens=0,
        versions=(),
        sampling={},
        timings=TurnTimings(received=0.0, first_token=0.0, finished=1.0),
    )


def test_the_check_passes_what_is_right() -> None:
    assert sample_faults(rollouts(), TOKENIZER) == []


@pytest.mark.parametrize(
    ("field", "index", "value", "complaint"),
    [
        ("ids", -2, 40, "is the text of no turn"),
        ("loss_mask", -1, 0, "its samples train"),
        ("loss_mask", 0, 1, "is the text of no turn"),
        ("logprobs", -1, 0.5, "log-probability 0.5"),
        ("versions", -1, -1, "version -1"),
    ],
)
def test_the_check_sees_what_is_wrong(field: str, index: int, value: float, complaint: str) -> None:
    [sample] = rollouts().groups[0].samples or ()
    column = list(getattr(sample, field))
    column[index] = value
    assert any(complaint in fault for fault in sample_faults(rollouts(**{field: column}), TOKENIZER))


@pytest.mark.parametrize("missing", [{"packed_logprobs": b""}, {"version_spans": ()}])
def test_the_check_sees_a_token_without_its_numbers(missing: dict[str, Any]) -> None:
    made = rollouts()
    [sample] = made.groups[0].samples or ()
    short = msgspec.structs.replace(sample, **missing)
    group = msgspec.structs.replace(made.groups[0], samples=(short,))
    assert "not every id that trains" in sample_faults(msgspec.structs.replace(made, groups=(group,)), TOKENIZER)[0]


def test_sums_are_over_sessions_and_groups() -> None:
    made = rollouts()
    [row, total] = tallies(made.groups * 2)[-2:]
    assert (row.name, row.sessions, row.mean_reward) == ("rye", 1, 1.0)
    assert (total.name, total.sessions, total.completed, total.errors) == ("total", 2, 2, 0)
    assert best_session(made).id == "s"
