"""Unpacks the tar layers of an image into one folder, whose files all belong to the current user.

The owners of the files are returned and not set (see owners.py). Set-user-id bits and extended attributes are dropped.
Devices, sockets and pipes are skipped and counted. Symbolic links in the image are followed as if the folder were `/`.
Invariant: no archive can cause a read or write outside of the folder. A malformed archive raises BadImage.
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from outrider.errors import RequestError
from outrider.sandbox.rootfs.owners import Owners

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
"""Names with which a layer removes files of lower layers, according to the OCI image specification. `.wh.NAME` removes
the file NAME. OPAQUE removes all files in its folder that come from lower layers."""
MAX_LINKS = 40
"""Maximum number of symbolic links in one path, as in Linux."""
MAX_DEPTH = 256
"""Maximum depth of folders. The kernel rejects long paths, and real root file systems have only about thirty levels."""
MAX_HEADER = 1 << 20
"""Maximum bytes of an entry's long name or extended header, which tarfile reads into memory."""
MAX_BYTES = 64 << 30
"""Maximum bytes of an image's files. The same limit applies to the image's layers after decompression."""
RATIO, ANY_RATIO_BYTES = 100, 1 << 30
"""An image may be at most RATIO times as large as its archives. Images of up to ANY_RATIO_BYTES are exempt. A file of
zeros can shrink to a thousandth, and a sparse file to nothing. Layers of real images shrink to about a third."""
MAX_ENTRIES = 4_000_000
"""Maximum number of files, folders and links in an image. The largest images for machine learning have a million."""
KEPT_FREE, KEPT_SHARE = 1 << 30, 20
"""Space that an image must leave free on its disk: the smaller of KEPT_FREE bytes and 1/KEPT_SHARE of the disk."""
COPY_BYTES = 1 << 20
PERMISSIONS = 0o777
"""The permission bits that are taken from the archive."""
ROOT = (0, 0)
OLDEST, NEWEST = -(1 << 31), 1 << 33
"""The range of file times that every file system supports, in seconds since the epoch: from 1901 to 2242."""


class BadImage(RequestError):
    """An image cannot be created. Its archive is broken, too large or not an image, or a build or download has
    failed."""

    code = "bad_image"


UNREADABLE = (
    tarfile.TarError,
    EOFError,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    ValueError,  # A header field is not a number.
    OverflowError,  # A number is larger than any offset in a file.
    RecursionError,  # tarfile reads the header after an extended header by recursion.
)
"""Exceptions that tarfile raises for a broken archive, in addition to OSError."""


