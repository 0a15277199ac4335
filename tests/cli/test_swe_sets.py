"""Rows of data sets of repositories: their images and commands, missing columns, and TOML files for rows.

The rows have the columns of the real sets (`tasks/swe_sets.py` names the sources), and use the small repository of
`evaluators/swe_world.py`. `test_swe_images.py` runs each of them in an image.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cli.test_answer_sets import GSM8K, NEMO_CODE
from cli.test_examples import needs_namespaces
from evaluators.swe_world import BASE, FAULT, FIELDS, FIX, GIT, PATCH, QUICK, ROW, TEST
from outrider.cli.task_sources import examples_in
from outrider.errors import InvalidField
from outrider.evaluators.factory import make_evaluator
from outrider.evaluators.swebench.options import SwebenchOptions, restored_paths
from outrider.tasks import drafts
from outrider.tasks.adapters import ADAPTERS
from outrider.tasks.dataset_rows import Additions
from outrider.tasks.examples import Example
from test_datasets import as_task

from .world import Cli

PYTHON = FIELDS["mounts"]
SOURCE = "src/shop/prices.py"
GOLD = (
    f"diff --git a/{SOURCE} b/{SOURCE}\n--- a/{SOURCE}\n+++ b/{SOURCE}\n"
    f"@@ -1,2 +1,2 @@\n def total(prices):\n-{FAULT.splitlines()[1]}\n+{FIX.splitlines()[1]}\n"
)
VERIFIED: dict[str, Any] = {
    "repo": "pallets/flask",
    "instance_id": "pallets__flask-5014",
    "base_commit": "7ee9ceb71e868944a46e1ff00b506772a53a4f1d",
    "patch": GOLD,
    "test_patch": PATCH,
    "problem_statement": "The sum of prices leaves one out.",
    "hints_text": "",
    "created_at": "2023-03-04T18:36:21Z",
    "version": "2.3",
    "FAIL_TO_PASS": json.dumps(ROW["fail_to_pass"]),
    "PASS_TO_PASS": json.dumps(ROW["pass_to_pass"]),
    "environment_setup_commit": "182ce3dd15dfa3537391c3efaf9c3ff407d134d4",
    "difficulty": "<15 min fix",
}
LISTS = {"FAIL_TO_PASS": ROW["fail_to_pass"], "PASS_TO_PASS": ROW["pass_to_pass"]}
SWE_GYM: dict[str, Any] = {
    **{name: value for name, value in VERIFIED.items() if name not in ("environment_setup_commit", "difficulty")},
    **LISTS,
    "repo": "getmoto/moto",
    "instance_id": "getmoto__moto-7365",
    "version": "5.0",
}
SWE_REBENCH: dict[str, Any] = {
    **VERIFIED,
    **LISTS,
    "repo": "oemof/tespy",
    "instance_id": "oemof__tespy-653",
    "version": "0.8",
    "docker_image": "swerebench/sweb.eval.x86_64.oemof_1776_tespy-653",
    "install_config": {
        "env_vars": None,
        "install": "pip install -e .[dev]",
        "log_parser": "parse_log_pytest",
        "no_use_env": None,
        "packages": "requirements.txt",
        "pip_packages": ["pytest"],
        "pre_install": None,
        "python": "3.9",
        "test_cmd": "pytest --no-header -rA --tb=line --color=no -p no:cacheprovider -W ignore::DeprecationWarning",
    },
    "meta": {"commit_name": "head_commit", "has_test_patch": True, "is_lite": True, "num_modified_files": 1},
}
BUG = (
    f"diff --git a/{SOURCE} b/{SOURCE}\n--- a/{SOURCE}\n+++ b/{SOURCE}\n"
    f"@@ -1,2 +1,2 @@\n def total(prices):\n-{FIX.splitlines()[1]}\n+{FAULT.splitlines()[1]}\n"
)
TESTS = """\
from helpers import check
from shop import total

def test_empty():
    assert total([]) == 0

def test_all_are_counted():
    check(total([1, 2]), 3)

def test_it_is_a_number():
    assert total([1]) != 7
