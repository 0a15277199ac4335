"""File systems of the host that are mounted below what is shown of it.

Engines that show a folder read-only show these in it as well, and leave them writable: to be read-only, each has to be
shown by itself, over what is there. It knows no engine and mounts nothing. Invariant: where one folder is inside, the
file systems in it are at the same places below.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
ESCAPED = re.compile(rb"\\([0-7]{3})")
"""Blanks and the like in a path of that file."""


def inner_mounts(shown: Iterable[tuple[Path, str]], *, mounts: Path = MOUNTS) -> list[tuple[Path, str]]:
    """Of (path of the host, where it is inside) those for what is mounted below, outer ones first. Blocks, for as long
    as a look at some paths."""
    points = sorted({point(line) for line in mounts.read_bytes().splitlines()})
    found = []
    for source, target in shown:
        top = os.path.realpath(source)
        below = [path for path in points if path != top and path.startswith(f"{top.rstrip('/')}/")]
        found += [
            (Path(path), os.path.join(target, os.path.relpath(path, top))) for path in below if os.path.lexists(path)
        ]
    return found


def point(line: bytes) -> str:
    """Where something is mounted, by a line of mountinfo."""
    return os.fsdecode(ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), line.split(b" ")[4]))
