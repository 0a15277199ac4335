"""Tar layers unpacked into one folder, which belongs to the user who unpacks them.

It knows no image format. Ownership, set-user-id bits and extended attributes are left out, because a sandbox over the
folder has one user; devices, sockets and pipes are left out and counted. Links in a layer are followed with the folder
as `/`. Invariant: nothing outside of the folder is read or written, whatever an archive says of itself: it ends in its
root or in a BadImage.
"""

from __future__ import annotations

import gzip
import lzma
import math
import os
import shutil
import stat
import tarfile
import zlib
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from outrider.errors import RequestError

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
"""The OCI image specification's names for what a layer removes: `.wh.NAME`, and all of a folder's lower content."""
MAX_LINKS = 40
"""Links followed on the way to one entry; as many as Linux follows."""
MAX_DEPTH = 256
"""Maximum depth of folders. Roots of real systems have some thirty; a folder too deep for a path cannot be used."""
MAX_HEADER = 1 << 20
"""Maximum bytes of an entry's long name or extended header, which tarfile reads in one piece."""
MAX_BYTES = 64 << 30
"""Maximum bytes of an image's files, and of its unpacked layers."""
RATIO, ANY_RATIO_BYTES = 100, 1 << 30
"""An image may be so many times as large as its archive, and that large in any case. Layers of real images shrink to a
third; a file of zeros can shrink to a thousandth, and a sparse one to nothing."""
MAX_ENTRIES = 4_000_000
"""Maximum files, folders and links of an image. The largest images of the machine learning trade have a million."""
KEPT_FREE, KEPT_SHARE = 1 << 30, 20
"""Bytes that an image leaves free on its disk, or on a small one that part of it."""
COPY_BYTES = 1 << 20
PERMISSIONS = 0o777
"""Mode bits that are kept."""
OLDEST, NEWEST = -(1 << 31), 1 << 33
"""Times that every file system can hold, in seconds since the epoch: 1901 to 2242."""


class BadImage(RequestError):
    """An archive that is no image, or one that is broken."""

    code = "bad_image"


UNREADABLE = (
    tarfile.TarError,
    EOFError,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    ValueError,  # fields that are no numbers
    OverflowError,  # numbers beyond a file's offsets
    RecursionError,  # tarfile reads the header behind an extended header by recursion
)
"""Exceptions of reading a broken archive, besides OSError."""


