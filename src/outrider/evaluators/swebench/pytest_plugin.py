"""The pytest plugin that reports the outcome of each test to the evaluator.

The plugin runs in the sandbox, in the process of the tests. The evaluator sends this text, with final lines that call
`canaries` and `plant`. The plugin needs only Python 3.6 and pytest 4, or newer. The code under test can read and change
the plugin, because it runs in the same process (docs/evaluators/swebench.md lists the consequences). Invariant: each
line of the report is one JSON object with the evaluation's key, written by one system call.
"""

import builtins
import functools
import json
import os
import site
import sys
import sysconfig
import types
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
    *getattr(site, "getsitepackages", list)(),
    os.path.dirname(os.path.dirname(pytest.__file__)),
}
"""Folders of Python's libraries, outside the repository."""
OF_TESTING = ("pytest", "_pytest", "pluggy", "unittest", "numpy.testing", "pandas.testing", "pandas._testing")
"""Modules whose functions decide whether tests pass. This includes their submodules."""
BUILTINS = tuple(dir(builtins))
NAMES_OF_EXCUSES = ("skip", "xfail", "require")
"""Parts of the names with which a test skips itself or expects its own failure, such as `pytest.importorskip` and
`unittest.SkipTest`."""


class ReportFile:
    """The file in which this run reports to the evaluator. Each line has the key of the evaluation."""

    def __init__(self, path: str, key: str) -> None:
        self._key = key
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, **what: Any) -> None:
        os.write(self._file, (json.dumps({"key": self._key, **what}) + "\n").encode())


class Reporter:
    """Reports the beginning and the end of the run, and each phase of a test that may decide its outcome."""

    def __init__(self, config: Any, report: ReportFile, key: str, planted: str) -> None:
        self._config = config
        self._canary = canary_name(key)
        self._planted = "::" + planted
        self._report = report
        report.write(begun=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        if report.when != "call" and report.outcome == "passed":
            return
        if name.endswith(self._canary):
            self._report.write(canary=report.outcome, when=report.when)
            return
        excused = getattr(report, "outrider_excused_by", None)
        if name.endswith(self._planted):
            self._report.write(
                planted=report.outcome, when=report.when, file=name.partition("::")[0], excused_by=excused
            )
            return
        if hasattr(report, "context"):  # a subtest; pytest's log does not list it under the test's name
            return
        shown = getattr(self._config, "cwd_relative_nodeid", str)(name)  # the name that pytest's own summary shows
        expected = hasattr(report, "wasxfail")
        self._report.write(test=shown, when=report.when, outcome=report.outcome, expected=expected, excused_by=excused)

    def pytest_sessionfinish(self, exitstatus: Any) -> None:
        self._report.write(ended=int(exitstatus))


class Guard:
    """Reports what the code under test has replaced: code of tests, test files, or parts of pytest, unittest and Python
    that decide whether tests pass. Each process that runs tests has a guard."""

    def __init__(self, report: ReportFile) -> None:
        self._report = report
        self._parts = {name: (value, code_of(value)) for name, value in parts_of_testing().items()}
        self._modules = {module for module, _ in self._parts}
        self._plugins: Any = None
        self._own: Any = ()
        self._texts: Any = {}
        self._codes: Any = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: Any) -> None:
        """Remember the plugins that pytest has loaded before it imports tests. Their packages count as parts of pytest,
        not as code under test."""
        self._plugins = session.config.pluginmanager.get_plugins()
        names = [each.__name__ for each in self._plugins if isinstance(each, types.ModuleType)]
        tops = [sys.modules.get(name.partition(".")[0]) for name in (*names, *OF_TESTING)]
        places = [(path_of(vars(top)), hasattr(top, "__path__")) for top in tops if top is not None]
        self._own = tuple(os.path.dirname(path) + os.sep if package else path for path, package in places if path)

    def pytest_collectreport(self, report: Any) -> None:
        """Remember the content of test files, before pytest imports the first module of their folder."""
        for found in report.result or ():
            if isinstance(found, pytest.Module):
                self._texts.setdefault(str(found.fspath), text_of(found))

    def pytest_collectstart(self, collector: Any) -> None:
        if isinstance(collector, pytest.Module):
            text = text_of(collector)
            if self._texts.setdefault(str(collector.fspath), text) != text:
                self._report.write(changed=f"the file {collector.fspath}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: Any) -> None:
        """Remember the code of all functions in the test modules."""
        for module in {id(item.module): item.module for item in session.items if is_function(item)}.values():
            scopes = [vars(module), *(vars(each) for each in vars(module).values() if isinstance(each, type))]
            functions = [each for scope in scopes for each in scope.values() if isinstance(each, types.FunctionType)]
            folder = folder_of_tests(os.path.abspath(str(module.__file__)))
            self._codes += [(each, each.__code__) for each in functions if each.__code__.co_filename.startswith(folder)]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        items = getattr(session, "items", ())
        folders = tuple({folder_of_tests(os.path.abspath(str(item.fspath))) for item in items})
        for (module, name), value in parts_of_testing().items():
            before = self._parts.get((module, name))
            if before is None and module in self._modules:  # a new name in a known module replaces nothing
                continue
            if before is not None and before[0] is value and before[1] is code_of(value):
                continue
            # A function without a file was made by `exec`. If its name existed before, the function has replaced
            # something.
            made = before is not None and isinstance(value, types.FunctionType) and not files_of(value)
            if made or self._is_under_test(value, folders):
                self._report.write(changed=f"{module}.{name}")
        for name, value in self._added(session.config, items):
            if self._is_under_test(value, folders):
                self._report.write(changed=name)
        for function, code in self._codes:
            if function.__code__ is not code:
                self._report.write(changed=f"the code of {function.__qualname__}")

    def _added(self, config: Any, items: Any) -> Any:
        """Yield objects that the code under test may have added after pytest imported the tests, each with a name for
        the report."""
        # A test module that mentions `pytest_plugins` may load new plugins. If there is such a module, new plugins are
        # not reported. The plugin's own file is also in `_texts`, because pytest collects the canaries from this file.
        # It is not searched, because it contains the word `pytest_plugins` itself.
        texts = [text for file, text in self._texts.items() if os.path.basename(file) != os.path.basename(__file__)]
        if self._plugins is not None and not any(b"pytest_plugins" in (text or b"") for text in texts):
            for plugin in config.pluginmanager.get_plugins() - self._plugins:
                content = getattr(plugin, "__dict__", {})
                for value in (plugin, *(hook for name, hook in content.items() if name.startswith("pytest_"))):
                    yield f"the plugin {type(plugin).__name__}", value
        yield "the function of sys.settrace", sys.gettrace()
        yield "the function of sys.setprofile", sys.getprofile()
        for item in filter(is_function, items):
            yield f"the loader of {item.module.__name__}", getattr(item.module, "__loader__", None)

    def _is_under_test(self, value: Any, folders: Any) -> bool:
        """Return whether some code of a value is code under test: it is in the repository, but not in a test folder, a
        plugin or a `conftest.py`."""
        known = (*self._own, *folders, os.path.abspath(__file__))
        files = [file for file in files_of(value) if not is_of_library(file) and not file.startswith(known)]
        return any(os.path.basename(file) != "conftest.py" for file in files)


def parts_of_testing() -> Any:
    """Return the objects of Python and its libraries that decide whether tests pass, by module and name."""
    parts = {("builtins", name): getattr(builtins, name, None) for name in BUILTINS}
    for module, content in list(sys.modules.items()):
        if (module + ".").startswith(tuple(each + "." for each in OF_TESTING)):
            for name, value in list(getattr(content, "__dict__", {}).items()):
                parts[module, name] = value
                for kind in reversed(value.__mro__[:-1]) if isinstance(value, type) else ():
                    parts.update(((module, name + "." + part), each) for part, each in list(vars(kind).items()))
    return parts


def code_of(value: Any) -> Any:
    return getattr(value, "__code__", None)


def files_of(value: Any) -> Any:
    """Return the existing files that contain the code of a function, module or class. For any other value, return the
    files of its class."""
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        files = [os.path.abspath(value.__code__.co_filename), path_of(value.__globals__)]
    elif isinstance(value, types.ModuleType):
        files = [path_of(vars(value))]
    else:
        kind = value if isinstance(value, type) else type(value)
        files = [path_of(getattr(sys.modules.get(kind.__module__), "__dict__", {}))]
    return [file for file in files if file is not None and os.path.exists(file)]


def text_of(collector: Any) -> Any:
    try:
        return Path(str(collector.fspath)).read_bytes()
    except OSError:
        return None


class Watcher:
    """Adds canaries, which are tests that must fail, and records which file excused a test (skipped it or expected its
    failure). Each process with tests has a watcher. `planted` names the canary in each module."""

    def __init__(self, planted: str) -> None:
        self._planted = planted

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: Any, items: Any) -> None:
        if not items:
            return
        # Plant no canaries in modules if failures stop the run, as with `--maxfail`: the canaries would stop the run
        # too early.
        if not any(getattr(session.config.option, name, None) for name in ("maxfail", "stepwise")):
            self._plant(items)
        make: Any = getattr(pytest.Module, "from_parent", None)
        if make is None:
            module: Any = pytest.Module(local(session, __file__), session)
        elif hasattr(session, "path"):
            module = make(session, path=Path(__file__))
        else:
            module = make(session, fspath=local(session, __file__))
        items.extend(session.genitems(module))

    def _plant(self, items: Any) -> None:
        """Add a canary after the last test of each module. Elsewhere, fixtures of a module might be set up twice."""
        last = {item.getparent(pytest.Module): place for place, item in enumerate(items) if is_function(item)}
        for module, place in sorted(last.items(), key=lambda found: -found[1]):
            scope = vars(module.obj)
            if self._planted not in scope:
                # The canary raises explicitly, because `python -O` removes assert statements.
                text = f"def {self._planted}(): raise AssertionError('this test always fails: Outrider has added it')"
                exec(compile(text, str(module.fspath), "exec"), scope)
                make: Any = getattr(pytest.Function, "from_parent", None)
                item = make(module, name=self._planted) if make else pytest.Function(self._planted, module)
                item.fixturenames = []  # otherwise the automatic fixtures of the module would run once more
                items.insert(place + 1, item)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        made = yield
        if call.excinfo is None:
            return
        report, error = made.get_result(), call.excinfo.value
        report.outrider_excused_by = excused_by(error, item)
        if item.name == self._planted and call.when == "call" and isinstance(error, EXCUSES):
            # The canary never skips itself, so other code must have done it.
            report.outrider_excused_by = str(item.fspath)


