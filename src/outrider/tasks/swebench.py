"""Makes tasks from SWE-bench's rows. Rows are read from data set files or from the task repositories of swebench 5.x.

The module runs and downloads nothing. The evaluator `swebench` grades the tasks, and gets the row's columns as options.
The row's gold patch is the known solution. Adapters for other data sets (`swe_sets.py`) use parts of this module.
Invariant: no agent sees the gold patch, the test patch, or the names of the tests.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.errors import InvalidField
from outrider.evaluators.swebench.options import files_of, is_test
from outrider.tasks.dataset_rows import Additions, Columns, Draft
from outrider.tasks.datasets import Example, Gold, read_rows
from outrider.tasks.drafts import example_of, whole
from outrider.text_files import check_depth

ASK = """\
{statement}

Change the code in the working directory so that this is solved. Hidden tests will check it; changes to the tests and
to their configuration are not kept.
"""
FILES = {
    "patch": "gold.patch",
    "test_patch": "test.patch",
    "eval_script": "eval.sh",
    "problem_statement": "problem_statement.md",
}
"""Columns that are separate files in a task repository."""
FOLDER = "/testbed"
"""Folder of the repository in SWE-bench's images."""
IMAGE = "swebench/sweb.eval.x86_64.{instance_id/__/_1776_}:latest"
"""Template for the names of SWE-bench's published images (`instance_image_key` of swebench 4.1.0)."""
TESTS, MODULES = "{tests}", "{modules}"
EVAL_TYPES = ("pass_and_fail", "fail_only")
NOT_RUN = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
SECONDS = 1800
"""Time limit of an evaluation in seconds. swebench has the same limit for a test run."""
ACTIVATE = """\
export LANG=C.UTF-8 LC_ALL=C.UTF-8
[ ! -e /opt/miniconda3/bin/activate ] || { . /opt/miniconda3/bin/activate && conda activate testbed; }
"""
"""Lines that precede a test command. In images built by swebench's harness, they activate the conda environment that
has the repository's Python."""
PYTEST = f"pytest -rA {TESTS}"
OR_IN_FILE = "or [rows] test_command in a TOML file"
"""End of a remedy that begins with the option `--test-command`."""
COMMANDS = {
    **dict.fromkeys(
        (
            *("astropy/astropy", "matplotlib/matplotlib", "marshmallow-code/marshmallow", "pallets/flask"),
            *("psf/requests", "pvlib/pvlib-python", "pydata/xarray", "pydicom/pydicom", "pylint-dev/astroid"),
            *("pylint-dev/pylint", "pytest-dev/pytest", "pyvista/pyvista", "scikit-learn/scikit-learn"),
            "sqlfluff/sqlfluff",
        ),
        PYTEST,
    ),
    "mwaskom/seaborn": f"pytest --no-header -rA {TESTS}",
    "django/django": f"./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {MODULES}",
    "sphinx-doc/sphinx": f"tox --current-env -epy39 -v -- {TESTS}",
    "sympy/sympy": f"PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning bin/test -C --verbose {TESTS}",
}
"""Test commands for SWE-bench's repositories, from swebench 4.1.0 (`MAP_REPO_VERSION_TO_SPECS_PY`, as in SWE-rebench's
fork at 39316f79). Rows of swebench 5.x contain their own commands."""
OLDER = {
    ("django/django", "1.9"): f"./tests/runtests.py --verbosity 2 {MODULES}",
    ("astropy/astropy", "0."): f"pytest -rA -vv -o console_output_style=classic --tb=no {TESTS}",
    ("astropy/astropy", "1."): f"pytest -rA -vv -o console_output_style=classic --tb=no {TESTS}",
}
"""Test commands for older versions of some repositories. A key is a pair: a repository and the beginning of a version
number."""
HIDDEN_PYTEST = ("tox ",)
"""Prefixes of test commands that hide environment variables from pytest. Without the variables, pytest cannot load the
evaluator's plugin, so no plugin report is expected."""
PLACEHOLDER = re.compile(r"\{(?:row\.)?([^{}/]+)(?:/([^{}/]+)/([^{}/]*))?\}")


