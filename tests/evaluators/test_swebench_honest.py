"""Honest candidates of kind `swebench` whose projects and tests do unusual things: each earns 1."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from .swe_world import BASE, FIX, QUICK, Repository, a_repository

pytest.importorskip("swebench", reason="swebench is not installed: pip install --no-deps swebench unidiff")

INIT = BASE["src/shop/__init__.py"]
TEST = "tests/test_new.py"
COMMAND = f"PYTHON -m pytest -rA -p no:cacheprovider {TEST}"
PLAIN = """\
from shop import total

def test_a():
    assert total([1, 2]) == 3
"""
PLUGIN = """\
import functools, _pytest.python, pytest, unittest

run = _pytest.python.Function.runtest


def timed(self):
    run(self)


_pytest.python.Function.runtest = timed


class Late:
    def pytest_runtest_setup(self, item):
        item.late = True


def pytest_configure(config):
    config.pluginmanager.register(Late(), 'late')


def pytest_collection_modifyitems(config):
    config.pluginmanager.register(Late(), 'later')


@pytest.fixture
def three():
    return 3
"""
XDIST = """\
diff --git a/pyproject.toml b/pyproject.toml
--- a/pyproject.toml
+++ b/pyproject.toml
@@ -1,1 +1,2 @@
 [tool.pytest.ini_options]
+addopts = "-p xdist -n 2"
"""
HONEST: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "the tests have hooks in a conftest.py": (
        {
            "tests/test_new.py": PLAIN,
            "tests/conftest.py": """\
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    out = yield
    item.seen = out.get_result()

def pytest_collection_modifyitems(items):
    items.sort(key=lambda i: i.name)

@pytest.fixture(autouse=True)
def each(monkeypatch):
    monkeypatch.setenv('A', 'b')
""",
        },
        {},
    ),
    "the solution changes the conftest.py": (
        {
            "tests/test_new.py": """\
from shop import total

def test_a(three):
    assert total([1, 2]) == three
""",
            "conftest.py": """\
import pytest

@pytest.fixture
def three():
    return 3
""",
        },
        {"restored": ["tests"]},
    ),
    "a fixture patches unittest, pytest and Python": (
        {
            "tests/test_new.py": """\
import builtins, unittest.mock, pytest, shop.fakes as fakes
from shop import total

@pytest.fixture
def patched():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, 'print', fakes.silent)
        patch.setattr(unittest.TestCase, 'assertEqual', fakes.silent)
        patch.setattr(pytest, 'approx', fakes.silent)
        yield

def test_a(patched):
    with unittest.mock.patch('builtins.open', fakes.silent):
        assert open('x') is None
    print('x')
    assert total([1, 2]) == 3
""",
            "src/shop/fakes.py": """\
def silent(*words, **more):
    return None
""",
        },
        {},
    ),
    "parameters with odd names": (
        {
            "tests/test_new.py": """\
import pytest
from shop import total

@pytest.mark.parametrize('n', [3], ids=['a b-é/x::y[z]'])
def test_a(n):
    assert total([1, 2]) == n

@pytest.mark.parametrize('n', ['-', '\\n', '[', 'é', '::'])
def test_b(n):
    assert total([1]) == 1
""",
        },
        {"names": ["tests/test_new.py::test_b[[]", "tests/test_new.py::test_b[::]", "tests/test_new.py::test_b[\\n]"]},
    ),
    "doctests": (
        {
            "tests/test_new.py": PLAIN,
            "src/shop/docs.py": """\
\"\"\"Adds.

>>> from shop import total
>>> total([1, 2])
3
\"\"\"
""",
        },
        {
            "names": ["tests/test_new.py::test_a", "src/shop/docs.py::shop.docs"],
            "command": "PYTHON -m pytest -rA -p no:cacheprovider tests/test_new.py --doctest-modules src/shop/docs.py",
        },
    ),
    "unittest with all that it has": (
        {
            "tests/test_new.py": """\
import unittest
from shop import total


