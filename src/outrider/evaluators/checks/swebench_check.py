"""Judges the log of a test run, using swebench's parsers and grading. Runs in a separate process (see `zygote.py`).

The code under test has written to the log, and may also have forged pytest's reports. Invariant: a log is never judged
better than by swebench's `get_eval_report`.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import swebench

from outrider.evaluators.checks.expected_statuses import compare

# This replaces swebench's own `harness/__init__.py`, which would import docker, datasets and modal.
harness = types.ModuleType("swebench.harness")
harness.__path__ = [str(Path(swebench.__file__).parent / "harness")]
sys.modules.setdefault("swebench.harness", harness)
grading: Any = importlib.import_module("swebench.harness.grading")
constants: Any = importlib.import_module("swebench.harness.constants")
classify_text: Any = importlib.import_module("swebench.harness.infra_failure").classify_text

LANGUAGES = ("c", "go", "java", "javascript", "php", "python", "ruby", "rust")
START, END, EXIT_CODE = constants.START_TEST_OUTPUT, constants.END_TEST_OUTPUT, constants.TEST_EXIT_CODE
MARKS = (
    *(START, END, EXIT_CODE, constants.APPLY_PATCH_FAIL, constants.RESET_FAILED),
    *(constants.TESTS_ERROR, constants.TESTS_TIMEOUT),
)
"""Texts that only the script around the tests may print."""
OF_PYTEST = frozenset(
    ("parse_log_pytest", "parse_log_pytest_options", "parse_log_pytest_v2", "parse_log_matplotlib", "parse_log_seaborn")
)
"""Functions that parse pytest's log, by their own names. swebench's registry lists some of them under other names,
too."""
LINE_BY_LINE = {
    **dict.fromkeys(OF_PYTEST, ""),
    **dict.fromkeys(("parse_log_cargo", "parse_log_gotest", "parse_log_googletest"), ""),
    **dict.fromkeys(("parse_log_jest_json", "parse_log_vitest"), ""),
    # These parsers list the results of whole test files in Jest's output.
    **dict.fromkeys(("parse_log_carbon", "parse_log_grommet", "parse_log_react_pdf"), ""),
    **dict.fromkeys(("parse_log_minitest", "parse_log_jq", "parse_log_micropython_test"), ""),
    # If a test has a docstring, Django's log names the test by the docstring's first line. The pattern excludes these
    # names, because several tests may share a first line.
    "parse_log_django": r"\w+ \([\w.]+\)",
}
"""Parsers that handle each line of a log separately. Maps the parser's function name to a pattern. The pattern matches
the names that belong to only one test; "" stands for all names."""
SUMMARY = re.compile(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in \d[\d.]* ?s", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[\d;]*m")
PASSING = ("PASSED", "XFAIL", "SKIPPED", None)
ORDER = ("PASSED", "SKIPPED", "XFAIL", "XPASS", "ERROR", "FAILED")
"""The order in which `log_of` lists tests by status, as in pytest's own summary. If a test is listed twice, parsers use
its last status. Failures come last, so a failure outweighs a pass."""
ENDED_WELL, NO_TESTS = (0, 1), 5
NODE = "::"
"""A string in the name of every pytest test. A name without this string, such as `[100%]` in some rows of SWE-bench,
comes from another line of the log and is not a test."""
NAMED = 5
"""Maximum number of failing tests in a verdict's reason."""


CONTRADICTS = "the log contradicts itself"


class NotBelieved(Exception):
    """The output cannot be the log of a real test run. The message says why."""


