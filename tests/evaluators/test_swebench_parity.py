"""Our verdict on a log is swebench's own, for every parser that it has; and what we refuse to believe."""

from __future__ import annotations

import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from outrider.evaluators.checks.pool import Checks, checks_of
from outrider.evaluators.swebench.evaluator import CHECKS
from outrider.runtimes.node_host import Host

pytest.importorskip("swebench", reason="swebench is not installed: pip install --no-deps swebench unidiff")

from outrider.evaluators.checks import swebench_check  # it imports swebench

PYTEST = (
    "PASSED t.py::a\nPASSED t.py::b[x]\nFAILED t.py::c - assert 1 == 2\nERROR t.py::d\nXFAIL t.py::e\nSKIPPED t.py::f\n"
)
PASS_FAIL = "PASS src/a.js (5ms)\nPASS src/b.js\nFAIL src/c.js (1.5 s)\n"
LOGS: dict[str, str] = {
    "parse_log_pytest": PYTEST,
    "parse_log_pytest_options": PYTEST + "PASSED t.py::g[/tmp/x/y]\n",
    "parse_log_pytest_v2": PYTEST + "t.py::h \x1b[32mPASSED\x1b[0m\n",
    "parse_log_matplotlib": PYTEST + "PASSED t.py::g[MouseButton.LEFT]\n",
    "parse_log_seaborn": PYTEST + "t.py::h PASSED [ 10%]\n",
    "parse_log_django": "a (x.T) ... ok\nb (x.T) ... OK\nc (x.T) ... FAIL\nd (x.T) ... skipped 'x'\ne ... ERROR\n",
    "parse_log_sympy": "test_a ok\ntest_b ok\ntest_c F\ntest_d E\n____ x/test_y.py:test_z ____\n",
    "parse_log_calypso": " ./node_modules/.bin/jest x\n  suite\n    ✓ a (5ms)\n    ✓ b\n    ✕ c\nTest Suites: 1\n",
    "parse_log_bpmn_js": "HeadlessChrome 1.2.3 (Linux 0.0.0) suite a FAILED\n\nExecuted 5 of 5\n",
    "parse_log_carbon": PASS_FAIL,
    "parse_log_eslint": "  1) suite\n   a:\n   AssertionError: no\n5 passing\n",
    "parse_log_grommet": PASS_FAIL,
    "parse_log_highlightjs": "\n  suite\n    ✓ a (5ms)\n    ✔ b\n    1) c\n\n  2 passing\n",
    "parse_log_lighthouse": "PASS a.js\nPASS b.js\nFAIL c.js\n",
    "parse_log_next": " xvfb-run x\nStarting browser Chrome\n  suite\n    ✓ a\n    ✓ b\n    ✗ c\nTOTAL: 3\n",
    "parse_log_openlayers": "Chrome 1.2.3 (Linux 0.0.0) suite a FAILED\ncase x': ok\n",
    "parse_log_prismjs": (
        "+ ./node_modules/.bin/mocha tests/run.js --reporter json\n"
        '{"failures": [{"fullTitle": "c"}], "passes": [{"fullTitle": "a"}, {"fullTitle": "b"}]}\n'
    ),
    "parse_log_quarto_cli": "[smoke] a ... \x1b[32mok\n[unit] b ... \x1b[32mok\n[smoke] c ... \x1b[31mFAILED\n",
    "parse_log_chart_js": "\x1b[1mChrome 1.2 (Linux 0.0.0) suite a FAILED\nTOTAL: 4 SUCCESS\n",
    "parse_log_marked": "1) a is wrong\n3 specs, 1 failure\n",
    "parse_log_p5js": "  1) suite\n       a:\n     AssertionError\n  5 passing\n",
    "parse_log_react_pdf": PASS_FAIL,
    "parse_log_jest": "  ✓ a (5 ms)\n  ✓ b\n  ✕ c\n  ○ d\n",
    "parse_log_jest_json": "[PASSED] a\n[PASSED] b\n[FAILED] c\n",
    "parse_log_vitest": " ✓ a 5ms\n ✓ b\n \u00d7 c\n ↓ d [skipped]\n",
    "parse_log_karma": "Starting browser Chrome\n  suite\n  ✔ a\n  ✔ b\n  ✖ c\nSUMMARY:\n",
    "parse_log_tap": "ok 1 a\nok 2 b\nnot ok 3 c\n",
    "parse_log_immutable_js": "  ✓ a (5 ms)\n  ✓ b\n  ✕ c\n",
    "parse_log_redis": "[ok]: a (5 ms)\n[ok]: b\n[err]: c in tests/c.tcl\n[skip]: d\n",
    "parse_log_jq": "PASS: a\nPASS: b\nFAIL: c\n",
    "parse_log_doctest": (
        '<doctest><TestCase name="t">'
        '<SubCase name="a"><Expression success="true"/></SubCase><SubCase name="b"/>'
        '<SubCase name="c"><Expression success="false"/></SubCase></TestCase></doctest>\n'
    ),
    "parse_log_micropython_test": "pass a\npass b\nFAIL c\nskip d\n",
    "parse_log_googletest": "[ OK ] a (0 ms)\n[       OK ] b (0 ms)\n[  FAILED  ] c (1 ms)\n",
    "parse_log_gotest": "--- PASS: a (0.00s)\n--- PASS: b (0.00s)\n--- FAIL: c (0.00s)\n--- SKIP: d (0.00s)\n",
    "parse_log_maven": "mvn -Dtest=a\nBUILD SUCCESS\nmvn -Dtest=b\nBUILD SUCCESS\nmvn -Dtest=c\nBUILD FAILURE\n",
    "parse_log_ant": "[junit] [PASS] a\n[junit] [PASS] b\n[junit] [FAIL] c\n[junit] [ERR] d\n",
    "parse_log_gradle_custom": "x.T > a PASSED\nx.T > b\nwarning\nPASSED\nx.T > c FAILED\n",
    "parse_log_phpunit": "Suite (Tests)\n ✔ a\n ✔ b\n ✘ c\n ↩ d\n",
    "parse_log_minitest": "T#a. 0.01 s = .\nT#b. 0.01 s = .\nT#c. 0.01 s = F\n",
    "parse_log_cucumber": "a ..\nb ..\nc .F\n",
    "parse_log_ruby_unit": "test: a:\t.: (0.1)\ntest: b:\t.: (0.1)\ntest: c:\tF\ntest: d:\tO\n",
    "parse_log_rspec_transformed_json": "a - passed\nb - passed\nc - failed\n",
    "parse_log_jekyll": "T#a. 0.01 s = .\nT#b. 0.01 s = .\nT#c. 0.01 s = F\n",
    "parse_log_cargo": "test a ... ok\ntest b ... ok\ntest c ... FAILED\n",
}
"""By the name of the parser's function, a log of it in which something fails, and something passes if it says so."""
INSTANCES = {"parse_log_immutable_js": "x__x-2006", "parse_log_jekyll": "jekyll__jekyll-9141"}


