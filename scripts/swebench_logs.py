"""Writes the logs that tests/evaluators/test_swebench_parity.py reads, by running the test tools of this machine.

Each tool runs a small project twice: once with a fault, and once without. The outputs become `failing.log` and
`passing.log` in the folder of the parser that reads such logs. Logs of tools that do not run are left unchanged.
JavaScript tools are found in `node_modules` of --node, and Python tools beside --python.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

LOGS = Path(__file__).parent.parent / "tests" / "evaluators" / "swebench_logs"
FAULT = "@VALUE@"
"""A placeholder in the files of a project. Its value is 2 with the fault, and 1 without."""
RUN_SECONDS = 300


class Run(NamedTuple):
    """A project, and the command that tests it. `shown` is a line that swebench's script prints before the command's
    output, because of `set -x`."""

    files: dict[str, str]
    command: str
    shown: str = ""


PYTEST = {
    "tests/test_a.py": """\
import sys
import pytest

def test_first(): assert 1 == 1
@pytest.mark.parametrize("path", ["/etc/one", "two words"])
def test_second(path): assert path
class TestThird:
    def test_method(self): assert @VALUE@ == 1
def test_fourth(): assert int("@VALUE@") == 1, "a - b"
@pytest.mark.skip(reason="not now")
def test_skipped(): pass
@pytest.mark.xfail
def test_later(): assert 0
@pytest.fixture
def broken(): assert @VALUE@ == 1
def test_error(broken): print("PASSED by print")
""",
    "tests/test_b.py": """\
import enum
import pytest

class MouseButton(enum.Enum):
    LEFT = 1
    RIGHT = 3
@pytest.mark.parametrize("button", MouseButton, ids=str)
def test_button(button): assert button.value in (1, 3 if @VALUE@ == 1 else 4)
""",
}
DJANGO = {
    "run.py": """\
import sys
import django
from django.conf import settings
settings.configure(SECRET_KEY="x", DATABASES={})
django.setup()
from django.test.runner import DiscoverRunner
sys.exit(bool(DiscoverRunner(verbosity=2).run_tests(["shop"])))
""",
    "shop/__init__.py": "",
    "shop/tests.py": """\
import unittest
from django.test import SimpleTestCase

class Prices(SimpleTestCase):
    def test_first(self): self.assertEqual(1, 1)
    def test_second(self):
        "A docstring takes the test's place."
    def test_printing(self): print("something else")
    def test_third(self): self.assertEqual(@VALUE@, 1)
    def test_fourth(self): {1: 0}[@VALUE@]
    @unittest.skip("not now")
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_later(self): self.fail()
""",
}
SYMPY = {
    "sympy/shop/tests/test_shop.py": """\
from sympy.testing.pytest import XFAIL, skip

def test_first(): assert 1 == 1
def test_second(): pass
def test_third(): assert @VALUE@ == 1
def test_fourth(): {1: 0}[@VALUE@]
def test_skipped(): skip("not now")
@XFAIL
def test_later(): assert 0
""",
    "run.py": """\
