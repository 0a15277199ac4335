"""Adapters for data sets that resemble SWE-bench. Each adapter's docstring says how its rows differ from those of
SWE-bench.

Sources of the columns and of the rules:

- SWE-Gym: SWE-Gym/SWE-Bench-Fork (242429c1: `constants.py`, `log_parsers.py`)
- SWE-rebench: SWE-rebench/SWE-bench-fork (39316f79: `test_spec.py`, `grading.py`, `utils.py`)
- SWE-smith: SWE-bench/SWE-smith (cf2e649d: `harness/utils.py`, `harness/grading.py`, `harness/gather.py`)
- R2E-Gym: R2E-Gym/R2E-Gym (69bc9535: `agenthub/runtime/docker.py`, `repo_analysis/execution_log_parser.py`)
- SWE-bench Pro: scaleapi/SWE-bench_Pro-os (ca10a60a: `swe_bench_pro_eval.py`, `run_scripts`, `README.md`)
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outrider.errors import InvalidField
from outrider.evaluators.checks.expected_statuses import COLOUR, STATUSES
from outrider.evaluators.swebench.options import is_test
from outrider.tasks.dataset_rows import Additions, Columns, Draft
from outrider.tasks.examples import Gold
from outrider.tasks.row_values import value_at
from outrider.tasks.swebench import (
    ACTIVATE,
    COMMANDS,
    MODULES,
    OR_IN_FILE,
    PYTEST,
    TESTS,
    image_of,
    options_of,
    run_by_command,
    swe_draft,
)

PARSER = "parse_log_pytest"
SWE_GYM_IMAGE = "xingyaoww/sweb.eval.x86_64.{instance_id/__/_s_}:latest"
SWE_GYM_COMMANDS = {
    "getmoto/moto": f"pytest -n0 -rA {TESTS}",
    "conan-io/conan": f"pytest -n0 -rA {TESTS}",
    "dask/dask": f"pytest -n0 -rA --color=no {TESTS}",
    "project-monai/monai": f"pytest -rA {TESTS}",
    "iterative/dvc": f"pytest -rA {TESTS}",
    "bokeh/bokeh": f"pytest -rA -n0 {TESTS}",
    "modin-project/modin": f"pytest -n0 -rA {TESTS}",
    "hypothesisworks/hypothesis": f"pytest -n0 -rA --tb=no --no-header {TESTS}",
    "pydantic/pydantic": f"pytest -rA --tb=short -vv -o console_output_style=classic --no-header {TESTS}",
    "pandas-dev/pandas": f"pytest -rA --tb=long {TESTS}",
    "facebookresearch/hydra": f"pytest -rA --tb=long {TESTS}",
}
MYPY, MYPY_CASE = "python/mypy", re.compile(r"\[case ([^\]]+)\]")
SWE_REBENCH_IMAGE = "swerebench/sweb.eval.x86_64.{instance_id/__/_1776_}:latest"
SMITH_COMMAND = "pytest --disable-warnings --color=no --tb=no --verbose -rA"
"""SWE-smith's own command, plus the option `-rA`, which prints the summary that swebench's parser reads."""
BUG, APPLY = ".outrider-bug.patch", "git apply"
BREAK = f"""\
set -e
{APPLY} {BUG} || patch --batch --fuzz=5 -p1 -i {BUG}
rm {BUG}
rm -rf .git
git init -q . && git add -A && git -c user.name=x -c user.email=x@localhost commit -q -m base
"""
"""Shell script that applies the bug to the repository, and makes the result the only commit. With more commits, a diff
or an older commit would show the solution. SWE-smith's own copies of repositories also have a single commit."""
NAMED = 20
"""Maximum number of failing tests that an instruction lists."""
R2E_PLACE = "/root/r2e"
R2E_HIDE = f"""\
mkdir -p {R2E_PLACE}
for file in run_tests.sh r2e_tests /r2e_tests; do
    [ ! -e "$file" ] || mv "$file" {R2E_PLACE}/
done
"""
"""Shell script that moves the hidden tests out of the repository, like R2E-Gym's own setup."""
R2E_COMMAND = f"rm -rf r2e_tests\nln -s {R2E_PLACE}/r2e_tests r2e_tests\nbash {R2E_PLACE}/run_tests.sh"
R2E_RUNNERS = ("tornado", "datalad")
"""Repositories of R2E-Gym that do not run their tests with pytest."""
ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
PRO_SCRIPTS = {"run_script.sh": "run", "parser.py": "parse"}
PRO_COMMAND = """\
{before}
place=$(mktemp -d)
printf %s {run} > $place/run_script.sh
printf %s {parse} > $place/parser.py
bash $place/run_script.sh {selected} > $place/stdout.log 2> $place/stderr.log
python=$(command -v python || command -v python3)
$python $place/parser.py $place/stdout.log $place/stderr.log $place/output.json
$python -c {report} $place/output.json
"""
PRO_REPORT = """\
import json, re, sys
for test in json.load(open(sys.argv[1]))["tests"]:
    status = "PASSED" if test["status"] == "PASSED" else "FAILED"
    print(status, re.sub(r"[%\\s]", lambda blank: "%%%02X" % ord(blank.group()), test["name"]))
"""
"""Program that prints the results of an instance's own parser. The output has a format that swebench's parser reads."""