def is_function(item: Any) -> bool:
    """Return whether a test is a function or a method in a module."""
    return isinstance(item, pytest.Function) and isinstance(item.module, types.ModuleType)


def local(session: Any, path: str) -> Any:
    """Return a path in the form that older versions of pytest need."""
    return type(session.fspath)(path)


def canary_name(key: str) -> str:
    return "test_outrider_" + key[:8]


def canaries(key: str) -> Any:
    """Return a test function and a TestCase with a test method, by the names under which pytest collects them. Both
    tests must fail. If manipulated code makes all tests pass, these tests also pass, and so reveal the manipulation."""
    name = canary_name(key)

    def function() -> None:
        must_fail()

    function.__test__ = True  # type: ignore[attr-defined]  # collected even if the repository sets `python_functions`
    case = type("Outrider", (unittest.TestCase,), {name: lambda self: must_fail()})
    return {name: function, "Outrider": case}


def must_fail() -> None:
    """Fail if all of these assertions fail, as they must. If one of them passes, the code under test has manipulated
    assertions. Then return: the test passes, and so reveals the manipulation."""
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
    # This assert statement also checks that pytest's rewriting of assert statements works.
    assert not checks, "this test always fails: Outrider has added it"


def excused_by(error: Any, item: Any) -> Any:
    """Return a file whose code excused a test but is not trusted to do so, or None. To excuse a test is to skip it, to
    expect its failure, or to call code that does one of the two. Libraries are trusted, and so is test code that uses a
    name with one of NAMES_OF_EXCUSES. Code under test is not trusted, because it must not excuse its own failure."""
    test = os.path.abspath(str(item.fspath))
    while error is not None:
        if isinstance(error, EXCUSES):
            frames = []
            trace = error.__traceback__
            while trace is not None:
                frames.append(trace.tb_frame)
                trace = trace.tb_next
            outside = [frame for frame in frames if not is_of_library(file_of(frame))]
            if outside and not (is_of_tests(outside[-1], item) and names_an_excuse(outside[-1].f_code)):
                return file_of(outside[-1])
            own = [frame for frame in frames if file_of(frame) == test and is_of_tests(frame, item)]
            if own:
                # If the error left a context manager, the traceback lists the first frame of the test twice, with the
                # context manager's frames in between. So the last position of this frame counts.
                place = max(number for number, frame in enumerate(frames) if frame is own[0])
                for frame in frames[place:]:
                    # Generated code, such as that of a decorator, has no file.
                    if (
                        os.path.exists(file_of(frame))
                        and not is_of_library(file_of(frame))
                        and not is_of_tests(frame, item)
                    ):
                        return file_of(frame)
        error = error.__context__
    return None


