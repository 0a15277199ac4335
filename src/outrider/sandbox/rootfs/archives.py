"""Reads image archives: an OCI layout, the output of `docker save` or `podman save`, or a plain tar of a root file
system.

The result is a list of tar layers, which unpack.py unpacks, and the image's settings. Invariant: a file that is named
by a digest is used only if its content has this digest.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import msgspec

from outrider.sandbox.rootfs.unpack import UNREADABLE, ArchiveMember, BadImage, check_expansion

T = TypeVar("T")

MAX_DOCUMENT = 8 << 20
"""Maximum size of a JSON document in an image, in bytes."""
MAX_NESTING = 4
"""Maximum depth of nested image indexes. An index can point to another index."""
MAX_LAYERS = 512
"""Maximum number of an image's layers. Container engines create at most 127."""
MAX_MEMBERS = 10_000
"""How many entries are searched for the documents that identify the archive's format. A plain root file system may have
millions of entries, and none of these documents."""
CHUNK = 1 << 20
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""The names of processor architectures in an image index, by the output of `uname -m`."""
NESTED = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")


class Layered(msgspec.Struct, frozen=True):
    """An image in layers. `layers` opens the layers one after another, the lowest first. `env` and `workdir` are the
    environment variables and the working directory that the image sets."""

    digest: str
    layers: Callable[[], Iterator[BinaryIO]]
    env: dict[str, str]
    workdir: str | None


class Platform(msgspec.Struct, frozen=True):
    architecture: str | None = None
    os: str | None = None


class Descriptor(msgspec.Struct, frozen=True):
    """A descriptor of the OCI image specification: it refers to a file of the image by its digest."""

    digest: str
    media_type: str | None = msgspec.field(name="mediaType", default=None)
    platform: Platform | None = None


class Manifest(msgspec.Struct, frozen=True):
    """Either an index, which lists `manifests`, or the manifest of one image, which has `config` and `layers`."""

    manifests: list[Descriptor] = []
    config: Descriptor | None = None
    layers: list[Descriptor] = []


class Settings(msgspec.Struct, frozen=True):
    env: list[str] | None = msgspec.field(name="Env", default=None)
    workdir: str | None = msgspec.field(name="WorkingDir", default=None)


class Configuration(msgspec.Struct, frozen=True):
    config: Settings | None = None


class Saved(msgspec.Struct, frozen=True):
    config: str = msgspec.field(name="Config")
    layers: list[str] = msgspec.field(name="Layers")


Open = Callable[[str], BinaryIO]
"""A function that opens a file by its path in the image. Raises BadImage if the file is missing."""


@contextmanager
def layered(path: Path) -> Iterator[Layered]:
    """Open an image that is a folder or a tar file. A tar file is closed at the end of the `with` block. Raises
    BadImage."""
    if path.is_dir():

        def below(name: str) -> BinaryIO:
            place = path / name
            if "\0" in name or not place.resolve().is_relative_to(path.resolve()) or not place.is_file():
                raise BadImage(f"{path} has no {name}")
            return place.open("rb")

        yield _oci(below)
        return
    try:
        opened = tarfile.open(path, tarinfo=ArchiveMember)  # noqa: SIM115  # a `with` would catch errors of its body
    except (*UNREADABLE, OSError) as error:
        raise BadImage(f"{path} is not a tar archive: {error}") from error
    with opened as archive:
        size = path.stat().st_size
        names = {member.name.removeprefix("./"): member for member in islice(_members(archive, size), MAX_MEMBERS)}

        def within(name: str) -> BinaryIO:
            member = names.get(name) or next((one for one in _members(archive, size) if one.name == name), None)
            file = archive.extractfile(member) if member is not None and member.isfile() else None
            if file is None:
                raise BadImage(f"{path} has no {name}")
            return cast(BinaryIO, file)

        if "oci-layout" in names or "index.json" in names:
            yield _oci(within)
        elif "manifest.json" in names:
            yield _saved(within)
        else:
            yield Layered(f"sha256:{digest_of_file(path.open('rb'))}", lambda: iter([path.open("rb")]), {}, None)


def _members(archive: tarfile.TarFile, size: int) -> Iterator[tarfile.TarInfo]:
    """Yield the entries of a tar archive of `size` bytes. Raises BadImage if the content is too large for an image, or
    if an entry does not start after the previous one. With such an entry, tarfile would read the same entries
    forever."""
    last = -1
    for member in archive:
        if member.offset <= last:
            raise BadImage("an entry of the archive does not start after the previous entry")
        check_expansion(max(archive.offset, member.size), size)
        last = member.offset
        yield member


def _oci(open_: Open) -> Layered:
    """Read an OCI layout, and return its image for this machine's architecture. Raises BadImage unless there is exactly
    one such image."""
    document = _document(open_("index.json"), "index.json", Manifest)
    machine = MACHINES.get(platform.machine(), platform.machine())
    for _ in range(MAX_NESTING):
        manifests = document.manifests
        fitting = [one for one in manifests if one.platform is None or one.platform.architecture in (machine, None)]
        if len(fitting) != 1:
            fitting = [one for one in fitting if one.platform is not None and one.platform.os == "linux"]
        if len(fitting) != 1:
            raise BadImage(f"the index names {len(manifests)} images, but not exactly one for Linux on {machine}")
        chosen = fitting[0]
        document = _document(_blob(open_, chosen.digest), chosen.digest, Manifest)
        if chosen.media_type not in NESTED and not document.manifests:
            break
    else:
        raise BadImage("the image's indexes are nested too deep")
    if document.config is None or not document.layers:
        raise BadImage("the image has no layers")
    names = _checked([layer.digest for layer in document.layers])
    config = _document(_blob(open_, document.config.digest), document.config.digest, Configuration)
    return _with_config(chosen.digest, lambda: (_blob(open_, name) for name in names), config)


def _saved(open_: Open) -> Layered:
    """Read an archive of `docker save`. Raises BadImage if the archive contains several images."""
    images = _document(open_("manifest.json"), "manifest.json", list[Saved])
    if len(images) != 1:
        raise BadImage("the archive has several images: save only one")
    [image] = images
    names = _checked(image.layers)
    digest = hashlib.sha256(b"".join(digest_of_file(open_(name)).encode() for name in names)).hexdigest()
    config = _document(open_(image.config), image.config, Configuration)
    return _with_config(f"sha256:{digest}", lambda: (open_(name) for name in names), config)


def _checked(layers: list[str]) -> list[str]:
    """Return the names of an image's layers unchanged. Raises BadImage if there are more than MAX_LAYERS, because
    reading each of them (twice) could take very long."""
    if len(layers) > MAX_LAYERS:
        raise BadImage(f"the image has {len(layers)} layers: more than {MAX_LAYERS} are not read")
    return layers


def _with_config(digest: str, layers: Callable[[], Iterator[BinaryIO]], configuration: Configuration) -> Layered:
    own = configuration.config or Settings()
    env = dict(entry.split("=", 1) for entry in own.env or () if "=" in entry)
    return Layered(digest, layers, env, own.workdir or None)


def _blob(open_: Open, digest: str) -> BinaryIO:
    kind, _, value = digest.partition(":")
    if kind != "sha256" or not value.isalnum():
        raise BadImage(f"the image names the blob {digest!r}: only sha256 digests are supported")
    name = f"blobs/sha256/{value}"
    if digest_of_file(open_(name)) != value:
        raise BadImage(f"the blob {digest} has other content than its name says")
    return open_(name)


def _document(file: BinaryIO, name: str, kind: type[T]) -> T:
    with file:
        try:
            return msgspec.json.decode(file.read(MAX_DOCUMENT), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadImage(f"{name} is not JSON of the form that images have: {error}") from error


def digest_of_file(file: BinaryIO) -> str:
    """Return the SHA-256 of an open file and close it."""
    with file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # BinaryIO lacks readinto


def digest_of(path: Path, without: frozenset[str] = frozenset()) -> str:
    """Return a digest of a file or a folder: of all names, types, contents and execute permissions, except for the
    paths in `without`."""
    found = hashlib.sha256()
    names = [str(path)]
    for folder, folders, files in os.walk(path):
        # os.walk visits the folders that are left in this list, in this order. The digest depends on the order, so it
        # must be the same on every machine.
        folders[:] = sorted(name for name in folders if os.path.join(folder, name) not in without)
        names += [os.path.join(folder, name) for name in sorted((*folders, *files))]
    for name in names:
        if name in without:
            continue
        status = os.lstat(name)
        mode = status.st_mode & 0o170111
        found.update(f"{os.path.relpath(name, path)}\0{mode:o}\0".encode("utf-8", "surrogateescape"))
        if os.path.islink(name):
            found.update(os.fsencode(os.readlink(name)))
        elif os.path.isfile(name):
            found.update(f"{status.st_size}\0".encode())
            with open(name, "rb") as file:
                while chunk := file.read(CHUNK):
                    found.update(chunk)
    return found.hexdigest()