def swe_gym(columns: Columns, given: Additions) -> Draft:
    """SWE-Gym: rows have SWE-bench's columns, but swebench has neither parsers nor test commands for these
    repositories. So all logs are read as pytest logs, as in SWE-Gym's fork."""
    options = {"log_parser": PARSER, **options_of(columns)}
    own = None
    # mypy's tests are cases in data files. pytest selects these cases by name.
    if str(columns.get("repo")).lower() == MYPY:
        cases = " or ".join(MYPY_CASE.findall(str(columns.get("test_patch"))))
        own = f'pytest -n0 -rA -k "{cases}"' if cases else None
    options |= run_by_command(columns, given, known={**COMMANDS, **SWE_GYM_COMMANDS}, own=own)
    return swe_draft(columns, options, image=image_of(columns, given, SWE_GYM_IMAGE))


def swe_rebench(columns: Columns, given: Additions) -> Draft:
    """SWE-rebench: rows have SWE-bench's columns and `docker_image`. `install_config` has the test command and the
    parser's name."""
    options = {**options_of(columns), "log_parser": columns.text("install_config.log_parser")}
    own = None
    if given.test_command is None:
        remedy = f'give --test-command, such as "{PYTEST}", {OR_IN_FILE}'
        own = f"{columns.text('install_config.test_cmd', remedy=remedy)} {TESTS}"
    options |= run_by_command(columns, given, own=own)
    return swe_draft(
        columns, options, image=image_of(columns, given, columns.optional_text("docker_image") or SWE_REBENCH_IMAGE)
    )


def swe_smith(columns: Columns, given: Additions) -> Draft:
    """SWE-smith: the repository contains the tests, and `patch` adds the bug. A prepare step applies the patch, and the
    known solution removes the bug. If a row has no problem statement, the instruction lists the failing tests."""
    name = columns.text("instance_id")
    bug = columns.patch("patch")
    fail_to_pass = columns.tests("FAIL_TO_PASS", needed=True)
    tests = sorted({test.partition("::")[0] for test in fail_to_pass})
    command = given.test_command or f"{SMITH_COMMAND} {TESTS}"
    options = {
        "instance_id": name,
        "log_parser": PARSER,
        "fail_to_pass": fail_to_pass,
        "pass_to_pass": columns.tests("PASS_TO_PASS"),
        "test_patch": "",
        "test_command": ACTIVATE + filled_in(command, "swe-smith", tests),
    }
    prepare = ({"write": bug, "to": BUG}, {"run": BREAK})
    gold = Gold(files=({"write": bug, "to": BUG},), run=f"{APPLY} --reverse {BUG} && rm {BUG}")
    failing = "\n".join(fail_to_pass[:NAMED])
    statement = columns.optional_text("problem_statement") or f"These tests fail, and must pass:\n\n{failing}"
    image = image_of(columns, given, columns.optional_text("image_name") or None)
    if image is None and given.image is None:
        columns.missing("image_name", "give --image-template")
    return swe_draft(columns, options, image=image, statement=statement, gold=gold, prepare=prepare)


def swebench_pro(columns: Columns, given: Additions) -> Draft:
    """SWE-bench Pro: the columns that list tests have lower-case names, and contain Python lists as text. The column
    `dockerhub_tag` names the image.

    For each instance, the folder `run_scripts` of SWE-bench Pro's repository has a script that runs the tests, and a
    program that reads the script's output. This folder must be beside the file of rows. If the user gives a test
    command, pytest's log is read instead."""
    name = columns.text("instance_id")
    patch = columns.patch("test_patch")
    lists = {key: columns.tests(key, needed=key == "fail_to_pass") for key in ("fail_to_pass", "pass_to_pass")}
    selected = columns.tests("selected_test_files_to_run")
    # As in SWE-bench Pro's own harness, only the last line of this column is run. The last line puts the graded tests
    # in place.
    before = (columns.optional_text("before_repo_set_cmd") or "").strip().rpartition("\n")[2]
    options: dict[str, Any] = {"instance_id": name, "log_parser": PARSER, "test_patch": patch}
    if given.test_command is not None:
        command = filled_in(given.test_command, "swebench-pro", selected)
        options |= {**lists, "test_command": f"{before}\n{command}".lstrip()}
    else:
        texts = {file: script_of(columns, given.folder / "run_scripts" / name / file) for file in PRO_SCRIPTS}
        options |= {key: [quoted(test) for test in tests] for key, tests in lists.items()}
        options["pytest"] = False  # pytest's own reports do not use the parser's names for the tests
        words = {key: shlex.quote(texts[file]) for file, key in PRO_SCRIPTS.items()}
        words |= {"selected": shlex.quote(",".join(selected)), "report": shlex.quote(PRO_REPORT)}
        options["test_command"] = PRO_COMMAND.format(before=before, **words)
    tag = columns.optional_text("dockerhub_tag")
    image = image_of(columns, given, f"jefzda/sweap-images:{tag}" if tag else None)
    if image is None and given.image is None:
        columns.missing("dockerhub_tag", "give --image-template")
    parts = [columns.text("problem_statement")]
    for title in ("requirements", "interface"):
        if (text := columns.optional_text(title)) is not None:
            parts.append(f"{title.capitalize()}:\n{text.strip()}")
    return swe_draft(columns, options, image=image, statement="\n\n".join(parts), workdir="/app", carry={"diff": "."})