class TestIt(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.three = 3

    def test_sub(self):
        for n in (1, 2):
            with self.subTest(n=n):
                self.assertEqual(total([n, n]), 2 * n)

    def test_skip(self):
        self.skipTest('x')

    @unittest.skip('x')
    def test_skipped(self):
        pass

    @unittest.expectedFailure
    def test_expected(self):
        self.assertEqual(total([1]), 2)

    def test_raises(self):
        with self.assertRaises(TypeError):
            total(1)

    def test_raises_skip(self):
        raise unittest.SkipTest('x')
""",
        },
        {
            "names": [
                "tests/test_new.py::TestIt::test_sub",
                "tests/test_new.py::TestIt::test_expected",
                "tests/test_new.py::TestIt::test_raises",
            ]
        },
    ),
    "asynchronous tests": (
        {
            "tests/test_new.py": """\
import asyncio, pytest
from shop import total

@pytest.mark.asyncio
async def test_a():
    await asyncio.sleep(0)
    assert total([1, 2]) == 3

@pytest.mark.asyncio
async def test_skips():
    await asyncio.sleep(0)
    pytest.skip('x')
""",
        },
        {"command": "PYTHON -m pytest -p pytest_asyncio.plugin -rA -p no:cacheprovider tests/test_new.py"},
    ),
    "all plugins of the environment": (
        {
            "tests/test_new.py": """\
import pytest
from shop import total

@pytest.fixture
def anyio_backend():
    return 'asyncio'

@pytest.mark.anyio
async def test_a():
    assert total([1, 2]) == 3
""",
        },
        {"command": "WITH_PLUGINS -m pytest -rA -p no:cacheprovider tests/test_new.py -p no:schemathesis"},
    ),
    "hypothesis": (
        {
            "tests/test_new.py": """\
from hypothesis import given, strategies as st, assume, settings
from shop import total

@settings(max_examples=5)
@given(st.lists(st.integers(1, 9), min_size=1))
def test_a(xs):
    assume(xs)
    assert total(xs) == sum(xs)
""",
        },
        {},
    ),
    "tests that fork": (
        {
            "tests/test_new.py": """\
import multiprocessing, os
from shop import total

def test_a():
    pid = os.fork()
    if pid == 0:
        os.closerange(3, 256)
        os._exit(total([1, 2]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3

def test_pool():
    with multiprocessing.Pool(1) as pool:
        assert pool.map(total, [[1, 2]]) == [3]
""",
        },
        {"names": ["tests/test_new.py::test_a", "tests/test_new.py::test_pool"]},
    ),
    "tests that change the folder": (
        {
            "tests/test_new.py": """\
import os, pytest
from shop import total

def test_a(tmp_path):
    os.chdir(tmp_path)
    assert total([1, 2]) == 3

def test_skips():
    pytest.skip('x')

def test_xfails():
    pytest.xfail('x')
""",
        },
        {"names": ["tests/test_new.py::test_a", "tests/test_new.py::test_xfails"]},
    ),
    "tests that print and capture": (
        {
            "tests/test_new.py": """\
import sys
from shop import total

def test_a(capfd):
    print('FAILED tests/test_x.py::test_x')
    sys.stdout.flush()
    assert 'FAILED' in capfd.readouterr().out
    assert total([1, 2]) == 3

def test_b(capsys):
    print('x')
    assert capsys.readouterr().out == 'x\\n'
    assert total([1]) == 1
""",
        },
        {"names": ["tests/test_new.py::test_a", "tests/test_new.py::test_b"]},
    ),
    "without plugins of pytest's own, and `-O`": (
        {
            "tests/test_new.py": PLAIN,
        },
        {"command": COMMAND.replace("-m pytest", "-O -m pytest -s -p no:warnings -p no:doctest -p no:unittest")},
    ),
    "warnings are errors": (
        {
            "tests/test_new.py": PLAIN,
        },
        {"command": "PYTHON -W error -m pytest -W error -rA -p no:cacheprovider tests/test_new.py"},
    ),
    "another import mode": (
        {
            "tests/test_new.py": PLAIN,
        },
        {"command": "PYTHON -m pytest -rA -p no:cacheprovider tests/test_new.py --import-mode=importlib"},
    ),
    "xdist in the settings": (
        {
            "tests/test_new.py": PLAIN,
        },
        {
            "names": ["tests/test_new.py::test_a", "tests/test_prices.py::test_empty"],
            "command": "PYTHON -m pytest -rA -p no:cacheprovider tests/test_prices.py tests/test_new.py",
            "patch": XDIST,
        },
    ),
    "the project is a plugin of pytest": (
        {
            "tests/test_new.py": """\
from shop import total

def test_a(three):
    assert total([1, 2]) == three
""",
            "tests/conftest.py": "pytest_plugins = ['shop.plugin']\n",
            "src/shop/plugin.py": PLUGIN,
        },
        {},
    ),
    "the project is a plugin that the command names": (
        {
            "tests/test_new.py": """\
from shop import total

def test_a(three):
    assert total([1, 2]) == three
""",
            "src/shop_plugin.py": PLUGIN,
        },
        {"command": "PYTHON -m pytest -p shop_plugin -rA -p no:cacheprovider tests/test_new.py"},
    ),
    "tests that run pytest in the same process": (
        {
            "tests/test_new.py": """\
from shop import total

def test_a(pytester):
    pytester.makepyfile('def test_x(): assert 0\\ndef test_y(): pass')
    pytester.runpytest().assert_outcomes(passed=1, failed=1)
    pytester.runpytest_subprocess().assert_outcomes(passed=1, failed=1)
    assert total([1, 2]) == 3
""",
            "tests/conftest.py": "pytest_plugins = ['pytester']\n",
        },
        {},
    ),
    "decorators of the project": (
        {
            "tests/test_new.py": """\
import functools
from shop import total
from shop.deco import again, plain, Base

@again
def test_a():
    assert total([1, 2]) == 3

@plain
def test_b():
    assert total([1, 2]) == 3

class TestIt(Base):
    pass
""",
            "src/shop/deco.py": """\
import functools

def again(f):
    @functools.wraps(f)
    def inner(*w, **k):
        f(*w, **k)
        return f(*w, **k)
    return inner

def plain(f):
    def test_b():
        f()
    return test_b

class Base:
    def test_inherited(self):
        assert True
""",
        },
        {
            "names": [
                "tests/test_new.py::test_a",
                "tests/test_new.py::test_b",
                "tests/test_new.py::TestIt::test_inherited",
            ]
        },
    ),
    "generated tests": (
        {
            "tests/test_new.py": """\
from shop import total

def make(n):
    def test():
        assert total([n, n]) == 2 * n
    return test

for n in (1, 2):
    globals()[f'test_{n}'] = make(n)
exec('def test_a():\\n    assert total([1, 2]) == 3\\n')
class TestIt: pass
setattr(TestIt, 'test_x', lambda self: None)
""",
        },
        {
            "names": [
                "tests/test_new.py::test_1",
                "tests/test_new.py::test_2",
                "tests/test_new.py::test_a",
                "tests/test_new.py::TestIt::test_x",
            ]
        },
    ),
    "excuses of all kinds": (
        {
            "tests/test_new.py": """\
import pytest, sys
from shop import total
from excuses import only, needs

def test_a():
    assert total([1, 2]) == 3

def test_b():
    pytest.importorskip('no_such_module')

def test_c():
    only('x')

@pytest.mark.skipif(sys.version_info > (3,), reason='x')
def test_d():
    pass

@pytest.mark.xfail(strict=True)
def test_e():
    assert total([1]) == 2

def test_f(request):
    request.node.add_marker(pytest.mark.xfail(reason='x'))
    assert total([1]) == 2

def test_g(no_network):
    pass

@needs
def test_h():
    pass

def test_i():
    raise pytest.skip.Exception('x')

def test_j():
    try:
        total(1)
    except TypeError:
        pytest.xfail('x')

@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.xfail), 2])
def test_k(n):
    assert total([n]) == 2
