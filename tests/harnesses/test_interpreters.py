"""Finding a Python of another version: the order in which places are searched, and the error if none has it."""

import os
import sys
from pathlib import Path

import pytest

from outrider.errors import HarnessUnavailable
from outrider.harnesses.interpreters import find_python

OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
OTHER = "3.99"


def pretend(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def python(path: Path, minor: str) -> Path:
    return pretend(path, f"echo {minor}; echo {path}")


@pytest.fixture(autouse=True)
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def test_without_a_wish_it_is_the_one_that_runs_outrider() -> None:
    assert find_python(None, uv=None) == Path(sys.executable)


def test_the_one_that_runs_outrider_goes_first(tmp_path: Path) -> None:
    python(tmp_path / "bin" / f"python{OWN}", OWN)
    assert find_python(OWN, uv=None) == Path(os.path.realpath(sys.executable))


def test_path_goes_before_uv_and_uv_before_pyenv(tmp_path: Path) -> None:
    in_pyenv = python(tmp_path / "pyenv" / "versions" / f"{OTHER}.4" / "bin" / f"python{OTHER}", OTHER)
    assert find_python(OTHER, uv=None) == in_pyenv
    of_uv = python(tmp_path / "uv" / "python", OTHER)
    uv = [str(pretend(tmp_path / "uv" / "uv", f"echo {of_uv}"))]
    assert find_python(OTHER, uv=uv) == of_uv
    on_path = python(tmp_path / "bin" / f"python{OTHER}", OTHER)
    assert find_python(OTHER, uv=uv) == on_path


@pytest.mark.parametrize("script", ["exit 127", "echo 3.98; echo /x", "echo nonsense", "true"])
def test_a_shim_that_does_not_work_is_passed_over(script: str, tmp_path: Path) -> None:
    pretend(tmp_path / "bin" / f"python{OTHER}", script)
    found = python(tmp_path / "pyenv" / "versions" / f"{OTHER}.0" / "bin" / f"python{OTHER}", OTHER)
    assert find_python(OTHER, uv=None) == found


def test_where_there_is_none_it_says_how_to_get_one(tmp_path: Path) -> None:
    uv = [str(pretend(tmp_path / "uv", "exit 2"))]
    with pytest.raises(HarnessUnavailable, match=r"needs Python 3\.99") as caught:
        find_python(OTHER, uv=uv)
    assert "uv python install 3.99" in (caught.value.hint or "")
