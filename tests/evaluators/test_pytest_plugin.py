"""The plugin in pytest's process: the tests that the plugin adds disturb no test of a repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.evaluators.swebench.evaluator import planted_name, plugin

pytestmark = pytest.mark.deep
PLANTED = "test_join_all_lines_later"
ONCE = """
import pytest

RAN = []

@pytest.fixture(autouse=True, scope="module", params=["a", "b"])
def opened(request):
    RAN.append("open")
    yield request.param
    RAN.append("close")
    assert RAN.count("open") == RAN.count("close") <= 2

@pytest.fixture(autouse=True)
def each():
    RAN.append("each")
    yield
    assert RAN.count("each") <= 4

def setup_module():
    RAN.append("setup")

def teardown_module():
    assert RAN.count("setup") == 1

"""
MODULES = {
    "test_once.py": f"{ONCE}def test_one(opened): pass\n\ndef test_two(opened): pass\n",
    "test_case.py": (
        "import unittest\n\n\nclass Case(unittest.TestCase):\n"
        "    def setUp(self):\n        self.value = 1\n\n    def test_it(self):\n        assert self.value\n"
    ),
    "test_class.py": "class TestIt:\n    def test_it(self):\n        pass\n",
    "test_skips.py": "import pytest\n\npytestmark = pytest.mark.skip\n\ndef test_it():\n    assert 0\n",
    "test_xfails.py": "import pytest\n\npytestmark = pytest.mark.xfail\n\ndef test_it():\n    assert 0\n",
    "test_not_run.py": ("import pytest\n\npytestmark = pytest.mark.xfail(run=False)\n\ndef test_it():\n    assert 0\n"),
    "test_params.py": (
        "import pytest\n\npytestmark = pytest.mark.parametrize('number', [1, 2])\n\n"
        "def test_it(number):\n    assert number\n"
    ),
    "test_taken.py": f"def {PLANTED}():\n    assert 0\n\ndef test_it():\n    pass\n",
    "test_excused.py": (
        "import contextlib, pytest, shop\n\ndef test_within():\n    with shop.opened():\n        pytest.xfail()\n\n"
        "def test_called():\n    shop.call(lambda: pytest.xfail())\n"
    ),
    "shop.py": (
        '"""Adds.\n\n>>> 1 + 1\n2\n"""\nimport contextlib\n\n@contextlib.contextmanager\ndef opened():\n'
        "    try:\n        yield\n    finally:\n        pass\n\ndef call(function):\n    function()\n"
    ),
    "test_empty.py": "import shop\n",
}


def run(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Run the tests of MODULES with the plugin, and return the plugin's report."""
    for name, text in MODULES.items():
        (folder / name).write_text(text)
    report = folder / "report"
    report.unlink(missing_ok=True)
    (folder / "outrider_x.py").write_text(plugin(str(report), "0123456789abcdef", PLANTED, "x"))
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTEST_ADDOPTS": "-p outrider_x ", "PYTHONDONTWRITEBYTECODE": "1"}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", f"--rootdir={folder}", *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return [json.loads(line) for line in report.read_text().splitlines()]


def planted(records: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the outcome of the test that was added to each file."""
    return {record["file"]: (record["when"], record["planted"]) for record in records if "planted" in record}


def results(records: list[dict[str, Any]]) -> set[tuple[str, str, str | None]]:
    return {(record["test"], record["outcome"], record["excused_by"]) for record in records if "test" in record}


FAILED = ("call", "failed")
EXPECTED = {
    **dict.fromkeys(("test_once.py", "test_case.py", "test_class.py", "test_params.py", "test_taken.py"), FAILED),
    "test_skips.py": ("setup", "skipped"),
    "test_xfails.py": ("call", "skipped"),
    "test_not_run.py": ("setup", "skipped"),
    "test_excused.py": FAILED,
}


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--doctest-modules", "--import-mode=importlib"),
        ("-p", "xdist", "-n2"),
        (
            "-o",
            "python_functions=check_* test_one test_two test_it test_join* test_within test_called",
            "-k",
            "not Case",
        ),
    ],
)
def test_the_added_tests_disturb_no_other(tmp_path: Path, words: tuple[str, ...]) -> None:
    records = run(tmp_path, *words)
    expected = {**EXPECTED}
    if "-k" in words:
        del expected["test_case.py"]
    assert planted(records) == expected
    bad = {(test, outcome, by) for test, outcome, by in results(records) if outcome == "failed" or by}
    assert bad == {("test_excused.py::test_called", "skipped", str(tmp_path / "shop.py"))}
    assert {test for test, *_ in results(records)} >= {
        f"test_once.py::test_{n}[{p}]" for n in ("one", "two") for p in "ab"
    }
    assert not any(record.get("excused_by") for record in records if "planted" in record)


def test_a_run_that_stops_at_a_failure_has_no_added_tests_within(tmp_path: Path) -> None:
    for word in ("-x", "--maxfail=3"):
        records = run(tmp_path, word)
        assert planted(records).keys() <= {"test_taken.py"}
        assert ("test_case.py::Case::test_it", "passed", None) in results(records)


def test_a_planted_name_looks_like_a_name() -> None:
    assert all(planted_name().isidentifier() for _ in range(50))
