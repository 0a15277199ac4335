"""The image store: the images that a user has on this machine, and their names.

    images/HEX/root         the root file system, whose files all belong to the user
    images/HEX/image.json   the description of the image
    images/HEX/owners       the owners of its files, if some do not belong to root (see owners.py)
    images/names/NAME       the HEX of the image with this name

HEX is the image's digest. Any number of processes may import, use and remove images at the same time (see
concurrency/build_once.py). A single lock protects all names. Invariants: every folder `HEX/root` is complete and never
changes; only an existing image gets a name.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from outrider.concurrency.build_once import build_once, lock_file, locked, new_draft, remove_tree
from outrider.environment import cache_home
from outrider.errors import InvalidField, NotFound, RequestError
from outrider.sandbox.rootfs.archives import digest_of_file, layered
from outrider.sandbox.rootfs.owners import Ownership, kept_owners, packed
from outrider.sandbox.rootfs.sif import is_sif, unpack_sif
from outrider.sandbox.rootfs.unpack import UNREADABLE, BadImage, Contents, unpack

NAME = re.compile(r"[a-z0-9]([a-z0-9._/-]{0,126}[a-z0-9])?(:[A-Za-z0-9._-]{1,64})?(@sha256:[0-9a-f]{64})?")
PINNED = re.compile(r"@sha256:[0-9a-f]{64}")
"""A digest at the end of an image's name, as registries use it. Only the image with this digest may have the name."""

OWNERS = "owners"


