"""The options of the evaluator `swebench`, and the paths of a repository that influence its test results. The module is
pure.

Invariant: options with which every run would pass are refused, such as an empty list of tests to be fixed.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from outrider.spec import SandboxPath, Spec

MAX_TESTS = 100_000
MAX_COMMAS = 10 * MAX_TESTS
"""Maximum number of commas in a row's tests, if the row gives them as one string. The maximum is higher than MAX_TESTS,
because names of tests may contain commas."""
SCRIPT = 1 << 20
"""Maximum characters of `eval_script` or `test_command`."""
PATCH = 16 << 20
"""Maximum characters of a patch. Sandbox runtimes have the same limit."""
PATCH_LINES = 200_000
"""Maximum lines of a patch. Parsing so many lines takes a second."""
CONFIGURATION = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "sitecustomize.py", "usercustomize.py", "entry_points.txt"),
)
"""Names of files that influence tests, in whichever folder of the repository they are. An `entry_points.txt` beside a
package on Python's path names plugins for pytest to load."""
GIT = (".git", ".gitattributes")
"""Files that `git` reads if the script calls it. They are restored, too, because an agent could name programs in them
that git runs, and because `.git` contains the original files that git restores."""
HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
NAMED = re.compile(r"(?:---|\+\+\+|(?:rename|copy) (?:from|to)) (?P<name>.+)")
SAME = re.compile(r'diff --git (?P<name>("?)(?:[aciw12]/)?(?P<path>.+)\2) \2(?:[bciwo12]/)?(?P=path)\2\r?$')
"""Matches a git diff's first line for a file, if the two names in this line are equal. If a file has no hunks, such as
a new empty file, only this line names it. If the names differ, other lines have them, too."""
PREFIX = re.compile(r"^[abciwo12]/")
"""Matches git's prefixes of file names: a/ and b/; c/, i/, o/ and w/ with `diff.mnemonicPrefix`; 1/ and 2/ with
`--no-index`."""
TEST_FOLDERS = frozenset(("test", "tests"))


def listed(given: Any) -> Any:
    """Return the tests of a row as a list. Data sets of swebench 4.x give a JSON string. Any other value is returned
    unchanged. Raises ValueError."""
    if not isinstance(given, str):
        return given
    # The commas are counted before parsing, because a list of millions of tests needs gigabytes of memory.
    if given.count(",") > MAX_COMMAS:
        raise ValueError(f"has more than {MAX_COMMAS} commas")
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is neither a list nor one as JSON: {error}") from error


Test = Annotated[str, Field(min_length=1, max_length=10_000)]
Tests = Annotated[tuple[Test, ...], Field(strict=False, max_length=MAX_TESTS, fail_fast=True), BeforeValidator(listed)]
Script = Annotated[str, StringConstraints(min_length=1, max_length=SCRIPT)]


class SwebenchOptions(Spec):
    """The options of kind `swebench`: the columns of a row of the data set, under swebench's names in lower case.

    eval_script: a script that applies the test patch, runs the tests and prints markers.
    test_command: runs the tests in place of `eval_script`. The evaluator first applies `test_patch`.
    test_patch: with `eval_script`, used only to find the files and folders of the tests.
    log_parser, repo: the parser of the log (swebench 5.x), or the repository that determines the parser (4.x).
    pytest: true if the tests run in pytest. By default, the parser decides.
    restored: paths below `folder` to restore to their state before the agent ran, besides the files of the test patch.
        The default is the result of `restored_paths`.
    expected: the status that each test must have, as in rows of R2E-Gym. The lists of tests then only name the tests.
    test_empty_patch: true to run the tests even if the agent changed nothing. By default, such an agent gets reward 0
        without a run, unless `expected` is set.
    """

    instance_id: Test
    fail_to_pass: Annotated[Tests, Field(min_length=1)]
    pass_to_pass: Tests = ()
    test_patch: Annotated[str, StringConstraints(max_length=PATCH)] | None = None
    test_command: Script | None = None
    eval_script: Script | None = None
    log_parser: Test | None = None
    repo: Test | None = None
    version: str = ""
    eval_type: Literal["pass_and_fail", "fail_only"] | None = None
    folder: SandboxPath = "."
    restored: Annotated[tuple[SandboxPath, ...], Field(strict=False, max_length=256)] | None = None
    pytest: bool | None = None
    expected: (
        Annotated[dict[Test, Literal["PASSED", "FAILED", "ERROR"]], Field(min_length=1, max_length=MAX_TESTS)] | None
    ) = None
    test_seconds: Annotated[float, Field(gt=0)] | None = None
    check_seconds: Annotated[float, Field(gt=0, le=60)] = 20.0
    test_empty_patch: bool = False

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.eval_script is None) == (self.test_command is None):
            raise ValueError("give exactly one of 'eval_script' and 'test_command'")
        if self.test_command is not None and self.test_patch is None:
            raise ValueError("a 'test_command' needs the 'test_patch'")
        if self.log_parser is None and self.repo is None:
            raise ValueError("give 'log_parser', or the 'repo' whose parser it is")
        if (lines := (self.test_patch or "").count("\n")) > PATCH_LINES:
            raise ValueError(f"'test_patch' has {lines} lines; the maximum is {PATCH_LINES}")
        try:
            files_of(self.test_patch or "")
        except ValueError as error:
            raise ValueError(f"'test_patch' is no diff: {error}") from error
        return self


