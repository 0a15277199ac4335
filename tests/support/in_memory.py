"""Temporary files of the tests in memory, where there is room: on a disk, the commits of a thousand stores take half of
the time of the fast tests. TMPDIR=/tmp keeps what a failed test has left."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
ROOM = 4 << 30
"""The bytes that must be free. The tests write a tenth of it."""


def use_memory(config: pytest.Config) -> None:
    """Make the folder of temporary files for this process, its workers, and what they start. It is removed at the
    end. Real programs, such as container engines, may not reach it, so their tests stay on the disk."""
    if "TMPDIR" in os.environ or "not real" not in config.option.markexpr or not has_room():
        return
    folder = tempfile.mkdtemp(prefix="o-", dir=MEMORY)  # a short name, because the path of a Unix socket is short
    Path(folder).chmod(0o1777)  # as /tmp: some tests have other users
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def has_room() -> bool:
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return False
    return os.access(MEMORY, os.W_OK) and not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize >= ROOM
