"""The columns for images and sub-agents in the table of programs: a certificate finds what each preset declares, with
the program's own tools."""

from __future__ import annotations

import pytest

from outrider.harnesses.presets import load_preset, preset_names

from .certified import IMAGE, SUB_AGENT, assert_exact, certified

pytestmark = [pytest.mark.real, pytest.mark.nightly]

PROGRAMS = [name for name in preset_names() if load_preset(name).install is not None]


@pytest.mark.parametrize("preset", PROGRAMS)
async def test_a_certificate_finds_what_the_preset_declares(preset: str) -> None:
    # `certified` compares the result with the preset.
    for row in (await certified(preset, (IMAGE, SUB_AGENT))).values():
        assert row.verdict != "does not hold", f"{row.row}: {row.reason}\n{row.log_tail}"
        if row.verdict == "holds":
            assert_exact(row)
