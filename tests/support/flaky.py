"""Runs failed tests again, each one alone. A test that then passes is flaky, and is reported as flaky.

This happens only in runs with several workers (`pytest -n`) and in runs beside other runs (`--beside-others`), and only
if at most MAX_FLAKY tests failed. A flaky test is printed as FLAKY with its first failure. It is a defect to be fixed
next. The run fails if a test fails again, or if more tests failed. tests/conftest.py imports the hooks.

If the environment variable FLAKY_FILE names a file, MAX_FLAKY is the limit for all runs with the same file together,
such as the runs of `.ci/run`. Each run appends its flaky tests to the file, and fails if the file then has more than
MAX_FLAKY.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

MAX_FLAKY = 3
FLAKY_FILE = "FLAKY_FILE"
RERUN_SECONDS = 600.0
"""Time limit of one test that runs alone."""

_failures = pytest.StashKey[dict[str, str]]()
"""Text of the first failure of each failed test, by node id."""
_session = pytest.StashKey[pytest.Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--beside-others",
        action="store_true",
        help="other runs of tests share this machine: run a failed test once more, as runs with several workers do",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    crowded = getattr(config.option, "numprocesses", None) or config.option.beside_others
    if crowded and not hasattr(config, "workerinput"):
        config.stash[_failures] = {}
        config.stash[_session] = session
        config.pluginmanager.register(FailureRecorder(config.stash[_failures]))


class FailureRecorder:
    def __init__(self, failures: dict[str, str]) -> None:
        self._failures = failures

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.setdefault(report.nodeid, report.longreprtext)


def pytest_terminal_summary(terminalreporter: TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    failures = config.stash.get(_failures, {})
    if exitstatus != pytest.ExitCode.TESTS_FAILED or not 0 < len(failures) <= MAX_FLAKY:
        return
    flaky = [test for test in failures if passes_alone(test, config)]
    for test in flaky:
        terminalreporter.write_sep("=", f"FLAKY: {test} failed beside others and passed alone", yellow=True, bold=True)
        terminalreporter.write_line(failures[test])
    count = counted(flaky)
    if count > MAX_FLAKY:
        terminalreporter.write_line(f"{count} tests have been flaky, and {MAX_FLAKY} may be: {os.environ[FLAKY_FILE]}")
    elif len(flaky) == len(failures):
        config.stash[_session].exitstatus = pytest.ExitCode.OK


def counted(flaky: Sequence[str]) -> int:
    """Append the flaky tests to the file that the runs share, and return the number of tests in the file. Without a
    file, or if `flaky` is empty, return the length of `flaky`. If runs append at the same time, the count of the last
    run includes all tests."""
    if not flaky or not (name := os.environ.get(FLAKY_FILE)):
        return len(flaky)
    with open(name, "a", encoding="utf-8") as file:
        file.write("".join(f"{test}\n" for test in flaky))
    return len(Path(name).read_text(encoding="utf-8").splitlines())


def passes_alone(test: str, config: pytest.Config) -> bool:
    """Run one test in a new process, with the options of this run that change the test: the filters of warnings and the
    profile of Hypothesis. Returns True if the test passes."""
    command = [sys.executable, "-m", "pytest", "-m", "", "-p", "no:cacheprovider", test]
    for warning in config.option.pythonwarnings or ():
        command += ["-W", warning]
    if profile := config.getoption("--hypothesis-profile", None):
        command += ["--hypothesis-profile", profile]
    try:
        alone = subprocess.run(command, cwd=config.rootpath, timeout=RERUN_SECONDS, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return False
    return alone.returncode == pytest.ExitCode.OK
