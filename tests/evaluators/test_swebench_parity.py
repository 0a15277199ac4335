"""The verdict on a log equals swebench's, for every parser of swebench with logs in swebench_logs. Logs that contradict
themselves or pytest's report earn nothing."""

from __future__ import annotations

import importlib
import io
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from outrider.evaluators.checks.pool import Checks, checks_of
from outrider.evaluators.swebench.evaluator import CHECKS
from outrider.sandbox.runtimes.node_host import Host

pytest.importorskip("swebench", reason="swebench is not installed: pip install --no-deps swebench unidiff")

from outrider.evaluators.checks import swebench_check  # it imports swebench

LOGS = Path(__file__).parent / "swebench_logs"
"""A folder for each parser, with a log in which tests fail and a log in which none fails. README.md names the tools
that printed the logs."""
LEFT_OUT = {
    "parse_log_cypress": "only rows of 4.x have it, and Cypress downloads its program from a server of its own",
    "parse_plotly_js": "only rows of 4.x have it, and we do not know which reporter prints what it reads",
}
"""Parsers without a log, and the reason."""
INSTANCES = {"parse_log_immutable_js": "x__x-2006", "parse_log_jekyll": "jekyll__jekyll-9141"}
PASSING = ("PASSED", "XFAIL")
CUTS = 4
"""The number of parts into which a log is divided; a log is cut short at each boundary."""


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
    """Return a log with its marks, as swebench's harness stores it."""
    told = f">>>>> Test Exit Code: {code}\n" if code is not None else ""
    return f"+ : '>>>>> Start Test Output'\n{log}+ : '>>>>> End Test Output'\n{told}"


def parsers() -> dict[str, tuple[Any, str]]:
    """Return all parsers that rows can name, and a repository for each, by the names of the parsers' functions. Parsers
    of swebench's registry have the repository "". The others can be named only by rows of 4.x of their repository."""
    found: dict[str, tuple[Any, str]] = {}
    for language in swebench_check.LANGUAGES:
        module = importlib.import_module(f"swebench.harness.log_parsers.{language}")
        for name, of_repositories in vars(module).items():
            if name.startswith("MAP_REPO_TO_PARSER"):
                found |= {parser.__name__: (parser, repository) for repository, parser in of_repositories.items()}
    return found | {parser.__name__: (parser, "") for parser in swebench_check.grading.PARSER_REGISTRY.values()}


def test_every_parser_has_logs_or_a_reason() -> None:
    have = {folder.name for folder in LOGS.iterdir() if folder.is_dir()}
    assert not have & LEFT_OUT.keys()
    assert have | LEFT_OUT.keys() == parsers().keys()
    table = (LOGS / "README.md").read_text("utf-8")
    assert set(re.findall(r"`(parse_\w+)`", table)) == have