class RootImage(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an image.

    `digest`: the digest of the image's source.
    `env`, `workdir`: the environment variables and the working directory that the image sets.
    `created`: the time of the import or build, in seconds since the epoch.
    `bytes`: the total size of the image's files.
    `left_out`: the number of devices, sockets and pipes that were not imported.
    `owners`: the summary of the file owners.
    """

    digest: str
    source: str
    created: float
    bytes: int
    entries: int
    left_out: int = 0
    owners: Ownership = Ownership()
    env: dict[str, str] = {}
    workdir: str | None = None


class ImageStore:
    """A folder of images. All methods block."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_home() / "images"

    def import_(self, source: Path, name: str, *, pulled: bool = False) -> RootImage:
        """Import an image from a file or folder, and give it a name (see `give`). An image that was imported before is
        not unpacked again.

        If the name contains a digest, the image must have this digest. If `pulled` is true, the caller has already
        compared the digests, and they are not compared here. Raises InvalidField for the name, NotFound if `source`
        does not exist, BadImage for an invalid image, and RuntimeUnavailable if a required program is not installed.
        """
        checked_name(name)
        if not source.exists():
            raise NotFound(f"no file or folder {source}")
        try:
            if source.is_file() and is_sif(source):
                digest = f"sha256:{digest_of_file(source.open('rb'))}"
                _check_pin(name, digest, pulled)
                return self.make(digest, name, partial(unpack_sif, source), source=source)
            with layered(source) as found:
                _check_pin(name, found.digest, pulled)

                def fill(root: Path) -> Contents:
                    contents = unpack(found.layers(), root)
                    if not contents.entries:
                        raise BadImage(f"{source} is empty")
                    return contents

                return self.make(found.digest, name, fill, source=source, env=found.env, workdir=found.workdir)
        except UNREADABLE as error:
            raise BadImage(f"{source} cannot be read: {error}") from error

    def make(
        self,
        digest: str,
        name: str,
        fill: Callable[[Path], Contents],
        *,
        source: Path,
        env: Mapping[str, str] = {},
        workdir: str | None = None,
    ) -> RootImage:
        """Give a name to the image with this digest, and return the image. A missing image is created first: `fill`
        writes the files into the image's empty root folder, and the other arguments become the image's description."""

        def build(draft: Path) -> None:
            (draft / "root").mkdir(mode=0o755)
            contents = fill(draft / "root")
            owners, ownership = kept_owners(draft / "root", contents.owners, contents.base_owners)
            if owners:
                (draft / OWNERS).write_bytes(packed(owners))
            image = RootImage(
                digest=digest,
                source=str(source),
                created=time.time(),
                bytes=contents.bytes,
                entries=contents.entries,
                left_out=contents.left_out,
                owners=ownership,
                env=dict(env),
                workdir=workdir,
            )
            (draft / "image.json").write_bytes(msgspec.json.encode(image))

        while True:
            build_once(self._folder / _hex(digest), build, is_built=lambda place: (place / "image.json").exists())
            with suppress(NotFound):  # another process may have just removed the image: create it again
                return self.give(name, digest)

    def give(self, name: str, digest: str) -> RootImage:
        """Give a name to the image with this digest, and return the image.

        If another image has this name, the other image loses it. If the other image then has no name, its digest
        becomes its name, so that users can still list, use and remove this image. Raises InvalidField for an invalid
        name, and NotFound if no image has this digest.
        """
        place = self._name(checked_name(name))
        with locked(self._names):
            image = self._described(_hex(digest))
            if image is None:
                raise NotFound(f"no image of digest {digest} on this node")
            earlier = self._named(place)
            _write_name(place, digest)
            if earlier is not None and _hex(earlier.digest) not in self._used():
                _write_name(self._name(earlier.digest), earlier.digest)
        return image

    def images(self) -> dict[str, RootImage]:
        """Return all images by their names."""
        found = {unquote(path.name): self._named(path) for path in sorted(self._name_files())}
        return {name: image for name, image in found.items() if image is not None}

    def names(self) -> frozenset[str]:
        """Return the names of all images, without reading the images."""
        return frozenset(unquote(path.name) for path in self._name_files())

    def image(self, name: str) -> RootImage:
        """Return the image with this name. Raises NotFound if there is none."""
        image = self._named(self._name(checked_name(name)))
        if image is None:
            raise NotFound(f"no image {name!r} on this node", hint="`outrider image import FILE` makes one")
        return image

    def pull_file(self, reference: str) -> Path:
        """Return the file that all pulls of a reference lock (see pull.py). There is one file for each reference and
        processor architecture, because the same reference may mean different images on different architectures."""
        pulled = f"{platform.machine()} {reference}"
        file = lock_file(self._folder / f"pull-{hashlib.sha256(pulled.encode()).hexdigest()}")
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def root(self, image: RootImage) -> Path:
        return self._folder / _hex(image.digest) / "root"

    def owners_file(self, image: RootImage) -> Path | None:
        """Return the file with the owners of the image's files (see owners.py), or None if all files belong to root."""
        file = self._folder / _hex(image.digest) / OWNERS
        return file if file.exists() else None

    def remove(self, name: str) -> bool:
        """Remove a name. If the image has no other name, remove the image too, and return True. Sandboxes that use the
        image then break. Raises NotFound if there is no such name."""
        with ExitStack() as held:
            with locked(self._names):  # keeps other processes from giving the image a new name
                image = self.image(name)
                self._name(name).unlink()
                if _hex(image.digest) in self._used():
                    return False
                place = self._folder / _hex(image.digest)
                held.enter_context(locked(place))
                # First move the image away, so that no process finds a half-removed image. If this process is killed,
                # the next import removes the rest.
                gone = new_draft(place)
                os.rename(place, gone / "image")
            remove_tree(gone)  # takes seconds, so the lock on the names is already released
        return True

    def _used(self) -> set[str]:
        """Return the digests of all images with a name, in hexadecimal form. The caller must hold the lock on the
        names."""
        return {path.read_text() for path in self._name_files()}

    def _named(self, place: Path) -> RootImage | None:
        """Return the image for a file in `images/names`, or None if there is no such file or image."""
        try:
            return self._described(place.read_text())
        except FileNotFoundError:
            return None

    def _described(self, content: str) -> RootImage | None:
        """Return the image with a digest in hexadecimal form, or None if there is no such image."""
        try:
            return msgspec.json.decode((self._folder / content / "image.json").read_bytes(), type=RootImage)
        except FileNotFoundError:
            return None

    @property
    def _names(self) -> Path:
        return self._folder / "names"

    def _name_files(self) -> Iterator[Path]:
        return self._names.glob("[!.]*")

    def _name(self, name: str) -> Path:
        return self._names / quote(name, safe="")


def _write_name(place: Path, digest: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=place.parent, prefix=".")
    with os.fdopen(handle, "w") as file:
        file.write(_hex(digest))
        file.flush()
        os.fsync(handle)
    os.replace(draft, place)  # readers see either the old or the new content, never a part of it


def has_image(name: str | None, names: frozenset[str] | None = None) -> bool:
    """Return whether a task with this image can run without a pull. It can if `name` is None or a path, or if the image
    is in the store. For a task on another machine, `names` are the names in the store of that machine. Images of a
    container engine do not count."""
    if name is None or os.path.isabs(name):
        return True
    if names is not None:
        return name in names
    try:
        ImageStore().image(name)
    except RequestError:
        return False
    return True


def begins_with(image: str, prefix: str) -> bool:
    """Return whether an image's name starts with `prefix`. The prefix must end where a part of the name ends: `python`
    matches `python:3.12`, but not `pythonic/x`."""
    rest = image.removeprefix(prefix)
    return image.startswith(prefix) and (not rest or prefix[-1:] in ("/", ":", "@") or rest[0] in "/:@")


def known_image(name: str) -> RootImage:
    """Return the image with this name. If there is none, raises InvalidField for the field task.runtime.image."""
    try:
        return ImageStore().image(name)
    except RequestError as error:
        raise InvalidField(error.message, field="task.runtime.image", hint=error.hint) from error


def checked_name(name: str, *, field: str = "name") -> str:
    """Return the name unchanged if it is a valid image name. Raises InvalidField otherwise."""
    if not NAME.fullmatch(name) or ".." in name or "//" in name:
        raise InvalidField(
            f"{name!r} is not a valid name for an image", field=field, hint="such as debian, or tools/python:3.12"
        )
    return name


def _check_pin(name: str, digest: str, pulled: bool) -> None:
    """Raise InvalidField if the name contains a digest that is not the digest of the image. With `pulled`, the caller
    has already checked this."""
    _, pinned, wanted = name.partition("@")
    if pinned and not pulled and digest != wanted:
        raise InvalidField(
            f"the archive has {digest}, and the name says {wanted}",
            field="name",
            hint="an archive lacks the digest of a tag for several machines: pull the image by its digest, or give it"
            " a name without a digest",
        )


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