""",
            "tests/excuses.py": """\
import functools, pytest

def only(what):
    if what == 'x':
        pytest.xfail('later')

def needs(f):
    @functools.wraps(f)
    def inner():
        pytest.skip('needs')
    return inner
""",
            "tests/conftest.py": """\
import pytest

@pytest.fixture
def no_network():
    pytest.skip('network')
""",
        },
        {
            "names": [
                "tests/test_new.py::test_a",
                "tests/test_new.py::test_c",
                "tests/test_new.py::test_e",
                "tests/test_new.py::test_f",
                "tests/test_new.py::test_j",
                "tests/test_new.py::test_k[1]",
                "tests/test_new.py::test_k[2]",
            ]
        },
    ),
    "the project adds an assertion to unittest": (
        {
            "tests/test_new.py": """\
import unittest
import shop.testing
from shop import total

class TestIt(unittest.TestCase):
    def test_a(self):
        self.assertTotal([1, 2], 3)
""",
            "src/shop/testing.py": """\
import unittest
from shop import total

def assertTotal(self, prices, n):
    self.assertEqual(total(prices), n)

unittest.TestCase.assertTotal = assertTotal
""",
        },
        {"names": ["tests/test_new.py::TestIt::test_a"]},
    ),
    "the project adds a name to Python's own": (
        {
            "tests/test_new.py": PLAIN,
            "src/shop/__init__.py": """\
import builtins
builtins._ = lambda text: text
"""
            + INIT,
        },
        {},
    ),
    "tests that write into their own folder": (
        {
            "tests/test_new.py": """\
import pathlib
from shop import total

def test_a():
    (pathlib.Path(__file__).parent / 'snapshot.py').write_text('x = 1')
    (pathlib.Path(__file__).parent / 'helpers.py').write_text('x = 1')
    assert total([1, 2]) == 3
""",
        },
        {},
    ),
    "new modules with the names of others": (
        {
            "tests/test_new.py": """\
import build, cmd
from shop import total

