"""File systems that are mounted below the host folders that a sandbox is shown.

Container engines that mount a folder read-only mount these with it and leave them writable. To be read-only, each has
to be mounted again by itself, over what is there. This module mounts nothing. Invariant: the places that it names keep
their positions relative to the folder they are in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")
ESCAPED = re.compile(rb"\\([0-7]{3})")
"""How mountinfo writes blanks and the like in a path."""


def inner_mounts(shown: Iterable[tuple[Path, str]], *, mountinfo: Path = MOUNTINFO) -> list[tuple[Path, str]]:
    """What is mounted below the paths of `shown`, as `shown` itself: (path of the host, path inside), outer ones first.

    Blocks for as long as a look at some paths."""
    points = sorted({mount_point(line) for line in mountinfo.read_bytes().splitlines()})
    found = []
    for source, target in shown:
        top = os.path.realpath(source)
        below = [path for path in points if path != top and path.startswith(f"{top.rstrip('/')}/")]
        # A mount that a later one hides is still listed, though its path leads nowhere.
        found += [
            (Path(path), os.path.join(target, os.path.relpath(path, top))) for path in below if os.path.lexists(path)
        ]
    return found


def mount_point(line: bytes) -> str:
    """The fifth field of a line of mountinfo."""
    return os.fsdecode(ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), line.split(b" ")[4]))
