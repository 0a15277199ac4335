"""Three releases of real packages as tasks: the next release's sources earn 1, and an unchanged release earns 0."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from outrider.lab.certify.task_check import check_tasks
from outrider.tasks.release_pairs import RELEASES, release_pair_examples

pytestmark = [pytest.mark.real, pytest.mark.nightly]
pytest.importorskip("swebench", reason="swebench is not installed: pip install --no-deps swebench unidiff")

KINDS = ("FAIL_TO_PASS", "PASS_TO_PASS")


@pytest.mark.timeout(1800)  # pip builds the metadata of six source distributions first
async def test_the_next_release_is_worth_everything_and_doing_nothing_is_not(tmp_path: Path) -> None:
    examples = await asyncio.to_thread(release_pair_examples)
    assert [example.id for example in examples] == [f"{pair.name}__{pair.name}-{pair.new}" for pair in RELEASES]
    assert [tuple(len(example.row[kind]) for kind in KINDS) for example in examples] == [(1, 57), (8, 222), (4, 229)]
    reports = await check_tasks(examples, folder=tmp_path, at_once=2)
    assert [(report.gold, report.nothing, report.problems) for report in reports] == [
        ((1.0, 1.0), (0.0, 0.0), ()) for _ in RELEASES
    ]
