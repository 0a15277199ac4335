"""Unified diffs, read and applied as git does it, and told why when they do not apply."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.sandbox.runtimes.guest.filesystem.patch import PatchEntry, PatchRefused, lines_of, plan_patch

PLAIN, RUNS, LINK = 0o100644, 0o100755, 0o120000
Files = dict[str, tuple[int, bytes]]

LINES = st.lists(
    st.sampled_from([b"a", b"b", b"c", b"d", b"", b"x y", "é".encode(), b"- d", b"+++ e", b"\\ f"]), max_size=12
)
CONTENTS = st.builds(lambda lines, end: b"\n".join(lines) + (b"\n" if end and lines else b""), LINES, st.booleans())
NAMES = st.sampled_from(["one", "two", "d/three", "d/e/fo ur", "ünf", 'q"uote', "tab\tname"])
TREES = st.dictionaries(NAMES, st.tuples(st.sampled_from([PLAIN, RUNS]), CONTENTS), max_size=5)


def patched(files: Mapping[str, tuple[int, bytes]], text: bytes) -> Files:
    changes = plan_patch(text, lambda path: PatchEntry(*files[path]) if path in files else None)
    after = dict(files)
    for path, entry in changes.items():
        after.pop(path, None)
        if entry is not None:
            after[path] = (entry.mode, entry.data)
    return after


def one(before: bytes, text: str) -> bytes:
    return patched({"f": (PLAIN, before)}, text.encode())["f"][1]


def refused(files: Files, text: str) -> str:
    with pytest.raises(PatchRefused) as conflict:
        patched(files, text.encode())
    return str(conflict.value)


HUNK = "--- a/f\n+++ b/f\n@@ -2,3 +2,3 @@ context\n b\n-c\n+C\n d\n"


def test_a_hunk_may_have_moved_and_the_nearest_place_counts() -> None:
    assert one(b"a\nb\nc\nd\ne\n", HUNK) == b"a\nb\nC\nd\ne\n"
    assert one(b"0\n0\n0\na\nb\nc\nd\ne\n", HUNK) == b"0\n0\n0\na\nb\nC\nd\ne\n"
    assert one(b"a\nb\nc\nd\n" + b"x\n" * 9 + b"b\nc\nd\n", HUNK).startswith(b"a\nb\nC\n")


def test_a_hunk_at_an_end_stays_there() -> None:
    first = "--- a/f\n+++ b/f\n@@ -1,2 +1,3 @@\n+0\n a\n b\n"
    assert one(b"a\nb\nc\n", first) == b"0\na\nb\nc\n"
    assert "does not apply" in refused({"f": (PLAIN, b"x\na\nb\n")}, first)
    last = "--- a/f\n+++ b/f\n@@ -2 +2,2 @@\n b\n+c\n"
    assert one(b"a\nb\n", last) == b"a\nb\nc\n"
    assert "does not apply" in refused({"f": (PLAIN, b"a\nb\nmore\n")}, last)


def test_missing_last_newlines() -> None:
    mark = "\\ No newline at end of file\n"
    head = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n"
    assert one(b"a", f"{head}-a\n{mark}+b\n") == b"b\n"
    assert one(b"a\n", f"{head}-a\n+b\n{mark}") == b"b"
    assert one(b"a", f"{head}-a\n{mark}+b\n{mark}") == b"b"
    assert "line 1 is 'a'" in refused({"f": (PLAIN, b"a")}, f"{head}-a\n+b\n")


def test_what_is_around_a_diff_is_skipped() -> None:
    assert one(b"a\nb\nc\nd\n", f"From: me\n\nSubject\n--\n{HUNK}-- \n2.39.5\n") == b"a\nb\nC\nd\n"
    assert one(b"a\nb\nc\nd\n", HUNK.removesuffix("\n")) == b"a\nb\nC\nd\n"
    assert one(b"a\n\nc\n", "--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n-a\n+b\n\n c\n") == b"b\n\nc\n"


def test_names() -> None:
    for old, new in (
        ("a/f", "b/f"),
        ("f", "f"),
        ("i/f", "w/f"),
        ('"a/\\146"', '"b/f"'),
        ("a/f\t2020-01-01", "b/f\tnow"),
    ):
        assert one(b"1\n", f"--- {old}\n+++ {new}\n@@ -1 +1 @@\n-1\n+2\n") == b"2\n"
    assert patched({}, b"--- /dev/null\n+++ b/d/e\n@@ -0,0 +1 @@\n+1\n") == {"d/e": (PLAIN, b"1\n")}
    assert patched({"b/f": (PLAIN, b"1\n")}, b"--- b/f\n+++ b/f\n@@ -1 +1 @@\n-1\n+2\n")["b/f"][1] == b"2\n"
    for name in ("../f", "/f", "d/../f", "d//f", "."):
        assert "below its folder" in refused({}, f"--- /dev/null\n+++ {name}\n@@ -0,0 +1 @@\n+1\n")


def test_modes_links_renames_and_copies() -> None:
    files: Files = {"a": (PLAIN, b"1\n2\n"), "b": (RUNS, b"x\n")}
    assert patched(files, b"diff --git a/a b/a\nold mode 100644\nnew mode 100755\n")["a"] == (RUNS, b"1\n2\n")
    link = b"diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+b\n"
    link += b"\\ No newline at end of file\n"
    assert patched(files, link)["l"] == (LINK, b"b")
    swap = b"diff --git a/a b/b\nsimilarity index 100%\nrename from a\nrename to b\n"
    swap += b"diff --git a/b b/a\nsimilarity index 100%\nrename from b\nrename to a\n"
    assert patched(files, swap) == {"a": (RUNS, b"x\n"), "b": (PLAIN, b"1\n2\n")}
    copy = b"diff --git a/a b/c\ncopy from a\ncopy to c\n--- a/a\n+++ b/c\n@@ -1,2 +1,2 @@\n 1\n-2\n+3\n"
    assert patched(files, copy)["c"] == (PLAIN, b"1\n3\n")
    assert patched(files, copy)["a"] == (PLAIN, b"1\n2\n")
    empty = b"diff --git a/new b/new\nnew file mode 100644\nindex 0000000..e69de29\n"
    assert patched({}, empty) == {"new": (PLAIN, b"")}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (HUNK, "f: hunk 1 (@@ -2 +2 @@) does not apply: line 3 is 'z\\n', where the patch has 'c\\n'"),
        (HUNK.replace("-2,3", "-2,4"), "f: hunk 1 is cut short"),
        (HUNK.replace("@@ -2,3", "@@ -x,3"), "no header of a hunk"),
        (HUNK.replace("a/f", "a/g").replace("b/f", "b/g"), "g: there is no such file"),
        ("--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+1\n", "f: there is such a file already"),
        ("diff --git a/f b/f\ndeleted file mode 100644\n--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "f: "),
        ("@@ -1 +1 @@\n-a\n+b\n", "without lines --- and +++"),
        ("diff --git a/s b/s\nnew file mode 160000\n", "is none of a file"),
        ("diff --git a/x b/x\nindex 1..2 100644\nBinary files a/x and b/x differ\n", "binary"),
        ("nothing", "no change of a file"),
    ],
)
def test_refusals_name_the_file_and_the_hunk(text: str, why: str) -> None:
    assert why in refused({"f": (PLAIN, b"a\nb\nz\nd\n")}, text)


@given(CONTENTS, CONTENTS, st.integers(1, 4))
def test_what_difflib_writes_is_applied(before: bytes, after: bytes, context: int) -> None:
    """Files that end with a newline: difflib does not mark those that do not."""
    before, after = before.rstrip(b"\n") + b"\n", after.rstrip(b"\n") + b"\n"
    old, new = ([line.decode() for line in lines_of(data)] for data in (before, after))
    text = "".join(difflib.unified_diff(old, new, "a/f", "b/f", n=context))
    if text:
        assert one(before, text) == after


@given(st.binary(max_size=200), st.binary(max_size=60))
def test_any_text_is_applied_or_refused(text: bytes, data: bytes) -> None:
    for tried in (text, HUNK.encode() + text, HUNK.encode()[: len(text)] + text):
        with contextlib.suppress(PatchRefused):
            patched({"f": (PLAIN, data)}, tried)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@given(TREES, TREES, st.integers(1, 3), st.booleans())
def test_what_git_writes_is_applied(before: Files, after: Files, context: int, moved: bool) -> None:
    if moved:
        after = {**after, **{f"moved/{name}": entry for name, entry in before.items() if name not in after}}
    with tempfile.TemporaryDirectory(prefix="or-git-") as folder:
        text = git_diff(Path(folder), before, after, context)
    if text:
        assert patched(before, text) == after


def git_diff(folder: Path, before: Files, after: Files, context: int) -> bytes:
    def git(*words: str) -> bytes:
        env = {"PATH": os.defpath, "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
        return subprocess.run(["git", *words], cwd=folder, env=env, capture_output=True, check=True).stdout

    git("init", "-q")
    trees = []
    for files in (before, after):
        fill(folder, files)
        git("add", "--all")
        trees.append(git("write-tree").decode().strip())
        for name in files:
            (folder / name).unlink()
    return git("diff", "--find-renames", "--find-copies", f"-U{context}", *trees)


def fill(folder: Path, files: Files) -> None:
    for name, (mode, data) in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        (folder / name).chmod(mode & 0o777)