def names_an_excuse(code: types.CodeType) -> bool:
    """Return whether code uses a name such as `skip`. Test code without such a name has not skipped the test itself: an
    object that this code called has done so."""
    names = (*code.co_names, *code.co_varnames, *code.co_freevars)
    return any(word in name.lower() for name in names for word in NAMES_OF_EXCUSES)


def file_of(frame: types.FrameType) -> str:
    return os.path.abspath(frame.f_code.co_filename)


def is_of_library(file: str) -> bool:
    return os.path.exists(file) and file.startswith(tuple(folder + os.sep for folder in LIBRARIES))


def is_of_tests(frame: Any, item: Any) -> bool:
    """Return whether a frame runs test code. Its code must be from a test file, and its global variables must be those
    of this file's module."""
    file, scope = file_of(frame), frame.f_globals
    folder = folder_of_tests(os.path.abspath(str(item.fspath)))
    if os.path.basename(file) != "conftest.py" and not file.startswith(folder):
        return False
    for module in (sys.modules.get(scope.get("__name__")), getattr(item, "module", None)):
        if getattr(module, "__dict__", None) is scope:
            return bool(path_of(scope) == file)
    # Some versions of pytest import a test module without listing it in sys.modules. So code that claims to be from
    # this file is also trusted if no listed module has the file.
    others = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    return path_of(scope) == file and os.path.exists(file) and all(path_of(other) != file for other in others)


def path_of(scope: Any) -> Any:
    """Return the absolute path of a module's file, or None. `scope` has the module's global variables."""
    path = scope.get("__file__")
    return os.path.abspath(path) if isinstance(path, str) else None


def folder_of_tests(file: str) -> str:
    """Return the outermost folder of tests above a test file, with a final slash. If there is no such folder, return
    the file."""
    above = os.path.dirname(STARTED_IN)
    parts = os.path.relpath(file, above).split(os.sep)
    for number, part in enumerate(parts[:-1], 1):
        if part in TEST_FOLDERS:
            return os.path.join(above, *parts[:number]) + os.sep
    return file


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Stop looking for shadowed modules (see `shadow_finder.py`): pytest has imported what it needs."""
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "ShadowFinder"]


def plant(config: Any, path: str, key: str, planted: str, option: str) -> None:
    """Make this run report to the file `path`. `planted` names the canary in each test module. `option` is the pytest
    option that loads this plugin. This option is removed from the environment, so that nested runs do not report."""
    worker = hasattr(config, "workerinput")
    # With xdist, the first process keeps the option, because the workers read it from the environment, too.
    if worker or getattr(config.option, "dist", "no") == "no":
        os.environ["PYTEST_ADDOPTS"] = os.environ.get("PYTEST_ADDOPTS", "").replace(option, "")
    report = ReportFile(path, key)
    config.pluginmanager.register(Guard(report), "outrider-guard")
    config.pluginmanager.register(Watcher(planted), "outrider-watcher")
    if not worker:  # pytest passes the reports of workers on to the first process
        config.pluginmanager.register(Reporter(config, report, key, planted), "outrider-reporter")