@pytest.fixture
async def checks(tmp_path: Path) -> AsyncIterator[Checks]:
    folder = tmp_path / f"node-{time.monotonic_ns()}"
    folder.mkdir()
    async with Host(folder) as host:
        yield await checks_of(host, CHECKS)


async def judged(checks: Checks, **request: Any) -> dict[str, Any]:
    row = {"instance_id": "x-1", "log_parser": "parse_log_pytest", "pass_to_pass": [], "version": "3.0", **request}
    answer = (await checks.check({"records": "", "key": "k", "pytest": False, **row}, seconds=20)).answer
    assert answer is not None
    return answer


def written(log: str, *, code: int | None = None) -> str:
    """A log with its marks, as swebench's harness keeps it."""
    told = f">>>>> Test Exit Code: {code}\n" if code is not None else ""
    return f"+ : '>>>>> Start Test Output'\n{log}+ : '>>>>> End Test Output'\n{told}"


def test_there_is_a_log_of_every_parser() -> None:
    registry = swebench_check.grading.PARSER_REGISTRY
    assert {parser.__name__ for parser in registry.values()} == LOGS.keys()


@pytest.mark.deep
@pytest.mark.parametrize("function", LOGS)
async def test_the_verdict_is_that_of_swebench(checks: Checks, function: str, tmp_path: Path) -> None:
    swe = swebench_check.grading
    registry = swe.PARSER_REGISTRY
    name = next(name for name, parser in registry.items() if parser.__name__ == function)
    instance = INSTANCES.get(function, "x-1")
    log = LOGS[function]
    blank = swe.TestSpec(instance, "", [], "x/x", "3.0", [], [], name, "pass_and_fail")
    with redirect_stdout(io.StringIO()):  # some parsers print
        statuses = registry[name](written(log), blank)
    passing = [test for test, status in statuses.items() if status in ("PASSED", "XFAIL")]
    others = [test for test in statuses if test not in passing]
    assert others, "a parser that sees nothing is not tried"
    rows = [
        (others[:1], passing),
        (passing[:1] or ["absent"], passing[1:]),
        (["absent"], others),
        (["absent"], ["gone"]),
    ]
    rows += [(passing[:1] or ["absent"], others[-1:]), ((passing or others)[:1], ["absent"])]
    logs = [written(log), written(log, code=0), written(log, code=1), written(""), log, written("no news\n", code=1)]
    logs += [written(log).replace("\n", "\r\n"), written(log) + ">>>>> Tests Timed Out\n"]
    verdicts = set()
    for kind in ("pass_and_fail", "fail_only"):
        for number, text in enumerate(logs):
            file = tmp_path / f"{kind}-{number}"
            file.write_text(text, newline="")
            for fail_to_pass, pass_to_pass in rows:
                spec = swe.TestSpec(instance, "", [], "x/x", "3.0", fail_to_pass, pass_to_pass, name, kind)
                prediction = {"instance_id": instance, "model_name_or_path": "m", "model_patch": "p"}
                with redirect_stdout(io.StringIO()):
                    theirs = swe.get_eval_report(spec, prediction, str(file), True)[instance]
                ours = await judged(
                    checks,
                    instance_id=instance,
                    log_parser=name,
                    eval_type=kind,
                    fail_to_pass=fail_to_pass,
                    pass_to_pass=pass_to_pass,
                    log=text,
                )
                assert ours["resolved"] is theirs["resolved"], (kind, number, fail_to_pass, pass_to_pass, ours)
                if theirs["resolved"]:
                    assert (ours["fail_to_pass"], ours["pass_to_pass"]) == (len(fail_to_pass), len(pass_to_pass))
                verdicts.add(theirs["resolved"])
    assert verdicts == {True, False}


