"""Rows of R2E-Gym: the tests must have exactly the expected statuses."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.evaluators.checks.expected_statuses import compare, statuses_of

EXPECTED = {"test_a": "PASSED", "T.test_b": "FAILED", "test_c[x]": "ERROR"}
LINES = ("PASSED r2e_tests/test_1.py::test_a", "FAILED r2e_tests/test_1.py::T::test_b - assert 1 == 2")
CUT = "ERROR r2e_tests/test_2.py::test_c[x] - RuntimeError: PASS"
CANARIES = ("test_outrider_0123abcd", "test_join_all_later")
ADDED = tuple(f"FAILED outrider_1.py::{name} - AssertionError" for name in CANARIES)
HEAD = "1 passed\n=== short test summary info ===\n"


def judged(*lines: str, reported: tuple[str, ...] | None = None, expected: dict[str, str] = EXPECTED) -> Any:
    return compare(expected, HEAD + "\n".join(lines), reported, CANARIES)


def test_the_same_statuses_are_a_solution() -> None:
    assert judged(*LINES, CUT, *ADDED) == {"resolved": True, "fail_to_pass": 3, "pass_to_pass": 0, "why": None}
    coloured = [line.replace("PASSED", "\x1b[32mPASSED\x1b[0m") for line in LINES]
    assert judged(*coloured, CUT)["resolved"]
    assert judged(*LINES, CUT, reported=(LINES[0], LINES[1].split(" - ")[0], CUT.split(" - ")[0]))["resolved"]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((LINES[0], CUT), r"T.test_b (not run, not FAILED)"),
        ((*LINES, CUT, "PASSED r2e_tests/test_1.py::test_d"), "test_d (PASSED, not expected)"),
        ((LINES[0].replace("PASSED", "FAILED"), LINES[1], CUT), "test_a (FAILED, not PASSED)"),
        ((LINES[0], LINES[1].replace("FAILED", "PASSED"), CUT), "T.test_b (PASSED, not FAILED)"),
        ((), "test_a (not run, not PASSED)"),
        ((LINES[0], LINES[0].replace("PASSED", "FAILED"), *LINES, CUT), "test_a (PASSED and FAILED, not PASSED)"),
    ],
)
def test_any_other_status_is_none(lines: tuple[str, ...], why: str) -> None:
    verdict = judged(*lines)
    assert not verdict["resolved"]
    assert why in verdict["why"]


def test_a_printed_status_needs_the_second_witness() -> None:
    reported = ("FAILED r2e_tests/test_1.py::test_a", *LINES[1:], CUT)
    verdict = judged(*LINES, CUT, reported=tuple(line.split(" - ")[0] for line in reported))
    assert not verdict["resolved"]
    assert verdict["fail_to_pass"] == 2


def test_only_the_summary_is_read() -> None:
    assert statuses_of("PASSED a.py::test_a\n") == {}
    assert statuses_of(f"FAILED a.py::test_a\n{HEAD}PASSED a.py::test_a\n") == {"test_a": "PASSED"}


def test_what_pytest_itself_lists_twice_is_believed() -> None:
    """pytest lists a name twice if two files have a test of this name, and if a test passes and its teardown fails."""
    other_file = "FAILED r2e_tests/test_0.py::test_a"
    assert judged(other_file, *LINES, CUT)["resolved"]
    end = "ERROR r2e_tests/test_1.py::test_a"
    assert judged(*LINES, CUT, end, expected={**EXPECTED, "test_a": "ERROR"})["resolved"]
