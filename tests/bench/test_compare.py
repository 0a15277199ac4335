"""Several rounds of a benchmark are combined into medians with ranges, and two checkouts are compared figure by
figure."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from bench.__main__ import main
from bench.rounds import Figure, combined, compared, leaves, medians, one_round
from bench.sheets import sheets
from bench.tables import number
from rich.console import Console

from bench import report

ROOT = Path(__file__).parents[2]


def test_every_number_has_a_name() -> None:
    results = {"gateway": {"rate": {"whole": 2.0}, "points": [{"ms": 1}], "quick": True, "kind": "x", "none": None}}
    assert dict(leaves(results)) == {"gateway.rate.whole": 2.0, "gateway.points.0.ms": 1.0}


def test_rounds_become_one_of_medians_that_keep_their_range() -> None:
    rounds = [
        {
            "ms": ms,
            "same": 3,
            "kind": "x",
            "only": {str(ms): 1},
            "points": [{"ms": 10 * ms}],
            "some": [1] * ms,
            "ok": True,
        }
        for ms in (1, 5, 2)
    ]
    one = combined(rounds)
    assert medians(one) == {
        "ms": 2.0,
        "same": 3,
        "kind": "x",
        "only": {},
        "points": [{"ms": 20.0}],
        "some": [1, 1],
        "ok": True,
    }
    assert (number(one["ms"]), number(one["same"])) == ("2.00 (1.00 to 5.00)", "3.00")
    assert f"{one['points'][0]['ms']} {one['ms']:.0f}" == "20 (10 to 50) 2 (1 to 5)"
    assert orjson.dumps(medians(one))


def test_what_is_computed_of_figures_is_computed_round_by_round() -> None:
    cost, floor = Figure([4.0, 9.0, 8.0]), Figure([1.0, 3.0, 2.0])
    assert (cost / floor).rounds == (4.0, 3.0, 4.0)
    assert (cost - floor).rounds == (3.0, 6.0, 6.0)
    assert [figure.rounds for figure in (12 / floor, 2 * floor, floor * 2, floor + 1)] == [
        (12.0, 4.0, 6.0),
        (2.0, 6.0, 4.0),
        (2.0, 6.0, 4.0),
        (2.0, 4.0, 3.0),
    ]
    assert cost / floor <= 4.0


def test_the_medians_of_what_both_have_are_compared() -> None:
    before = combined([{"a": {"ms": ms, "s": 0.0}, "b": {"ms": 1.0}, "c": {"ms": 1.0}} for ms in (1.0, 9.0, 2.0)])
    after = combined([{"a": {"ms": ms, "s": 1.0}, "b": {"ms": 4.0}} for ms in (1.0, 1.0, 7.0)])
    written = io.StringIO()
    Console(file=written, width=100).print(compared(before, after, "ms"))
    lines = [line.split() for line in written.getvalue().splitlines() if ".ms" in line]
    cells = [" ".join(cell for cell in line if cell != "│") for line in lines]
    assert cells == ["a.ms 2 (1 to 9) 1 (1 to 7) 0.50", "b.ms 1 4 4.00"]


def test_every_figure_of_a_kept_run_can_be_a_median_with_a_range() -> None:
    """The newest stored results are made into three rounds that differ in every decimal number. The tables of the three
    rounds have the same rows, with ranges."""

    def scaled(value: Any, by: float) -> Any:
        match value:
            case dict():
                return {key: scaled(inner, by) for key, inner in value.items()}
            case list():
                return [scaled(inner, by) for inner in value]
            case float():
                return value * by
            case _:
                return value

    newest = report.latest()
    rounds = tuple(scaled(medians(newest.results), by) for by in (1.0, 0.5, 2.0))
    several = msgspec.structs.replace(newest, results=medians(combined(rounds)), rounds=rounds)

    assert several.results == medians(newest.results)
    assert "Medians of 3 rounds, with the smallest and the largest." in report.markdown(several)
    one, many = sheets(newest.figures()), sheets(several.figures())
    assert [sheet.title for sheet in one] == [sheet.title for sheet in many]
    for alone, ranged in zip(one, many, strict=True):
        assert len(alone.rows) == len(ranged.rows)
        for row, other in zip(alone.rows, ranged.rows, strict=True):
            for cell, medians_cell in zip(row, other, strict=True):
                assert medians_cell.startswith(cell.split(" ")[0]), (alone.title, row)
    (first, *_) = many
    assert [
        row[0] for row in first.rows if " to " not in row[1] and not row[1].startswith(("0.00", "not measured"))
    ] == []


@pytest.mark.nightly
def test_the_command_runs_rounds_beside_another_checkout(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for folder in ("bench", "tests", "src"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    file = tmp_path / "out.json"
    command = [*(sys.executable, "-m", "bench", "memory", "--quick", "--rounds", "2"), "--json", str(file)]

    done = subprocess.run(
        [*command, "--against", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )

    assert done.returncode == 0, done.stderr
    written = orjson.loads(file.read_bytes())
    assert [list(found) for found in written["rounds"] + written["against"]] == [["memory"]] * 4
    kept = [found["memory"]["bytes_per_call"] for found in written["rounds"]]
    assert min(kept) <= written["results"]["memory"]["bytes_per_call"] <= max(kept)
    assert "after / before" in done.stdout


def test_a_round_that_fails_says_what_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"-m bench memory .* failed in "):
        one_round(sys.executable, tmp_path, "memory", quick=True)


def test_another_checkout_without_an_environment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["memory", "--against", str(tmp_path)])

    assert f"{tmp_path} has no environment: run `make venv` there" in capsys.readouterr().err
