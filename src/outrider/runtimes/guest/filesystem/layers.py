"""A sandbox's writable layers as an archive, and back: all that was changed, by whom and where ever.

An archive is a tar whose members begin with the number of their layer. What a layer takes away from below it is kept
as the kernel keeps it: a character device 0:0, and an attribute of folders. Invariant: an archive, whatever is in it,
is unpacked with the layer as the root, so that it reaches nothing else.
"""

from __future__ import annotations

import os
import stat
import tarfile

from outrider.runtimes.guest.filesystem.tree_writer import Way, make_folder, put_file, put_link, vacate
from outrider.runtimes.guest.filesystem.trees import Packer

OPAQUE = "user.overlay.opaque"
HEADER = "SCHILY.xattr." + OPAQUE


def save_layers(out: int, layers: list[int]) -> None:
    """Write the archive of the layers' folders, given as descriptors, to a descriptor, in a process of its own. Sockets
    are left out."""
    with open(out, "wb", closefd=False) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        for number, layer in enumerate(layers):
            Packer(archive, describe).add_tree(os.dup(layer), ".", str(number))


def describe(member: tarfile.TarInfo, folder: int, name: str) -> None:
    """Nobody's, and with what the kernel keeps of a folder."""
    member.uid = member.gid = 0
    if member.isdir():
        os.fchdir(folder)
        if OPAQUE in os.listxattr(name, follow_symlinks=False):
            member.pax_headers = {HEADER: os.getxattr(name, OPAQUE, follow_symlinks=False).decode("ascii")}


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
    except BaseException as error:  # whatever it is, the parent is told, and this fork ends
        os.write(writer, f"{type(error).__name__}: {error}"[:4000].encode("utf-8", "replace"))
    finally:
        os._exit(0)


def unpack(source: int, prefix: str) -> None:
    """Put what begins with `prefix`, or is the same without its slash, below the folder `/`."""
    top = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    way = Way(top)
    with open(source, "rb", closefd=False) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
        while (member := archive.next()) is not None:
            if f"{member.name}/".startswith(prefix):
                put(archive, member, way, prefix)
            archive.members = []  # type: ignore[attr-defined]  # it would keep every one
    os.close(way.descent.fd)
    os.close(top)


def put(archive: tarfile.TarFile, member: tarfile.TarInfo, way: Way, prefix: str) -> None:
    """Only what has a place of its own below the top, at the end of folders."""
    parts = parts_of(member.name, prefix)
    above = way.to(parts[:-1])
    if above < 0 or ".." in parts:
        return
    name = parts[-1] if parts else "."
    if member.isdir():
        put_folder(member, above, name)
    elif not parts:
        return
    elif member.isreg():
        put_file(archive, member, above, name, member.mode & 0o7777)
    elif member.islnk():
        link(member, way, above, name, parts_of(member.linkname, prefix))
    elif member.issym():
        vacate(above, name)
        os.symlink(member.linkname, name, dir_fd=above)
    elif member.ischr() or member.isfifo():
        vacate(above, name)
        kind = stat.S_IFIFO if member.isfifo() else stat.S_IFCHR
        os.mknod(name, kind | member.mode & 0o7777, os.makedev(member.devmajor, member.devminor), dir_fd=above)


def parts_of(path: str, prefix: str) -> list[str]:
    return [part for part in path[len(prefix) :].split("/") if part not in ("", ".")]


def put_folder(member: tarfile.TarInfo, above: int, name: str) -> None:
    folder = make_folder(above, name, member.mode & 0o7777)
    try:
        if HEADER in member.pax_headers:
            os.setxattr(folder, OPAQUE, member.pax_headers[HEADER].encode())
    finally:
        os.close(folder)


def link(member: tarfile.TarInfo, way: Way, above: int, name: str, goal: list[str]) -> None:
    kept = os.dup(above)
    try:
        source = way.to(goal[:-1])
        if source >= 0 and goal and ".." not in goal:
            put_link(source, goal[-1], kept, name)
    finally:
        os.close(kept)
