"""The plugin by which pytest tells the evaluator what became of each test.

It runs in the sandbox, in the process of the tests: its text is sent along, with a last line that calls `plant`.
Standard library and pytest only, Python 3.6 or newer, pytest 4 or newer. It shares that process with the code under
test, which can read and change it (docs/evaluators/swebench.md lists what that allows). Invariant: each line is
one JSON object with the key of this evaluation, written with one call.
"""

import json
import os
from typing import Any

import pytest


class Reporter:
    """Writes a line for each part of a test, and one for the end of the run. One test that must fail is added to the
    run, with a name of its own: what makes every test pass makes that one pass, too."""

    def __init__(self, config: Any, path: str, key: str) -> None:
        self._config = config
        self._key = key
        self._canary = "outrider-" + key[:8]
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._tell(begun=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        if report.when != "call" and report.outcome == "passed":
            return
        if name.endswith(self._canary):
            self._tell(canary=report.outcome, when=report.when)
            return
        if hasattr(report, "context"):  # a part of a test, which pytest's log does not list by the test's name
            return
        shown = getattr(self._config, "cwd_relative_nodeid", str)(name)  # as pytest's own summary names it
        expected = hasattr(report, "wasxfail")
        self._tell(test=shown, when=report.when, outcome=report.outcome, expected=expected)

    def pytest_sessionfinish(self, exitstatus: Any) -> None:
        self._tell(ended=int(exitstatus))

    def _tell(self, **what: Any) -> None:
        os.write(self._file, (json.dumps({"key": self._key, **what}) + "\n").encode())


class Canary(pytest.Item):
    """The test that must fail."""

    def runtest(self) -> None:
        raise AssertionError("this test always fails: Outrider has added it")


class Planter:
    """Adds the canary behind all other tests, in each process that collects them."""

    def __init__(self, key: str) -> None:
        self._name = "outrider-" + key[:8]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: Any, items: Any) -> None:
        if items:
            make: Any = getattr(Canary, "from_parent", None)
            items.append(make(session, name=self._name) if make else Canary(self._name, session))


def plant(config: Any, path: str, key: str, option: str) -> None:
    """Tell of this run in the file. `option` is what loads this plugin: runs that this one starts do without it."""
    worker = hasattr(config, "workerinput")
    if worker or getattr(config.option, "dist", "no") == "no":  # xdist's workers find it there, too
        os.environ["PYTEST_ADDOPTS"] = os.environ.get("PYTEST_ADDOPTS", "").replace(option, "")
    config.pluginmanager.register(Planter(key), "outrider-planter")
    if not worker:  # which reports to the first process
        config.pluginmanager.register(Reporter(config, path, key), "outrider-reporter")
