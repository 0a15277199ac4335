"""The comparison with Harbor's own package (tests/harbor_tasks/test_parity.py), in a separate environment with a Python
that Harbor supports. Most of Harbor's dependencies, hundreds of megabytes, are not needed and not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.environments import environment_with

pytestmark = [pytest.mark.real, pytest.mark.nightly]

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = ROOT / ".venv-harbor"
HARBOR = "harbor==0.25.0"
NEEDS = ("pathspec", "toml", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
LEAST = "import sys, ensurepip; sys.exit(sys.version_info < (3, 12))"


def fitting_python() -> str:
    """Return a Python 3.12 or newer: this interpreter, one on the PATH, or one of pyenv's. Skips if there is none."""
    of_pyenv = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.1[2-4].*/bin/python"))
    on_path = filter(None, map(shutil.which, ("python3.12", "python3.13", "python3.14")))
    for python in (sys.executable, *on_path, *map(str, of_pyenv)):
        if subprocess.run([python, "-c", LEAST], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip("Harbor needs Python 3.12 or newer, and none is here")


@pytest.mark.timeout(600)
def test_harbors_own_package_agrees_with_us() -> None:
    environment_with(ENVIRONMENT, [HARBOR], "--no-deps", python=fitting_python())
    python = environment_with(ENVIRONMENT, [*NEEDS, "--editable", f"{ROOT}[parquet]"])
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/harbor_tasks/test_parity.py"]
    done = subprocess.run(tests, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout, done.stdout[-4000:]
    print(done.stdout.strip().splitlines()[-1])
