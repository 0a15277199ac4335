"""Certifies an installed preset in namespace sandboxes, as `outrider harness check` does, and hands back its rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from outrider.certify.judge import RowVerdict
from outrider.certify.rows import ROWS
from outrider.certify.run import Subject, certify
from outrider.harnesses.install import install
from outrider.harnesses.presets import DIALECT, load_preset
from outrider.spec import HarnessSpec


async def certified(preset: str, *, dialect: str = "chat", without: Iterable[str] = ()) -> dict[str, RowVerdict]:
    """The verdict of every row but those `without`, by its name; the program is installed first."""
    await asyncio.to_thread(install, preset)
    known = load_preset(preset)
    options = {DIALECT: dialect} if DIALECT in known.options else {}
    subject = Subject(
        name=preset, harness=HarnessSpec(preset=preset, options=options), dialect=dialect, hint=known.certify
    )
    rows = [row for row in ROWS if row.name not in set(without)]
    certificate = await certify(subject, rows, runtime="namespace", agent_seconds=300)
    for row in certificate.rows:
        print(f"{preset} ({dialect}) {row.row}: {row.verdict} {row.reason} {row.branches} {row.seconds} s")
    return {row.row: row for row in certificate.rows}


def assert_passed(row: RowVerdict) -> None:
    """It passed, and every token that was sampled is accounted for."""
    assert row.verdict == "ok", f"{row.row}: {row.reason}\n{row.log_tail}"
    assert row.drift_tokens == 0
    assert 0 < row.trained_tokens <= row.sampled_tokens
