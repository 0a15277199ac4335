"""The owners of an image's files, as data beside the image: the files themselves belong to the user of the store.

A sandbox of several users gives the files to their owners when it starts (see guest/isolation/isolate.py). This module
decides which images need such a sandbox. Invariant: a list of owners names only paths that exist in the image, and no
path leads through a link.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TypeAlias

import msgspec

Owners: TypeAlias = dict[str, tuple[int, int]]
"""The user id and the group id of each file that is not root's. Keys are paths below the root without a leading `/`;
the root itself is ""."""
MOST_USERS = 65_536
"""Maximum number of user ids in a sandbox."""
MOST_BYTES, MOST_ENTRIES = 256 << 20, 50_000
"""Maximum total size and maximum number of the files that are given to their owners when a sandbox starts. Each of
these files is copied into the sandbox's memory."""
PLAIN_USERS = frozenset({"_apt", "man"})
"""Users of Debian's base system that own nothing but caches. A sandbox with one user rebuilds the caches as root."""
FIRST_PERSON, HOMES = 1000, "home/"
"""The first user id of a person, and the folder of people's homes. Such homes do not require several users, because
many base images have an account that no program of the image uses."""
SYSTEM = ("usr", "etc", "bin", "")
"""Paths that usually belong to root. If another user owns one of them, this user probably made the archive, so root
gets all files of this user."""
MAX_PASSWD = 1 << 20
ONE_OWNER = "or set task.runtime.users to 1, if the task works with root as the owner of all files"
"""The end of a hint for a task whose sandbox cannot have the owners of its image."""


class Ownership(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the owners in an image.

    `entries`, `bytes`: number and size of the files that the sandbox copies to give them to their owners.
    `foreign`: describes the first file for which a sandbox needs several users, or "" if one user is enough.
    `highest`: the highest user or group id of the files for which a sandbox needs several users.
    `unkept`: the reason why no sandbox can have these owners, or "".
    """

    entries: int = 0
    bytes: int = 0
    foreign: str = ""
    highest: int = 0
    unkept: str = ""


def kept_owners(root: Path, owners: Owners, base: Owners | None = None) -> tuple[Owners, Ownership]:
    """Return the owners, except root, of the files that exist below `root`, and the summary. `base` are the owners in
    the image's base, if the image was built on one. If the build has made an account, its home is assumed to be used by
    the task, so a sandbox of the image needs several users."""
    makers = {owners[path][0] for path in SYSTEM if path in owners and owners[path][0]}
    names = _user_names(root)
    kept: Owners = {}
    plain: dict[str, bool] = {"": True}
    copied = set[str]()
    size = highest = 0
    foreign = unkept = ""
    for path, (uid, gid) in sorted(owners.items()):
        if uid in makers:
            uid = gid = 0
        if (uid, gid) == (0, 0) or not _is_plain(root, os.path.dirname(path), plain):
            continue
        try:
            status = os.lstat(root / path)
        except FileNotFoundError:
            continue
        kept[path] = (uid, gid)
        above = path
        while above not in copied:
            copied.add(above)
            above = os.path.dirname(above)
        size += status.st_size if stat.S_ISREG(status.st_mode) else 0
        is_home = uid >= FIRST_PERSON and path.startswith(HOMES) and (base is None or base.get(path) == (uid, gid))
        if uid == 0 or names.get(uid) in PLAIN_USERS or is_home:
            continue
        highest = max(highest, uid, gid)
        foreign = foreign or f"/{path} of {names.get(uid, 'a user')} (id {uid})"
        if not (0 <= uid < MOST_USERS and 0 <= gid < MOST_USERS):
            unkept = unkept or f"/{path} belongs to {uid}:{gid}, and a sandbox has ids up to {MOST_USERS - 1}"
    if size > MOST_BYTES or len(copied) > MOST_ENTRIES:
        unkept = unkept or (
            f"{len(copied)} files of {size >> 20} MiB belong to other users or are above such files, and a sandbox"
            f" can copy {MOST_ENTRIES} files of {MOST_BYTES >> 20} MiB"
        )
    return kept, Ownership(entries=len(copied), bytes=size, foreign=foreign, highest=highest, unkept=unkept)


def packed(owners: Owners) -> bytes:
    """Return the content of an image's file of owners: `UID GID PATH` for each file, with a NUL at the end."""
    return b"".join(b"%d %d %s\0" % (uid, gid, os.fsencode(path)) for path, (uid, gid) in owners.items())


def unpacked(data: bytes) -> Owners:
    """Return the owners that `packed` has written."""
    found: Owners = {}
    for entry in data.split(b"\0")[:-1]:
        uid, gid, path = entry.split(b" ", 2)
        found[os.fsdecode(path)] = (int(uid), int(gid))
    return found


def _is_plain(root: Path, folder: str, known: dict[str, bool]) -> bool:
    """Return whether a folder exists below `root` and no part of its path is a link. `known` holds earlier results."""
    if folder not in known:
        above = _is_plain(root, os.path.dirname(folder), known)
        known[folder] = above and os.path.isdir(root / folder) and not os.path.islink(root / folder)
    return known[folder]


def _user_names(root: Path) -> dict[int, str]:
    """Return the names of the users in /etc/passwd of a root file system. No link is followed."""
    if not _is_plain(root, "etc", {"": True}):
        return {}
    try:
        descriptor = os.open(root / "etc/passwd", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    with open(descriptor, "rb") as file:
        text = file.read(MAX_PASSWD).decode(errors="replace")
    rows = [line.split(":") for line in text.splitlines()]
    return {int(row[2]): row[0] for row in rows if len(row) > 2 and row[2].isdecimal()}
