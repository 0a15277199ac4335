"""A sandbox's writable layers as an archive, and back: all that was changed, by whom and where ever.

An archive is a tar whose members begin with the number of their layer. What a layer takes away from below it is kept
as the kernel keeps it: a character device 0:0, and an attribute of folders. Invariant: an archive, whatever is in it,
is unpacked with the layer as the root, so that it reaches nothing else.
"""

from __future__ import annotations

import os
import stat
import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

OPAQUE = "user.overlay.opaque"
HEADER = "SCHILY.xattr." + OPAQUE


def save_layers(out: int, layers: list[int]) -> None:
    """Write the archive of the layers' folders, given as descriptors, to a descriptor. Sockets are left out."""
    with open(out, "wb", closefd=False) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        for number, layer in enumerate(layers):
            os.fchdir(layer)
            for path in walk("."):
                add(archive, path, f"{number}/{path}")


def walk(folder: str) -> Iterator[str]:
    """All below a folder, parents first; links are not followed."""
    yield folder
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from walk(entry.path)
        else:
            yield entry.path


def add(archive: tarfile.TarFile, path: str, name: str) -> None:
    if stat.S_ISSOCK(os.lstat(path).st_mode):
        return
    member = archive.gettarinfo(path, name)
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if member.isdir() and OPAQUE in os.listxattr(path, follow_symlinks=False):
        member.pax_headers = {HEADER: os.getxattr(path, OPAQUE, follow_symlinks=False).decode("ascii")}
    if member.isreg():
        with open(path, "rb") as file:
            archive.addfile(member, file)
    else:
        archive.addfile(member)


def restore_layers(source: int, folders: list[str]) -> None:
    """Fill the folders, which are empty, from the archive at a descriptor. In a child of its own, whose root each
    folder becomes in turn. Raises OSError."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        with open(reader, "rb") as told:
            fault = told.read()
        os.waitpid(pid, 0)
        if fault:
            raise OSError(f"the layer cannot be restored: {fault.decode(errors='replace')}")
        return
    try:
        old = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        for number, folder in enumerate(folders):
            os.chroot(folder)
            os.chdir("/")
            os.lseek(source, 0, os.SEEK_SET)
            unpack(source, f"{number}/")
            os.fchdir(old)
            os.chroot(".")
    except BaseException as error:
        os.write(writer, f"{type(error).__name__}: {error}"[:4000].encode("utf-8", "replace"))
    finally:
        os._exit(0)


def unpack(source: int, prefix: str) -> None:
    with open(source, "rb", closefd=False) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
        archive.extraction_filter = lambda member, path: member  # the root is the layer: nothing leads out of it
        for member in archive:
            if not member.name.startswith(prefix):
                continue
            member.name = member.name[len(prefix) :]
            if member.islnk():
                member.linkname = member.linkname[len(prefix) :]
            if member.name != ".":
                archive.extract(member, "/", set_attrs=True, numeric_owner=True)
            if HEADER in member.pax_headers:
                os.setxattr(member.name, OPAQUE, member.pax_headers[HEADER].encode())