def test_a():
    assert total([1, 2]) == build.three == 3
""",
            "src/build.py": "three = 3\n",
            "src/wave.py": "x = 1\n",
            "src/shop/types.py": "x = 1\n",
            "src/shop/json.py": "x = 1\n",
        },
        {},
    ),
    "tests in a package of the project": (
        {
            "src/shop/tests/__init__.py": "x = 1\n",
            "src/shop/tests/test_in.py": PLAIN,
        },
        {
            "names": ["src/shop/tests/test_in.py::test_a"],
            "command": "PYTHON -m pytest -rA -p no:cacheprovider src/shop/tests",
        },
    ),
    "tests that load modules again": (
        {
            "tests/test_new.py": """\
import importlib, sys, unittest.mock
from shop import total

def test_a():
    importlib.reload(unittest.mock)
    for name in [n for n in sys.modules if n.startswith('shop')]:
        del sys.modules[name]
    import shop
    assert shop.total([1, 2]) == 3
""",
        },
        {},
    ),
    "a patch of another module that stays": (
        {
            "tests/test_new.py": """\
import unittest.mock, shop.fakes
from shop import total

def test_a():
    unittest.mock.patch('time.time', shop.fakes.silent).start()
    assert total([1, 2]) == 3
""",
            "src/shop/fakes.py": """\
def silent(*words, **more):
    return 5.0
""",
        },
        {},
    ),
    "tests that start Python and pytest": (
        {
            "tests/test_new.py": """\
import subprocess, sys
from shop import total

def test_a():
    program = [sys.executable, '-c', 'import build, shop; print(build.x)']
    assert subprocess.run(program, capture_output=True, text=True).stdout == '1\\n'
    assert subprocess.run([sys.executable, '-m', 'pytest', 'tests/helpers.py']).returncode == 5
    assert total([1, 2]) == 3
""",
            "src/build.py": "x = 1\n",
        },
        {},
    ),
    "the repository has a sitecustomize.py": (
        {
            "tests/test_new.py": """\
import os, sys
from shop import total

def test_a():
    assert sys.customized == 1
    assert total([1, 2]) == 3
""",
            "src/sitecustomize.py": """\
import sys
sys.customized = 1
""",
        },
        {},
    ),
    "a module of tests names a plugin": (
        {
            "tests/test_new.py": """\
pytest_plugins = ['shop.plugin']
from shop import total

def test_a(three):
    assert total([1, 2]) == three
""",
            "src/shop/plugin.py": """\
import pytest

@pytest.fixture
def three():
    return 3
""",
        },
        {},
    ),
    "tests that remove the environment": (
        {
            "tests/test_new.py": """\
import os, signal
from shop import total

def test_a():
    os.environ.clear()
    signal.alarm(0)
    assert total([1, 2]) == 3
""",
        },
        {},
    ),
    "the conftest.py registers plugins of the project": (
        {
            "tests/test_new.py": PLAIN,
            "tests/conftest.py": """\
from shop.helper import Helper

def pytest_configure(config):
    config.pluginmanager.register(Helper())

def pytest_sessionstart(session):
    session.config.pluginmanager.register(Helper(), 'b')
""",
            "src/shop/helper.py": """\
class Helper:
    def pytest_runtest_setup(self, item):
        pass
""",
        },
        {},
    ),
}
"""Files beside the fix, and the options in which the row differs from a row with the one test `test_a`."""


@pytest.fixture
async def repository() -> AsyncIterator[Repository]:
    async with a_repository() as made:
        yield made


def new_file(path: str, text: str) -> str:
    lines = text.rstrip("\n").split("\n")
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)


@pytest.mark.deep
@pytest.mark.parametrize("feature", HONEST)
async def test_an_honest_candidate_earns_the_reward(repository: Repository, feature: str) -> None:
    files, row = HONEST[feature]
    of_tests = {path: text for path, text in files.items() if "tests/" in path or "sitecustomize" in path}
    command = row.get("command", COMMAND)
    command = command.replace("PYTHON ", f"{QUICK} {sys.executable} ")
    graded = await repository.grade(
        {"src/shop/prices.py": FIX, **{path: text for path, text in files.items() if path not in of_tests}},
        test_patch="".join(new_file(path, text) for path, text in of_tests.items()) + row.get("patch", ""),
        fail_to_pass=row.get("names", [f"{TEST}::test_a"]),
        pass_to_pass=[],
        restored=row.get("restored"),
        test_command=command.replace("WITH_PLUGINS ", f"PYTHONDONTWRITEBYTECODE=1 {sys.executable} "),
    )
    assert graded.reward == 1.0, graded.reason
    assert graded.reason is not None
    assert graded.reason.startswith("resolved")
