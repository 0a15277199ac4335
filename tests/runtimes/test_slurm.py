"""Sandboxes in the jobs of an ordinary user of a real Slurm: `.ci/sandboxes` starts a cluster of one node."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ordinary import ROOT, ordinary_user, python_of, run_tests

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

VARIABLE = "SANDBOX_SLURM"
KINDS = ("namespace", "apptainer")
MARK = f"8{os.getpid():09}"
"""So many seconds: no other's `sleep` has that number."""
JOB = f"outrider-{MARK}"


@pytest.fixture(scope="module")
def job() -> Iterator[list[str]]:
    """The command of an interpreter that runs in a job."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} is not set: .ci/sandboxes FILE starts a Slurm and writes it to FILE")
    conf = os.environ[VARIABLE]
    with (
        ordinary_user(conf) as user,
        python_of(user, "srun", "--quiet", f"--job-name={JOB}", SLURM_CONF=conf) as python,
    ):
        yield python
        slurm("scancel", f"--user={user}", "--signal=KILL")
        wait_for_none(user)


def kinds() -> list[str]:
    return [kind for kind in KINDS if kind != "apptainer" or shutil.which(kind)]


def slurm(*command: str) -> str:
    environment = {**os.environ, "SLURM_CONF": os.environ[VARIABLE]}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def wait_for_none(mark: str) -> None:
    """Until no process of this machine has this in its command line, whatever its namespaces."""
    end = time.monotonic() + 15
    while left := of_mark(mark):
        assert time.monotonic() < end, left
        time.sleep(0.05)


def of_mark(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found += [f"{process.name} {command}"] if mark in command else []
    return found


def test_sandboxes_in_a_job(job: list[str]) -> None:
    """They keep their contract there, as everywhere."""
    wanted = " or ".join(f"[{kind}" for kind in kinds())
    files = ["runtimes/test_contract.py", "runtimes/test_limits.py", "runtimes/test_leaks.py"]
    told = run_tests(job, files, "-m", "real or not real", "-k", wanted, seconds=280)
    assert " passed" in told


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_a_job_that_is_cancelled(job: list[str], signal: str) -> None:
    """By a word that its program may heed, or by force: nothing of its sandboxes is left."""
    command = [*job, "-m", "runtimes.busy_job", MARK, *kinds()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            assert running.stdout.readline() == "busy\n", running.communicate()[1]
            assert len([line for line in of_mark(MARK) if f" sleep {MARK}" in line]) == len(kinds())
            slurm("scancel", f"--name={JOB}", *(["--signal=KILL"] if signal == "KILL" else []))
            running.communicate(timeout=30)
        finally:
            running.kill()
    wait_for_none(MARK)