def files_of(patch: str) -> set[str]:
    """Return the paths in a diff, before and after the change. Raises ValueError for an invalid diff."""
    files: set[str] = set()
    lines = iter(patch.split("\n"))
    for line in lines:
        if hunk := HUNK.match(line):
            old, new = (int(count or 1) for count in hunk.groups())
            while old > 0 or new > 0:
                # An empty line is an empty context line whose leading space some editors have stripped.
                sign = (next(lines, "cut") or " ")[:1]
                if sign not in " -+\\":
                    raise ValueError("a hunk is cut short, or its header counts wrong")
                old, new = old - (sign in " -"), new - (sign in " +")
        elif named := NAMED.match(line) or SAME.match(line):
            name = plain_name(named["name"])
            if not line.startswith(("rename", "copy")):  # lines for a rename or a copy have names without a prefix
                name = PREFIX.sub("", name)
            if name == "/dev/null":
                continue
            if {"", ".", ".."} & set(name.split("/")):
                raise ValueError(f"{name}: a patch may only name files below its folder")
            files.add(name)
    if patch.strip() and not files:
        raise ValueError("no line of it names a file")
    return files


def plain_name(field: str) -> str:
    """Return the file name in a field of a diff. A quoted name has backslash escapes. Any other name ends at a tab."""
    name = field.rstrip("\r").partition("\t")[0]
    if name.startswith('"'):
        name = codecs.escape_decode(name.strip('"').encode("utf-8", "surrogateescape"))[0].decode(
            "utf-8", "surrogateescape"
        )
    return name


def test_folder(path: str) -> str | None:
    """Return the path of the outermost folder named `test` or `tests` above a file, or None."""
    parts = path.split("/")[:-1]
    for number, part in enumerate(parts, 1):
        if part in TEST_FOLDERS:
            return "/".join(parts[:number])
    return None


def is_test(path: str) -> bool:
    """Return True if the names of a file and its folders show that the file belongs to tests. `src/_pytest/a.py` does
    not belong to tests."""
    name = path.rpartition("/")[2]
    stem = name.removesuffix(".py")
    return (
        test_folder(path) is not None
        or name == "conftest.py"
        or (name.endswith(".py") and (stem.startswith("test_") or stem.endswith("_test")))
    )


def restored_paths(options: SwebenchOptions, found: Iterable[str]) -> list[str]:
    """Return the paths below `folder` to restore, sorted. These are the files of the test patch. Without a test patch,
    they are the test files that the names of the row's tests begin with, such as `tests/test_a.py` in
    `tests/test_a.py::test_b`.

    The option `restored` adds its paths. Without this option, these are added:

    - the test folders of these files
    - `found`, the configuration files in the repository
    - the files in GIT, if there is an `eval_script`"""
    files = files_of(options.test_patch or "")
    if not files:
        named = {test.partition("::")[0] for test in (*options.fail_to_pass, *options.pass_to_pass) if "::" in test}
        files = {file for file in named if is_test(file) and not {"", ".", ".."} & set(file.split("/"))}
    if options.restored is not None:
        return sorted({*files, *options.restored})
    folders = {folder for file in files if (folder := test_folder(file)) is not None}
    # Restoring a folder restores the files in it, so these need not be listed.
    files = {file for file in files if test_folder(file) is None} if not options.test_patch else files
    git = GIT if options.eval_script is not None else ()
    return sorted({*files, *folders, *found, *git})