"""
SWE_SMITH: dict[str, Any] = {
    "instance_id": "shop__shop.1fd52536.combine_file__09vlzwgc",
    "patch": BUG,
    **LISTS,
    "image_name": "jyangballin/swesmith.x86_64.shop_1776_shop.1fd52536",
    "repo": "swesmith/shop__shop.1fd52536",
    "problem_statement": "",
}
SMITHS_REPOSITORY = [{"write": FIX, "to": SOURCE}, {"write": TESTS, "to": TEST}, {"run": GIT}]
EXPECTED = {"test_empty": "PASSED", "test_all_are_counted": "PASSED", "test_not_yet": "FAILED"}
COMMIT = {
    "file_diffs": [
        {"old_file_content": FAULT, "new_file_content": FIX, "header": {"file": {"path": SOURCE}, "misc_line": None}},
        {"old_file_content": "", "new_file_content": "raise", "header": {"file": {"path": TEST}, "misc_line": None}},
    ],
    "old_commit_hash": "0" * 40,
    "new_commit_hash": "1" * 40,
    "commit_message": "Count all",
    "metadata": {},
}
R2E: dict[str, Any] = {
    "repo_name": "pillow",
    "docker_image": "namanjain12/pillow_final:" + "1" * 40,
    "commit_hash": "1" * 40,
    "parsed_commit_content": json.dumps(COMMIT),
    "execution_result_content": json.dumps({"test_file_names": ["test_1.py"], "test_file_codes": [""]}),
    "modified_files": [SOURCE],
    "modified_entity_summaries": [],
    "relevant_files": [SOURCE],
    "num_non_test_files": 1,
    "prompt": "You are an expert software engineer.",
    "problem_statement": "Some words.\n[ISSUE]\n**The sum leaves one out.**\n[/ISSUE]",
    "expected_output_json": json.dumps({**EXPECTED, "\x1b[1mtest_empty\x1b[0m": "PASSED"}),
}
R2E_TESTS = "from shop import total\n\n" + "\n\n".join(
    f"def {name}():\n    assert {check}"
    for name, check in zip(EXPECTED, ("total([]) == 0", "total([1, 2]) == 3", "total([1]) == 7"), strict=True)
)
PRO: dict[str, Any] = {
    "repo": "shop/shop",
    "instance_id": "instance_shop__shop-01d1d149-v2ef375ac",
    "base_commit": "base",
    "patch": GOLD,
    "test_patch": PATCH,
    "problem_statement": "The sum of prices leaves one out.",
    "requirements": "- Every price counts.",
    "interface": "No new interfaces are introduced.",
    "repo_language": "python",
    "fail_to_pass": str(["all are | counted 100%"]),
    "pass_to_pass": str(["empty", "it is a number"]),
    "issue_specificity": '["minor_bug"]',
    "issue_categories": '["back_end_knowledge"]',
    "before_repo_set_cmd": f"git reset --hard base\ngit clean -fd\ngit checkout base\ngit checkout solved -- {TEST}",
    "selected_test_files_to_run": str([TEST, "tests/test_more.py"]),
    "dockerhub_tag": "shop.shop-shop__Shop-01d1d149",
}
RUN_SCRIPT = """\
#!/bin/bash
IFS=',' read -r -a files <<< "$1"
[ "${files[1]}" = tests/test_more.py ] || exit 3
pytest -v "${files[0]}" 2>&1
"""
PARSER = """\
import json, re, sys
names = {"test_all_are_counted": "all are | counted 100%"}
results = re.findall(r"::(\\w+) (PASSED|FAILED)", open(sys.argv[1]).read())
tests = [{"name": names.get(name, name[5:].replace("_", " ")), "status": status} for name, status in results]
json.dump({"tests": tests}, open(sys.argv[3], "w"))
"""
pytestmark = needs_namespaces


def toml(value: Any) -> str:
    """Return a value as TOML without line breaks."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(name)} = {toml(inner)}" for name, inner in value.items()) + " }"
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else json.dumps(value)


