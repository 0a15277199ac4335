"""The options of the SWE-bench evaluator, and which paths of a repository decide what its tests say. Pure.

It knows no sandbox. Invariant: an option that would let every run pass, such as an empty list of tests that must be
mended, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from outrider.runtimes.guest.filesystem.patch import Conflict, read_patch
from outrider.spec import SandboxPath, Spec

MAX_TESTS = 100_000
MAX_COMMAS = 10 * MAX_TESTS
"""Maximum number of commas in the tests of a row as one text. The names of tests have some, too."""
SCRIPT = 1 << 20
"""Maximum characters of a script."""
PATCH = 16 << 20
"""Maximum characters of a patch, as of a runtime's."""
PATCH_LINES = 200_000
"""Maximum lines of a patch: reading so many takes a second."""
CONFIGURATION = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "sitecustomize.py", "usercustomize.py", "entry_points.txt"),
)
"""Files that decide which tests run and what they say, wherever they are in the repository. The last one, beside a
package on Python's path, names plugins that pytest loads."""
GIT = (".git", ".gitattributes")
"""What git runs programs of, and takes the original files from."""
TEST_FOLDERS = frozenset(("test", "tests"))


def listed(given: Any) -> Any:
    """The tests of a row: a list, or a list as JSON in a text, as the data sets of 4.x have it."""
    if not isinstance(given, str):
        return given
    if given.count(",") > MAX_COMMAS:  # read before it is checked, a list of millions takes gigabytes
        raise ValueError(f"has more than {MAX_COMMAS} commas")
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is neither a list nor one as JSON: {error}") from error


Test = Annotated[str, Field(min_length=1, max_length=10_000)]
Tests = Annotated[tuple[Test, ...], Field(strict=False, max_length=MAX_TESTS, fail_fast=True), BeforeValidator(listed)]
Script = Annotated[str, StringConstraints(min_length=1, max_length=SCRIPT)]


class SwebenchOptions(Spec):
    """The columns of a row that grade it, by swebench's names in lower case.

    The tests are run by `eval_script`, which applies the test patch itself and prints the markers, or by
    `test_command`, in front of which the evaluator applies `test_patch`; with a script the patch only says which files
    and folders are those of the tests. The parser is `log_parser` (5.x), or the one
    of `repo` (4.x). `pytest` tells whether the tests run in pytest; without it, the parser does. `restored`: paths
    below `folder` that are made what they were before the agent, besides the files of the test patch; without it,
    what `restored_paths` says.
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
        except Conflict as error:
            raise ValueError(f"'test_patch' is no diff: {error}") from error
        return self


def files_of(patch: str) -> set[str]:
    """The paths that a diff names, before and after. Raises Conflict for what is no diff, or a binary one."""
    patches = read_patch(patch.encode("utf-8", "surrogateescape")) if patch.strip() else []
    return {name for one in patches for name in (one.old, one.new) if name is not None}


def test_folder(path: str) -> str | None:
    """The outermost folder of a file that is called `test` or `tests`."""
    parts = path.split("/")[:-1]
    for number, part in enumerate(parts, 1):
        if part in TEST_FOLDERS:
            return "/".join(parts[:number])
    return None


def is_test(path: str) -> bool:
    """Whether a file of a repository is of its tests, by the segments of its path: `src/_pytest/a.py` is not."""
    name = path.rpartition("/")[2]
    stem = name.removesuffix(".py")
    return (
        test_folder(path) is not None
        or name == "conftest.py"
        or (name.endswith(".py") and (stem.startswith("test_") or stem.endswith("_test")))
    )


def restored_paths(options: SwebenchOptions, found: Iterable[str]) -> list[str]:
    """The paths below `folder` that are made what they were, sorted: those that the options name, else the folders
    of the tests that the test patch changes, and what was `found` of the configuration; and always the files of the
    test patch."""
    files = files_of(options.test_patch or "")
    if options.restored is not None:
        return sorted({*files, *options.restored})
    folders = {folder for file in files if (folder := test_folder(file)) is not None}
    git = GIT if options.eval_script is not None else ()
    return sorted({*files, *folders, *found, *git})
