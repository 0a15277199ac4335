"""Certifies a preset's program in namespace sandboxes, as `outrider harness check` does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from outrider.harnesses.install import install
from outrider.harnesses.presets import DIALECT, load_preset
from outrider.lab.certify.judge import RowVerdict, Subject
from outrider.lab.certify.rows import row_named
from outrider.lab.certify.run import certify
from outrider.spec import HarnessSpec, RuntimeSpec

ECHOES = ("reasoning", "json-spacing", "unicode", "parallel-calls", "malformed-call")
"""Rows that test whether a program sends the model's output back unchanged. `reasoning` includes the turns of the
simplest row, `three-turns`."""
STREAMED = ("streaming", *ECHOES)
SUB_AGENT = "sub-agent"
IMAGE = "image"
OTHER_DIALECT = ("streaming", "reasoning", "parallel-calls")
"""Rows for a dialect that is not the program's default. They cover the parts that each dialect writes differently.
Sub-agents are not among them, because they make the same calls in every dialect."""


async def certified(preset: str, rows: Iterable[str], *, dialect: str | None = None) -> dict[str, RowVerdict]:
    """Install the program, and certify these rows. Returns the verdicts by the rows' names. `dialect` defaults to the
    preset's first dialect. Fails if the preset declares another result for images or sub-agents."""
    await asyncio.to_thread(install, preset)
    known = load_preset(preset)
    dialect = dialect or known.dialects[0]
    options = {DIALECT: dialect} if DIALECT in known.options else {}
    subject = Subject(
        name=preset,
        harness=HarnessSpec(preset=preset, options=options),
        runtime=RuntimeSpec(kind="namespace"),
        dialect=dialect,
        hint=known.certify,
    )
    asked = [row for name in rows if (row := row_named(name)) is not None]
    certificate = await certify(subject, asked, agent_seconds=300)
    for done in certificate.rows:
        told = " ".join([*(f"{kind} {count}" for kind, count in done.branches.items()), *done.labels])
        print(f"{preset} ({dialect}) {done.row}: {done.verdict} {done.reason} {told} {done.seconds} s")
        # The table of programs in docs/harnesses.md shows these results, for the default dialect.
        if done.verdict != "does not hold" and dialect == known.dialects[0] and done.row in (IMAGE, SUB_AGENT):
            declared = known.certified.image if done.row == IMAGE else known.certified.subagent
            assert done.found == declared, f"{preset}.toml declares {declared!r} for {done.row}: {done.reason}"
    return {row.row: row for row in certificate.rows}


def assert_exact(row: RowVerdict) -> None:
    """Check that the row holds, that no token drifted, and that at least one sampled token trains."""
    assert row.verdict == "holds", f"{row.row}: {row.reason}\n{row.log_tail}"
    assert row.drift_tokens == 0
    assert 0 < row.trained_tokens <= row.sampled_tokens


def assert_one_conversation(row: RowVerdict, *, label: str | None = None, typed: bool = True) -> None:
    """Call `assert_exact`, and check that the program sends the model's output back unchanged: there are no forks and
    one branch, and in the row `sub-agent` a second branch. `label` is the label of the second branch; None allows any
    label. A program whose sub-agents are not `typed` has no labels."""
    assert_exact(row)
    assert row.forks == {}, f"{row.row}: {row.reason}"
    if row.row != SUB_AGENT:
        assert (row.branches, row.labels) == ({"main": 1}, ())
        return
    assert row.branches == {"main": 1, "subagent": 1}
    assert len(row.labels) == (1 if typed else 0)
    assert label in (None, *row.labels)
