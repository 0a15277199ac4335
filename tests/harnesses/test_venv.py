"""Virtual environments: the folders of the host that they need, with environments written by hand, and their bytecode,
with an environment that works.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.errors import InvalidField
from outrider.harnesses.venv import compile_modules, read_venv, stray_links
from support.environments import environment


def interpreter(folder: Path) -> Path:
    """Write a Python installation: its program, and the part of its library that is examined. Returns the program."""
    for name in ("bin/python3.11", "lib/python3.11/os.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch(mode=0o755)
    return folder / "bin" / "python3.11"


def venv(folder: Path, python: Path) -> Path:
    return environment(folder, python, "python3.11")


def shown(folder: Path) -> set[Path]:
    return set(read_venv(str(folder)).shown)


def test_an_environment_needs_its_interpreter_and_the_library_of_that(tmp_path: Path) -> None:
    venv(tmp_path / "env", interpreter(tmp_path / "base"))
    assert shown(tmp_path / "env") == {tmp_path / "env", tmp_path / "base"}
    assert not read_venv(str(tmp_path / "env")).of_system


def test_an_interpreter_of_the_system_is_there_already(tmp_path: Path) -> None:
    venv(tmp_path / "env", Path("/usr/bin/env"))  # any program of the system will do
    found = read_venv(str(tmp_path / "env"))
    assert (set(found.shown), found.of_system) == ({tmp_path / "env"}, True)


def test_links_on_the_way_to_the_interpreter_are_there_too(tmp_path: Path) -> None:
    """One link leads to the program, as in a user's `bin` folder; the other leads to the folder of a version, as made
    by uv."""
    interpreter(tmp_path / "python-3.11.9")
    (tmp_path / "python-3.11").symlink_to("python-3.11.9")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/python3").symlink_to(tmp_path / "python-3.11/bin/python3.11")
    venv(tmp_path / "env", tmp_path / "links/python3")
    needed = {"env", "links", "python-3.11", "python-3.11.9"}
    assert shown(tmp_path / "env") == {tmp_path / name for name in needed}


def test_an_environment_behind_a_link_is_there_under_both_names(tmp_path: Path) -> None:
    venv(tmp_path / "env-2", interpreter(tmp_path / "base"))
    (tmp_path / "env").symlink_to("env-2")
    assert shown(tmp_path / "env") == {tmp_path / name for name in ("env", "env-2", "base")}


def test_what_is_installed_editable_is_there(tmp_path: Path) -> None:
    """An editable install is found by a line of a .pth file, by the finder that setuptools writes, or by the
    installer's record alone."""
    packages = venv(tmp_path / "env", interpreter(tmp_path / "base"))
    for folder in ("by_line/src", "by_finder/pkg", "by_record", "told/src", "copied"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "one.py").touch()
    (packages / "a.pth").write_text(
        f"# a comment\nimport os\n{tmp_path}/by_line/src\n{tmp_path}/told/src\n/nowhere\nlib\n"
    )
    (packages / "lib").mkdir()
    mapping = {"pkg": f"{tmp_path}/by_finder/pkg", "one": f"{tmp_path}/one", "gone": "/nowhere"}
    (packages / "__editable___pkg_1_0_finder.py").write_text(f"x = 1\nMAPPING: dict[str, str] = {mapping!r}\n")
    for name, editable in (("by_record", True), ("told", True), ("copied", False)):
        record = packages / f"{name}-1.0.dist-info/direct_url.json"
        record.parent.mkdir()
        record.write_text(json.dumps({"url": f"file://{tmp_path}/{name}", "dir_info": {"editable": editable}}))
    needed = {"env", "base", "by_line/src", "told/src", "by_finder/pkg", "one.py", "by_record"}
    assert shown(tmp_path / "env") == {tmp_path / name for name in needed}


def test_a_link_that_leaves_is_found_unless_it_is_shown(tmp_path: Path) -> None:
    packages = venv(tmp_path / "env", interpreter(tmp_path / "base"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/x.py").touch()
    (packages / "x.py").symlink_to(tmp_path / "cache/x.py")
    (packages / "inside").symlink_to("../site-packages")
    (packages / "broken").symlink_to("/nowhere")
    found = read_venv(str(tmp_path / "env"))
    assert stray_links(found, []) == [packages / "x.py"]
    assert stray_links(found, [tmp_path / "cache"]) == []


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("pyvenv.cfg", "has no pyvenv.cfg"),
        ("../base/bin/python3.11", "the interpreter of .* is gone"),
        ("lib/python3.11/site-packages", "has no lib/python3"),
    ],
)
def test_what_is_no_working_environment_is_refused(tmp_path: Path, broken: str, error: str) -> None:
    venv(tmp_path / "env", interpreter(tmp_path / "base"))
    (tmp_path / "env" / broken).rename(tmp_path / "elsewhere")
    with pytest.raises(InvalidField, match=error) as refused:
        read_venv(str(tmp_path / "env"))
    assert refused.value.field == "task.harness.venv"


@pytest.mark.parametrize("unreadable", ["interpreter", "project"])
def test_what_this_user_may_not_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str) -> None:
    """uv keeps its interpreters in the home folder of the user, who may also have the source of an editable package
    there."""
    python = interpreter(tmp_path / "base")
    packages = venv(tmp_path / "env", python)
    (packages / "a.pth").write_text(f"{tmp_path}/project\n")
    (tmp_path / "project").mkdir()
    secret = str(python if unreadable == "interpreter" else tmp_path / "project")
    stat, lstat = os.stat, os.lstat

    def refusing(original: Any) -> Any:
        def look(path: Any, *args: Any, **named: Any) -> Any:
            if str(path) == secret:
                raise PermissionError(errno.EACCES, "Permission denied", secret)
            return original(path, *args, **named)

        return look

    with monkeypatch.context() as patched:  # the tests may run as root, who may read everything
        patched.setattr(os, "stat", refusing(stat))
        patched.setattr(os, "lstat", refusing(lstat))
        with pytest.raises(InvalidField, match=f"needs {secret}, which this service cannot read") as refused:
            read_venv(str(tmp_path / "env"))
    assert refused.value.field == "task.harness.venv"


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working environment with one module."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    packages = environment(tmp_path / "env")
    (packages / "agent.py").write_text("NAME = 'agent'\n")
    return tmp_path / "env"


def compile_it(folder: Path, stamp: str, *, times: int = 1, seconds: float = 60.0) -> None:
    """Compile the environment's modules in `times` sessions at once. The interpreter's library is left out: it is large
    and not under test."""
    found = read_venv(str(folder))
    own = tuple(source for source in found.sources if source.is_relative_to(folder))
    found = msgspec.structs.replace(found, sources=own, stamp=stamp)

    async def sessions() -> None:
        await asyncio.gather(*(compile_modules(found, seconds=seconds) for _ in range(times)))

    asyncio.run(sessions())


def test_modules_are_compiled_once_for_each_state_of_the_environment(real: Path) -> None:
    compile_it(real, "1", times=2)
    [file] = real.rglob("*.pyc")
    said = subprocess.run([real / "bin/python", "-v", "-c", "import agent"], capture_output=True, text=True, check=True)
    assert f"code object from {str(file)!r}" in said.stderr, "Python takes what was compiled"
    file.unlink()
    compile_it(real, "1")
    assert not file.exists(), "that state of it has been compiled"
    compile_it(real, "2")
    assert file.exists()


def test_what_takes_too_long_to_compile_is_gone_on_with_later(real: Path) -> None:
    compile_it(real, "1", seconds=0)
    compile_it(real, "1")
    assert [path.name.split(".")[0] for path in real.rglob("*.pyc")] == ["agent"]


def test_nothing_is_written_into_another_users_environment(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    compile_it(real, "1")
    assert list(real.rglob("*.pyc")) == []


def test_the_stamp_changes_with_what_is_installed(real: Path) -> None:
    before = read_venv(str(real)).stamp
    assert read_venv(str(real)).stamp == before
    (next(real.glob("lib/python3*/site-packages")) / "another").mkdir()
    assert read_venv(str(real)).stamp != before
