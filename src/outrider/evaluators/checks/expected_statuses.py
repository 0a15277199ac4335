"""Judges the test log of a row of the data set R2E-Gym: every test must have exactly the status that the row expects.
The module is pure, and runs in the process of `swebench_check`.

Logs are read in the same way as by R2E-Gym's own parser (`repo_analysis/execution_log_parser.py` and
`agenthub/runtime/docker.py` at commit 69bc9535). Invariant: the judgement is never better than R2E-Gym's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

COLOUR = re.compile(r"\x1b\[[0-9;]*m|\r")
SUMMARY = "short test summary info"
STATUSES = ("PASSED", "FAILED", "ERROR")
CONTRADICTED = "PASSED and FAILED"
"""The status of a test that pytest's summary lists both as passed and as failed. pytest itself never does this."""
NAMED = 5
"""Maximum number of tests named in a verdict's reason."""


def name_of_test(test: str) -> str:
    """Return the name that R2E-Gym gives to a test. For example, `tests/a.py::Suite::test_b - message` becomes
    `Suite.test_b`."""
    return ".".join(test.split("::")[1:]).split(" - ")[0]


def statuses_of(log: str) -> dict[str, str]:
    """Return the status of each test in pytest's summary, by the name that R2E-Gym gives to the test. If tests of
    several files share a name, the last status counts, as in R2E-Gym. If the summary lists one test of one file both as
    passed and as failed, the status is CONTRADICTED."""
    _, found, summary = COLOUR.sub("", log).partition(SUMMARY)
    statuses: dict[str, str] = {}
    decided: dict[str, str] = {}
    contradicted: set[str] = set()
    for line in summary.partition(SUMMARY)[0].strip().split("\n") if found else ():
        status = next((status for status in STATUSES if status in line), None)
        if status is None:
            continue
        name = name_of_test(line)
        statuses[name] = status
        test = line.split(" - ")[0].replace(status, "", 1).strip()
        # An ERROR does not contradict a PASSED: pytest itself lists a test with both statuses if the test passes and
        # its teardown fails.
        if status != "ERROR" and decided.setdefault(test, status) != status:
            contradicted.add(name)
    return statuses | dict.fromkeys(contradicted, CONTRADICTED)


def compare(
    expected: Mapping[str, str], log: str, reported: Iterable[str] | None, added: tuple[str, ...]
) -> dict[str, Any]:
    """Return the judgement in the format of `swebench_check.check`.

    expected: the status that each test must have, by name.
    reported: lines from Outrider's pytest plugin, each with a status and a test, or None if the tests do not run in
        pytest. If `reported` is given, a test has its expected status only if both the log and one of these lines show
        it.
    added: endings of the names of Outrider's own tests. Tests with such an ending are ignored."""
    wanted = {name.split(" - ")[0]: status for name, status in expected.items()}
    found = {name: status for name, status in statuses_of(log).items() if not name.endswith(added)}
    met = {name for name, status in wanted.items() if found.get(name) == status}
    if reported is not None:
        witnessed: dict[str, set[str]] = defaultdict(set)
        for line in reported:
            status, _, test = line.partition(" ")
            witnessed[name_of_test(test)].add(status)
        met = {name for name in met if wanted[name] in witnessed[name]}
    other = [f"{name} ({found.get(name, 'not run')}, not {wanted[name]})" for name in wanted if name not in met]
    other += [f"{name} ({status}, not expected)" for name, status in found.items() if name not in wanted]
    more = f" and {len(other) - NAMED} more" if len(other) > NAMED else ""
    why = f"these have other statuses than expected: {', '.join(other[:NAMED])}{more}" if other else None
    return {"resolved": not other, "fail_to_pass": len(met), "pass_to_pass": 0, "why": why}
