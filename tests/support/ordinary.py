"""Runs tests a second time as an unprivileged user of this machine, if the tests run as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from outrider.sandbox.pythons.portable import portable_python

USER = f"outrider-test-{os.getpid()}"
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def ordinary_user(*readable: str | Path) -> Iterator[str]:
    """Create a user, yield the name, and remove the user at the end of the block. Skips the test if the tests do not
    run as root, or if the user cannot read this file and the files `readable`."""
    if os.geteuid() != 0:
        pytest.skip("this is an ordinary user already")
    remove = ["userdel", "--remove", USER]
    subprocess.run(remove, capture_output=True, check=False)  # a killed run may have left the user
    subprocess.run(["useradd", "--create-home", USER], check=True, capture_output=True)
    try:
        for path in (__file__, *readable):
            if subprocess.run(["runuser", "-u", USER, "--", "test", "-r", path], check=False).returncode:
                pytest.skip(f"an ordinary user cannot read {path}")
        yield USER
    finally:
        subprocess.run(remove, check=True, capture_output=True)


@contextlib.contextmanager
def python_of(user: str, *before: str, **environment: str) -> Iterator[list[str]]:
    """Yield a command that runs a Python with our packages as `user`, with the variables `environment`. `before` is a
    command that starts the Python, such as `srun`. The Python is a copy of the portable interpreter, because our own
    interpreter may be in a folder that only root can read."""
    with tempfile.TemporaryDirectory(prefix="outrider-user-") as shared:
        os.chmod(shared, 0o755)
        python = shutil.copytree(portable_python(), Path(shared, "python"), symlinks=True) / "bin/python3"
        find_own_libraries(python)
        packages = [path for path in sys.path if path and Path(path).is_dir() and "lib-dynload" not in path]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": f"/home/{user}",
            "PYTHONPATH": ":".join(packages),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": f"/home/{user}",
            **environment,
        }
        variables = (f"{name}={value}" for name, value in environment.items())
        yield ["runuser", "-u", user, "--", "env", "-i", *variables, *before, str(python)]


def find_own_libraries(python: Path) -> None:
    """Replace the library path that is linked into this copy of Python by a path relative to the program. The linked
    path may be a folder that only root can read. With the relative path, the program needs no loader and can be started
    as `sys.executable`."""
    told, beside = f"\0{sysconfig.get_config_var('LIBDIR')}\0".encode(), b"\0$ORIGIN/../lib\0"
    if len(beside) <= len(told):
        python.write_bytes(python.read_bytes().replace(told, beside.ljust(len(told), b"\0")))


def run_tests(python: Sequence[str], tests: Sequence[str], *options: str, seconds: float) -> str:
    """Run tests with this interpreter, check that they pass, and return pytest's output."""
    command = [*python, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
    command += [str(ROOT / "tests" / test) for test in tests]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout
