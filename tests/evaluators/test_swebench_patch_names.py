"""The file names that are read from a test patch, compared with the names that git finds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from outrider.evaluators.swebench.options import files_of


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("style", [(), ("--no-prefix",), ("--no-renames",), ("--binary", "-M")])
def test_the_names_are_those_of_git(tmp_path: Path, style: tuple[str, ...]) -> None:
    git(tmp_path, "init", "-q")
    for name in ("src/kept.py", "a b/moved.py", 'q"uote.py', "ünf.py", "gone.py", "mode.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n-- a/no.py\n" * 9)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "before")
    for name in ("src/kept.py", 'q"uote.py', "ünf.py"):
        (tmp_path / name).write_text("++ b/no.py\n")
    (tmp_path / "a b/moved.py").rename(tmp_path / "tab\tname.py")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "mode.sh").chmod(0o755)
    (tmp_path / "src/empty.py").touch()
    (tmp_path / "b.bin").write_bytes(bytes(range(256)))
    git(tmp_path, "add", "-A")
    named = git(tmp_path, "diff", "--cached", "--name-only", "-z", "--no-renames").split("\0")
    assert files_of(git(tmp_path, "diff", "--cached", *style)) == set(named) - {""}


def test_plain_diffs_and_their_dates() -> None:
    assert files_of("--- x.py\t2026-01-01\n+++ x.py\t2026-01-02\n@@ -1 +1 @@\n-1\n+2\n") == {"x.py"}
    assert files_of("") == set()


@pytest.mark.parametrize("text", ["no diff", "--- a/x\n+++ b/x\n@@ -1,9 +1 @@\n", "--- a/../x\n+++ b/../x\n"])
def test_what_is_no_diff_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"names a file|cut short|below its folder"):
        files_of(text)
