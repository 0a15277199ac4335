"""Saves a sandbox's writable layers as a tar archive, and restores them. The layers contain all files that were written
in the sandbox.

The name of each member begins with the number of its layer. Removals are stored as in overlayfs: a character device 0:0
stands for a removed file, and an extended attribute marks a folder that hides the folder of the same path in lower
layers.

Invariant: while a layer is unpacked, its folder is the root of the process that unpacks it. So whatever an archive
contains, nothing outside the layer is changed.
"""

from __future__ import annotations

import os
import stat
import tarfile

from outrider.sandbox.runtimes.guest.filesystem.tree_writer import (
    FolderCursor,
    make_folder,
    put_file,
    put_link,
    remove_entry,
)
from outrider.sandbox.runtimes.guest.filesystem.trees import Packer

OPAQUE = "user.overlay.opaque"
"""The extended attribute of a folder that hides the folder of the same path in lower layers. overlayfs uses this name
in mounts with the option `userxattr`."""
OPAQUE_HEADER = "SCHILY.xattr." + OPAQUE
"""The name of the attribute OPAQUE in an archive. GNU tar and star use the same form."""


def save_layers(out: int, layers: list[int]) -> None:
    """Write an archive of the layers to the descriptor `out`. `layers` has a descriptor of each layer's folder. Sockets
    are left out. Only a forked child may call this function, because it changes the working directory."""
    with open(out, "wb", closefd=False) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        for number, layer in enumerate(layers):
            Packer(archive, describe).add_tree(os.dup(layer), ".", str(number))


def describe(member: tarfile.TarInfo, folder: int, name: str) -> None:
    """If the archive member is a folder with the attribute OPAQUE, store the attribute in the member."""
    if member.isdir():
        os.fchdir(folder)  # the functions for extended attributes take no `dir_fd`
        if OPAQUE in os.listxattr(name, follow_symlinks=False):
            member.pax_headers = {OPAQUE_HEADER: os.getxattr(name, OPAQUE, follow_symlinks=False).decode("ascii")}


def restore_layers(source: int, folders: list[str]) -> None:
    """Fill empty folders from the archive that is read from the descriptor `source`. Raises OSError.

    A forked child does this. Each folder becomes the child's root in turn, so nothing in the archive can lead out of
    the folder.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        with open(reader, "rb") as pipe:
            fault = pipe.read()
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
            os.chroot(".")  # `old` was opened before the first chroot, so it leads out again
    except BaseException as error:  # the parent raises an error with this text, and this fork exits
        os.write(writer, f"{type(error).__name__}: {error}"[:4000].encode("utf-8", "replace"))
    finally:
        os._exit(0)


def unpack(source: int, prefix: str) -> None:
    """Write the files of one layer to `/`. For example, the prefix `0/` chooses the member `0` and all members below
    it."""
    top = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    cursor = FolderCursor(top)
    with open(source, "rb", closefd=False) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
        while (member := archive.next()) is not None:
            if f"{member.name}/".startswith(prefix):
                put(archive, member, cursor, prefix)
            archive.members = []  # type: ignore[attr-defined]  # tarfile keeps every member it ever read
    os.close(cursor.descent.fd)
    os.close(top)


def put(archive: tarfile.TarFile, member: tarfile.TarInfo, cursor: FolderCursor, prefix: str) -> None:
    """Write one member of an archive. Skips a member whose path contains `..`, or leads through a file or a link."""
    parts = parts_of(member.name, prefix)
    above = cursor.to(parts[:-1])
    if above < 0 or ".." in parts:
        return
    name = parts[-1] if parts else "."
    if not parts and not member.isdir():
        return
    if member.isdir():
        put_folder(member, above, name)
    elif member.isreg():
        put_file(archive, member, above, name, member.mode & 0o7777)
    elif member.islnk():  # a hard link has the same owner as its file, which is already set
        link(member, cursor, above, name, parts_of(member.linkname, prefix))
        return
    elif member.issym():
        remove_entry(above, name)
        os.symlink(member.linkname, name, dir_fd=above)
    elif member.ischr() or member.isfifo():
        remove_entry(above, name)
        kind = stat.S_IFIFO if member.isfifo() else stat.S_IFCHR
        os.mknod(name, kind | member.mode & 0o7777, os.makedev(member.devmajor, member.devminor), dir_fd=above)
    else:
        return
    if (member.uid, member.gid) != (0, 0):
        os.chown(name, member.uid, member.gid, dir_fd=above, follow_symlinks=False)
        # a change of the owner clears the set-user-id and set-group-id bits
        if member.mode & 0o6000 and not member.issym():
            os.chmod(name, member.mode & 0o7777, dir_fd=above)


def parts_of(path: str, prefix: str) -> list[str]:
    return [part for part in path[len(prefix) :].split("/") if part not in ("", ".")]


def put_folder(member: tarfile.TarInfo, above: int, name: str) -> None:
    folder = make_folder(above, name, member.mode & 0o7777)
    try:
        if OPAQUE_HEADER in member.pax_headers:
            os.setxattr(folder, OPAQUE, member.pax_headers[OPAQUE_HEADER].encode())
    finally:
        os.close(folder)


def link(member: tarfile.TarInfo, cursor: FolderCursor, above: int, name: str, goal: list[str]) -> None:
    kept = os.dup(above)
    try:
        source = cursor.to(goal[:-1])
        if source >= 0 and goal and ".." not in goal:
            put_link(source, goal[-1], kept, name)
    finally:
        os.close(kept)
