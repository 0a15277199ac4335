"""Parses the multipart body of Harbor's run API, and unpacks the task archive in it.

Invariants: unpacking writes only into the given folder, at most MAX_UNPACKED bytes and MAX_ENTRIES files and folders. A
malformed body or archive raises InvalidField or TooLarge.
"""

from __future__ import annotations

import errno
import gzip
import io
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from outrider.errors import InvalidField, TooLarge
from outrider.sandbox.rootfs.unpack import UNREADABLE, ArchiveMember
from outrider.tasks.harbor.tasks import TASK_TOML

METADATA, ARCHIVE = "metadata", "task_archive"
"""Names of the two parts of the multipart body."""
MAX_PARTS = 16
MAX_HEADERS = 16 << 10
"""Maximum size of the headers of one part, in bytes."""
MAX_UNPACKED = 64 << 20
"""Maximum size of a task's files, in bytes. `tasks/harbor/files.py` has lower limits for files that are sent into the
sandbox, such as tests."""
RATIO, ANY_RATIO_BYTES = 100, 1 << 20
"""An archive may unpack to at most RATIO times its size, or to ANY_RATIO_BYTES, whichever is more."""
MAX_CONFIG = 1 << 20
"""Maximum size of a task.toml in bytes. Parsing a large one is slow."""
MAX_ENTRIES = 4096
MAX_DEPTH = 32
COPY_BYTES = 1 << 18
BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,200})"|([^;\s"]{1,200}))', re.IGNORECASE)
PART_NAME = re.compile(rb'(?:^|[;\s])name=(?:"([^"\r\n]*)"|([^;\s"]+))', re.IGNORECASE)
NAMES_AT_FAULT = frozenset({errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})
"""`errno` values that a bad file name in the archive can cause."""


def parts_of(content_type: str, body: bytes) -> Mapping[str, bytes]:
    """Return the parts `metadata` and `task_archive` of a multipart body. Raises InvalidField with the name of the
    faulty part."""
    found = BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise InvalidField(
            f"the body is not multipart/form-data with a boundary, but {content_type[:100]!r}",
            field="body",
            hint=f"send the parts {METADATA} (JSON) and {ARCHIVE} (a task folder as tar.gz)",
        )
    delimiter = b"\r\n--" + (found[1] or found[2]).encode("utf-8", "replace")
    _, *pieces = (b"\r\n" + body).split(delimiter, MAX_PARTS + 1)
    if not pieces or not pieces[-1].startswith(b"--"):
        raise InvalidField(f"the body has no end, or more than {MAX_PARTS} parts", field="body")
    parts: dict[str, bytes] = {}
    for piece in pieces[:-1]:
        head, blank, content = piece.partition(b"\r\n\r\n")
        if not blank or len(head) > MAX_HEADERS:
            raise InvalidField("a part of the body has no headers, or too many", field="body")
        name = _name(head)
        if name not in (METADATA, ARCHIVE):
            raise InvalidField("is no part of a run's request", field=name[:200], hint=f"send {METADATA} and {ARCHIVE}")
        if name in parts:
            raise InvalidField("was sent twice", field=name)
        parts[name] = content
    for name in (METADATA, ARCHIVE):
        if name not in parts:
            raise InvalidField("is missing", field=name, hint=f"send the parts {METADATA} and {ARCHIVE}")
    return parts


def _name(head: bytes) -> str:
    """Return the name of a part from its headers. Raises InvalidField if it has none."""
    for line in head.split(b"\r\n"):
        title, _, value = line.partition(b":")
        named = PART_NAME.search(value) if title.strip().lower() == b"content-disposition" else None
        if named is not None:
            return cast(bytes, named[1] if named[1] is not None else named[2]).decode("utf-8", "replace")
    raise InvalidField("a part of the body has no name", field="body")


