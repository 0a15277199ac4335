"""Temporary files of the tests in memory, where this is allowed: on a disk, the commits of a thousand stores take a
third of the processor time of the fast tests, and more of the wait. TMPDIR=/tmp keeps what a failed test has left."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.guest.isolation import syscalls

ROOM = 8 << 20
"""The KiB of memory that must be free. The fast tests write some hundred megabytes, the deep ones about 4 gigabytes."""
MS_SLAVE = 1 << 19
"""Other processes do not see the mounts of this process, but this process sees theirs."""


def use_memory(config: pytest.Config) -> None:
    """Mount the folder of temporary files for this process, its workers, and what they start. No other process sees
    it, and it ends with them. Needs root. Real programs, such as container engines, would not see it, so their tests
    stay on the disk."""
    if "TMPDIR" in os.environ or "not real" not in config.option.markexpr or free_memory() < ROOM:
        return
    folder = tempfile.mkdtemp(prefix="o-")
    config.add_cleanup(lambda: Path(folder).rmdir())
    with suppress(OSError):  # not allowed here
        syscalls.unshare(syscalls.NEWNS)
        syscalls.mount("none", "/", None, syscalls.MS_REC | MS_SLAVE)
        syscalls.mount("tmpfs", folder, "tmpfs", 0, f"mode=1777,size={ROOM}k")
        config.add_cleanup(lambda: syscalls.detach(folder))
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        # The default name is longer, and the path of a Unix socket must be short.
        config.option.basetemp = config.option.basetemp or f"{folder}/p"


def free_memory() -> int:
    """In KiB, of the machine or, if that is less, of the container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    [free] = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    limit = Path("/sys/fs/cgroup/memory.max")  # in a container only
    if limit.exists() and (most := limit.read_text().strip()).isdigit():
        free = min(free, int(most) >> 10)
    return free
