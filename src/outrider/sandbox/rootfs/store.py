"""The images of this user on this machine: root folders by content, and the names given to them.

    images/HEX/root         the root file system, owned by the user
    images/HEX/image.json   its description
    images/names/NAME       the HEX of the image with this name

Any number of processes may import, use and remove images at once (see concurrency/build_once.py). Invariant: a folder
`HEX/root` is complete, and never changes.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from outrider.concurrency.build_once import build_once, locked, new_draft, remove_tree
from outrider.environment import cache_home
from outrider.errors import InvalidField, NotFound, RequestError
from outrider.sandbox.rootfs.archives import digest_of_file, layered
from outrider.sandbox.rootfs.sif import is_sif, unpack_sif
from outrider.sandbox.rootfs.unpack import UNREADABLE, BadImage, unpack

NAME = re.compile(r"[a-z0-9]([a-z0-9._/-]{0,126}[a-z0-9])?(:[A-Za-z0-9._-]{1,64})?")


class RootImage(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an image. `digest` identifies the content of the source from which the image was made. `env`
    and `workdir` are the image's settings. `created` is the time of import or build, in seconds since the epoch.
    `bytes` is the total size of the image's files. `left_out` is the number of devices, sockets and pipes left out."""

    digest: str
    source: str
    created: float
    bytes: int
    entries: int
    left_out: int = 0
    env: dict[str, str] = {}
    workdir: str | None = None


class ImageStore:
    """A folder of images. The methods block."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_home() / "images"

    def import_(self, source: Path, name: str) -> RootImage:
        """Make an image from an archive and give it a name (see `give`). Content that was imported before is not
        unpacked again. Raises BadImage, NotFound, InvalidField for the name, and RuntimeUnavailable without the tool
        that the archive needs."""
        checked_name(name)
        if not source.exists():
            raise NotFound(f"no file or folder {source}")
        try:
            image = self._import_sif(source) if source.is_file() and is_sif(source) else self._import_layers(source)
        except UNREADABLE as error:
            raise BadImage(f"{source} cannot be read: {error}") from error
        self.give(name, image)
        return image

    def make(self, digest: str, name: str, put: Callable[[Path], RootImage]) -> RootImage:
        """Give the image with this digest a name. If the image does not exist, `put` fills its empty root and returns
        its description."""
        image = self._made(digest, put)
        self.give(name, image)
        return image

    def give(self, name: str, image: RootImage) -> None:
        """Give an image a name. An earlier image of the same name loses this name. If it has no other name, its digest
        becomes its name, so that the image can still be listed, used and removed. Raises InvalidField for an invalid
        name."""
        earlier = self.images().get(checked_name(name))
        self._put_name(name, image)
        if earlier is not None and earlier not in self.images().values():
            self._put_name(earlier.digest, earlier)

    def _put_name(self, name: str, image: RootImage) -> None:
        place = self._name(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=place.parent, prefix=".")
        with os.fdopen(handle, "w") as file:
            file.write(_hex(image.digest))
            file.flush()
            os.fsync(handle)
        os.replace(draft, place)  # other readers see the old content or the new, never a part

    def images(self) -> dict[str, RootImage]:
        """Return the images by name."""
        found = {}
        for path in sorted(self._names.glob("[!.]*")):
            if (image := self._image(path.read_text())) is not None:
                found[unquote(path.name)] = image
        return found

    def names(self) -> frozenset[str]:
        """Return the names of all images without reading the images."""
        return frozenset(unquote(path.name) for path in self._names.glob("[!.]*"))

    def image(self, name: str) -> RootImage:
        """Return the image with this name. Raises NotFound."""
        checked_name(name)
        try:
            image = self._image(self._name(name).read_text())
        except FileNotFoundError:
            image = None
        if image is None:
            raise NotFound(f"no image {name!r} on this node", hint="`outrider image import FILE` makes one")
        return image

    def root(self, image: RootImage) -> Path:
        return self._folder / _hex(image.digest) / "root"

    def remove(self, name: str) -> bool:
        """Remove a name, and the image if it has no other name. Returns True if the image was removed. Sandboxes that
        run on the image break. Raises NotFound."""
        image = self.image(name)
        self._name(name).unlink()
        if image in self.images().values():
            return False
        place = self._folder / _hex(image.digest)
        with locked(place):
            # The folder is renamed first, because a half-removed image must not be found. If this process is killed
            # meanwhile, the next import removes the folder, which then has a draft's name.
            gone = new_draft(place)
            os.rename(place, gone / "image")
            remove_tree(gone)
        return True

    def _import_sif(self, source: Path) -> RootImage:
        digest = f"sha256:{digest_of_file(source.open('rb'))}"

        def put(root: Path) -> RootImage:
            unpack_sif(source, root)
            entries = size = 0
            for folder, folders, files in os.walk(root):
                entries += len(folders) + len(files)
                size += sum(os.lstat(os.path.join(folder, name)).st_size for name in files)
            return RootImage(digest=digest, source=str(source), created=time.time(), bytes=size, entries=entries)

        return self._made(digest, put)

    def _import_layers(self, source: Path) -> RootImage:
        with layered(source) as found:

            def put(root: Path) -> RootImage:
                contents = unpack(found.layers(), root)
                if not contents.entries:
                    raise BadImage(f"{source} is empty")
                return RootImage(
                    digest=found.digest,
                    source=str(source),
                    created=time.time(),
                    bytes=contents.bytes,
                    entries=contents.entries,
                    left_out=contents.left_out,
                    env=found.env,
                    workdir=found.workdir,
                )

            return self._made(found.digest, put)

    def _made(self, digest: str, put: Callable[[Path], RootImage]) -> RootImage:
        """Return the image with this digest. If the image does not exist, `put` fills its empty root."""

        def build(draft: Path) -> None:
            (draft / "root").mkdir(mode=0o755)
            (draft / "image.json").write_bytes(msgspec.json.encode(put(draft / "root")))

        place = build_once(self._folder / _hex(digest), build)
        return msgspec.json.decode((place / "image.json").read_bytes(), type=RootImage)

    def _image(self, content: str) -> RootImage | None:
        try:
            return msgspec.json.decode((self._folder / content / "image.json").read_bytes(), type=RootImage)
        except FileNotFoundError:
            return None

    @property
    def _names(self) -> Path:
        return self._folder / "names"

    def _name(self, name: str) -> Path:
        return self._names / quote(name, safe="")


def has_image(name: str | None, names: frozenset[str] | None = None) -> bool:
    """Return True if a task's image need not be fetched: there is none, it is a path, or it has been imported under
    this name. A container engine's own images are not looked up. To check for another machine, pass the `names` of the
    images imported there."""
    if name is None or os.path.isabs(name):
        return True
    if names is not None:
        return name in names
    try:
        ImageStore().image(name)
    except RequestError:
        return False
    return True


def known_image(name: str) -> RootImage:
    """Return the image with this name. Raises InvalidField, naming the task's field, if there is no such image."""
    try:
        return ImageStore().image(name)
    except RequestError as error:
        raise InvalidField(error.message, field="task.runtime.image", hint=error.hint) from error


def checked_name(name: str) -> str:
    """Return the name. Raises InvalidField for an invalid name."""
    if not NAME.fullmatch(name) or ".." in name or "//" in name:
        raise InvalidField(
            f"{name!r} is no name for an image", field="name", hint="such as debian, or tools/python:3.12"
        )
    return name


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
