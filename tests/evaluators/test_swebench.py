"""The evaluator `swebench`: right and wrong candidates, candidates that are attacks, and rows that are refused."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.errors import EvaluatorError, InvalidField
from outrider.evaluators.base import ChecksSpec, DecidesEarly, Outcome
from outrider.evaluators.factory import make_evaluator
from outrider.evaluators.swebench.evaluator import read_only_mounts
from outrider.evaluators.swebench.options import is_test
from outrider.lab.certify.task_check import check_tasks, checked_task
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import DiffSpec, EvaluatorSpec
from outrider.tasks.datasets import Example, Gold

from .swe_world import BASE, COMMAND, FIELDS, FIX, PATCH, ROW, SCRIPT, TEST, Repository, a_repository, spec_of

pytest.importorskip("swebench", reason="swebench is not installed: pip install --no-deps swebench unidiff")

NAME = f"{TEST}::test_all_are_counted"
INIT = BASE["src/shop/__init__.py"]
FORGED = f"PASSED {NAME}\\nPASSED {TEST}::test_empty\\nPASSED {TEST}::test_it_is_a_number\\n"
XFAILS = "def total(prices):\n    __import__('pytest').xfail('later')\n"
CHANGED = "the code under test has changed what tests run with"
PASS_ALL = "def pytest_pyfunc_call(pyfuncitem):\n    return True\n"


METHOD = f"{TEST}::TestTotal::test_all_are_counted"
OF_UNITTEST = f"""\
diff --git a/{TEST} b/{TEST}
--- a/{TEST}
+++ b/{TEST}
@@ -1,1 +1,3 @@
+import unittest
+
 from shop import total
@@ -4,1 +6,6 @@
     assert total([]) == 0
