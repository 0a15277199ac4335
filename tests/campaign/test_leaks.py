"""The campaign's measurement of processes."""

from __future__ import annotations

import os
import subprocess

from campaign.leaks import footprint


def test_a_process_that_has_exited_has_no_footprint() -> None:
    assert footprint(os.getpid()) is not None
    program = subprocess.Popen(["true"])
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)  # a zombie until `wait` is called
    assert footprint(program.pid) is None
    program.wait()
    assert footprint(program.pid) is None
