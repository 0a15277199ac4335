"""Sandboxes in the jobs of an ordinary user of a real Slurm: `.ci/sandboxes` starts a cluster of one node."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from support.ordinary import ROOT, ordinary_user, python_of, run_tests

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

VARIABLE = "SANDBOX_SLURM"
KINDS = ("namespace", "apptainer")
MARK = "4003"
"""The number of seconds for `sleep` in the sandboxes of a job."""


@pytest.fixture(scope="module")
def user() -> Iterator[str]:
    """The name of the ordinary user who runs the jobs."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} is not set: .ci/sandboxes FILE starts a Slurm and writes it to FILE")
    with ordinary_user(os.environ[VARIABLE]) as name:
        yield name
        cancel(name, "--signal=KILL")
        wait_for_none(name)


@pytest.fixture(scope="module")
def job(user: str) -> Iterator[list[str]]:
    """The command of an interpreter that runs in a job."""
    with python_of(user, "srun", "--quiet", SLURM_CONF=os.environ[VARIABLE]) as python:
        yield python


def kinds() -> list[str]:
    return [kind for kind in KINDS if kind != "apptainer" or shutil.which(kind)]


def cancel(user: str, *options: str) -> None:
    environment = {**os.environ, "SLURM_CONF": os.environ[VARIABLE]}
    subprocess.run(["scancel", f"--user={user}", *options], env=environment, check=True, capture_output=True)


def wait_for_none(user: str) -> None:
    """Wait until no process of this user runs on this machine, in any namespace."""
    wait_until(lambda left: not left, user)


def wait_until(seen: Callable[[list[str]], bool], user: str) -> None:
    """Wait until `seen` returns True for the user's processes."""
    end = time.monotonic() + 15
    while not seen(found := processes_of(user)):
        assert time.monotonic() < end, found
        time.sleep(0.05)


def processes_of(user: str) -> list[str]:
    """Return the command lines of the user's processes."""
    line = f"\nUid:\t{pwd.getpwnam(user).pw_uid}\t"
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended
            if line in (process / "status").read_text():
                found.append((process / "cmdline").read_text(errors="replace").replace("\0", " "))
    return found


def test_sandboxes_in_a_job(job: list[str]) -> None:
    """Sandboxes in a job pass the tests of the contract, of limits and of leaks."""
    wanted = " or ".join(f"[{kind}" for kind in kinds())
    files = ["runtimes/test_contract.py", "runtimes/test_limits.py", "runtimes/test_leaks.py"]
    told = run_tests(job, files, "-m", "real or not real", "-k", wanted, seconds=280)
    assert " passed" in told


@pytest.mark.parametrize("options", [(), ("--signal=KILL",)], ids=["asked", "killed"])
def test_a_job_that_is_cancelled(user: str, job: list[str], options: Sequence[str]) -> None:
    """A signal that the program may handle, or SIGKILL, ends the job. Nothing of its sandboxes is left."""
    command = [*job, "-m", "runtimes.busy_job", MARK, *kinds()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            assert running.stdout.readline() == "busy\n", running.communicate()[1]
            # The programs start in the background: each is `setsid` before it is `sleep`.
            wait_until(lambda found: found.count(f"sleep {MARK} ") == len(kinds()), user)
            cancel(user, *options)
            running.communicate(timeout=30)
        finally:
            running.kill()
    wait_for_none(user)
