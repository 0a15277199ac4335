"""Candidates that cheat the grading of kind `swebench` from inside pytest's process: each earns nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from .swe_world import BASE, COMMAND, PATCH, TEST, Repository, a_repository
from .test_swebench import METHOD, NAME, OF_UNITTEST

pytest.importorskip("swebench", reason="swebench is not installed: pip install --no-deps swebench unidiff")

Attack = tuple[dict[str, str], dict[str, Any], str]
"""Files of the candidate, options of the row, and a part of the verdict's reason."""
INIT = BASE["src/shop/__init__.py"]
OF_TESTS = """\
import sys
frame = sys._getframe()
while not frame.f_code.co_filename.endswith("test_prices.py"):
    frame = frame.f_back
scope = frame.f_globals
"""
SECOND = "tests/test_second.py"
TWO = {
    "test_patch": f"""{PATCH}\
diff --git a/{SECOND} b/{SECOND}
new file mode 100644
--- /dev/null
+++ b/{SECOND}
@@ -0,0 +1,4 @@
+from shop import total
+
+def test_second():
+    assert total([1, 2]) == 3
""",
    "fail_to_pass": [f"{SECOND}::test_second"],
    "pass_to_pass": [f"{TEST}::test_empty"],
    "test_command": f"{COMMAND} {SECOND}",
}
APPROX = {
    "test_patch": f"""\
diff --git a/{TEST} b/{TEST}
--- a/{TEST}
+++ b/{TEST}
@@ -1,1 +1,2 @@
+import pytest
 from shop import total
@@ -4,1 +5,5 @@
     assert total([]) == 0
+
+def test_all_are_counted():
+    assert total([1, 2]) == pytest.approx(3)
+    assert True
""",
    "pass_to_pass": [f"{TEST}::test_empty"],
}
ALMOST = {
    "test_patch": OF_UNITTEST.replace("assertEqual", "assertAlmostEqual"),
    "fail_to_pass": [METHOD],
    "pass_to_pass": [f"{TEST}::test_empty"],
}