class _Limited(io.RawIOBase):
    """Stream of an archive's unpacked bytes. Raises TooLarge if they exceed the limits of `check_size`."""

    def __init__(self, archive: bytes) -> None:
        self._unpacked = gzip.GzipFile(fileobj=io.BytesIO(archive))
        self._archived = len(archive)
        self._size = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._unpacked.read(min(size, COPY_BYTES) if size >= 0 else COPY_BYTES)
        self._size += len(data)
        check_size(self._size, self._archived)
        return data


def check_size(size: int, archived: int) -> None:
    """Raise TooLarge if `size` unpacked bytes are too many for a task, or for an archive of `archived` bytes."""
    if size > MAX_UNPACKED:
        raise TooLarge(
            f"the task has more than {MAX_UNPACKED >> 20} MiB",
            field=ARCHIVE,
            hint="put large files into the task's image",
        )
    if size > ANY_RATIO_BYTES and size > RATIO * archived:
        raise TooLarge(
            f"{archived} bytes unpack to {size} bytes or more: no task's files compress that well", field=ARCHIVE
        )


def unpack_task(archive: bytes, into: Path) -> Path:
    """Unpack a task archive into an empty folder, and return the task's folder. This is `into` itself, or the only
    folder at the top of the archive. Blocks. Raises InvalidField and TooLarge."""
    try:
        with tarfile.open(fileobj=cast(BinaryIO, _Limited(archive)), mode="r|", tarinfo=ArchiveMember) as tar:
            for number, member in enumerate(tar):
                if number >= MAX_ENTRIES:
                    raise TooLarge(f"the archive has more than {MAX_ENTRIES} files and folders", field=ARCHIVE)
                check_size(member.size, len(archive))
                _write(tar, member, into)
    except (*UNREADABLE, OSError) as error:  # gzip raises OSError for damaged data
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile) and error.errno is not None:
            raise
        raise InvalidField(
            f"is not a tar archive with gzip: {error}", field=ARCHIVE, hint="pack the task's folder: tar -czf"
        ) from error
    folders = [into] if (into / TASK_TOML).is_file() else [path for path in into.iterdir() if path.is_dir()]
    if len(folders) != 1 or not (folders[0] / TASK_TOML).is_file():
        raise InvalidField(
            f"has no {TASK_TOML}, neither at its top nor in its one folder",
            field=ARCHIVE,
            hint="pack one task's folder",
        )
    if (folders[0] / TASK_TOML).stat().st_size > MAX_CONFIG:
        raise TooLarge(f"{TASK_TOML} has more than {MAX_CONFIG >> 20} MiB", field=ARCHIVE)
    return folders[0]


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    name = PurePosixPath(member.name)
    shown = member.name[:200].encode("utf-8", "replace").decode()
    parts = name.parts
    if name.is_absolute() or ".." in parts or "\0" in member.name or len(parts) > MAX_DEPTH:
        raise InvalidField(f"{shown!r} is no path of a file below the task's folder", field=ARCHIVE)
    if not (member.isdir() or (member.isreg() and not member.issparse())):
        raise InvalidField(
            f"{shown!r} is neither a file nor a folder", field=ARCHIVE, hint="pack copies in place of links: tar -h"
        )
    try:
        member.name.encode()
        if member.isdir():
            (into / name).mkdir(parents=True, exist_ok=True)
            return
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        source = tar.extractfile(member)
        assert source is not None  # not None for a regular file
        with (into / name).open("xb") as file:
            while data := source.read(COPY_BYTES):
                file.write(data)
        (into / name).chmod(0o755 if member.mode & 0o111 else 0o644)
    except UnicodeEncodeError as error:
        raise InvalidField(f"the name {shown!r} is not in UTF-8", field=ARCHIVE) from error
    except OSError as error:
        if error.errno not in NAMES_AT_FAULT:
            raise
        raise InvalidField(f"{shown!r} cannot be written: {error.strerror}", field=ARCHIVE) from error