class Logs:
    """The passing and the failing log of a parser, and tests as the parser reads them: `broken` do not pass in the
    failing log; `mended` pass in the passing log only, and are `broken` if there are no such tests; `kept` pass in
    both."""

    def __init__(self, function: str) -> None:
        self.texts = {kind: (LOGS / function / f"{kind}.log").read_text("utf-8") for kind in ("passing", "failing")}
        self.instance = INSTANCES.get(function, "x-1")
        spec = swebench_check.grading.TestSpec(self.instance, "", [], "", "3.0", [], [], function, "pass_and_fail")
        with redirect_stdout(io.StringIO()):  # some parsers print
            told = {kind: parsers()[function][0](text, spec) for kind, text in self.texts.items()}
        good = {kind: {test for test, status in tests.items() if status in PASSING} for kind, tests in told.items()}
        self.broken = [test for test in told["failing"] if test not in good["failing"]]
        self.mended = sorted(good["passing"] - good["failing"]) or self.broken
        self.kept = sorted(good["passing"] & good["failing"])

    def rows(self) -> dict[str, tuple[list[str], list[str]]]:
        """Return FAIL_TO_PASS and PASS_TO_PASS of each row, by a description of the row."""
        return {
            "all of it": (self.mended, self.kept),
            "one that passed fails": (self.kept[:1] or self.mended, [*self.kept[1:], *self.broken[:1]]),
            "one to mend is not there": ([*self.mended, "absent"], self.kept),
            "one that passed is not there": (self.mended, [*self.kept, "absent"]),
            "one is there twice": (self.mended * 2, self.kept * 2),
        }

    def logs(self) -> dict[str, str]:
        passing, failing = self.texts["passing"], self.texts["failing"]
        whole = written(passing, code=0)
        return {
            "all pass": whole,
            "some fail": written(failing, code=1),
            "some fail, and it exits with 0": written(failing, code=0),
            "no exit code": written(passing),
            "all pass, and it exits with 1": written(passing, code=1),
            "no test ran": written("", code=1),
            "no mark of the beginning": whole.replace(swebench_check.START, ""),
            "no mark of the end": whole.replace(swebench_check.END, ""),
            "no marks": passing,
            "results before the marks": passing + written("", code=0),
            "lines end as on Windows": whole.replace("\n", "\r\n"),
            "the patch was not applied": f"{swebench_check.constants.APPLY_PATCH_FAIL}\n{whole}",
            "the repository was not reset": f"{swebench_check.constants.RESET_FAILED}\n{whole}",
            "the tests errored": whole + swebench_check.constants.TESTS_ERROR,
            "the tests timed out": whole + swebench_check.constants.TESTS_TIMEOUT,
        }

    def cut_logs(self) -> dict[str, str]:
        """Return logs that end early: without the mark of the end, as if the machine had stopped, and with exit code
        137, as if only the tests had been killed."""
        cut = {}
        for kind, text in self.texts.items():
            for part in range(1, CUTS):
                until = text[: len(text) * part // CUTS]
                cut[f"{kind}, cut at {part}/{CUTS}"] = written(until).partition(f"+ : '{swebench_check.END}")[0]
                cut[f"{kind}, tests killed at {part}/{CUTS}"] = written(f"{until}\n", code=137)
        return cut


def theirs(spec: Any, file: Path) -> dict[str, Any] | None:
    """Return swebench's report, or None if its parser raises an exception."""
    prediction = {"instance_id": spec.instance_id, "model_name_or_path": "m", "model_patch": "p"}
    try:
        with redirect_stdout(io.StringIO()):
            report = swebench_check.grading.get_eval_report(spec, prediction, str(file), True)
    except Exception:  # a parser may raise any exception
        return None
    found: dict[str, Any] = report[spec.instance_id]
    return found


@pytest.mark.deep
@pytest.mark.parametrize("function", sorted({folder.name for folder in LOGS.iterdir() if folder.is_dir()}))
async def test_the_verdict_is_that_of_swebench(
    checks: Checks, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = swebench_check.grading.PARSER_REGISTRY
    parser, repo = parsers()[function]
    name = next((name for name, known in registry.items() if known is parser), function)
    if repo:
        monkeypatch.setitem(registry, name, parser)  # swebench 5.x uses only the registry
    logs, file = Logs(function), tmp_path / "log"
    texts, verdicts = {**logs.logs(), **logs.cut_logs()}, set()
    cases = [
        (log, row) for log in texts for row in logs.rows() if row == "all of it" or log in ("all pass", "some fail")
    ]
    for kind in ("pass_and_fail", "fail_only"):
        for log, row in cases:
            fail_to_pass, pass_to_pass = logs.rows()[row]
            file.write_text(texts[log], encoding="utf-8", newline="")
            spec = swebench_check.grading.TestSpec(
                logs.instance, "", [], repo, "3.0", fail_to_pass, pass_to_pass, name, kind
            )
            expected = theirs(spec, file)
            ours = await judged(
                checks,
                instance_id=logs.instance,
                **({"log_parser": None, "repo": repo} if repo else {"log_parser": name}),
                eval_type=kind,
                fail_to_pass=fail_to_pass,
                pass_to_pass=pass_to_pass,
                log=texts[log],
            )
            case = (kind, log, row, ours)
            if expected is None:
                assert ours["resolved"] is False, case
                assert "cannot read the log" in ours["why"], case
                continue
            status = expected.get("tests_status", {})
            counts = [len(status.get(which, {}).get("success", [])) for which in ("FAIL_TO_PASS", "PASS_TO_PASS")]
            assert ours["resolved"] is expected["resolved"], case
            assert [ours["fail_to_pass"], ours["pass_to_pass"]] == counts, case
            verdicts.add((kind, expected["resolved"]))
    assert verdicts >= {("pass_and_fail", False), ("fail_only", True), ("fail_only", False)}
    # Some parsers list only failing tests. With such a parser no row of the type pass_and_fail is resolved.
    assert (("pass_and_fail", True) in verdicts) is bool(logs.kept)


CONTRADICTIONS = {
    "a test passes and fails": ("FAILED t.py::a - no\nPASSED t.py::a\n", True),
    "it fails and passes": ("PASSED t.py::a\nERROR t.py::a\n", False),
    "more pass than pytest counts": ("PASSED t.py::a\nPASSED t.py::b\n= 1 failed, 1 passed in 0.10s =\n", True),
    "a second end": ("PASSED t.py::a\n>>>>> End Test Output\nFAILED t.py::a\n", True),
    "a second beginning": ("FAILED t.py::a\n>>>>> Start Test Output\nPASSED t.py::a\n", False),
    "an exit code of its own": ("PASSED t.py::a\n>>>>> Test Exit Code: 0\n", True),
}
"""Logs that contradict themselves, and whether swebench counts their row as resolved."""


@pytest.mark.parametrize("what", CONTRADICTIONS)
async def test_a_log_that_contradicts_itself_is_worth_nothing(checks: Checks, what: str, tmp_path: Path) -> None:
    log, believed = CONTRADICTIONS[what]
    (tmp_path / "log").write_text(written(log, code=0), encoding="utf-8")
    spec = swebench_check.grading.TestSpec("x-1", "", [], "", "", ["t.py::a"], [], "parse_log_pytest", "pass_and_fail")
    report = theirs(spec, tmp_path / "log")
    assert report is not None
    assert report["resolved"] is believed
    requests: list[dict[str, Any]] = [
        {"log": written(log, code=0)},
        {"log": log, "exit_code": 0},
    ]  # the log of a script, and the log of a command
    for request in requests:
        found = await judged(checks, fail_to_pass=["t.py::a"], **request)
        assert found["resolved"] is False
        assert found["why"].startswith("the log contradicts itself: ")


def parser_or_repository(function: str) -> dict[str, str | None]:
    """Return the options by which a row names a parser: the name in swebench's registry, or a repository if only rows
    of 4.x have the parser."""
    names = (name for name, known in swebench_check.grading.PARSER_REGISTRY.items() if known.__name__ == function)
    name = next(names, None)
    return {"log_parser": name} if name else {"log_parser": None, "repo": parsers()[function][1]}


FORGED = {
    "parse_log_pytest": ("t.py::a", "{status} t.py::a", "PASSED", "FAILED"),
    "parse_log_gotest": ("TestA", "--- {status}: TestA (0.00s)", "PASS", "FAIL"),
    "parse_log_cargo": ("shop::a", "test shop::a ... {status}", "ok", "FAILED"),
    "parse_log_googletest": ("Shop.A", "[  {status} ] Shop.A (0 ms)", "     OK", "FAILED"),
    "parse_log_jest_json": ("shop a", "[{status}] shop a", "PASSED", "FAILED"),
    "parse_log_vitest": ("a.test.js > shop > a", " {status} a.test.js > shop > a 2ms", "✓", "\u00d7"),
    "parse_log_carbon": ("src/a.test.js", "{status} src/a.test.js (5.1 s)", "PASS", "FAIL"),
    "parse_log_grommet": ("src/a.test.js", "{status} src/a.test.js (5.1 s)", "PASS", "FAIL"),
    "parse_log_react_pdf": ("src/a.test.js", "{status} src/a.test.js", "PASS", "FAIL"),
    "parse_log_minitest": ("Shop#test_: a", "Shop#test_: a.  = 0.00 s = {status}", ".", "F"),
    "parse_log_jq": ("tests/a", "{status}: tests/a", "PASS", "FAIL"),
    "parse_log_micropython_test": ("basics/a.py", "{status}  basics/a.py", "pass", "FAIL"),
    "parse_log_django": ("test_a (shop.Tests)", "test_a (shop.Tests) ... {status}", "ok", "FAIL"),
}
"""By parser: a test, the line with its status, and the words for a pass and a failure."""


@pytest.mark.parametrize("function", sorted(FORGED.keys() | swebench_check.LINE_BY_LINE.keys()))
def test_no_true_log_contradicts_itself(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser, repo = parsers()[function]
    monkeypatch.setitem(swebench_check.grading.PARSER_REGISTRY, function, parser)
    for text in Logs(function).texts.values():
        spec = swebench_check.grading.TestSpec("x-1", "", [], repo, "3.0", [], [], function, "pass_and_fail")
        spec.FAIL_TO_PASS.extend(parser(text, spec))
        assert spec.FAIL_TO_PASS
        swebench_check.check_log(spec, written(text))


async def test_a_name_that_tests_of_django_share_is_no_contradiction(checks: Checks) -> None:
    test = "A docstring takes the test's place."
    log = written(f"{test} ... FAIL\n{test} ... ok\n", code=0)
    found = await judged(checks, log_parser="parse_log_django", fail_to_pass=[test], log=log)
    assert found["resolved"] is True


@pytest.mark.parametrize("parser", FORGED)
async def test_a_pass_before_and_after_the_true_failure_is_worth_nothing(checks: Checks, parser: str) -> None:
    test, line, passes, fails = FORGED[parser]
    for order in ((passes,), (passes, passes), (passes, fails, passes), (fails, passes), (passes, fails), (fails,)):
        log = "".join(line.format(status=status) + "\n" for status in order)
        row = {"fail_to_pass": [test], "pytest": False} | parser_or_repository(parser)
        found = await judged(checks, log=written(log, code=0), **row)
        assert found["resolved"] is (fails not in order), (order, found)
        if {*order} == {passes, fails}:
            assert found["why"].startswith(f"the log contradicts itself: {test} is ")


@pytest.mark.parametrize(
    "log",
    [
        "PASSED t.py::a\n= 1 passed in 0.10s =\n",
        "PASSED t.py::a\nFAILED t.py::z\nPASSED t.py::z\n1 failed, 2 passed in 0.10s\n",
        "FAILED u.py::a[b\nPASSED u.py::a[b\nPASSED t.py::a\n",
        "PASSED inner.py::x\nPASSED t.py::a\n= 1 passed in 0.10s =\n",
        "t.py::a PASSED\nPASSED [100%]\nPASSED t.py::a\n= 1 passed in 0.10s =\n",
    ],
)
async def test_what_only_looks_like_a_contradiction_is_believed(checks: Checks, log: str) -> None:
    assert (await judged(checks, fail_to_pass=["t.py::a"], log=written(log)))["resolved"] is True


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps({"key": "k", **record}) + "\n" for record in records)


BEGUN, ENDED = {"begun": True}, {"ended": 1}
FAILS = {"canary": "failed", "when": "call"}
PLANTED = {"planted": "failed", "when": "call", "file": "t.py", "excused_by": None}
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
    "the code that is tested says that it is expected to fail": (
        lines(BEGUN, {**PASSES, "outcome": "skipped", "expected": True, "excused_by": "/s/a.py"}, FAILS, ENDED),
        False,
    ),
    "a mark says so": (
        lines(BEGUN, {**PASSES, "outcome": "skipped", "expected": True, "excused_by": None}, FAILS, ENDED),
        True,
    ),
    "another test passes": (lines(BEGUN, {**PASSES, "test": "t.py::b"}, FAILS, ENDED), False),
    "a test that must fail in its file fails": (lines(BEGUN, PASSES, PLANTED, FAILS, ENDED), True),
    "it is marked as an expected failure": (
        lines(BEGUN, PASSES, {**PLANTED, "planted": "skipped"}, FAILS, ENDED),
        True,
    ),
    "it passes in its file": (lines(BEGUN, PASSES, {**PLANTED, "planted": "passed"}, FAILS, ENDED), False),
    "it is excused": (
        lines(BEGUN, PASSES, {**PLANTED, "planted": "skipped", "excused_by": "t.py"}, FAILS, ENDED),
        False,
    ),
}


@pytest.mark.parametrize("what", REPORTS)
async def test_a_test_counts_if_pytests_report_says_so_too(checks: Checks, what: str) -> None:
    records, believed = REPORTS[what]
    request = {"fail_to_pass": ["t.py::a"], "log": "PASSED t.py::a\n", "exit_code": 0, "records": records}
    assert (await judged(checks, **request, pytest=None))["resolved"] is believed
    assert (await judged(checks, **request, pytest=False))["resolved"] is True


async def test_pytest_need_not_know_of_what_is_no_test(checks: Checks) -> None:
    """Rows of SWE-bench, such as pytest-dev__pytest-5262, list a name that is no test: the parser reads the end of a
    line as a test."""
    log = "t.py::a PASSED\nPASSED [100%]\nPASSED t.py::a\n= 1 passed in 0.10s =\n"
    request = {"fail_to_pass": ["t.py::a"], "pass_to_pass": ["[100%]"], "exit_code": 0, "pytest": None}
    found = await judged(checks, **request, log=log, records=lines(BEGUN, PASSES, FAILS, ENDED))
    assert (found["resolved"], found["pass_to_pass"]) == (True, 1)
    failing = lines(BEGUN, {**PASSES, "outcome": "failed"}, FAILS, ENDED)
    found = await judged(checks, **request, log=log, records=failing)
    assert (found["resolved"], found["fail_to_pass"], found["pass_to_pass"]) == (False, 0, 1)