def swebench_examples(
    source: Path,
    *,
    image: str | None = None,
    template: Mapping[str, Any] | None = None,
    test_command: str | None = None,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
) -> list[Example]:
    """Return the tasks of a task repository, or of a file with rows of swebench 4.x or 5.x, in the order of the source.
    Raises InvalidField.

    image: template for the names of all images (see `image_name`). The default is the row's column `image`.
    template: parts of a task, such as prepare steps or carried paths. These parts override the same parts of all tasks.
    test_command: the test command for rows of 4.x, which do not have one. The default is the command for the row's
        repository. `{tests}` in the command becomes the test files of the test patch. `{modules}` becomes the same
        files in the form of Django's test runner.
    tasks: the rows to return, by `instance_id`.
    """
    rows = list(swebench_rows(source))
    by_id = {str(row.get("instance_id")): row for row in rows}
    if tasks is not None:
        for name in tasks:
            if name not in by_id:
                raise InvalidField(f"there is no task {name!r} in {source}", field="tasks")
        rows = [by_id[name] for name in tasks]
    return [
        swebench_example(row, image=image, template=template, test_command=test_command, where=f"row {number}")
        for number, row in enumerate(rows[:limit])
    ]


def swebench_rows(source: Path) -> Iterator[dict[str, Any]]:
    return task_repository(source) if (source / "tasks").is_dir() else read_rows(source)


def swebench_example(
    row: Mapping[str, Any],
    *,
    image: str | None = None,
    template: Mapping[str, Any] | None = None,
    test_command: str | None = None,
    where: str = "the row",
) -> Example:
    """Return the task of one row. Raises InvalidField. `where` names the row in the error message."""
    given = Additions(image=image, test_command=test_command, own=template or {})
    return whole(example_of(lambda columns, given: swebench(columns, given, image=None), row, given, where), where)


def swebench(columns: Columns, given: Additions, *, image: str | None = IMAGE) -> Draft:
    """The adapter for rows of SWE-bench 4.x and 5.x. `image` is a template for rows that do not name their image."""
    options = options_of(columns)
    command = given.test_command or columns.optional_text("test_command")
    if columns.optional_text("eval_script") is not None and command is None:
        options["eval_script"] = columns.text("eval_script")
        # If `files_of` cannot parse the test patch, the patch is left out. Such a patch is no fault of the row, because
        # the row's script applies the patch itself, and the script may accept more kinds of diffs.
        with suppress(ValueError):
            options |= {"test_patch": columns.text("test_patch")} if files_of(columns.text("test_patch")) else {}
    else:
        options |= run_by_command(columns, given)
    return swe_draft(columns, options, image=image_of(columns, given, columns.optional_text("image") or image))


def options_of(columns: Columns) -> dict[str, Any]:
    """Return the options of the evaluator for a row with SWE-bench's columns, except those that run the tests."""
    names = ("log_parser", "repo", "version", "eval_type")
    options: dict[str, Any] = {"instance_id": columns.text("instance_id")}
    options |= {name: value for name in names if (value := columns.optional_text(name)) is not None}
    if options.get("eval_type") not in (None, *EVAL_TYPES):
        columns.fault("eval_type", f"is {options['eval_type']!r}, which is none of {', '.join(EVAL_TYPES)}")
    fail_to_pass = columns.tests("FAIL_TO_PASS", needed=True)
    return options | {"fail_to_pass": fail_to_pass, "pass_to_pass": columns.tests("PASS_TO_PASS")}


def run_by_command(
    columns: Columns, given: Additions, *, known: Mapping[str, str] = COMMANDS, own: str | None = None
) -> dict[str, Any]:
    """Return the options that run the tests of the row's test patch. The first of these commands is used:

    - the user's command
    - the row's column `test_command`, without ACTIVATE
    - `own`, another command in the row
    - the command for the row's repository in OLDER or `known`"""
    patch = columns.patch("test_patch")
    try:
        changed = files_of(patch)
    except ValueError:  # `columns.patch` has recorded the fault
        changed = set()
    repo, version = columns.optional_text("repo") or "", columns.optional_text("version") or ""
    older = [command for (name, start), command in OLDER.items() if name == repo and version.startswith(start)]
    command = given.test_command or own or next(iter(older), None) or known.get(repo.lower())
    if given.test_command is None and (as_it_is := columns.optional_text("test_command")) is not None:
        return {"test_patch": patch, "test_command": filled_command(as_it_is, changed)}
    if command is None:
        columns.missing("test_command", f'give --test-command, such as "python -m {PYTEST}", {OR_IN_FILE}')
        return {"test_patch": patch}
    hidden = {"pytest": False} if command.startswith(HIDDEN_PYTEST) else {}
    return {"test_patch": patch, "test_command": ACTIVATE + filled_command(command, changed), **hidden}