def task_file(folder: Path, kind: str, row: dict[str, Any], prepare: list[dict[str, Any]], **rows: str) -> Path:
    """Write a TOML file for one row. The sandbox has the repository without an image, and a program `pytest` on its
    PATH, as in the real images."""
    written(folder, row)
    program = "#!/bin/sh\n" + f'{QUICK} exec {sys.executable} -m pytest -p xdist.plugin "$@"\n'
    runtime = {
        "workdir": FIELDS["workdir"],
        "env": {**FIELDS["env"], "PATH": "/opt/bin:/usr/bin:/bin"},
        "resources": FIELDS["resources"],
        "mounts": [{"source": str(path)} for path in PYTHON],
        "prepare": [
            {"write": program, "to": "/opt/bin/pytest", "executable": True},
            *({"write": text, "to": path} for path, text in BASE.items()),
            *prepare,
        ],
    }
    path = folder / "task.toml"
    table = {"file": "rows.jsonl", "kind": kind, "image": "", **rows}
    path.write_text(f"rows = {toml(table)}\nruntime = {toml(runtime)}\nevaluator = {{ seconds = 120 }}\n")
    return path


def run_scripts(folder: Path) -> None:
    place = folder / "run_scripts" / PRO["instance_id"]
    place.mkdir(parents=True)
    (place / "run_script.sh").write_text(RUN_SCRIPT)
    (place / "parser.py").write_text(PARSER)


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def example_of(kind: str, folder: Path, row: dict[str, Any], **options: Any) -> Example:
    [example] = examples_in(f"{kind}:{written(folder, row)}", limit=None, image=None, **options)
    return example


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kind", "row", "made"), [("swebench", VERIFIED, [{"run": GIT}]), ("swe-smith", SWE_SMITH, SMITHS_REPOSITORY)]
)
async def test_the_known_solution_earns_1_and_nothing_0(
    cli: Cli, tmp_path: Path, kind: str, row: dict[str, Any], made: list[dict[str, Any]]
) -> None:
    pytest.importorskip("swebench", reason="swebench is not installed: pip install --no-deps swebench unidiff")
    ran = await cli("task", "check", task_file(tmp_path, kind, row, made), "--json")
    assert ran.document == {"tasks": 1, "ok": 1, "bad": []}


@pytest.mark.parametrize(
    ("kind", "row", "image", "command"),
    [
        ("swebench", VERIFIED, "swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest", f"pytest -rA {TEST}"),
        ("swe-gym", SWE_GYM, "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365:latest", f"pytest -n0 -rA {TEST}"),
        (
            "swe-rebench",
            SWE_REBENCH,
            "swerebench/sweb.eval.x86_64.oemof_1776_tespy-653",
            f"{SWE_REBENCH['install_config']['test_cmd']} {TEST}",
        ),
        (
            "swe-rebench",
            {**SWE_REBENCH, "docker_image": None},
            "swerebench/sweb.eval.x86_64.oemof_1776_tespy-653:latest",
            f"{SWE_REBENCH['install_config']['test_cmd']} {TEST}",
        ),
    ],
)
def test_image_and_command_are_those_of_the_set(
    tmp_path: Path, kind: str, row: dict[str, Any], image: str, command: str
) -> None:
    example = example_of(kind, tmp_path, row)
    assert example.task["runtime"]["image"] == image
    assert example.task["evaluator"]["options"]["test_command"].splitlines()[-1] == command


def without(row: dict[str, Any], *names: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names} | changes


