"""Keeps the tests' temporary files in memory, if this process may mount a file system. On a disk, the commits of a
thousand stores take a third of the fast tests' processor time, and a larger share of their duration. With TMPDIR=/tmp,
the files of a failed test are kept."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.guest.isolation import syscalls

ROOM = 8 << 20
"""Memory in KiB that must be available, and size of the file system. The fast tests write some hundred megabytes, the
deep tests about 4 gigabytes."""
MS_SLAVE = 1 << 19
"""Flag of mount(2): later mounts of other processes appear in this process, but its own mounts do not appear in other
processes."""


def use_memory(config: pytest.Config) -> None:
    """Mount a file system in memory as the folder of temporary files. The mount exists only for this process and the
    processes that it starts, and ends with them. Needs root.

    The tests with real programs use the disk, because programs such as container engines run outside this process and
    could not open the files.
    """
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
    """Return the machine's available memory in KiB, or the memory limit of the container if that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    [free] = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    limit = Path("/sys/fs/cgroup/memory.max")  # the file exists only in a container
    if limit.exists() and (most := limit.read_text().strip()).isdigit():
        free = min(free, int(most) >> 10)
    return free