+
+
+class TestTotal(unittest.TestCase):
+    def test_all_are_counted(self):
+        self.assertEqual(total([1, 2]), 3)
"""


def at_exit(before: str, behind: str) -> str:
    """Return the source of a package that, when pytest has ended, prints passes between `before` and `behind` and ends
    the process."""
    printed = f"os.write(1, b'''\n{before}{FORGED}{behind}''')"
    return f"import atexit, os\ndef end():\n    {printed}\n    os._exit(0)\natexit.register(end)\n{INIT}"


@pytest.fixture
async def repository() -> AsyncIterator[Repository]:
    async with a_repository() as made:
        yield made


@pytest.mark.deep
async def test_a_fix_is_resolved_and_nothing_is_not(repository: Repository) -> None:
    fixed = await repository.grade({"src/shop/prices.py": FIX})
    assert (fixed.reward, fixed.reason) == (1.0, f"resolved (swebench {version('swebench')})")
    assert fixed.metrics.keys() >= {"test_seconds", "check_seconds"}
    counts = ("fail_to_pass", "fail_to_pass_total", "pass_to_pass", "pass_to_pass_total")
    assert [fixed.metrics[name] for name in counts] == [1, 1, 2, 2]
    nothing = await repository.grade({})
    assert nothing.reward == 0.0
    assert f"PASSED {NAME}" in repository.log.decode()
    assert f"FAILED {NAME}" in repository.log.decode()
    assert nothing.reason.startswith(f"these do not pass: {NAME} (")
    assert [nothing.metrics[name] for name in counts] == [0, 1, 2, 2]
    broken = await repository.grade({"src/shop/prices.py": "def total(prices):\n    return 3\n"})
    assert (broken.reward, broken.metrics["fail_to_pass"], broken.metrics["pass_to_pass"]) == (0.0, 1, 1)


@pytest.mark.deep
@pytest.mark.parametrize("module", ["parse_log_pytest", "parse_log_pytest_options", "parse_log_pytest_v2"])
async def test_rows_of_4x_have_lists_as_json_and_a_repository(repository: Repository, module: str) -> None:
    repo = {"parse_log_pytest": "pallets/flask", "parse_log_pytest_options": "psf/requests"}.get(
        module, "sphinx-doc/sphinx"
    )
    graded = await repository.grade(
        {"src/shop/prices.py": FIX},
        fail_to_pass=f'["{NAME}"]',
        pass_to_pass=f'["{TEST}::test_empty"]',
        log_parser=None,
        repo=repo,
        version="2.3",
    )
    assert graded.reward == 1.0, graded.reason


@pytest.mark.deep
async def test_a_script_of_5x_applies_the_patch_itself() -> None:
    options = {"test_command": None, "eval_script": SCRIPT}
    async with a_repository(git=True) as repository:
        assert (await repository.grade({"src/shop/prices.py": FIX}, **options)).reward == 1.0
        assert (await repository.grade({}, **options)).reward == 0.0
        # Hooks, and then a filter, that write the fix as soon as the evaluator runs git.
        mend = f"printf %s {FIX!r} | sed 's/\\\\n/\\n/g' > src/shop/prices.py"
        hook = {
            ".git/hooks/post-checkout": f"#!/bin/sh\n{mend}\n",
            ".git/hooks/post-index-change": f"#!/bin/sh\n{mend}\n",
        }
        attacked = await repository.grade(hook, "chmod +x .git/hooks/*", **options)
        assert attacked.reward == 0.0
        assert attacked.metrics["fail_to_pass"] == 0
        driver = f"git config filter.x.smudge '{mend.replace(chr(39), '')}; cat'"
        attacked = await repository.grade({".gitattributes": "*.py filter=x\n"}, driver, **options)
        assert attacked.reward == 0.0
        # The commit from which the tests are taken is replaced by another commit, and a helper of the tests by another
        # helper.
        helper = {"tests/helpers.py": "def check(found, wanted):\n    pass\n"}
        replaced = (
            "git -c user.name=a -c user.email=a@b.c commit -qam other && git replace base HEAD && git tag -f base"
        )
        attacked = await repository.grade(helper, replaced, **options)
        assert (attacked.reward, attacked.metrics["fail_to_pass"]) == (0.0, 0)
        without = await repository.grade(helper, **options, restored=["conftest.py"])
        assert without.reward == 1.0, "the same attack, where a task restores less"


ATTACKS: dict[str, tuple[dict[str, str | None], str]] = {
    "it ends the process when it is imported": (
        {"src/shop/__init__.py": f"import os\nos._exit(0)\n{INIT}"},
        "pytest did not come to its end|left no results",
    ),
    "it prints the log that is wanted, and ends": (
        {"src/shop/__init__.py": f"import os\nos.write(1, b'''\n{FORGED}''')\nos._exit(0)\n{INIT}"},
        "contradicts|did not come to its end|left no results",
    ),
    "it prints what passes when pytest has ended": (
        {"src/shop/__init__.py": at_exit("", "")},
        f"the log contradicts itself: {NAME} is FAILED and PASSED",
    ),
    "it prints the mark of the end": (
        {
            "src/shop/__init__.py": (
                f"import os\nos.write(2, b'''\n{FORGED}>>>>> End Test Output\n''')\nos._exit(0)\n{INIT}"
            )
        },
        "contradicts|did not come to its end|left no results",
    ),
    "its objects are equal to everything": (
        {
            "src/shop/prices.py": (
                "class Any:\n    def __eq__(self, other):\n        return True\n"
                "    __hash__ = None\n\n\ndef total(prices):\n    return Any()\n"
            )
        },
        "test_it_is_a_number",
    ),
    "it makes every report a good one": (
        {
            "src/shop/__init__.py": (
                "from _pytest import reports\nmake = reports.TestReport.from_item_and_call\n"
                "def good(item, call):\n    made = make(item, call)\n    made.outcome = 'passed'\n    return made\n"
                f"reports.TestReport.from_item_and_call = good\n{INIT}"
            )
        },
        CHANGED,
    ),
    "it prints another summary": (
        {
            "src/shop/__init__.py": (
                "from _pytest.terminal import TerminalReporter\n"
                f"TerminalReporter.short_test_summary = lambda self: self.write_line('''{FORGED}''')\n"
                "TerminalReporter.summary_stats = lambda self: None\n"
                f"TerminalReporter.summary_failures = lambda self: None\n{INIT}"
            )
        },
        "the tests left no results",  # swebench uses the exit code
    ),
    "a conftest.py beside the tests": ({"tests/conftest.py": PASS_ALL}, f"these do not pass: {NAME}"),
    "a conftest.py above all": ({"conftest.py": PASS_ALL}, f"these do not pass: {NAME}"),
    "a pytest.ini": ({"pytest.ini": "[pytest]\naddopts = -p fake\n", "src/fake.py": PASS_ALL}, NAME),
    "a setup.cfg": ({"setup.cfg": "[tool:pytest]\naddopts = -p fake\n", "src/fake.py": PASS_ALL}, NAME),
    "a sitecustomize.py": (
        {"src/sitecustomize.py": f"import shop.prices\nexec({FIX!r}, shop.prices.__dict__)\n"},
        f"these do not pass: {NAME}",
    ),
    "another helper of the tests": ({"tests/helpers.py": "def check(found, wanted):\n    pass\n"}, NAME),
    "another test": ({TEST: "def test_all_are_counted():\n    pass\n"}, f"these do not pass: {NAME}"),
    "a pyproject.toml": (
        {"pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p fake'\n", "src/fake.py": PASS_ALL},
        f"these do not pass: {NAME}",
    ),
    "a tox.ini": (
        {"pyproject.toml": None, "tox.ini": "[pytest]\naddopts = -p fake\n", "src/fake.py": PASS_ALL},
        f"these do not pass: {NAME}",
    ),
    "a pytest.toml": (
        {"pytest.toml": "[pytest]\naddopts = ['-p', 'fake']\n", "src/fake.py": PASS_ALL},
        f"these do not pass: {NAME}",
    ),
    "a file of paths": (
        {"src/fake.pth": "import fake\n", "fake.pth": "import fake\n", "src/fake.py": PASS_ALL},
        f"these do not pass: {NAME}",
    ),
    "the tests are gone": ({"tests": None, "conftest.py": None}, f"these do not pass: {NAME}"),
    "the tests have another name": (
        {TEST: None, "tests/prices_test.py": "def test_all_are_counted():\n    pass\n"},
        f"these do not pass: {NAME}",
    ),
    "it prints the mark of the beginning": (
        {"src/shop/__init__.py": at_exit(">>>>> Start Test Output\\n", "")},
        "contradicts",
    ),
    "it prints an exit code": ({"src/shop/__init__.py": at_exit("", ">>>>> Test Exit Code: 0\\n")}, "contradicts"),
    "it ends pytest": ({"src/shop/prices.py": "import pytest\npytest.exit('', 0)\n"}, "did not come to its end"),
    "it says that it is expected to fail": (
        {"src/shop/prices.py": "import pytest\n\n\ndef total(prices):\n    pytest.xfail('later')\n"},
        f"these do not pass: {NAME}",
    ),
    "its objects say so when they are compared": (
        {
            "src/shop/prices.py": (
                "import pytest\n\n\nclass Any:\n    def __eq__(self, other):\n        pytest.xfail('later')\n\n"
                "    __ne__ = __eq__\n    __hash__ = None\n\n\ndef total(prices):\n    return Any()\n"
            )
        },
        f"these do not pass: {NAME}",
    ),
    "it says so in a folder of tests of its own": (
        {
            "src/shop/prices.py": "from shop.tests.later import total\n",
            "src/shop/tests/__init__.py": "",
            "src/shop/tests/later.py": "import pytest\n\n\ndef total(prices):\n    pytest.xfail('later')\n",
        },
        f"these do not pass: {NAME}",
    ),
    "whatever fails is expected to": (
        {"src/shop/__init__.py": f"import builtins, pytest\nbuiltins.AssertionError = pytest.xfail.Exception\n{INIT}"},
        "the test that always fails did not fail",
    ),
    "it runs no test": (
        {"src/shop/__init__.py": f"from _pytest import python\npython.Function.runtest = lambda self: None\n{INIT}"},
        CHANGED,
    ),
    "it adds a plugin to pytest": (
        {
            "src/shop/__init__.py": (
                "import sys\nframe = sys._getframe()\n"
                "while not hasattr(frame.f_locals.get('self'), 'config'):\n    frame = frame.f_back\n"
                "class Plugin:\n    def pytest_pyfunc_call(self, pyfuncitem):\n        return True\n"
                f"frame.f_locals['self'].config.pluginmanager.register(Plugin())\n{INIT}"
            )
        },
        CHANGED,
    ),
    "a pytest of its own": ({"pytest.py": f"print('''{FORGED}''')\n"}, CHANGED),
    "it replaces the code of all functions of a test's file": (
        {
            "src/shop/prices.py": (
                "import sys\n\n\ndef nothing():\n    pass\n\n\ndef total(prices):\n"
                "    tests = sys._getframe(1).f_globals\n"
                "    for value in tests.values():\n"
                "        if getattr(value, '__module__', None) == tests['__name__']:\n"
                "            value.__code__ = nothing.__code__\n"
                "    return 0\n"
            )
        },
        CHANGED,
    ),
    "it excuses all functions of a test's file": (
        {
            "src/shop/prices.py": (
                "import sys\n\n\ndef total(prices):\n    tests = sys._getframe(1).f_globals\n    scope = {}\n"
                "    text = 'def later():\\n    __import__(\"pytest\").xfail()'\n"
                "    exec(compile(text, tests['__file__'], 'exec'), scope)\n"
                "    for value in tests.values():\n"
                "        if getattr(value, '__module__', None) == tests['__name__']:\n"
                "            value.__code__ = scope['later'].__code__\n"
                "    return 0\n"
            )
        },
        CHANGED,
    ),
    "it runs no test of a file": (
        {
            "src/shop/__init__.py": (
                "from _pytest.python import Function\nrun = Function.runtest\n"
                f"Function.runtest = lambda self: run(self) if '{TEST}' not in self.nodeid else None\n{INIT}"
            )
        },
        CHANGED,
    ),
    "it makes every report of a file a good one": (
        {
            "src/shop/__init__.py": (
                "from _pytest import reports\nmake = reports.TestReport.from_item_and_call\n"
                "def good(item, call):\n    made = make(item, call)\n"
                f"    if '{TEST}' in made.nodeid:\n        made.outcome = 'passed'\n    return made\n"
                f"reports.TestReport.from_item_and_call = good\n{INIT}"
            )
        },
        CHANGED,
    ),
    "it says that it is expected to fail, under the name of the test's file": (
        {
            "src/shop/prices.py": (
                f"import os\n\nscope = {{}}\nexec(compile({XFAILS!r}, os.path.abspath('{TEST}'), 'exec'), scope)\n"
                "total = scope['total']\n"
            )
        },
        f"these do not pass: {NAME}",
    ),
    "it says so in code that runs as a part of the test's module": (
        {
            "src/shop/prices.py": (
                "import sys\n\n\ndef total(prices):\n    tests = sys._getframe(1).f_globals\n"
                f"    exec(compile({XFAILS.replace('total', 'later')!r}, tests['__file__'], 'exec'), tests)\n"
                "    return tests['later'](prices)\n"
            )
        },
        f"these do not pass: {NAME}",
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_earns_nothing(repository: Repository, attack: str) -> None:
    changes, why = ATTACKS[attack]
    graded = await repository.grade(changes)
    assert graded.reward == 0.0
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(graded.reason)


STILL_EARN: dict[str, tuple[dict[str, str | None], dict[str, Any]]] = {
    "finds the plugin's report, reads its key, and reports any result": (
        {
            "src/shop/__init__.py": (
                "import atexit, json, os, sys\nfrom _pytest import reports\n"
                "make = reports.TestReport.from_item_and_call\n"
                "def good(item, call):\n    made = make(item, call)\n    made.outcome = 'passed'\n    return made\n"
                "reports.TestReport.from_item_and_call = good\n"
                "[report] = [path + '/report' for path in sys.path if os.path.exists(path + '/report')]\n"
                "@atexit.register\ndef write():\n"
                "    lines = [json.loads(line) for line in open(report)]\n"
                "    for line in lines:\n"
                "        line.update(dict.fromkeys(line.keys() & {'canary', 'planted'}, 'failed'))\n"
                "    text = ''.join(json.dumps(line) + '\\n' for line in lines if 'changed' not in line)\n"
                f"    open(report, 'w').write(text)\n{INIT}"
            )
        },
        {},
    ),
    "returns an object that equals everything, and also differs from everything": (
        {
            "src/shop/prices.py": (
                "class Any:\n    def __eq__(self, other):\n        return True\n\n    __ne__ = __eq__\n\n\n"
                "def total(prices):\n    return Any()\n"
            )
        },
        {},
    ),
    "reads the expected value in the test's file or in the test's frame, and returns it": (
        {
            "src/shop/prices.py": (
                "import sys\n\n\ndef total(prices):\n"
                "    numbers = [each for each in sys._getframe(1).f_code.co_consts if isinstance(each, int)]\n"
                "    return max(numbers, default=0) if len(prices) != 1 else 1\n"
            )
        },
        {},
    ),
    "changes a module of tests while pytest imports the module, or puts another one in its place": (
        {
            "src/shop/__init__.py": (
                "import sys\n\nframe = sys._getframe()\n"
                f"while not frame.f_code.co_filename.endswith('{TEST}'):\n    frame = frame.f_back\n"
                f"frame.f_globals['check'] = lambda found, wanted: None\n{INIT}"
            )
        },
        {},
    ),
    "patches pytest for a test that it knows by name, and takes the patch back before the run ends": (
        {
            "src/shop/__init__.py": (
                "from _pytest.python import Function\nrun = Function.runtest\n"
                "def once(self):\n"
                f"    if '{NAME}' in self.nodeid:\n        Function.runtest = run\n    else:\n        run(self)\n"
                f"Function.runtest = once\n{INIT}"
            )
        },
        {},
    ),
    "changes objects of pytest's run for a test that it knows by name, such as a test's function": (
        {
            "src/shop/prices.py": (
                "import gc\nfrom _pytest.python import Function\n\n\ndef total(prices):\n"
                f"    [test] = [one for one in gc.get_objects() if type(one) is Function and one.nodeid == '{NAME}']\n"
                "    test.obj = lambda: None\n    return sum(prices)\n"
            )
        },
        {},
    ),
    "calls `pytest.xfail` in a function that it defines in the test's module, under the name of its file": (
        {
            "src/shop/prices.py": (
                f"import sys\n\nframe = sys._getframe()\nwhile not frame.f_code.co_filename.endswith('{TEST}'):\n"
                f"    frame = frame.f_back\n"
                f"exec(compile({XFAILS!r}, frame.f_code.co_filename, 'exec'), frame.f_globals)\n"
                "total = frame.f_globals['total']\n"
            )
        },
        {},
    ),
}
"""The cheats in the table of docs/evaluators/swebench.md, with the files of a candidate and the options of its row."""


@pytest.mark.deep
@pytest.mark.parametrize("cheat", STILL_EARN)
async def test_a_cheat_still_earns(repository: Repository, cheat: str) -> None:
    changes, options = STILL_EARN[cheat]
    graded = await repository.grade(changes, **options)
    assert graded.reward == 1.0, graded.reason


def test_the_page_lists_the_cheats_that_still_earn() -> None:
    page = (Path(__file__).parents[2] / "docs/evaluators/swebench.md").read_text("utf-8")
    table = page.partition("| Code under test that |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([^-].*?) \| ", table, re.MULTILINE) == list(STILL_EARN)


@pytest.mark.deep
async def test_a_plugin_of_its_own_is_not_loaded(repository: Repository) -> None:
    """The candidate adds a distribution with a pytest plugin to Python's path."""
    changes = {
        "src/fast-1.dist-info/METADATA": "Name: fast\nVersion: 1\n",
        "src/fast-1.dist-info/entry_points.txt": "[pytest11]\nfast = fast\n",
        "src/fast.py": PASS_ALL,
    }
    command = COMMAND.replace("PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", "")
    graded = await repository.grade(changes, test_command=command)
    assert graded.reward == 0.0
    assert graded.reason.startswith(f"these do not pass: {NAME}")


FORGES = f"""\
import glob, marshal
[cached] = glob.glob("__pycache__/conftest.*-pytest-*.pyc")
head = open(cached, "rb").read(16)
open(cached, "wb").write(head + marshal.dumps(compile({PASS_ALL!r}, "conftest.py", "exec")))
"""


@pytest.mark.deep
async def test_a_compiled_conftest_of_its_own_is_not_loaded(repository: Repository) -> None:
    """The agent runs pytest, which compiles the repository's conftest.py, and then replaces the code in the compiled
    file."""
    commands = (f"{sys.executable} -m pytest tests", f"{sys.executable} forge.py")
    graded = await repository.grade({"forge.py": FORGES}, *commands)
    assert graded.reward == 0.0
    assert graded.reason.startswith(f"these do not pass: {NAME}")


@pytest.mark.deep
async def test_what_is_mounted_in_the_repository_stays_as_it_is(tmp_path: Path) -> None:
    """A folder is mounted below the working directory, as an agent's program may be."""
    for name in ("__pycache__/a.pyc", "conftest.py", "a b[1].dist-info/entry_points.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    mount = {"source": str(tmp_path), "target": "/repository/src/a [program]"}
    async with a_repository(mounts=[mount]) as repository:
        assert (await repository.grade({"src/shop/prices.py": FIX})).reward == 1.0
        assert (await repository.grade({"tests/conftest.py": PASS_ALL})).reward == 0.0
    assert (tmp_path / "__pycache__" / "a.pyc").exists()


def test_read_only_mounts_may_have_any_name() -> None:
    lines = ["/", "/repo/a\\040b", "/repo/c\x0cd\u2028e", "/repo\\012", "/repository"]
    mounts = "".join(f"none {path} tmpfs ro,nosuid 0 0\n" for path in lines) + "none /repo/own tmpfs rw 0 0\n"
    assert read_only_mounts(f"/repo\0{mounts}".encode()) == ["./a b", "./c\x0cd\u2028e"]


@pytest.mark.deep
async def test_a_repository_that_leads_to_a_folder_of_any_name(repository: Repository) -> None:
    """The agent has moved the repository's folder and left a link in its place. The new name has a newline and a form
    feed."""
    name = "/moved\n\x0cx"
    graded = await repository.grade(
        {"src/shop/prices.py": FIX}, f"mv /repository '{name}' && ln -s '{name}' /repository"
    )
    assert graded.reward == 1.0, graded.reason


UNITTEST_ATTACKS = {
    "it runs no method": (
        "from _pytest import unittest\nunittest.TestCaseFunction.runtest = lambda self: None\n",
        CHANGED,
    ),
    "it runs no test case": (
        "import unittest\nunittest.TestCase.run = unittest.TestCase.__call__ = lambda self, result: None\n",
        CHANGED,
    ),
    "its assertions never fail": (
        "import unittest\nunittest.TestCase.assertEqual = lambda self, *words: None\n",
        CHANGED,
    ),
    "it is expected to fail": (
        "import unittest\nunittest.TestCase.assertEqual = lambda self, *words: __import__('pytest').xfail('later')\n",
        CHANGED,
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("attack", UNITTEST_ATTACKS)
async def test_an_attack_on_unittest_earns_nothing(repository: Repository, attack: str) -> None:
    options = {"test_patch": OF_UNITTEST, "fail_to_pass": [METHOD], "pass_to_pass": [f"{TEST}::test_empty"]}
    fixed = await repository.grade({"src/shop/prices.py": FIX}, **options)
    assert fixed.reward == 1.0, fixed.reason
    does, why = UNITTEST_ATTACKS[attack]
    graded = await repository.grade({"src/shop/__init__.py": does + INIT}, **options)
    assert graded.reward == 0.0
    assert graded.reason.startswith(why)


@pytest.mark.deep
async def test_a_test_may_say_that_it_is_expected_to_fail(repository: Repository) -> None:
    """`pytest.xfail` is allowed in a test, in a helper of the tests and as a mark. An attack makes the same call in the
    code under test."""
    patch = f"""\
diff --git a/tests/later.py b/tests/later.py
new file mode 100644
--- /dev/null
+++ b/tests/later.py
@@ -0,0 +1,5 @@
+import pytest
+
+
+def later():
+    pytest.xfail("later")
diff --git a/{TEST} b/{TEST}
--- a/{TEST}
+++ b/{TEST}
@@ -1,1 +1,4 @@
+import pytest
+
+from later import later
 from shop import total
@@ -4,1 +7,12 @@
     assert total([]) == 0
+
+def test_all_are_counted():
+    assert total([1, 2]) == 3
+    pytest.xfail("later")
+
+def test_helped():
+    later()
+
+@pytest.mark.xfail
+def test_marked():
+    assert total([1]) == 2
"""
    names = [f"{TEST}::test_{name}" for name in ("empty", "helped", "marked")]
    graded = await repository.grade({"src/shop/prices.py": FIX}, test_patch=patch, pass_to_pass=names)
    assert graded.reward == 1.0, graded.reason


@pytest.mark.deep
async def test_tests_may_run_in_several_processes(repository: Repository) -> None:
    command = COMMAND.replace("-m pytest", "-m pytest -p xdist -n 2")
    assert (await repository.grade({"src/shop/prices.py": FIX}, test_command=command)).reward == 1.0
    for attack in ("it makes every report a good one", "it says that it is expected to fail"):
        changes, why = ATTACKS[attack]
        attacked = await repository.grade(changes, test_command=command)
        assert attacked.reward == 0.0
        assert attacked.reason.startswith(why)


@pytest.mark.deep
async def test_what_the_tests_start_is_not_counted(repository: Repository) -> None:
    """The code under test runs pytest in another process, on a test that fails."""
    inner = "def test_all_are_counted():\n    assert 0\n"
    runs = (
        "import subprocess, sys\n\n\ndef total(prices):\n"
        "    words = ['-m', 'pytest', '-p', 'no:cacheprovider', 'src/inner/test_prices.py']\n"
        "    done = subprocess.run([sys.executable, *words])\n"
        "    return sum(prices) if done.returncode == 1 else -1\n"
    )
    graded = await repository.grade({"src/inner/test_prices.py": inner, "src/shop/prices.py": runs})
    assert graded.reward == 1.0, graded.reason


@pytest.mark.deep
async def test_links_in_the_place_of_tests_lead_nowhere(repository: Repository) -> None:
    fake = {"src/fake/test_prices.py": "def test_all_are_counted():\n    pass\n"}
    graded = await repository.grade(fake, "rm -r tests", "ln -s src/fake tests")
    assert graded.reward == 0.0
    assert graded.reason.startswith(f"these do not pass: {NAME}")
    fixed = await repository.grade({"src/shop/prices.py": FIX}, "rm -r tests", "ln -s src/fake tests")
    assert fixed.reward == 1.0


@pytest.mark.deep
async def test_a_candidate_that_hangs_is_worth_nothing(repository: Repository) -> None:
    hanging = await repository.grade({"src/shop/prices.py": "while True:\n    pass\n"}, test_seconds=3)
    assert (hanging.reward, hanging.metrics["fail_to_pass"]) == (0.0, 0)
    assert hanging.reason.startswith("the tests did not end within 3 s")


async def test_a_test_patch_that_does_not_apply_is_an_error(repository: Repository) -> None:
    with pytest.raises(EvaluatorError, match="the test patch does not apply"):
        await repository.grade({}, test_patch=PATCH.replace(" from shop import", " from stock import"))


PROGRAMS = """\
mkdir -p "$HOME/bin" bin
for name in python python3 bash sh find rm; do
    printf '#!/bin/sh\\nprintf "%s"\\n' 'FORGED' > "$HOME/bin/$name"
    cp "$HOME/bin/$name" bin/ ; chmod +x "$HOME/bin/$name" "bin/$name"
    cp "bin/$name" /usr/bin/ 2>/dev/null; cp "bin/$name" /usr/local/bin/ 2>/dev/null
done
echo 'export PATH=$HOME/bin:$PATH' | tee -a "$HOME/.bashrc" "$HOME/.profile" > "$HOME/.bash_profile"
true
"""
BACKGROUND = """\
nohup setsid sh -c 'while :; do
    printf "def check(found, wanted):\\n    pass\\n" > tests/helpers.py
    for file in /tmp/*/outrider-*/report "$HOME"/*/outrider-*/report; do echo > "$file"; done
done' > /dev/null 2>&1 &
true
"""


@pytest.mark.deep
async def test_what_the_agent_leaves_outside_of_the_carried_paths_does_nothing(tmp_path: Any) -> None:
    prepare: list[dict[str, Any]] = [{"write": text, "to": path} for path, text in BASE.items()]
    task = {
        "instruction": "x",
        "runtime": {
            **{name: FIELDS[name] for name in ("workdir", "env", "resources")},
            "mounts": [{"source": str(path)} for path in FIELDS["mounts"]],
            "prepare": prepare,
        },
        "evaluator": spec_of().model_dump(mode="json"),
    }
    mended = f"printf %s {FIX!r} | sed 's/\\\\n/\\n/g' > src/shop/prices.py"
    runs = {"fix": mended, "programs": PROGRAMS.replace("FORGED", FORGED), "background": BACKGROUND}
    examples = [Example(id=name, task=task, gold=Gold(run=run)) for name, run in runs.items()]
    reports = {report.id: report for report in await check_tasks(examples, folder=tmp_path, at_once=2)}
    assert reports["fix"].problems == ()
    assert reports["programs"].gold == (0.0, 0.0), reports["programs"]
    assert reports["background"].gold == (0.0, 0.0), reports["background"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"fail_to_pass": []}, "options.fail_to_pass", "at least 1"),
    ({"fail_to_pass": "[]"}, "options.fail_to_pass", "at least 1"),
    ({"fail_to_pass": "[a"}, "options.fail_to_pass", "neither a list"),
    ({"fail_to_pass": f"[{'[],' * 1_100_000}]"}, "options.fail_to_pass", "commas"),
    ({"test_patch": "\n" * 200_001}, "options", "200001 lines"),
    ({"log_parser": "parse_log_of_nobody"}, "options.log_parser", "no parser"),
    ({"log_parser": None, "repo": "nobody/nothing"}, "options.repo", "no parser"),
    ({"log_parser": None}, "options", "log_parser"),
    ({"log_parser": "parse_log_immutable_js"}, "options.instance_id", "Unknown instance"),
    ({"eval_script": "x"}, "options", "exactly one"),
    ({"test_patch": None}, "options", "test_patch"),
    ({"test_patch": "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,9 +1 @@\n"}, "options", "no diff"),
    ({"test_seconds": 120}, "options.test_seconds", "must be below"),
    ({"nonsense": 1}, "options.nonsense", "unknown field"),
]


@pytest.mark.parametrize(("options", "field", "says"), REFUSED)
async def test_what_cannot_grade_is_refused(options: dict[str, Any], field: str, says: str, tmp_path: Any) -> None:
    async def submit() -> None:
        async with Host(tmp_path) as host:
            evaluator = make_evaluator(spec_of(**options))
            assert isinstance(evaluator, ChecksSpec)
            await evaluator.check_spec(host)

    with pytest.raises(InvalidField, match=says) as refused:
        await submit()
    assert refused.value.field == f"task.evaluator.{field}"


def test_the_changes_to_a_repository_may_be_tested() -> None:
    make_evaluator(EvaluatorSpec(kind="swebench", options=ROW, carry=DiffSpec(diff="."), seconds=120))


@pytest.mark.parametrize("carry", [None, "all"])
def test_the_agents_own_sandbox_is_refused(carry: Any) -> None:
    with pytest.raises(InvalidField) as refused:
        make_evaluator(EvaluatorSpec(kind="swebench", options=ROW, carry=carry, seconds=120))
    assert refused.value.field == "task.evaluator.carry"


def test_a_part_of_a_combination_has_the_carried_files_of_the_whole() -> None:
    part = {"kind": "swebench", "options": ROW}
    make_evaluator(EvaluatorSpec(kind="all", options={"parts": {"swe": part}}, carry=["src"], seconds=120))
    with pytest.raises(InvalidField):
        make_evaluator(EvaluatorSpec(kind="all", options={"parts": {"swe": part}}, seconds=120))


def test_parts_share_the_time_of_the_whole() -> None:
    parts = {name: {"kind": "swebench", "options": {**ROW, "test_seconds": 50}} for name in ("one", "two")}
    make_evaluator(EvaluatorSpec(kind="all", options={"parts": parts}, carry=["src"], seconds=110))
    with pytest.raises(InvalidField) as refused:
        make_evaluator(EvaluatorSpec(kind="all", options={"parts": parts}, carry=["src"], seconds=100))
    assert refused.value.field == "task.evaluator.options.parts.one.options.test_seconds"


def test_tests_are_told_by_the_segments_of_their_paths() -> None:
    tests = [
        "tests/a.py",
        "src/x/tests/data/a.json",
        "test/a",
        "conftest.py",
        "src/conftest.py",
        "a/test_b.py",
        "b_test.py",
    ]
    others = ["src/_pytest/main.py", "testing.py", "src/contest/a.py", "latest.py", "docs/tests.md", "src/attest.py"]
    assert [path for path in (*tests, *others) if is_test(path)] == tests


@pytest.mark.parametrize(
    ("patch", "options", "decided"),
    [
        (b"", {}, True),
        (b"diff", {}, False),
        (None, {}, False),
        (b"", {"test_empty_patch": True}, False),
        (b"", {"expected": {"tests/test_shop.py::test_total": "PASSED"}}, False),
    ],
)
def test_an_empty_patch_is_decided_without_a_sandbox(
    patch: bytes | None, options: dict[str, Any], decided: bool, outcome: Callable[[EvaluatorSpec], Outcome]
) -> None:
    spec = spec_of(**options)
    evaluator = make_evaluator(spec)
    assert isinstance(evaluator, DecidesEarly)
    verdict = evaluator.decide(msgspec.structs.replace(outcome(spec), patch=patch))
    assert (verdict is not None) == decided
    if verdict is not None:
        assert (verdict.reward, verdict.metrics["fail_to_pass"]) == (0.0, 0.0)
        assert verdict.metrics["fail_to_pass_total"] >= 1


def test_a_check_of_tasks_tests_empty_patches_too() -> None:
    whole: dict[str, Any] = {
        "kind": "all",
        "options": {"parts": {"a": {"kind": "swebench", "options": {"x": 1}}, "b": {"run": "y"}}},
    }
    task: dict[str, Any] = {
        "instruction": "x",
        "evaluator": whole,
        "then": [{"evaluator": {"kind": "swebench", "options": {}}}],
    }
    checked = checked_task(Example(id="x", task=task, gold=None), 0, "nothing")
    parts = checked["evaluator"]["options"]["parts"]
    assert parts == {"a": {"kind": "swebench", "options": {"x": 1, "test_empty_patch": True}}, "b": {"run": "y"}}
    assert checked["then"][0]["evaluator"]["options"] == {"test_empty_patch": True}
    assert whole["options"]["parts"]["a"]["options"] == {"x": 1}
