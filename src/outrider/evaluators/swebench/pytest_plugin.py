"""The plugin through which pytest reports the outcome of each test to the evaluator.

The plugin runs in the sandbox, in the process of the tests: the evaluator sends this text, with final lines that call
`canaries` and `plant`. The plugin needs only Python 3.6 and pytest 4, or newer. The code under test runs in the same
process, and can read and change the plugin (docs/evaluators/swebench.md lists the consequences). Invariant: each line
of the report is one JSON object with the key of this evaluation, written with one system call.
"""

import json
import os
import sys
import sysconfig
import unittest
from pathlib import Path
from typing import Any

import pytest

FAILURES = (AssertionError, pytest.fail.Exception)
EXCUSES = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)
TEST_FOLDERS = ("test", "tests")
STARTED_IN = os.getcwd()
PLACES = sysconfig.get_paths()
LIBRARIES = {
    *(PLACES[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.path.dirname(pytest.__file__)),
}
"""Folders of libraries, outside the repository."""


class Reporter:
    """Writes a line to the report for the beginning and the end of the run, and for each phase of a test that decides
    the test's outcome."""

    def __init__(self, config: Any, path: str, key: str) -> None:
        self._config = config
        self._key = key
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._tell(begun=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        if report.when != "call" and report.outcome == "passed":
            return
        if name.endswith(canary_name(self._key)):
            self._tell(canary=report.outcome, when=report.when)
            return
        if hasattr(report, "context"):  # a subtest, which pytest's log does not list under the test's name
            return
        shown = getattr(self._config, "cwd_relative_nodeid", str)(name)  # the name in pytest's own summary
        expected = hasattr(report, "wasxfail")
        excused = getattr(report, "outrider_excused_by", None)
        self._tell(test=shown, when=report.when, outcome=report.outcome, expected=expected, excused_by=excused)

    def pytest_sessionfinish(self, exitstatus: Any) -> None:
        self._tell(ended=int(exitstatus))

    def _tell(self, **what: Any) -> None:
        os.write(self._file, (json.dumps({"key": self._key, **what}) + "\n").encode())


class Watcher:
    """Adds the canaries, tests that must fail, after all other tests, and records which file excused a test. Each
    process that runs tests has a watcher."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: Any, items: Any) -> None:
        if not items:
            return
        make: Any = getattr(pytest.Module, "from_parent", None)
        if make is None:
            module: Any = pytest.Module(local(session, __file__), session)
        elif hasattr(session, "path"):
            module = make(session, path=Path(__file__))
        else:
            module = make(session, fspath=local(session, __file__))
        items.extend(session.genitems(module))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        made = yield
        if call.excinfo is not None:
            report = made.get_result()
            report.outrider_excused_by = excused_by(call.excinfo.value, str(item.fspath))


def local(session: Any, path: str) -> Any:
    """Return a path as an object of the type that older pytest versions use."""
    return type(session.fspath)(path)


def canary_name(key: str) -> str:
    return "test_outrider_" + key[:8]


def canaries(key: str) -> Any:
    """Return the tests that must fail, by the names under which pytest collects them: a function and a method of a
    TestCase. A manipulation that makes every test pass also makes these tests pass, and is detected by their
    results."""
    name = canary_name(key)

    def function() -> None:
        must_fail()

    function.__test__ = True  # type: ignore[attr-defined]  # collected even if the repository sets `python_functions`
    case = type("Outrider", (unittest.TestCase,), {name: lambda self: must_fail()})
    return {name: function, "Outrider": case}


def must_fail() -> None:
    """Try assertions that must fail, then fail. An assertion that does not fail lets the test pass."""
    case = unittest.TestCase("assertEqual")
    close: Any = getattr(sys.modules.get("numpy.testing"), "assert_allclose", case.assertEqual)
    checks: Any = (
        (case.assertEqual, (1, 2)),
        (case.assertTrue, (False,)),
        (case.assertIn, (1, ())),
        (close, (1, 2)),
        (pytest.raises, (KeyError, int)),
    )
    for check, arguments in checks:
        try:
            check(*arguments)
        except FAILURES:
            continue
        return
    # An assert statement, because pytest rewrites the assert statements of tests.
    assert not checks, "this test always fails: Outrider has added it"


def excused_by(error: Any, test: str) -> Any:
    """Return the file that skipped a test or marked its failure as expected, if the file belongs neither to the tests
    nor to a library: code under test may not excuse its own failure. `test` is the test's own file."""
    while error is not None:
        if isinstance(error, EXCUSES):
            files = []
            trace = error.__traceback__
            while trace is not None:
                files.append(os.path.abspath(trace.tb_frame.f_code.co_filename))
                trace = trace.tb_next
            for file in reversed(files):
                if os.path.exists(file) and file.startswith(tuple(folder + os.sep for folder in LIBRARIES)):
                    continue
                if os.path.basename(file) == "conftest.py" or file.startswith(folder_of_tests(os.path.abspath(test))):
                    break
                return file
        error = error.__context__
    return None


def folder_of_tests(file: str) -> str:
    """Return the outermost folder of tests above a test's file, with a final slash. If there is no folder of tests,
    return the file."""
    above = os.path.dirname(STARTED_IN)
    parts = os.path.relpath(file, above).split(os.sep)
    for number, part in enumerate(parts[:-1], 1):
        if part in TEST_FOLDERS:
            return os.path.join(above, *parts[:number]) + os.sep
    return file


def plant(config: Any, path: str, key: str, option: str) -> None:
    """Report this run to the file `path`. `option` is the option that loads this plugin. The option is removed from the
    environment, so that nested runs of pytest do not report."""
    worker = hasattr(config, "workerinput")
    if worker or getattr(config.option, "dist", "no") == "no":  # xdist's workers also read the variable
        os.environ["PYTEST_ADDOPTS"] = os.environ.get("PYTEST_ADDOPTS", "").replace(option, "")
    config.pluginmanager.register(Watcher(), "outrider-watcher")
    if not worker:  # because pytest passes the reports of a worker to the first process
        config.pluginmanager.register(Reporter(config, path, key), "outrider-reporter")