import sys
from pathlib import Path
from sympy.testing import runtests
reporter = runtests.PyTestReporter(verbose=True, tb="short", colors=False, force_colors=False)
runner = runtests.SymPyTests(reporter)
reporter.root_dir(str(Path.cwd()))
files = ["sympy/shop/tests/test_shop.py"]
runner._testfiles = [str(Path.cwd() / file) for file in files]
sys.exit(0 if runner.test() else 1)
""",
}
JEST_TEST = """\
describe("prices", () => {
  test("first", () => { expect(1).toBe(1); });
  test("second one (of two)", async () => { await new Promise((go) => setTimeout(go, 8)); });
  describe("of others", () => {
    test("third", () => { expect(@VALUE@).toBe(1); });
  });
  test.skip("not now", () => {});
});
"""
SKIPPED = re.compile(r"  test\.skip.*\n")
JEST = {
    "package.json": '{"name": "shop"}',
    "jest.config.js": "module.exports = { testEnvironment: 'node', cache: false, transform: {} };",
    "src/prices.test.js": JEST_TEST,
    "src/others.test.js": "test('fourth', () => { expect(2).toBe(2); });\n",
    "src/more.test.js": "test('fifth', () => { expect(3).toBe(3); });\n",
}
JEST_RUN = "node_modules/.bin/jest --colors=false --ci -i"
JEST_JSON = (
    'jq -r \'.testResults[].assertionResults[] | "[" + (.status | ascii_upcase) + "] " + '
    '((.ancestorTitles | join(" > ")) + (if ((.ancestorTitles | length) > 0) then " > " else "" end) + .title)\''
)
VITEST = {
    "package.json": '{"name": "shop", "type": "module"}',
    "src/prices.test.js": "import { describe, expect, test } from 'vitest';\n" + JEST_TEST,
}
MOCHA_TEST = """\
const assert = require("assert");
describe("prices", function () {
  it("first", function () { assert.strictEqual(1, 1); });
  it("second one", function (done) { setTimeout(done, 90); });
  it.skip("not now", function () {});
  it("third", function () { assert.strictEqual(@VALUE@, 1); });
});
describe("others", function () {
  it("fourth", function () { assert.strictEqual(2, 2); });
});
"""
MOCHA = {"package.json": '{"name": "shop"}', "tests/run.js": MOCHA_TEST}
KARMA_TEST = MOCHA_TEST.replace('const assert = require("assert");\n', "").replace(
    "assert.strictEqual", "((a, b) => { if (a !== b) throw new Error(`expected ${a} to be ${b}`); })"
)
KARMA_CONFIG = """\
module.exports = (config) => config.set({
  frameworks: ["mocha"], files: ["test.js"], reporters: ["REPORTER"], browsers: ["Here"], singleRun: true,
  logLevel: "INFO", customLaunchers: { Here: { base: "BROWSER", flags: ["--no-sandbox", "--disable-gpu"] } },
});
"""


def karma(browser: str, reporter: str, *, shown: str = "", system: str = "0.0.0") -> Run:
    """Return a karma project. With `system`, the browser reports its processor, as older browsers do."""
    config = KARMA_CONFIG.replace("REPORTER", reporter).replace("BROWSER", browser)
    screen = "" if browser.endswith("Headless") else "xvfb-run -a "
    start = f"CHROME_BIN=$(command -v chromium) {screen}node_modules/.bin/karma start karma.conf.js --no-colors"
    command = f"{start} | sed 's/(Linux 0.0.0)/(Linux {system})/'"
    files = {"package.json": '{"name": "shop"}', "test.js": KARMA_TEST}
    return Run({**files, "karma.conf.js": config}, command, shown)


RUNS: dict[str, Run] = {
    "parse_log_pytest": Run(PYTEST, "python -m pytest -rA tests"),
    "parse_log_pytest_options": Run(PYTEST, "python -m pytest -rA --tb=no tests"),
    "parse_log_pytest_v2": Run(
        {
            **PYTEST,
            "tox.ini": "[testenv]\nskip_install = true\ndeps = pytest\ncommands = pytest -rA --color=yes tests\n",
        },
        "python -m tox run -e py",
    ),
    "parse_log_matplotlib": Run(PYTEST, "python -m pytest -rA tests"),
    "parse_log_seaborn": Run(PYTEST, "python -m pytest -v --no-header --tb=short -rA tests"),
    "parse_log_django": Run(DJANGO, "python run.py"),
    "parse_log_sympy": Run(SYMPY, "python run.py"),
    "parse_log_jest": Run(JEST, f"{JEST_RUN} --verbose"),
    "parse_log_immutable_js": Run(JEST, f"{JEST_RUN} --verbose"),
    "parse_log_calypso": Run(
        JEST, f"{JEST_RUN} --verbose src/prices 2>&1 | sed 's/ ms)/ms)/'", shown=f"./{JEST_RUN} --verbose src/prices"
    ),
    "parse_log_carbon": Run(JEST, JEST_RUN),
    "parse_log_grommet": Run(JEST, JEST_RUN),
    "parse_log_react_pdf": Run(JEST, JEST_RUN),
    "parse_log_lighthouse": Run(JEST, JEST_RUN),
    "parse_log_emotion": Run(JEST, JEST_RUN),
    "parse_log_jest_json": Run(JEST, f"{JEST_RUN} --json 2> errors | {JEST_JSON}"),
    "parse_log_vitest": Run(VITEST, "node_modules/.bin/vitest run --reporter=verbose --no-color"),
    "parse_log_highlightjs": Run(MOCHA, "node_modules/.bin/mocha tests/run.js"),
    "parse_log_eslint": Run(MOCHA, "node_modules/.bin/mocha tests/run.js --reporter min --timeout 60000"),
    "parse_log_p5js": Run(MOCHA, "node_modules/.bin/mocha tests/run.js --reporter dot"),
    "parse_log_prismjs": Run(
        MOCHA,
        "node_modules/.bin/mocha tests/run.js --reporter json",
        shown="./node_modules/.bin/mocha tests/run.js --reporter json",
    ),
    "parse_log_bpmn_js": karma("ChromeHeadless", "dots", system="x86_64"),
    "parse_log_openlayers": karma("ChromeHeadless", "progress"),
    "parse_log_chart_js": karma("Chrome", "progress"),
    "parse_log_next": karma("Chrome", "spec", shown="xvfb-run -a karma start"),
    "parse_log_karma": karma("ChromeHeadless", "mocha"),
    "parse_log_marked": Run(
        {
            "package.json": '{"name": "shop"}',
            "spec/prices.spec.js": SKIPPED.sub("", JEST_TEST).replace("test(", "it("),
        },
        "node_modules/.bin/jasmine --no-color --random=false 'spec/*.spec.js'",
    ),
    "parse_log_tap": Run(
        {
            "package.json": '{"name": "shop"}',
            "test.js": (
                "const test = require('tape');\n"
                "test('prices', (t) => { t.equal(1, 1, 'first'); t.ok(true, 'second one'); t.end(); });\n"
                "test('others', (t) => { t.equal(@VALUE@, 1, 'third'); t.skip('not now'); t.end(); });\n"
            ),
        },
        "node_modules/.bin/tape test.js",
    ),
    "parse_log_cargo": Run(
        {
            "Cargo.toml": '[package]\nname = "shop"\nversion = "0.1.0"\nedition = "2021"\n',
            "src/lib.rs": (
                "#[cfg(test)]\nmod tests {\n"
                "    #[test]\n    fn first() { assert_eq!(1, 1); }\n"
                '    #[test]\n    fn second() { println!("test third ... ok"); }\n'
                "    #[test]\n    fn third() { assert_eq!(@VALUE@, 1); }\n"
                "    #[test]\n    #[ignore]\n    fn not_now() {}\n}\n"
            ),
        },
        "cargo test --offline",
    ),
    "parse_log_gotest": Run(
        {
            "go.mod": "module shop\n\ngo 1.19\n",
            "shop_test.go": (
                'package shop\n\nimport "testing"\n\n'
                "func TestFirst(t *testing.T) {}\n"
                'func TestSecond(t *testing.T) { t.Run("one of two", func(t *testing.T) {}) }\n'
                'func TestThird(t *testing.T) { if @VALUE@ != 1 { t.Fatal("no") } }\n'
                'func TestNotNow(t *testing.T) { t.Skip("not now") }\n'
            ),
        },
        "HOME=$PWD go test -v ./...",
    ),
    "parse_log_googletest": Run(
        {
            "test.cc": (
                "#include <gtest/gtest.h>\n"
                "TEST(Prices, First) { EXPECT_EQ(1, 1); }\nTEST(Prices, Second) { EXPECT_TRUE(true); }\n"
                'TEST(Prices, Third) { EXPECT_EQ(@VALUE@, 1); }\nTEST(Prices, NotNow) { GTEST_SKIP() << "not now"; }\n'
            )
        },
        "g++ test.cc -o test -lgtest_main -lgtest -lpthread && ./test",
    ),
    "parse_log_doctest": Run(
        {
            "test.cc": (
                "#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN\n#include <doctest/doctest.h>\n"
                'TEST_CASE("prices") {\n  SUBCASE("first") { CHECK(1 == 1); }\n'
                '  SUBCASE("second") { CHECK(2 == 2); }\n  SUBCASE("third") { CHECK(@VALUE@ == 1); }\n}\n'
            )
        },
        "g++ test.cc -o test && ./test -s -r=xml",
    ),
    "parse_log_jq": Run(
        {
            "configure.ac": (
                "AC_INIT([shop], [1])\nAM_INIT_AUTOMAKE([foreign])\nAC_CONFIG_FILES([Makefile])\nAC_OUTPUT\n"
            ),
            "Makefile.am": "TESTS = tests/first tests/second tests/third\nLOG_COMPILER = sh\n",
            "tests/first": "exit 0\n",
            "tests/second": "exit 0\n",
            "tests/third": "exit $((@VALUE@ - 1))\n",
        },
        "autoreconf -i > made 2>&1 && ./configure >> made 2>&1 && make check",
    ),
    "parse_log_maven": Run(
        {
            "pom.xml": (
                "<project><modelVersion>4.0.0</modelVersion><groupId>shop</groupId><artifactId>shop</artifactId>"
                "<version>1</version><packaging>pom</packaging></project>\n"
            )
        },
        # Without a registry Maven cannot load the plugin that runs tests, but its output for a failed build is the
        # same.
        "set -x; mvn -o -B validate -Dtest=Prices#first; mvn -o -B validate -Dtest=Prices#second; "
        "mvn -o -B $([ @VALUE@ = 1 ] && echo validate || echo nothing) -Dtest=Prices#third",
    ),
    "parse_log_phpunit": Run(
        {
            "PricesTest.php": (
                "<?php\nuse PHPUnit\\Framework\\TestCase;\nfinal class PricesTest extends TestCase {\n"
                "    public function testFirst(): void { $this->assertSame(1, 1); }\n"
                "    public function testSecondOne(): void { $this->assertTrue(true); }\n"
                "    public function testThird(): void { $this->assertSame(@VALUE@, 1); }\n"
                "    public function testNotNow(): void { $this->markTestSkipped('not now'); }\n}\n"
            )
        },
        "phpunit --testdox --colors=never PricesTest.php",
    ),
    "parse_log_minitest": Run(
        {
            "test.rb": (
                "require 'minitest/autorun'\nclass Prices < Minitest::Test\n"
                "  define_method('test_: prices should be first. ') { assert_equal 1, 1 }\n"
                "  define_method('test_: prices should be second. ') { assert true }\n"
                "  define_method('test_: prices should be third. ') { assert_equal 1, @VALUE@ }\n"
                "  define_method('test_: prices should wait. ') { skip 'not now' }\nend\n"
            )
        },
        "ruby test.rb -v --seed 1",
    ),
    "parse_log_ruby_unit": Run(
        {
            "test.rb": (
                "require 'test/unit'\nclass Prices < Test::Unit::TestCase\n"
                "  test('first') { assert_equal 1, 1 }\n  test('second one') { assert true }\n"
                "  test('third') { assert_equal 1, @VALUE@ }\n  test('not now') { omit 'not now' }\nend\n"
            )
        },
        "ruby test.rb -v",
    ),
    "parse_log_rspec_transformed_json": Run(
        {
            "prices_spec.rb": (
                "RSpec.describe 'prices' do\n  it('is first') { expect(1).to eq 1 }\n"
                "  it('is second') { expect(2).to eq 2 }\n  it('is third') { expect(@VALUE@).to eq 1 }\n"
                "  xit('is not now') { }\nend\n"
            )
        },
        "rspec --format json prices_spec.rb | jq -r '.examples[] | \"\\(.description) - \\(.id) - \\(.status)\"'",
    ),
}
RUNS["parse_log_jekyll"] = RUNS["parse_log_minitest"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node", type=Path, help="folder with node_modules")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="with pytest, tox, django and sympy")
    parser.add_argument("--out", type=Path, default=LOGS)
    parser.add_argument("parsers", nargs="*", help="all, unless named")
    given = parser.parse_args()
    for name in given.parsers or RUNS:
        for kind, value in (("failing", "2"), ("passing", "1")):
            log = printed(RUNS[name], value, given.node, given.python)
            (given.out / name).mkdir(parents=True, exist_ok=True)
            (given.out / name / f"{kind}.log").write_text(log, encoding="utf-8")
        print(name, flush=True)


def printed(run: Run, value: str, node: Path | None, python: Path) -> str:
    """Return the output of a project's command, without details of this machine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, text in run.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text.replace(FAULT, value), encoding="utf-8")
        if node is not None:
            (folder / "node_modules").symlink_to(node.absolute() / "node_modules")
        done = subprocess.run(
            ["bash", "-c", f'export PATH="{python.parent}:$PATH"; {run.command.replace(FAULT, value)}'],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=RUN_SECONDS,
            check=False,
        )
        log = done.stdout.decode("utf-8", "replace").replace("\r\n", "\n")
        for place, instead in ((str(folder.resolve()), "/testbed"), (str(python.parent.parent.absolute()), "/venv")):
            log = log.replace(place, instead)
        if node is not None:
            log = log.replace(str(node.resolve()), "/testbed")
        shown = f"+ {run.shown}\n" if run.shown else ""
        return shown + re.sub(r"0x[0-9a-f]{6,}", "0x0", log)


if __name__ == "__main__":
    main()