BROKEN: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("swebench", without(VERIFIED, "instance_id"), "instance_id", "is missing", "it has: "),
    ("swebench", without(VERIFIED, problem_statement=" "), "problem_statement", "is empty", "leave the row out"),
    ("swebench", without(VERIFIED, problem_statement=7), "problem_statement", "is a number and must be", "leave"),
    ("swebench", without(VERIFIED, patch="Mend it."), "patch", "is no diff", "leave the row out"),
    ("swebench", without(VERIFIED, FAIL_TO_PASS="[]"), "FAIL_TO_PASS", "is empty, so that every run", "leave"),
    ("swebench", without(VERIFIED, FAIL_TO_PASS="a, b"), "FAIL_TO_PASS", "is neither a list", "leave"),
    ("swebench", without(VERIFIED, PASS_TO_PASS=[1]), "PASS_TO_PASS", "is no list of the names of tests", "leave"),
    ("swebench", without(VERIFIED, eval_type="all"), "eval_type", "is 'all'", "leave the row out"),
    ("swebench", without(VERIFIED, repo="a/b"), "test_command", "is missing", "--test-command"),
    ("swe-gym", without(SWE_GYM, repo="spyder-ide/spyder"), "test_command", "is missing", "--test-command"),
    ("swe-gym", without(SWE_GYM, test_patch=None), "test_patch", "is missing", "it has: "),
    ("swe-rebench", without(SWE_REBENCH, "install_config"), "install_config.log_parser", "is missing", "it has: "),
    (
        "swe-rebench",
        without(SWE_REBENCH, install_config={"log_parser": "parse_log_pytest"}),
        "install_config.test_cmd",
        "is missing",
        "--test-command",
    ),
    ("swe-smith", without(SWE_SMITH, "image_name"), "image_name", "is missing", "--image-template"),
    ("r2e-gym", without(R2E, "commit_hash"), "commit_hash", "is missing", "it has: "),
    ("r2e-gym", without(R2E, "docker_image"), "docker_image", "is missing", "--image-template"),
    ("r2e-gym", without(R2E, expected_output_json="[1]"), "expected_output_json", "is no object", "leave"),
    ("r2e-gym", without(R2E, expected_output_json='{"a": "OK"}'), "expected_output_json", "the status 'OK'", "leave"),
    ("r2e-gym", without(R2E, expected_output_json="{}"), "expected_output_json", "expects no test to pass", "leave"),
    ("swebench-pro", without(PRO, "dockerhub_tag"), "dockerhub_tag", "is missing", "--image-template"),
    ("swebench-pro", without(PRO, instance_id="instance_x"), "run_scripts", "has no run_script.sh", "clone of"),
    ("swebench-pro", without(PRO, fail_to_pass="[open('x')]"), "fail_to_pass", "is neither a list", "leave"),
    ("swebench-pro", without(PRO, fail_to_pass="[{[]: 1}]"), "fail_to_pass", "is neither a list", "leave"),
    ("swebench-pro", without(PRO, instance_id="a\0b"), "run_scripts", "has no run_script.sh", "clone of"),
    ("swebench-pro", without(PRO, instance_id="\ud800"), "run_scripts", "has no run_script.sh", "clone of"),
    (
        "r2e-gym",
        without(R2E, "commit_hash", parsed_commit_content={"file_diffs": ["x"]}),
        "commit_hash",
        "is missing",
        "it has: ",
    ),
]


@pytest.mark.parametrize(("kind", "row", "column", "says", "remedy"), BROKEN)
def test_what_a_row_lacks_is_named(
    tmp_path: Path, kind: str, row: dict[str, Any], column: str, says: str, remedy: str
) -> None:
    run_scripts(tmp_path)
    fault = example_of(kind, tmp_path, row, faults=True).faults[0]
    assert fault.column == column
    assert says in fault.problem
    assert remedy in fault.remedy
    with pytest.raises(InvalidField, match=r"row 0 of .*rows.jsonl") as raised:
        example_of(kind, tmp_path, row)
    assert raised.value.field == column
    assert remedy in str(raised.value.hint)


async def test_the_list_names_what_each_row_lacks(cli: Cli, tmp_path: Path) -> None:
    unknown = [without(VERIFIED, instance_id=f"shop__shop-{number}", repo="shop/shop") for number in (1, 2)]
    bare = {"instance_id": "shop__shop-3", "repo": "shop/shop", "note": "x" * 200}
    source = f"swebench:{written(tmp_path, VERIFIED, *unknown, bare)}"
    ran = await cli("task", "list", source)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["1", "shop__shop-1", "test_command"]
    assert lines[4].split()[:4] == ["3", "shop__shop-3", "FAIL_TO_PASS,", "test_patch,"]
    told = " ".join(" ".join(lines[5:]).split())
    assert 'test_command is missing in 3 rows: give --test-command, such as "python -m pytest -rA {tests}"' in told
    assert "problem_statement is missing in 1 row: it has: instance_id, note, repo" in told
    assert lines[-1] == "3 of 4 rows are no tasks yet"

    good, first, *_ = (await cli("task", "list", source, "--json")).document
    assert "missing" not in good
    assert good["image"] == "swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest"
    assert first["row"] == 1
    assert first["missing"][0]["column"] == "test_command"

    shown = (await cli("task", "show", source, "shop__shop-1", "--json")).document
    assert shown["missing"] == first["missing"]
    assert "missing.test_command" in (await cli("task", "show", source, "shop__shop-1")).out
    assert (await cli("task", "show", source)).code == 0

    ran = await cli("task", "check", source)
    assert ran.code == 2
    assert "has no column 'test_command', and 2 more rows have faults" in ran.err
    assert f"`outrider task list {source}` lists every fault" in ran.err
    mended = await cli("task", "list", f"swebench:{written(tmp_path, *unknown)}", "--test-command", "run {tests}")
    assert [line.split()[:3] for line in mended.out.splitlines()[2:]] == [
        [f"shop__shop-{number}", "swebench", "yes"] for number in (1, 2)
    ]
    assert max(map(len, mended.out.splitlines())) <= 80


def test_options_of_the_command_line_come_before_the_rows(tmp_path: Path) -> None:
    source = f"swe-rebench:{written(tmp_path, SWE_REBENCH)}"
    template = "Mirror.example/{docker_image/swerebench/rebench}:v1"
    [example] = examples_in(source, limit=None, image=template, test_command="run {tests}")
    assert example.task["runtime"]["image"] == "mirror.example/rebench/sweb.eval.x86_64.oemof_1776_tespy-653:v1"
    assert example.task["evaluator"]["options"]["test_command"].splitlines()[-1] == f"run {TEST}"


async def test_options_of_the_command_line_come_before_those_of_a_file(cli: Cli, tmp_path: Path) -> None:
    file = task_file(tmp_path, "swebench", {**VERIFIED, "repo": "shop/shop"}, [{"run": GIT}]).rename(
        tmp_path / "set.toml"
    )
    refused = await cli("task", "import", file, "--out", tmp_path / "out.jsonl")
    assert "give --test-command" in refused.err
    assert "[rows] test_command" in refused.err
    options: dict[str, Any] = {"image": "shop:v2", "test_command": "run {tests}"}
    for source, limit in ((file, None), (tmp_path, 1)):
        [example] = examples_in(str(source), limit=limit, **options)
        assert example.task["runtime"]["image"] == "shop:v2"
        assert example.task["evaluator"]["options"]["test_command"].splitlines()[-1] == f"run {TEST}"
    file = task_file(tmp_path, "swebench", VERIFIED, [{"run": GIT}], test_command="own {tests}")
    [example] = examples_in(str(file), limit=None, image=None)
    assert example.task["evaluator"]["options"]["test_command"].splitlines()[-1] == f"own {TEST}"


@pytest.mark.parametrize(
    ("kind", "row", "command", "line"),
    [
        ("swe-smith", SWE_SMITH, "run {tests}", f"run {TEST}"),
        ("swebench-pro", PRO, "run {tests}", f"run {TEST} tests/test_more.py"),
        ("r2e-gym", R2E, "run ${HOME} {a,b}", "run ${HOME} {a,b}"),
        ("swe-gym", SWE_GYM, "run {modules}", "run test_prices"),
    ],
)
def test_the_placeholders_of_a_command_are_replaced(
    tmp_path: Path, kind: str, row: dict[str, Any], command: str, line: str
) -> None:
    example = example_of(kind, tmp_path, row, test_command=command)
    assert example.task["evaluator"]["options"]["test_command"].splitlines()[-1] == line


@pytest.mark.parametrize(
    ("kind", "row", "name", "known"),
    [
        ("swe-smith", SWE_SMITH, "{modules}", "they know {tests}"),
        ("swebench-pro", PRO, "{modules}", "they know {tests}"),
        ("r2e-gym", R2E, "{tests}", "they know none"),
        ("r2e-gym", R2E, "{modules}", "they know none"),
    ],
)
def test_a_placeholder_that_a_set_does_not_know_is_refused(
    tmp_path: Path, kind: str, row: dict[str, Any], name: str, known: str
) -> None:
    with pytest.raises(InvalidField, match=f"{kind} do not know the placeholder {name}") as refused:
        example_of(kind, tmp_path, row, test_command=f"pytest -rA {name}", faults=True)
    assert refused.value.field == "test_command"
    assert known in (refused.value.hint or "")


