"""A test that fails beside other tests and passes alone does not fail the run. A test that fails again does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.flaky import FLAKY_FILE, MAX_FLAKY

SUPPORT = Path(__file__).parent

CONFTEST = "from support.flaky import pytest_addoption, pytest_sessionstart, pytest_terminal_summary\n"
CROWDED = """
import os, pytest
@pytest.mark.parametrize("number", range({flaky}))
def test_needs_quiet(number):
    assert "PYTEST_XDIST_WORKER" not in os.environ, "the others are loud"
@pytest.mark.parametrize("number", range({broken}))
def test_is_broken(number):
    assert False, "broken"
def test_is_well():
    pass
"""


def run(folder: Path, tests: str, *options: str, flaky_file: Path | None = None) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {SUPPORT}\nfilterwarnings = error\n")
    (folder / "test_crowd.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", FLAKY_FILE))}
    if flaky_file is not None:
        env[FLAKY_FILE] = str(flaky_file)
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # every process would import the other plugins for nothing
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("flaky", "broken", "code", "reported"),
    [(0, 0, 0, 0), (2, 0, 0, 2), (1, 1, 1, 1), (MAX_FLAKY + 1, 0, 1, 0), (0, 1, 1, 0)],
)
def test_a_crowd(tmp_path: Path, flaky: int, broken: int, code: int, reported: int) -> None:
    done = run(tmp_path, CROWDED.format(flaky=flaky, broken=broken), "-n", "2", "-p", "xdist")
    assert (done.returncode, done.stdout.count("FLAKY: ")) == (code, reported), done.stdout
    assert ("the others are loud" in done.stdout) == (flaky > 0)


@pytest.mark.deep
def test_runs_with_one_file_count_together(tmp_path: Path) -> None:
    """There are two runs of two flaky tests each. The second run exceeds the limit."""
    file, names = tmp_path / "flaky", [f"test_crowd.py::test_needs_quiet[{number}]" for number in range(2)]
    for code, before in ((0, 0), (1, 2)):
        done = run(tmp_path, CROWDED.format(flaky=2, broken=0), "-n", "2", "-p", "xdist", flaky_file=file)
        assert (done.returncode, done.stdout.count("FLAKY: ")) == (code, 2), done.stdout
        assert ("4 tests have been flaky, and 3 may be" in done.stdout) == (code == 1)
        assert len(file.read_text().splitlines()) == before + 2
    assert sorted(file.read_text().splitlines()) == sorted(2 * names)
    # A run without flaky tests of its own passes, even if the file has too many.
    done = run(tmp_path, CROWDED.format(flaky=0, broken=0), "-n", "2", "-p", "xdist", flaky_file=file)
    assert done.returncode == 0, done.stdout


WARY = """
import os, warnings
def test_fails_at_first():
    warnings.warn("of a package that is not ours")
    first = not os.path.exists("tried")
    open("tried", "w").close()
    assert not first, "the other run is loud"
"""


@pytest.mark.deep
@pytest.mark.parametrize(("options", "code"), [([], 1), (["--beside-others"], 0)])
def test_one_worker_beside_other_runs(tmp_path: Path, options: list[str], code: int) -> None:
    done = run(tmp_path, WARY, "-W", "default", *options)
    assert (done.returncode, done.stdout.count("FLAKY: ")) == (code, len(options)), done.stdout
    assert "the other run is loud" in done.stdout