def filled_in(command: str, kind: str, tests: Sequence[str] | None = None) -> str:
    """Return a test command with `{tests}` replaced by `tests`. Raises InvalidField for `{modules}`, whose output no
    parser of these data sets reads, and for `{tests}` if `tests` is None."""
    for name in (MODULES,) if tests is not None else (TESTS, MODULES):
        if name in command.replace(f"${name}", ""):  # `${tests}` is a variable of the shell
            hint = f"they know {TESTS}" if tests is not None else f"they know none: the tests are in {R2E_PLACE}"
            raise InvalidField(
                f"rows of the kind {kind} do not know the placeholder {name}", field="test_command", hint=hint
            )
    return command.replace(TESTS, shlex.join(tests)) if tests is not None else command


def script_of(columns: Columns, path: Path) -> str:
    """Return the text of a script that belongs to a row of SWE-bench Pro."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError):  # the file is not UTF-8, or the row's name cannot be a file's
        clone = "put the rows beside run_scripts of a clone of scaleapi/SWE-bench_Pro-os"
        remedy = f"{clone}, or give --test-command, {OR_IN_FILE}"
        columns.fault("run_scripts", f"has no {path.name} for this row", remedy)
        return ""


def quoted(test: str) -> str:
    """Return a test's name with its whitespace escaped, as PRO_REPORT prints it. Without the escapes, the log parser
    would cut the name at a space."""
    return re.sub(r"[%\s]", lambda blank: f"%{ord(blank.group()):02X}", test)


def r2e_gym(columns: Columns, given: Additions) -> Draft:
    """R2E-Gym: instead of a test patch and lists of tests, a row has the expected status of each test in the image. The
    known solution is the commit's new version of each Python file that the commit changed, except test files."""
    repo, commit = columns.text("repo_name"), columns.text("commit_hash")
    name = f"{repo}__{commit}"
    expected = expected_of(columns)
    statement = columns.text("problem_statement")
    issue = ISSUE.search(statement)
    options: dict[str, Any] = {
        "instance_id": name,
        "log_parser": PARSER,
        "fail_to_pass": list(expected),
        "expected": expected,
        "test_patch": "",
        "test_command": filled_in(given.test_command or R2E_COMMAND, "r2e-gym"),
    }
    if repo in R2E_RUNNERS:
        options["pytest"] = False
    image = image_of(columns, given, columns.optional_text("docker_image"))
    if image is None and given.image is None:
        columns.missing("docker_image", "give --image-template")
    draft = swe_draft(
        columns,
        options,
        image=image,
        statement=issue[1] if issue else statement,
        gold=Gold(),
        prepare=({"run": R2E_HIDE},),
        carry={"diff": "."},
    )
    return msgspec.structs.replace(draft, gold=commit_of(columns))


def expected_of(columns: Columns) -> dict[str, str]:
    """Return the expected status of each test in a row of R2E-Gym, by the test's name. Colour codes are removed from
    the names."""
    column = "expected_output_json"
    value = columns.get(column)
    if value is None:
        columns.missing(column)
        return {}
    try:
        table = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, Mapping) or not all(isinstance(status, str) for status in table.values()):
        columns.fault(column, "is no object of the tests and their statuses")
        return {}
    expected = {COLOUR.sub("", test): status for test, status in table.items()}
    if strange := sorted({*expected.values()} - {*STATUSES}):
        columns.fault(column, f"has the status {strange[0]!r}, which is none of {', '.join(STATUSES)}")
    if "PASSED" not in expected.values():
        columns.fault(column, "expects no test to pass")
    return expected


def commit_of(columns: Columns) -> Gold | None:
    """Return the known solution: the changes to Python files, except tests, in the commit of the column
    `parsed_commit_content`. Returns None if there are no such changes."""
    diffs = columns.get("parsed_commit_content.file_diffs")
    files: list[dict[str, Any]] = []
    removed: list[str] = []
    for diff in diffs if isinstance(diffs, list) else ():
        if not isinstance(diff, Mapping):
            continue
        path, new = value_at(diff, "header.file.path"), diff.get("new_file_content")
        if not isinstance(path, str) or not isinstance(new, str) or is_test(path) or not path.endswith(".py"):
            continue
        if new in ("", "/dev/null"):
            removed.append(path)
        else:
            files.append({"write": new, "to": path})
    if not files and not removed:
        return None
    return Gold(files=tuple(files), run=f"rm -f -- {shlex.join(removed)}" if removed else None)