def filled_command(command: str, changed: set[str]) -> str:
    """Replace the placeholders in a test command with the test files in `changed`. Data files are left out."""
    run = sorted(file for file in changed if is_test(file) and not file.endswith(NOT_RUN))
    run = [file for file in run if file.endswith(".py")] or run  # other files are left out if there are Python files
    modules = [file.removesuffix(".py").removeprefix("tests/").replace("/", ".") for file in run]
    return command.replace(TESTS, shlex.join(run)).replace(MODULES, shlex.join(modules))


def image_of(columns: Columns, given: Additions, image: str | None) -> str | None:
    """Return the name of the row's image. The user's template takes precedence over `image`, which is a name in the row
    or the template of the data set. An empty template means no image: the user's own runtime has the repository."""
    template = image if given.image is None else given.image
    return image_name(template, columns) if template else None


def image_name(template: str, columns: Columns) -> str:
    """Return the name of an image. In the template, `{NAME}` or `{row.NAME}` becomes the value of the row's column
    NAME. `{NAME/OLD/NEW}` also replaces OLD with NEW in the value. A name with a slash is a name in a registry, so the
    part before its tag is made lower case."""

    def column(match: re.Match[str]) -> str:
        name, old, new = match.groups()
        value = columns.get(name)
        if value is None:
            columns.missing(name, f"the name of the image, {template!r}, needs it: give --image-template")
        return str(value).replace(old, new) if old else str(value)

    name = PLACEHOLDER.sub(column, template)
    folder, slash, last = name.rpartition("/")
    place, colon, tag = last.partition(":")
    return f"{folder}{slash}{place}".lower() + colon + tag if slash else name


def swe_draft(
    columns: Columns,
    options: dict[str, Any],
    *,
    image: str | None,
    statement: str | None = None,
    gold: Gold | None = None,
    prepare: Sequence[Mapping[str, Any]] = (),
    workdir: str = FOLDER,
    carry: Any = (".",),
) -> Draft:
    """Return the task of a row whose tests are run by the evaluator `swebench`. By default, the statement and the gold
    patch come from SWE-bench's columns."""
    runtime: dict[str, Any] = {"image": image, "workdir": workdir} if image else {}
    task = {
        "instruction": ASK.format(statement=(statement or columns.text("problem_statement")).strip()),
        "runtime": runtime | ({"prepare": [dict(step) for step in prepare]} if prepare else {}),
        "evaluator": {
            "kind": "swebench",
            "options": options,
            "carry": dict(carry) if isinstance(carry, Mapping) else list(carry),
            "seconds": SECONDS,
        },
        "labels": {"swebench": options["instance_id"]},
    }
    return Draft(options["instance_id"], task, gold or Gold(patch=columns.patch("patch")))


def task_repository(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task repository, sorted by task. Raises InvalidField if a row cannot be read."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise InvalidField("task repositories need PyYAML", field="source", hint="pip install pyyaml") from error
    for place in sorted(found.parent for found in folder.glob("tasks/*/task.yaml")):
        try:
            row = dict(yaml.safe_load((place / "task.yaml").read_text("utf-8")))
            for column, name in FILES.items():
                # The file is read as bytes, because text mode would change the line ends of a patch.
                row[column] = (place / name).read_bytes().decode("utf-8")
            row |= json.loads((place / "tests.json").read_text("utf-8"))
            check_depth(row)
        except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
            raise InvalidField(f"cannot read the task in {place}: {error}", field="source") from error
        yield row
