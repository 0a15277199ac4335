"""Chooses the user ids of a sandbox. The first one is this user's own id. Further ids come from this user's ranges in
/etc/subuid and /etc/subgid (ID_FILES).

This module starts no process. Invariant: no other ids of the host are used.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from outrider.errors import RuntimeUnavailable
from outrider.sandbox.runtimes.namespace.plan import Ids
from outrider.sandbox.runtimes.node_host import ID_FILES

RANGE = re.compile(r"^([^:\n]+):([0-9]+):([0-9]+)\s*$", re.MULTILINE)
"""Matches a line `name:first:count`. Like newuidmap, this module ignores all other lines."""


class UserIds(msgspec.Struct, frozen=True):
    """The ranges of user ids and group ids, and the programs that map them. `Plan` explains the fields."""

    uids: tuple[Ids, ...]
    gids: tuple[Ids, ...]
    mappers: dict[str, str]


def user_ids(count: int, files: Mapping[str, Path] = ID_FILES) -> UserIds:
    """Return `count` user ids and as many group ids. The first of each is this user's own id, and the others come from
    `files` (see ID_FILES). Raises RuntimeUnavailable."""
    own = {"uid": (0, os.geteuid(), 1), "gid": (0, os.getegid(), 1)}
    if count == 1:
        return UserIds((own["uid"],), (own["gid"],), {})
    ids = {kind: (own[kind], (1, _range(kind, count - 1, file), count - 1)) for kind, file in files.items()}
    mappers = {}
    for kind in files if os.geteuid() != 0 else ():  # root can map ids without these programs
        program = f"new{kind}map"
        found = shutil.which(program)
        if found is None:
            raise RuntimeUnavailable(
                f"{program} is not installed, which gives a sandbox more than one user",
                field="task.runtime.users",
                hint="install your distribution's uidmap (or shadow-utils)",
            )
        mappers[kind] = found
    return UserIds(ids["uid"], ids["gid"], mappers)


def _range(kind: str, count: int, file: Path) -> int:
    """Find this user's first range in `file` with at least `count` ids, and return the first id of this range. Raises
    RuntimeUnavailable."""
    uid = os.geteuid()
    names = {str(uid)}
    with suppress(KeyError):  # a user without a name may have ranges by number
        names.add(pwd.getpwuid(uid).pw_name)
    try:
        text = file.read_text(errors="replace")
    except OSError:
        text = ""
    for name, first, size in RANGE.findall(text):
        if name in names and int(size) >= count:
            return int(first)
    raise RuntimeUnavailable(
        f"{file} sets no {count} ids aside for {' or '.join(sorted(names))}",
        field="task.runtime.users",
        hint=f"as root: usermod --add-sub{kind}s 100000-165535 {max(names, key=len)}",
    )