def test_two_rows_with_the_same_id_are_named(tmp_path: Path) -> None:
    source = f"swe-gym:{written(tmp_path, SWE_GYM, SWE_GYM)}"
    with pytest.raises(InvalidField, match=r"'instance_id' of row 1 of .* is 'getmoto__moto-7365', as in row 0"):
        examples_in(source, limit=None, image=None)


async def test_an_unknown_kind_names_the_kinds(cli: Cli, tmp_path: Path) -> None:
    ran = await cli("task", "list", task_file(tmp_path, "swe-gim", SWE_GYM, []))
    assert ran.code == 2
    assert "there is no kind of rows 'swe-gim'" in ran.err
    assert "swe-gym, swe-rebench" in ran.err
    written(tmp_path, SWE_GYM)
    ran = await cli("task", "list", f"swe-gim:{tmp_path}/rows.jsonl")
    assert ran.code == 2
    assert "the kinds are swebench, swe-gym" in ran.err


def test_prepare_steps_of_ones_own_come_before_the_bug(tmp_path: Path) -> None:
    [example] = examples_in(str(task_file(tmp_path, "swe-smith", SWE_SMITH, [{"run": GIT}])), limit=None, image=None)
    steps = example.task["runtime"]["prepare"]
    assert [step.get("run", step.get("to")) for step in steps[-3:-1]] == [GIT, ".outrider-bug.patch"]
    assert "These tests fail, and must pass:\n\n" + ROW["fail_to_pass"][0] in example.task["instruction"]


def test_cases_of_mypy_are_chosen_by_name(tmp_path: Path) -> None:
    patch = PATCH.replace("+def test_it_is_a_number():", "+[case testAbs]\n+[case testSum-skip]")
    patch = patch.replace("+5,7", "+5,8")
    options = example_of("swe-gym", tmp_path, {**SWE_GYM, "repo": "python/mypy", "test_patch": patch}).task
    command = options["evaluator"]["options"]["test_command"].splitlines()[-1]
    assert command == 'pytest -n0 -rA -k "testAbs or testSum-skip"'


def test_what_tests_without_a_patch_name_is_restored() -> None:
    options = SwebenchOptions.model_validate(
        {
            "instance_id": "a-1",
            "log_parser": "parse_log_pytest",
            "test_command": "pytest",
            "test_patch": "",
            "fail_to_pass": ["tests/unit/test_a.py::test", "test_b.py::T::test", "src/a.py::a.f"],
            "pass_to_pass": ["/etc/tests/test_c.py::test", "../tests/test_c.py::test", "tests/test_d.py::test[a::b]"],
        }
    )
    assert restored_paths(options, ["conftest.py"]) == ["conftest.py", "test_b.py", "tests"]


ODD: tuple[Any, ...] = (
    *(None, 0, -1.5, True, "", " ", "{", "[", "?", "[1]", "{}", "x" * 99),
    *([], [None], [[]], {}, {"a": {}}),
)
SETS = {
    "swebench": VERIFIED,
    "swe-gym": SWE_GYM,
    "swe-rebench": SWE_REBENCH,
    "swe-smith": SWE_SMITH,
    "r2e-gym": R2E,
    "swebench-pro": PRO,
    "verl": GSM8K,
    "nemo-gym": NEMO_CODE,
}
NESTED = frozenset(("install_config", "reward_model", "responses_create_params", "verifier_metadata"))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_no_value_of_a_column_is_a_traceback(tmp_path: Path, kind: str) -> None:
    run_scripts(tmp_path)
    row = SETS[kind]
    odd = [{**row, column: value} for column in row for value in ODD]
    odd += [
        {**row, name: {**row[name], key: value}} for name in NESTED & row.keys() for key in row[name] for value in ODD
    ]
    good = 0
    for changed in (row, *odd):
        example = drafts.example_of(ADAPTERS[kind], changed, Additions(folder=tmp_path), "row 0")
        if not example.faults:
            good += 1
            evaluator = as_task(example.task).evaluator
            if evaluator.kind != "math" or find_spec("math_verify") is not None:
                make_evaluator(evaluator)
    assert len(odd) > good > 1
