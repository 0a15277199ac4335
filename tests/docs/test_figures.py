"""The figures in the README and in bench/results/latest.md are those of the newest results."""

from __future__ import annotations

import re

import pytest
from bench.targets import TARGETS

from bench import report

from .pages import ROOT

NEWEST = report.latest()
README = (ROOT / "README.md").read_text()


def test_the_readme_has_the_figures_of_the_newest_results() -> None:
    assert report.with_targets(README, NEWEST) == README


def test_the_page_of_results_is_made_of_the_newest_results() -> None:
    assert (report.FOLDER / "latest.md").read_text() == report.markdown(NEWEST)


def test_a_stale_figure_and_a_missing_row_are_seen() -> None:
    table = README.partition(report.BEGIN)[2].partition(report.END)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len([target for target in TARGETS if target.bench in NEWEST.results])
    for row in rows:
        stale = row[: -len("yes |")] + "??? |"
        for page in (README.replace(f"{row}\n", ""), README.replace(row, stale)):
            assert page != README
            assert report.with_targets(page, NEWEST) == README


@pytest.mark.parametrize("mark", [report.BEGIN, report.END])
def test_a_page_without_a_mark_is_not_cut(mark: str) -> None:
    with pytest.raises(ValueError, match=re.escape(mark)):
        report.with_targets(README.replace(mark, ""), NEWEST)


def test_what_another_machine_measured_stands_beside_the_claim() -> None:
    differing = [target for target in TARGETS if target.elsewhere]
    assert differing
    for target in differing:
        (row,) = [line for line in README.splitlines() if line.startswith(f"| {target.name} ")]
        assert f"; another machine: {target.elsewhere}" in row