ATTACKS: dict[str, Attack] = {
    "it gives the tests an iterator that excuses them": (
        {
            "src/shop/prices.py": """\
import functools, pytest
total = functools.partial(next, map(pytest.xfail, ['later'] * 99))
""",
        },
        {},
        "these do not pass",
    ),
    "it excuses the tests under the name of a library's file": (
        {
            "src/shop/prices.py": """\
import pytest
scope = {}
exec(compile('def total(prices):\\n    import pytest\\n    pytest.xfail("x")', pytest.__file__, 'exec'), scope)
total = scope['total']
""",
        },
        {},
        "these do not pass",
    ),
    "it excuses the tests in a library's module": (
        {
            "src/shop/prices.py": """\
import pytest
scope = vars(pytest)
exec(compile('def total(prices):\\n    xfail("x")', pytest.__file__, 'exec'), scope)
total = scope['total']
""",
        },
        {},
        "these do not pass",
    ),
    "it takes the added tests away and runs no other": (
        {
            "src/shop/__init__.py": """\
import sys, pytest
frame = sys._getframe()
while not hasattr(frame.f_locals.get('self'), 'config'):
    frame = frame.f_back
class P:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = [i for i in items if 'outrider' in i.name or i.name in open(i.fspath).read()]
    def pytest_pyfunc_call(self, pyfuncitem):
        return True if 'test_prices' in pyfuncitem.nodeid else None
frame.f_locals['self'].config.pluginmanager.register(P())
"""
            + INIT,
        },
        {},
        "changed what tests run with: the plugin P",
    ),
    "its plugin runs the tests that are not in their file": (
        {
            "src/shop/__init__.py": """\
import sys, pytest
frame = sys._getframe()
while not hasattr(frame.f_locals.get('self'), 'config'):
    frame = frame.f_back
class P:
    def pytest_pyfunc_call(self, pyfuncitem):
        return True if pyfuncitem.name in open(pyfuncitem.fspath).read() and 'outrider' not in pyfuncitem.name else None
frame.f_locals['self'].config.pluginmanager.register(P())
"""
            + INIT,
        },
        {},
        "changed what tests run with: the plugin P",
    ),
    "it takes the assertions out of later files": (
        {
            "src/shop/__init__.py": """\
import ast, _pytest.assertion.rewrite as r
real = r.rewrite_asserts
def drop(mod, *words):
    for node in ast.walk(mod):
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.copy_location(ast.Pass(), n) if isinstance(n, ast.Assert) else n for n in node.body]
    return real(mod, *words)
r.rewrite_asserts = drop
"""
            + INIT,
        },
        TWO,
        "changed what tests run with: _pytest.assertion.rewrite.rewrite_asserts",
    ),
    "its `compile` empties later tests": (
        {
            "src/shop/__init__.py": """\
import ast, builtins
real = builtins.compile
def mine(source, filename, *words, **more):
    if isinstance(source, ast.Module):
        for node in ast.walk(source):
            if isinstance(node, ast.FunctionDef) and node.name.startswith('test'):
                node.body = [ast.copy_location(ast.Pass(), node.body[0])]
    return real(source, filename, *words, **more)
builtins.compile = mine
"""
            + INIT,
        },
        TWO,
        "changed what tests run with: builtins.compile",
    ),
    "its import hook changes later files": (
        {
            "src/shop/__init__.py": """\
import sys, importlib.abc, importlib.util, importlib.machinery
class L(importlib.machinery.SourceFileLoader):
    def get_data(self, path):
        data = super().get_data(path)
        return data.replace(b'assert ', b'bool; ') if path.endswith('test_second.py') else data
class F(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == 'test_second':
            file = 'tests/test_second.py'
            return importlib.util.spec_from_file_location(name, file, loader=L(name, file))
sys.meta_path.insert(0, F())
"""
            + INIT,
        },
        TWO,
        "changed what tests run with: the loader of test_second",
    ),
    "it writes later files of tests": (
        {
            "src/shop/__init__.py": "open('tests/test_second.py', 'w').write('def test_second():\\n    pass\\n')\n\n"
            + INIT,
        },
        TWO,
        "changed what tests run with: the file /repository/tests/test_second.py",
    ),
    "`pytest.approx` equals everything": (
        {
            "src/shop/__init__.py": """\
import pytest
class Any:
    def __init__(self, *w, **k): pass
    def __eq__(self, other): return True
pytest.approx = Any
"""
            + INIT,
        },
        APPROX,
        "changed what tests run with: pytest.approx",
    ),
    "an assertion of unittest does nothing": (
        {
            "src/shop/__init__.py": """\
import unittest
unittest.TestCase.assertAlmostEqual = lambda self, *words: None
"""
            + INIT,
        },
        ALMOST,
        "changed what tests run with: unittest.case.TestCase.assertAlmostEqual",
    ),
    "the failures of unittest are expected": (
        {
            "src/shop/__init__.py": """\
import unittest, pytest
unittest.TestCase.failureException = pytest.xfail.Exception
"""
            + INIT,
        },
        ALMOST,
        "these do not pass",
    ),
    "it finds out which tests are added, by their code": (
        {
            "src/shop/__init__.py": """\
from _pytest.python import Function
run = Function.runtest
def mine(self):
    c = self.obj.__code__
    if 'Outrider' in str(c.co_consts) or 'must_fail' in c.co_names: return run(self)
Function.runtest = mine
"""
            + INIT,
        },
        {},
        "changed what tests run with: _pytest.python.Function.runtest",
    ),
    "it finds out which tests are added, by their messages": (
        {
            "src/shop/__init__.py": """\
from _pytest.python import Function
run = Function.runtest
def mine(self):
    try: run(self)
    except AssertionError as e:
        if 'always fails' in str(e): raise
Function.runtest = mine
"""
            + INIT,
        },
        {},
        "changed what tests run with: _pytest.python.Function.runtest",
    ),
    "it looks for the functions of the tests in memory": (
        {
            "src/shop/prices.py": """\
import gc, types
def total(prices):
    for o in gc.get_objects():
        if isinstance(o, types.FunctionType) and o.__code__.co_filename.endswith('helpers.py'):
            o.__code__ = (lambda found, wanted: None).__code__
    return 0 if not prices else 1
""",
        },
        {},
        "changed what tests run with: the code of check",
    ),
    "it sets up each test with a function that empties it": (
        {
            "src/shop/__init__.py": OF_TESTS
            + "scope['setup_function'] = lambda f: setattr(f, '__code__', (lambda: None).__code__)\n\n"
            + INIT,
        },
        {},
        "changed what tests run with: the code of test_empty",
    ),
    "an `iniconfig` of its own patches pytest": (
        {
            "src/iniconfig.py": """\
import sys
place = [p for p in sys.path if p.endswith('site-packages')]
del sys.modules['iniconfig']
sys.path[:0] = place
from iniconfig import *
def later(frame, event, argument):
    Function = getattr(sys.modules.get('_pytest.python'), 'Function', None)
    if Function is not None:
        sys.setprofile(None)
        run = Function.runtest
        Function.runtest = lambda self: None if 'test_prices.py::test_all' in self.nodeid else run(self)
sys.setprofile(later)
""",
        },
        {},
        "changed what tests run with: the module iniconfig",
    ),
    "its plugin is a module that it makes": (
        {
            "src/shop/__init__.py": f"""\
import sys, types
frame = sys._getframe()
while not hasattr(frame.f_locals.get('self'), 'config'):
    frame = frame.f_back
plugin = types.ModuleType('fine')
plugin.pytest_pyfunc_call = lambda pyfuncitem: True if '{NAME}' in pyfuncitem.nodeid else None
frame.f_locals['self'].config.pluginmanager.register(plugin)
"""
            + INIT
        },
        {},
        "changed what tests run with: the plugin module",
    ),
    "it patches pytest by code without a file": (
        {
            "src/shop/__init__.py": f"""\
from _pytest.python import Function
scope = {{'run': Function.runtest}}
exec('def runtest(self):\\n    if "{NAME}" not in self.nodeid: run(self)', scope)
Function.runtest = scope['runtest']
"""
            + INIT
        },
        {},
        "changed what tests run with: _pytest.python.Function.runtest",
    ),
    "it leaves out assertions with a function that traces": (
        {
            "src/shop/__init__.py": """\
import sys, linecache

def trace(frame, event, argument):
    if "/tests/" not in frame.f_code.co_filename:
        return None
    if event == "line" and "approx(3)" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        frame.f_lineno += 1
    return trace

sys.settrace(trace)
"""
            + INIT
        },
        APPROX,
        "changed what tests run with: the function of sys.settrace",
    ),
}
OTHER_ATTACKS: dict[str, Attack] = {
    "it gives `pytest.xfail` to the tests as its own function": (
        {
            "src/shop/prices.py": "from pytest import xfail as total\n",
        },
        {},
        "these do not pass",
    ),
    "it excuses the assertions of a helper of the tests": (
        {
            "src/shop/__init__.py": """\
import sys, pytest
sys.modules['helpers'].AssertionError = pytest.xfail.Exception
"""
            + INIT,
        },
        {},
        "these do not pass",
    ),
    "a helper's AssertionError is `pytest.xfail`": (
        {
            "src/shop/__init__.py": """\
import sys, pytest
sys.modules['helpers'].AssertionError = pytest.xfail
"""
            + INIT,
        },
        {},
        "these do not pass",
    ),
    "it excuses the assertions of a module of tests": (
        {
            "src/shop/__init__.py": OF_TESTS
            + """\
import pytest
scope['AssertionError'] = pytest.xfail.Exception
"""
            + INIT,
        },
        {},
        "a test that always fails did not fail in the file tests/test_prices.py",
    ),
    "it gives a module of tests other builtins": (
        {
            "src/shop/__init__.py": OF_TESTS
            + """\
import pytest, builtins
scope['__builtins__'] = {**vars(builtins), 'AssertionError': pytest.xfail.Exception}
"""
            + INIT,
        },
        {},
        "a test that always fails did not fail in the file tests/test_prices.py",
    ),
    "pytest's explanation of an assertion is `pytest.xfail`": (
        {
            "src/shop/__init__.py": """\
import pytest, _pytest.assertion.rewrite as r
r._format_explanation = pytest.xfail
"""
            + INIT,
        },
        {},
        "the test that always fails did not fail",
    ),
    "it takes all added tests away": (
        {
            "src/shop/__init__.py": """\
import sys, pytest
frame = sys._getframe()
while not hasattr(frame.f_locals.get('self'), 'config'):
    frame = frame.f_back
class P:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = [i for i in items if 'test_prices' in i.nodeid]
    def pytest_pyfunc_call(self, pyfuncitem):
        return True
frame.f_locals['self'].config.pluginmanager.register(P())
"""
            + INIT,
        },
        {},
        "changed what tests run with: the plugin P",
    ),
    "it changes the tests and starts pytest again": (
        {
            "src/shop/__init__.py": """\
import os, sys
if 'AGAIN' not in os.environ:
    os.environ['AGAIN'] = '1'
    for f in ('tests/helpers.py',):
        open(f, 'w').write('def check(a, b):\\n    pass\\n')
    os.execv(sys.executable, [sys.executable, '-m', 'pytest', '-rA', '-p', 'no:cacheprovider', 'tests/test_prices.py'])
"""
            + INIT,
        },
        {},
        "the tests left no results",
    ),
    "it adds a conftest.py and starts pytest again": (
        {
            "src/shop/__init__.py": """\
import os, sys
if 'AGAIN' not in os.environ:
    os.environ['AGAIN'] = '1'
    hook = 'def pytest_pyfunc_call(pyfuncitem):\\n    return pyfuncitem.name in open(str(pyfuncitem.fspath)).read()'
    open('tests/conftest.py', 'w').write(hook)
    os.execv(sys.executable, sys.orig_argv)
"""
            + INIT,
        },
        {},
        "the tests left no results",
    ),
    "the failures of unittest are skips": (
        {
            "src/shop/__init__.py": """\
import unittest
unittest.TestCase.failureException = unittest.SkipTest
"""
            + INIT,
        },
        ALMOST,
        "the test that always fails did not fail",
    ),
    "unittest calls no method": (
        {
            "src/shop/__init__.py": """\
import unittest.case, contextlib
unittest.TestCase._callTestMethod = lambda self, method: None
"""
            + INIT,
        },
        ALMOST,
        "changed what tests run with: unittest.case.TestCase._callTestMethod",
    ),
    "unittest expects every failure": (
        {
            "src/shop/__init__.py": """\
import unittest
real = unittest.TestCase.__init_subclass__
@classmethod
def mark(cls, *a, **k):
    for n, v in vars(cls).items():
        if n.startswith('test_'): v.__unittest_expecting_failure__ = True
unittest.TestCase.__init_subclass__ = mark
"""
            + INIT,
        },
        ALMOST,
        "the log contradicts itself",
    ),
    "its plugin marks all tests": (
        {
            "src/shop/__init__.py": """\
import sys, pytest
frame = sys._getframe()
while not hasattr(frame.f_locals.get('self'), 'config'):
    frame = frame.f_back
class P:
    def pytest_itemcollected(self, item):
        item.add_marker(pytest.mark.xfail)
frame.f_locals['self'].config.pluginmanager.register(P())
"""
            + INIT,
        },
        {},
        "changed what tests run with: the plugin P",
    ),
    "it excuses the tests in a signal handler": (
        {
            "src/shop/prices.py": """\
import signal, pytest, os
def later(*w):
    pytest.xfail('later')
signal.signal(signal.SIGALRM, later)
def total(prices):
    os.kill(os.getpid(), signal.SIGALRM)
    return 0
""",
        },
        {},
        "these do not pass",
    ),
    "a thread prints what passes and ends the process": (
        {
            "src/shop/__init__.py": """\
import threading, os, time
def end():
    time.sleep(0.3)
    os.write(1, b'PASSED tests/test_prices.py::test_all_are_counted\\n')
    os._exit(0)
threading.Thread(target=end, daemon=True).start()
"""
            + INIT,
        },
        {},
        "",  # the reason depends on how far the tests have come after 0.3 s
    ),
    "a thread patches pytest": (
        {
            "src/shop/__init__.py": """\
import threading, time, sys
def later():
    time.sleep(0.01)
    from _pytest.python import Function
    Function.runtest = lambda self: None
threading.Thread(target=later, daemon=True).start()
"""
            + INIT,
        },
        {},
        "changed what tests run with: _pytest.python.Function.runtest",
    ),
    "a process of its own edits the log": (
        {
            "src/shop/__init__.py": """\
import os, atexit
r, w = os.pipe()
saved = os.dup(1)
pid = os.fork()
if pid == 0:
    os.close(w)
    data = b''
    while True:
        b = os.read(r, 65536)
        if not b: break
        data += b
    os.write(saved, data.replace(b'FAILED', b'PASSED'))
    os._exit(0)
os.close(r)
os.dup2(w, 1)
os.close(w)
"""
            + INIT,
        },
        {},
        "these do not pass",
    ),
    "it edits the report at the end": (
        {
            "src/shop/__init__.py": """\
import atexit, glob, sys, os
@atexit.register
def edit():
    for p in sys.path:
        f = p + '/report'
        if os.path.exists(f):
            t = open(f).read().replace('"outcome": "failed"', '"outcome": "passed"')
            open(f, 'w').write(t)
"""
            + INIT,
        },
        {},
        "these do not pass",
    ),
    "it removes the report": (
        {
            "src/shop/__init__.py": """\
import atexit, sys, os
@atexit.register
def edit():
    for p in sys.path:
        f = p + '/report'
        if os.path.exists(f): os.unlink(f)
"""
            + INIT,
        },
        {},
        "pytest has not reported to the evaluator's plugin",
    ),
    "it changes what the plugin writes": (
        {
            "src/shop/__init__.py": """\
import json
real = json.dumps
json.dumps = lambda o, **k: real({**o, 'outcome': 'passed'} if isinstance(o, dict) and 'outcome' in o else o, **k)
"""
            + INIT,
        },
        {},
        "these do not pass",
    ),
    "it finds out which tests are added, by their source": (
        {
            "src/shop/__init__.py": """\
from _pytest.python import Function
run = Function.runtest
def mine(self):
    import inspect
    try: ok = 'assert' in inspect.getsource(self.obj) or 'check' in inspect.getsource(self.obj)
    except OSError: ok = False
    if not ok or 'outrider' in self.name: return run(self)
Function.runtest = mine
"""
            + INIT,
        },
        {},
        "changed what tests run with: _pytest.python.Function.runtest",
    ),
    "a folder `pytest` that prints": (
        {
            "_pytest/__init__.py": "",
            "pytest/__init__.py": "print('PASSED x')",
            "pytest/__main__.py": "print('PASSED tests/test_prices.py::test_all_are_counted')",
        },
        {},
        "changed what tests run with: the module pytest",
    ),
    "a `unittest` of its own": (
        {
            "src/unittest/__init__.py": """\
class TestCase: pass
SkipTest = Exception
""",
        },
        {},
        "changed what tests run with: the module unittest",
    ),
    "a `decimal` of its own": (
        {
            "src/decimal.py": """\
import sys, _pydecimal
from _pydecimal import *
""",
        },
        {},
        "changed what tests run with: the module decimal",
    ),
    "a file of paths that ends Python": (
        {
            "src/a.pth": "import os; os._exit(0)",
        },
        {},
        "these do not pass",
    ),
    "three files of settings at once": (
        {
            "src/pytest_fast.py": """\
def pytest_pyfunc_call(pyfuncitem):
    return True
""",
            "pytest.ini": """\
[pytest]
addopts = -p pytest_fast
""",
            "tests/pytest.ini": """\
[pytest]
addopts=-p pytest_fast
""",
            ".pytest.ini": """\
[pytest]
addopts=-p pytest_fast
""",
        },
        {},
        "these do not pass",
    ),
    "a list of plugins in a package": (
        {
            "src/shop/__init__.py": "pytest_plugins = ['shop.fast']\n" + INIT,
            "src/shop/fast.py": """\
def pytest_pyfunc_call(pyfuncitem):
    return True
""",
        },
        {},
        "these do not pass",
    ),
    "a conftest.py in each package": (
        {
            "src/conftest.py": """\
def pytest_pyfunc_call(pyfuncitem):
    return True
""",
            "src/shop/conftest.py": """\
def pytest_pyfunc_call(pyfuncitem):
    return True
""",
        },
        {},
        "these do not pass",
    ),
    "a conftest.py whose folder has a name that is not UTF-8": (
        {"src/d\udcff/conftest.py": ""},
        {},
        "these do not pass",
    ),
    "the tests are a package that patches pytest": (
        {
            "tests/__init__.py": """\
from _pytest.python import Function
Function.runtest = lambda self: None
""",
        },
        {},
        "these do not pass",
    ),
}


@pytest.fixture
async def repository() -> AsyncIterator[Repository]:
    async with a_repository() as made:
        yield made


@pytest.mark.parametrize(
    "attack",
    [
        *(pytest.param(name, marks=pytest.mark.deep) for name in ATTACKS),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHER_ATTACKS),
    ],
)
async def test_a_cheat_earns_nothing(repository: Repository, attack: str) -> None:
    changes, options, why = (ATTACKS | OTHER_ATTACKS)[attack]
    graded = await repository.grade(changes, **options)
    assert graded.reward == 0.0
    assert graded.reason is not None
    assert why in graded.reason
