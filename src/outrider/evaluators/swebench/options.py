"""The options of the SWE-bench evaluator, and the paths of a repository that influence its test results. Pure.

Invariant: an option that would let every run pass is refused, such as an empty list of tests to be fixed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from outrider.sandbox.runtimes.guest.filesystem.patch import PatchRefused, read_patch
from outrider.spec import SandboxPath, Spec

MAX_TESTS = 100_000
MAX_COMMAS = 10 * MAX_TESTS
"""Maximum number of commas in the tests of a row given as one text. Names of tests can have commas, too."""
SCRIPT = 1 << 20
"""Maximum characters of a script."""
PATCH = 16 << 20
"""Maximum characters of a patch, the same as a runtime's."""
PATCH_LINES = 200_000
"""Maximum lines of a patch. Reading that many takes a second."""
CONFIGURATION = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "sitecustomize.py", "usercustomize.py", "entry_points.txt"),
)
"""Files in any folder of the repository that influence the tests and their results. The last file, beside a package on
Python's path, names plugins for pytest to load."""
GIT = (".git", ".gitattributes")
"""Files that name programs for git to run, and from which git restores the original files."""
TEST_FOLDERS = frozenset(("test", "tests"))


def listed(given: Any) -> Any:
    """Return the tests of a row: a list, or a JSON list as text, as in the data sets of swebench 4.x."""
    if not isinstance(given, str):
        return given
    if given.count(",") > MAX_COMMAS:  # checked before parsing: a list of millions takes gigabytes
        raise ValueError(f"has more than {MAX_COMMAS} commas")
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is neither a list nor one as JSON: {error}") from error


Test = Annotated[str, Field(min_length=1, max_length=10_000)]
Tests = Annotated[tuple[Test, ...], Field(strict=False, max_length=MAX_TESTS, fail_fast=True), BeforeValidator(listed)]
Script = Annotated[str, StringConstraints(min_length=1, max_length=SCRIPT)]


class SwebenchOptions(Spec):
    """The columns of a row for grading, under swebench's names in lower case.

    The tests are run by `eval_script`, which applies the test patch itself and prints the markers, or by
    `test_command`, before which the evaluator applies `test_patch`. With a script the patch only lists the files and
    folders of the tests. The parser is `log_parser` (5.x), or the parser of `repo` (4.x). `pytest`: whether the tests
    run in pytest; by default the parser decides. `restored`: paths below `folder` to restore to their state before the
    agent, besides the files of the test patch; by default the result of `restored_paths`.
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
    test_seconds: Annotated[float, Field(gt=0)] | None = None
    check_seconds: Annotated[float, Field(gt=0, le=60)] = 20.0

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
        except PatchRefused as error:
            raise ValueError(f"'test_patch' is no diff: {error}") from error
        return self


def files_of(patch: str) -> set[str]:
    """Return the paths in a diff, before and after the change. Raises PatchRefused for an invalid or binary diff."""
    patches = read_patch(patch.encode("utf-8", "surrogateescape")) if patch.strip() else []
    return {name for one in patches for name in (one.old, one.new) if name is not None}


def test_folder(path: str) -> str | None:
    """Return the outermost folder named `test` or `tests` above a file."""
    parts = path.split("/")[:-1]
    for number, part in enumerate(parts, 1):
        if part in TEST_FOLDERS:
            return "/".join(parts[:number])
    return None


def is_test(path: str) -> bool:
    """Return True for a test file, judged by the segments of its path: `src/_pytest/a.py` is not a test file."""
    name = path.rpartition("/")[2]
    stem = name.removesuffix(".py")
    return (
        test_folder(path) is not None
        or name == "conftest.py"
        or (name.endswith(".py") and (stem.startswith("test_") or stem.endswith("_test")))
    )


def restored_paths(options: SwebenchOptions, found: Iterable[str]) -> list[str]:
    """Return the sorted paths below `folder` to restore. These are the files of the test patch, and the paths of the
    option `restored`. Without that option they are also the test folders changed by the patch, the configuration files
    that were `found`, and, for an `eval_script`, the files of git."""
    files = files_of(options.test_patch or "")
    if options.restored is not None:
        return sorted({*files, *options.restored})
    folders = {folder for file in files if (folder := test_folder(file)) is not None}
    git = GIT if options.eval_script is not None else ()
    return sorted({*files, *folders, *found, *git})