class Member(tarfile.TarInfo):
    """An entry whose sizes are checked: tarfile itself seeks back for a negative size, and reads a header of any size
    into memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:  # tarfile's own way to be extended
        if self.size < 0 or (self.type in HEADERS and self.size > MAX_HEADER):
            raise tarfile.ReadError(f"an entry of {self.size} bytes that cannot be")
        member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]  # the stub lacks it
        if member.size < 0:
            raise tarfile.ReadError(f"the entry {member.name!r} has {member.size} bytes")
        return member


def is_tar(path: Path) -> bool:
    """Whether a file is a tar archive, also a compressed one."""
    try:
        with tarfile.open(path, tarinfo=Member):
            return True
    except (*UNREADABLE, OSError):
        return False


HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class Room:
    """How much an image may still take, which comes in layers of so many bytes as archives. Its methods raise
    BadImage."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._archived = 0
        self._bytes = 0
        self._entries = 0

    def add_archive(self, size: int) -> None:
        self._archived += size

    def take(self, size: int) -> None:
        """Before so many bytes are written."""
        self._bytes += size
        self.check(self._bytes)
        disk = os.statvfs(self._folder)
        free, kept = disk.f_bavail * disk.f_frsize, min(KEPT_FREE, disk.f_blocks * disk.f_frsize // KEPT_SHARE)
        if size > free - kept:
            raise BadImage(
                f"a file of {size >> 20} MiB leaves too little of the {free >> 20} MiB that are free on the disk",
                hint=f"free some space: images are in {self._folder}",
            )

    def check(self, size: int) -> None:
        """What is unpacked, or read on the way, has that many bytes in all."""
        check_expansion(size, self._archived)

    def take_entry(self) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise BadImage(f"the image has more than {MAX_ENTRIES} files and folders")


def check_expansion(size: int, archived: int) -> None:
    """Raises BadImage for an archive that unpacks to more than images do."""
    if size > MAX_BYTES:
        raise BadImage(f"the image is larger than {MAX_BYTES >> 30} GiB")
    if size > ANY_RATIO_BYTES and size > RATIO * archived:
        raise BadImage(f"{archived} bytes of archive unpack to {size >> 20} MiB or more: that is no image, but a bomb")


class Contents(msgspec.Struct):
    """What was unpacked: the number of files, folders and links, the bytes of files, and the number of special files
    left out."""

    entries: int = 0
    bytes: int = 0
    left_out: int = 0


def unpack(layers: Iterable[BinaryIO], target: Path) -> Contents:
    """Unpack layers, the lowest first, into an empty folder, and close them. They are tar, also compressed with gzip,
    bzip2 or xz. Raises BadImage, also for more than an image may be; the folder then holds a part."""
    contents, room = Contents(), Room(target)
    for number, layer in enumerate(layers):
        try:
            with layer:
                room.add_archive(layer.seek(0, os.SEEK_END))
                layer.seek(0)
                with tarfile.open(fileobj=layer, mode="r|*", tarinfo=Member) as archive:
                    _Layer(target, contents, room).put(archive)
        except OSError as error:
            raise BadImage(f"layer {number} cannot be unpacked: {error}") from error
        except UNREADABLE as error:
            raise BadImage(f"layer {number} cannot be read: {error}") from error
    return contents


class _Layer:
    """One layer being unpacked. `_own` are the places that it has written, and the folders above them: its whiteouts
    remove only what lower layers have written, whatever the order of its entries."""

    def __init__(self, root: Path, contents: Contents, room: Room) -> None:
        self._root = str(root)
        self._contents = contents
        self._room = room
        self._own: set[str] = set()

    def put(self, archive: tarfile.TarFile) -> None:
        folders: list[tuple[str, int, float]] = []
        opaque: set[str] = set()
        for member in archive:
            self._room.take_entry()
            self._room.check(archive.offset)  # behind this entry's data, which are read even if they are left out
            folder, name = self._place(member.name)
            if name.startswith(WHITEOUT):
                # Remove what lower layers have written: one name, or all that is in the folder. Once is enough: the
                # rest is this layer's, and a folder with a million files is not to be listed a million times.
                if name == OPAQUE and folder in opaque:
                    continue
                opaque |= {folder} if name == OPAQUE else set()
                gone = os.listdir(folder) if name == OPAQUE else [name.removeprefix(WHITEOUT)]
                if not all(gone) or {".", ".."} & set(gone):
                    raise BadImage(f"{name!r} takes nothing away")
                for each in gone:
                    place = os.path.join(folder, each)
                    if place not in self._own:
                        _clear(place)
                continue
            place = os.path.join(folder, name) if name else folder
            above = place
            while above not in self._own and above != self._root:
                self._own.add(above)
                above = os.path.dirname(above)
            if not name and not member.isdir():
                raise BadImage(f"the entry {member.name!r} would take the place of the root")
            if member.isdir():
                self._make_folder(place)
                folders.append((place, member.mode, member.mtime))
                self._contents.entries += 1
            elif self._put(archive, member, place):
                self._contents.entries += 1
            else:
                self._contents.left_out += 1
        for place, mode, changed in reversed(folders):  # last: a folder may have a mode that forbids writing
            if os.path.isdir(place) and not os.path.islink(place):
                os.chmod(place, mode & PERMISSIONS | stat.S_IRWXU)
                _set_time(place, changed)

    def _put(self, archive: tarfile.TarFile, member: tarfile.TarInfo, place: str) -> bool:
        """Write an entry that is no folder. Returns False for a special file."""
        if member.issym():
            if "\0" in member.linkname:
                raise BadImage(f"the link {member.name!r} leads to {member.linkname!r:.200}")
            _clear(place)
            os.symlink(member.linkname, place)
        elif member.islnk():
            linked = os.path.join(*self._place(member.linkname))
            if linked == place:
                return True
            if not stat.S_ISREG(os.lstat(linked).st_mode):
                raise BadImage(f"{member.name!r} is a hard link to {member.linkname!r}, which is no file")
            _clear(place)
            os.link(linked, place)
        elif member.isfile():
            _clear(place)
            self._room.take(member.size)
            source = archive.extractfile(member)
            assert source is not None
            mode = member.mode & PERMISSIONS | stat.S_IRUSR | stat.S_IWUSR
            with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
                shutil.copyfileobj(source, file, COPY_BYTES)
                os.fchmod(file.fileno(), mode)
            _set_time(place, member.mtime)
            self._contents.bytes += member.size
        else:
            return False
        return True

    def _make_folder(self, place: str) -> None:
        if os.path.islink(place) or not os.path.isdir(place):
            _clear(place)
            self._room.take_entry()
            os.mkdir(place)

    def _place(self, name: str) -> tuple[str, str]:
        """The folder of an entry, which is made if it is missing, and its name there; "" for the root itself."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts or "\0" in name:
            raise BadImage(f"the entry {name!r:.200} points out of the image")
        return (self._folder(parts[:-1]), parts[-1]) if parts else (self._root, "")

    def _folder(self, parts: list[str]) -> str:
        """The host's path of a folder, links followed with the root as `/`. What is missing or no folder is made one.
        The kernel cannot do it: it would follow an absolute link to the host's own file."""
        at: list[str] = []
        todo = deque(parts)
        links = 0
        while todo:
            part = todo.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                at = at[:-1]
                continue
            place = os.path.join(self._root, *at, part)
            if os.path.islink(place):
                links += 1
                if links > MAX_LINKS:
                    raise BadImage(f"too many links on the way to {'/'.join(parts)!r}")
                aim = os.readlink(place)
                at = [] if aim.startswith("/") else at
                todo.extendleft(reversed(aim.split("/")))
                continue
            if len(at) >= MAX_DEPTH:
                raise BadImage(f"the folder {'/'.join(parts)!r:.200} is more than {MAX_DEPTH} levels deep")
            self._make_folder(place)
            at.append(part)
        return os.path.join(self._root, *at)


def _set_time(place: str, changed: float) -> None:
    """Set the time of change, or the nearest one that file systems can hold. Headers can have NaN."""
    when = 0 if math.isnan(changed) else min(NEWEST, max(OLDEST, changed))
    os.utime(place, (when, when))


def _clear(place: str) -> None:
    """Remove what is at a place, a folder with all that is in it."""
    try:
        if stat.S_ISDIR(os.lstat(place).st_mode):
            shutil.rmtree(place)
        else:
            os.unlink(place)
    except FileNotFoundError:
        return
