"""An ordinary user runs the tests of the namespace runtime again, because the runtime is meant for ordinary users."""

from __future__ import annotations

import pytest

from support.ordinary import ordinary_user, python_of, run_tests

TESTS = (
    "contract",
    "isolation",
    "escapes",
    "limits",
    "layers",
    "leaks",
    "user_ids",
    "landlock",
    "roots",
    "poverty",
    "threads",
)


@pytest.mark.real
@pytest.mark.timeout(560)
def test_all_of_it_as_an_ordinary_user() -> None:
    files = [f"runtimes/test_{name}.py" for name in TESTS]
    with ordinary_user() as user, python_of(user) as python:
        told = run_tests(python, files, "-m", "not real", "-k", "not [memory] and not [process", seconds=540)
    assert " passed" in told