CONTRADICTIONS = {
    "a test passes and fails": "FAILED t.py::a - no\nPASSED t.py::a\n",
    "it fails and passes": "PASSED t.py::a\nERROR t.py::a\n",
    "more pass than pytest counts": "PASSED t.py::a\nPASSED t.py::b\n= 1 failed, 1 passed in 0.10s =\n",
    "a second end": "PASSED t.py::a\n>>>>> End Test Output\nFAILED t.py::a\n",
    "a second beginning": "FAILED t.py::a\n>>>>> Start Test Output\nPASSED t.py::a\n",
    "an exit code of its own": "PASSED t.py::a\n>>>>> Test Exit Code: 0\n",
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
async def test_a_log_that_contradicts_itself_is_worth_nothing(checks: Checks, what: str) -> None:
    for code in (None, 0):  # of a script, and of a command
        log = CONTRADICTIONS[what] if code is not None else written(CONTRADICTIONS[what])
        found = await judged(checks, fail_to_pass=["t.py::a"], log=log, exit_code=code)
        assert found["resolved"] is False
        assert found["why"].startswith("the log contradicts itself: ")


@pytest.mark.parametrize(
    "log",
    [
        "PASSED t.py::a\n= 1 passed in 0.10s =\n",
        "PASSED t.py::a\nFAILED t.py::z\nPASSED t.py::z\n1 failed, 2 passed in 0.10s\n",
        "FAILED u.py::a[b\nPASSED u.py::a[b\nPASSED t.py::a\n",
        "PASSED inner.py::x\nPASSED t.py::a\n= 1 passed in 0.10s =\n",
    ],
)
async def test_what_only_looks_like_a_contradiction_is_believed(checks: Checks, log: str) -> None:
    assert (await judged(checks, fail_to_pass=["t.py::a"], log=written(log)))["resolved"] is True


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps({"key": "k", **record}) + "\n" for record in records)


BEGUN, ENDED = {"begun": True}, {"ended": 1}
FAILS = {"canary": "failed", "when": "call"}
PASSES = {"test": "t.py::a", "when": "call", "outcome": "passed", "expected": False}
REPORTS: dict[str, tuple[str, bool]] = {
    "it passes": (lines(BEGUN, PASSES, FAILS, ENDED), True),
    "two runs": (lines(BEGUN, PASSES, FAILS, ENDED, BEGUN, FAILS, ENDED), True),
    "nothing": ("", False),
    "no end": (lines(BEGUN, PASSES, FAILS), False),
    "interrupted": (lines(BEGUN, PASSES, FAILS, {"ended": 2}), False),
    "another key": (lines(BEGUN, {**PASSES, "key": "x"}, FAILS, ENDED), False),
    "no JSON": (lines(BEGUN, PASSES, FAILS, ENDED) + "[[", False),
    "no object": (lines(BEGUN, PASSES, FAILS, ENDED) + "1\n", False),
    "the test that must fail passes": (lines(BEGUN, PASSES, {**FAILS, "canary": "passed"}, ENDED), False),
    "it is not there": (lines(BEGUN, PASSES, ENDED), False),
    "it fails": (lines(BEGUN, {**PASSES, "outcome": "failed"}, FAILS, ENDED), False),
    "it passes and fails": (lines(BEGUN, {**PASSES, "outcome": "failed"}, PASSES, FAILS, ENDED), False),
    "its end fails": (lines(BEGUN, PASSES, {**PASSES, "when": "teardown", "outcome": "failed"}, FAILS, ENDED), False),
    "another test passes": (lines(BEGUN, {**PASSES, "test": "t.py::b"}, FAILS, ENDED), False),
}


@pytest.mark.parametrize("what", REPORTS)
async def test_a_test_counts_if_pytests_report_says_so_too(checks: Checks, what: str) -> None:
    records, believed = REPORTS[what]
    request = {"fail_to_pass": ["t.py::a"], "log": "PASSED t.py::a\n", "exit_code": 0, "records": records}
    assert (await judged(checks, **request, pytest=None))["resolved"] is believed
    assert (await judged(checks, **request, pytest=False))["resolved"] is True