class ArchiveMember(tarfile.TarInfo):
    """An entry of a tar archive. Its sizes are checked, because tarfile would otherwise seek backwards for a negative
    size, and read a huge header into memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:  # tarfile calls this method for each entry
        if self.size < 0 or (self.type in HEADERS and self.size > MAX_HEADER):
            raise tarfile.ReadError(f"an entry has the impossible size of {self.size} bytes")
        member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]  # the stub lacks this method
        if member.size < 0:
            raise tarfile.ReadError(f"the entry {member.name!r} has {member.size} bytes")
        return member


def is_tar(path: Path) -> bool:
    """Return True if a file is a tar archive, compressed or not."""
    try:
        with tarfile.open(path, tarinfo=ArchiveMember):
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
    """Checks that an image in `folder` does not become too large. `archived` is the total size of the archives read so
    far, in bytes. The methods raise BadImage."""

    def __init__(self, folder: Path, archived: int = 0) -> None:
        self._folder = folder
        self.archived = archived
        self._bytes = 0
        self._entries = 0

    def take(self, size: int) -> None:
        """Count `size` bytes before they are written. Raises BadImage if the image or the disk would exceed a limit."""
        self._bytes += size
        check_expansion(self._bytes, self.archived)
        disk = os.statvfs(self._folder)
        free, kept = disk.f_bavail * disk.f_frsize, min(KEPT_FREE, disk.f_blocks * disk.f_frsize // KEPT_SHARE)
        if size > free - kept:
            raise BadImage(
                f"a file of {size >> 20} MiB leaves too little of the {free >> 20} MiB that are free on the disk",
                hint=f"free some space: images are in {self._folder}",
            )

    def take_entry(self) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise BadImage(f"the image has more than {MAX_ENTRIES} files and folders")


def check_expansion(size: int, archived: int) -> None:
    """Raise BadImage if an image of `size` bytes is larger than any image may be, or too large for its archives. The
    archives have `archived` bytes together."""
    if size > MAX_BYTES:
        raise BadImage(f"the image is larger than {MAX_BYTES >> 30} GiB")
    if size > ANY_RATIO_BYTES and size > RATIO * archived:
        raise BadImage(
            f"{archived} bytes of archive unpack to {size >> 20} MiB or more: no real image compresses that well"
        )


class Contents(msgspec.Struct):
    """The contents of a root file system.

    `entries`: the number of files, folders and links.
    `bytes`: the total size of the files.
    `left_out`: the number of special files that were skipped.
    `owners`: the owners of the files that do not belong to root.
    `base_owners`: the owners of the base image's files, or None if the image has no base image.
    """

    entries: int = 0
    bytes: int = 0
    left_out: int = 0
    owners: Owners = {}
    base_owners: Owners | None = None


def contents_of(root: Path) -> Contents:
    """Count the entries and bytes of an unpacked root file system."""
    found = Contents()
    for folder, folders, files in os.walk(root):
        found.entries += len(folders) + len(files)
        found.bytes += sum(os.lstat(os.path.join(folder, name)).st_size for name in files)
    return found


def unpack(layers: Iterable[BinaryIO], target: Path, *, owners: Mapping[str, tuple[int, int]] = {}) -> Contents:
    """Unpack layers into a folder, the lowest first, and close them. Each layer is a tar archive, optionally compressed
    with gzip, bzip2 or xz. `owners` are the owners of files that are already in the folder. The returned owners may
    contain paths that a higher layer has removed.

    Raises BadImage if a layer is broken or the image exceeds a limit. The folder then contains a part of the image.
    """
    contents, room = Contents(owners=dict(owners)), Room(target)
    for number, layer in enumerate(layers):
        try:
            with layer:
                room.archived += layer.seek(0, os.SEEK_END)
                layer.seek(0)
                with tarfile.open(fileobj=layer, mode="r|*", tarinfo=ArchiveMember) as archive:
                    _Layer(target, contents, room).put(archive)
        except OSError as error:
            raise BadImage(f"layer {number} cannot be unpacked: {error}") from error
        except UNREADABLE as error:
            raise BadImage(f"layer {number} cannot be read: {error}") from error
    return contents


class _Layer:
    """Unpacks one layer. `_own` has the paths that this layer has written, and the folders above them. A whiteout (an
    entry that removes files of lower layers) must not remove these paths."""

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
            # `archive.offset` is the end of this entry. Skipped entries also count, because tarfile reads their data.
            check_expansion(archive.offset, self._room.archived)
            folder, name = self._place(member.name)
            if name.startswith(WHITEOUT):
                # A whiteout removes one file of a lower layer. An opaque whiteout removes all files of lower layers in
                # its folder. A repeated opaque whiteout is skipped: it has no effect, and an archive may repeat it a
                # million times for a large folder.
                if name == OPAQUE and folder in opaque:
                    continue
                opaque |= {folder} if name == OPAQUE else set()
                gone = os.listdir(folder) if name == OPAQUE else [name.removeprefix(WHITEOUT)]
                if not all(gone) or {".", ".."} & set(gone):
                    raise BadImage(f"the whiteout {name!r} names no file")
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
                raise BadImage(f"the entry {member.name!r} would replace the root")
            if member.isdir():
                self._make_folder(place)
                folders.append((place, member.mode, member.mtime))
                self._contents.entries += 1
            elif self._put(archive, member, place):
                self._contents.entries += 1
            else:
                self._contents.left_out += 1
                continue
            self._own_by(place, (member.uid, member.gid))
        for place, mode, changed in reversed(folders):  # last, because writing a file changes its folder's time
            if os.path.isdir(place) and not os.path.islink(place):
                os.chmod(place, mode & PERMISSIONS | stat.S_IRWXU)
                _set_time(place, changed)

    def _put(self, archive: tarfile.TarFile, member: tarfile.TarInfo, place: str) -> bool:
        """Write a file or link. Returns False for a special file, which is not written."""
        if member.issym():
            if "\0" in member.linkname:
                raise BadImage(f"the target of the link {member.name!r} has a NUL: {member.linkname!r:.200}")
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

    def _own_by(self, place: str, owner: tuple[int, int]) -> None:
        path = place[len(self._root) + 1 :]
        if owner != ROOT:
            self._contents.owners[path] = owner
        else:
            self._contents.owners.pop(path, None)

    def _make_folder(self, place: str) -> None:
        if os.path.islink(place) or not os.path.isdir(place):
            _clear(place)
            self._room.take_entry()
            os.mkdir(place)
            self._own_by(place, ROOT)

    def _place(self, name: str) -> tuple[str, str]:
        """Return the folder of an entry and the entry's name in it. The folder is created if it is missing. For the
        root itself, the name is ""."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts or "\0" in name:
            raise BadImage(f"the entry {name!r:.200} leads out of the image")
        return (self._folder(parts[:-1]), parts[-1]) if parts else (self._root, "")

    def _folder(self, parts: list[str]) -> str:
        """Return the host path of the image's folder `parts`. A missing folder is created. A file in the place of a
        folder is replaced by a folder. Symbolic links are resolved here, with the image's root as `/`, because the
        kernel would follow an absolute link out of the image. Raises BadImage."""
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
    """Set a file's modification time, or the nearest time that every file system can store. NaN, which a header may
    contain, becomes 0."""
    when = 0 if math.isnan(changed) else min(NEWEST, max(OLDEST, changed))
    os.utime(place, (when, when))


def _clear(place: str) -> None:
    """Remove a file, or a folder with its content. Does nothing if the path does not exist."""
    try:
        if stat.S_ISDIR(os.lstat(place).st_mode):
            shutil.rmtree(place)
        else:
            os.unlink(place)
    except FileNotFoundError:
        return