def warm_up() -> None:
    for module in LANGUAGES:
        importlib.import_module(f"swebench.harness.log_parsers.{module}")
    request = {"instance_id": "a-1", "log_parser": "parse_log_pytest", "exit_code": 0, "log": "PASSED a.py::a\n"}
    check({**request, "fail_to_pass": ["a.py::a"], "pass_to_pass": [], "records": "{}", "key": ""})


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Judge the output of a row's tests. Without a `log` in the request, check whether the row is usable.

    With `log`, the result has these fields:

    - `resolved`: true if the row counts as solved.
    - `fail_to_pass`, `pass_to_pass`: the numbers of passing tests in the row's two lists.
    - `why`: the reason if some tests do not pass.

    If the request also has `statuses`, the result has only `statuses`, the status of each test in the log. If the
    request has no `log`, the result has `unusable`, which is None or the reason why the row is unusable. For an
    unusable row, it also has `field`, the option that is the cause."""
    parser = parser_of(request)
    if parser is None:
        field = "log_parser" if request.get("log_parser") else "repo"
        return {"unusable": f"swebench has no parser for {request.get(field)!r}", "field": field}
    spec = spec_of(request, parser)
    if "log" not in request:
        try:
            grading.PARSER_REGISTRY[parser]("", spec)
        except Exception as error:  # the parser refuses logs of this row, and can raise any exception
            return {"unusable": f"{parser} refuses it: {error}", "field": "instance_id"}
        return {"unusable": None}
    log = request["log"]
    try:
        if request.get("exit_code") is not None:
            for mark in MARKS:
                if mark in log:
                    raise NotBelieved(f"{CONTRADICTS}: the tests print {mark!r}")
            log = f"{START}\n{log}\n{END}\n{EXIT_CODE}: {request['exit_code']}\n"
        if "statuses" in request:
            return {"statuses": grading.PARSER_REGISTRY[parser](log, spec)}
        check_marks(log)
        if request.get("expected"):
            witness = None if request.get("pytest") is False else log_of(request["records"], request["key"])
            reported = None if witness is None else witness.splitlines()[1:-1]
            added = (f"test_outrider_{request['key'][:8]}", request["planted"])
            return compare(request["expected"], log, reported, added)
        report = report_of(spec, log)
        if "tests_status" in report:
            check_log(spec, log)
        elif why := report.get("infra_failure_reason"):
            return nothing_of(f"the tests left no results: it looks like {why}")
        else:
            return nothing_of("the tests left no results")
        passed = passing(report)
        in_pytest = request["pytest"] if request.get("pytest") is not None else name_of(parser) in OF_PYTEST
        if in_pytest:
            lists = ("fail_to_pass", "pass_to_pass")
            witnessed = {kind: [test for test in request[kind] if NODE in test] for kind in lists}
            witnessed_report = report_of(
                spec_of({**request, **witnessed}, parser), log_of(request["records"], request["key"])
            )
            passed = {
                kind: {test for test in tests if NODE not in test or test in passing(witnessed_report)[kind]}
                for kind, tests in passed.items()
            }
            report["resolved"] = report["resolved"] and witnessed_report["resolved"]
    except NotBelieved as error:
        return nothing_of(str(error))
    except Exception as error:  # parsers can raise any exception for a log in another format
        return nothing_of(f"{parser} cannot read the log: {type(error).__name__}")
    wanted = dict.fromkeys((*spec.FAIL_TO_PASS, *spec.PASS_TO_PASS))
    failing = [test for test in wanted if not any(test in tests for tests in passed.values())]
    named = ", ".join(failing[:NAMED]) + (f" and {len(failing) - NAMED} more" if len(failing) > NAMED else "")
    return {
        "resolved": report["resolved"],
        "fail_to_pass": sum(test in passed["FAIL_TO_PASS"] for test in spec.FAIL_TO_PASS),
        "pass_to_pass": sum(test in passed["PASS_TO_PASS"] for test in spec.PASS_TO_PASS),
        "why": f"these do not pass: {named}" if failing else None,
    }


def nothing_of(why: str) -> dict[str, Any]:
    return {"resolved": False, "fail_to_pass": 0, "pass_to_pass": 0, "why": why}


def name_of(parser: str) -> str:
    """Return the name of the parser's function. The registry lists many functions under several names."""
    return str(grading.PARSER_REGISTRY[parser].__name__)


def parser_of(request: dict[str, Any]) -> str | None:
    """Return the name of a row's parser in swebench's registry, or None if there is no such parser. Rows of swebench
    5.x name the parser (`log_parser`). For rows of 4.x, the repository determines the parser."""
    registry = grading.PARSER_REGISTRY
    if named := request.get("log_parser"):
        return named if named in registry else None
    for language in LANGUAGES:
        module = importlib.import_module(f"swebench.harness.log_parsers.{language}")
        for name, parsers in vars(module).items():
            if name.startswith("MAP_REPO_TO_PARSER") and (found := parsers.get(request.get("repo"))):
                registry.setdefault(found.__name__, found)
                return str(found.__name__)
    return None


def spec_of(request: dict[str, Any], parser: str) -> Any:
    repo = request.get("repo") or ""
    fails_only = repo in constants.FAIL_ONLY_REPOS and not request.get("log_parser")
    return grading.TestSpec(
        instance_id=request["instance_id"],
        image="",
        eval_script_list=[],
        repo=repo,
        version=request.get("version") or "",
        FAIL_TO_PASS=list(request.get("fail_to_pass") or ()),
        PASS_TO_PASS=list(request.get("pass_to_pass") or ()),
        log_parser=parser,
        eval_type=request.get("eval_type") or ("fail_only" if fails_only else "pass_and_fail"),
    )


def report_of(spec: Any, log: str) -> dict[str, Any]:
    """Return swebench's report about the log. swebench reads logs from files, but this process cannot write a file. So
    the functions with which swebench reads a log are replaced."""
    prediction = {"instance_id": spec.instance_id, "model_name_or_path": "", "model_patch": ""}
    classify_logs = grading.classify_logs
    grading.open = lambda path: io.StringIO(log, newline=None)
    grading.classify_logs = lambda path: classify_text(log)
    try:
        report: dict[str, Any] = grading.get_eval_report(spec, prediction, "", True)[spec.instance_id]
    finally:  # other users of swebench in this process, such as a benchmark, read real files
        del grading.open
        grading.classify_logs = classify_logs
    return report


def passing(report: dict[str, Any]) -> dict[str, set[str]]:
    """Return the passing tests of FAIL_TO_PASS and of PASS_TO_PASS, by the name of the list."""
    status = report.get("tests_status", {})
    return {kind: set(status.get(kind, {}).get("success", ())) for kind in ("FAIL_TO_PASS", "PASS_TO_PASS")}


def check_marks(log: str) -> None:
    """Raise NotBelieved if a test has printed one of the marks around the tests' output, or the mark of their exit
    code. swebench reads only the text between the first two marks, so a test could hide results with its own marks."""
    ends = log.split(END)
    # A script that prints the end mark under `set -x` prints it twice, with only a quote and a newline in between.
    if log.count(START) > 1 or any(between.strip() not in ("", "'", '"') for between in ends[1:-1]):
        raise NotBelieved(f"{CONTRADICTS}: a mark of the test output is there more than once")
    if EXIT_CODE in ends[0] or len(set(grading.TEST_EXIT_CODE_RE.findall(log))) > 1:
        raise NotBelieved(f"{CONTRADICTS}: the exit code is there more than once")


