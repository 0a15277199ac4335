"""Keeps the owners of an image's files in a list beside the image. The files themselves belong to Outrider's user,
because only root can give files to other users.

A sandbox with several users reads the list when it starts, and gives the files to their owners (see
guest/isolation/isolate.py). This module decides which images need such a sandbox. Invariant: every path in the list
exists in the image and contains no symbolic link.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TypeAlias

import msgspec

Owners: TypeAlias = dict[str, tuple[int, int]]
"""The files that do not belong to root, with the user id and group id of their owners. Keys are paths relative to the
root folder. The key of the root folder itself is ""."""
MOST_USERS = 65_536
"""Maximum number of user ids in one sandbox."""
MOST_BYTES, MOST_ENTRIES = 256 << 20, 50_000
"""Maximum total size and maximum number of the files that a sandbox gives to their owners when it starts. The sandbox
copies each of these files into memory."""
PLAIN_USERS = frozenset({"_apt", "man"})
"""Users of Debian's base system that own only caches. A sandbox without these users can create the caches again as
root."""
FIRST_PERSON, HOMES = 1000, "home/"
"""The first user id of an ordinary account, and the folder of home directories. A home directory alone is no reason for
several users, because many base images have an account that no program uses."""
SYSTEM = ("usr", "etc", "bin", "")
"""Paths that normally belong to root. If one of them belongs to another user, this user has probably created the
archive. All files of this user then count as root's."""
MAX_PASSWD = 1 << 20
ONE_OWNER = "or set task.runtime.users to 1, if the task works with root as the owner of all files"
"""The end of a hint, for a task whose sandbox cannot have the file owners of its image."""


class Ownership(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the file owners in an image.

    `entries`, `bytes`: number and total size of the files that a sandbox copies to change their owners.
    `foreign`: the first file that needs a sandbox with several users, with its owner, or "" if no file does.
    `highest`: the highest user or group id among the files that need several users.
    `unkept`: the reason why no sandbox can have these owners, or "".
    """

    entries: int = 0
    bytes: int = 0
    foreign: str = ""
    highest: int = 0
    unkept: str = ""


def kept_owners(
    root: Path, owners: Owners, base: Owners | None = None, *, most_entries: int = MOST_ENTRIES
) -> tuple[Owners, Ownership]:
    """Return the entries of `owners` that an image keeps, and a summary of them.

    An entry is kept if its owner is not root, and its file exists in the folder `root`. `base` contains the owners in
    the base image, if there is one. If `base` is given and does not contain a home directory with its present owner,
    the build has created the directory or changed its owner. Such a directory requires several users, because the task
    probably uses its account. `most_entries` is the maximum number of files that a sandbox can copy.
    """
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
    if size > MOST_BYTES or len(copied) > most_entries:
        unkept = unkept or (
            f"{len(copied)} files of {size >> 20} MiB belong to other users or are above such files, and a sandbox"
            f" can copy {most_entries} files of {MOST_BYTES >> 20} MiB"
        )
    return kept, Ownership(entries=len(copied), bytes=size, foreign=foreign, highest=highest, unkept=unkept)


def packed(owners: Owners) -> bytes:
    """Encode owners as the content of an image's file `owners` (see store.py): for each file `UID GID PATH` and a
    NUL."""
    return b"".join(b"%d %d %s\0" % (uid, gid, os.fsencode(path)) for path, (uid, gid) in owners.items())


def unpacked(data: bytes) -> Owners:
    """Decode the result of `packed`."""
    found: Owners = {}
    for entry in data.split(b"\0")[:-1]:
        uid, gid, path = entry.split(b" ", 2)
        found[os.fsdecode(path)] = (int(uid), int(gid))
    return found


def _is_plain(root: Path, folder: str, known: dict[str, bool]) -> bool:
    """Return whether a folder exists below `root` and its path contains no symbolic link. `known` caches the
    results."""
    if folder not in known:
        above = _is_plain(root, os.path.dirname(folder), known)
        known[folder] = above and os.path.isdir(root / folder) and not os.path.islink(root / folder)
    return known[folder]


def _user_names(root: Path) -> dict[int, str]:
    """Return the user names of an image by user id, from its /etc/passwd. Symbolic links are not followed."""
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