def check_log(spec: Any, log: str) -> None:
    """Raise NotBelieved if a test both passes and fails, or if the log lists more passing tests than pytest's summary
    counts. Only the row's own tests are checked, because other tests may print anything."""
    name = name_of(spec.log_parser)
    if name not in LINE_BY_LINE:
        return
    text = COLOUR.sub("", log.split(START)[1].split(END)[0])
    parser = grading.PARSER_REGISTRY[spec.log_parser]
    # Collect all statuses of a test, not only the last. A forged log may list a pass both before and after the true
    # failure.
    statuses: dict[str, dict[Any, None]] = {}
    for line in dict.fromkeys(text.split("\n")):
        for test, status in parser(line, spec).items():
            statuses.setdefault(test, {})[status] = None
    for test in (*spec.FAIL_TO_PASS, *spec.PASS_TO_PASS):
        if LINE_BY_LINE[name] and not re.fullmatch(LINE_BY_LINE[name], test):
            continue
        cut = test.count("[") > test.count("]")  # several tests may share a name that the parser has cut at a space
        found = tuple(statuses.get(test, ()))
        if not cut and len({status in PASSING for status in found}) > 1:
            raise NotBelieved(f"{CONTRADICTS}: {test} is {' and '.join(map(str, found))}")
    if name in OF_PYTEST and (printed := SUMMARY.findall(text)):
        files = {test.partition(NODE)[0] for test in (*spec.FAIL_TO_PASS, *spec.PASS_TO_PASS)}
        listed = sum(
            status == "PASSED" and NODE in test and test.partition(NODE)[0] in files
            for test, status in parser(text, spec).items()
        )
        counted = sum(int(number) for line in printed for number in re.findall(r"(\d+) passed", line))
        if listed > counted:
            raise NotBelieved(f"{CONTRADICTS}: {listed} tests are PASSED, and pytest counts {counted}")


def log_of(records: str, key: str) -> str:
    """Convert the report of the pytest plugin to a log that swebench can parse. Raises NotBelieved in these cases:

    - The report has a line that the plugin did not write.
    - pytest did not start, or did not come to its normal end.
    - A test that Outrider has added, and that must always fail, did not fail.
    - The code under test has changed pytest or the tests."""
    lines: list[tuple[str, str]] = []
    runs: Counter[Any] = Counter()
    canaries: Counter[tuple[str, str]] = Counter()
    passed: list[str] = []
    for line in records.splitlines():
        try:
            record = json.loads(line)
            known = record.get("key") == key
        except (ValueError, AttributeError, RecursionError):
            known = False
        if not known:
            raise NotBelieved("pytest's report has lines that its plugin did not write")
        if "changed" in record:
            raise NotBelieved(f"the code under test has changed what tests run with: {record['changed']}")
        if "canary" in record:
            canaries[record["when"], record["canary"]] += 1
        elif "planted" in record:
            # When the test that the plugin added is called, it must not pass, and no other code may skip it. But a
            # pytest mark on the whole module (skip, or expected failure) is accepted: with such a mark, `excused_by` is
            # None.
            if record["when"] == "call" and (record["planted"] == "passed" or record["excused_by"] is not None):
                passed.append(record["file"])
        elif "test" in record:
            if status := status_of(record):
                lines.append((status, record["test"]))
        else:
            runs[record.get("ended", "begun")] += 1
    begun = runs.pop("begun", 0)
    if not begun:
        raise NotBelieved("pytest has not reported to the evaluator's plugin")
    if begun != sum(runs.values()) or not runs.keys() <= {*ENDED_WELL, NO_TESTS}:
        raise NotBelieved("pytest did not come to its end")
    failed = sum(number for (_, outcome), number in canaries.items() if outcome == "failed")
    if failed < sum(runs[code] for code in ENDED_WELL) or canaries["call", "passed"] or canaries["call", "skipped"]:
        raise NotBelieved("the test that always fails did not fail")
    if passed:
        raise NotBelieved(f"a test that always fails did not fail in the file {passed[0]}")
    lines.sort(key=lambda line: ORDER.index(line[0]))
    return "\n".join([START, *(f"{status} {test}" for status, test in lines), END])


def status_of(record: dict[str, Any]) -> str | None:
    """Return a test's status in pytest's summary for one phase (setup, call or teardown), or None if the phase has no
    status. A test counts as failed if the code under test has skipped it or marked it as an expected failure."""
    if record["outcome"] == "skipped" and record.get("excused_by") is not None:
        return "FAILED"
    match record["when"], record["outcome"], record["expected"]:
        case _, "skipped", expected:
            return "XFAIL" if expected else "SKIPPED"
        case "call", "passed", expected:
            return "XPASS" if expected else "PASSED"
        case "call", "failed", _:
            return "FAILED"
        case _, "failed", _:
            return "ERROR"
    return None
