"""What can be an image: an OCI layout, what `docker save` or `podman save` writes, a plain tar of a root.

Each comes down to tar layers and the variables that the image sets. It unpacks nothing. Invariant: a blob that is
named by its digest is read only if it has that digest.
"""

from __future__ import annotations

import hashlib
import platform
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, BinaryIO, TypeVar, cast

import msgspec

from outrider.rootfs.unpack import UNREADABLE, BadImage, Member

T = TypeVar("T")

MAX_DOCUMENT = 8 << 20
MAX_NESTING = 4
MAX_MEMBERS = 10_000
CHUNK = 1 << 20
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""What image indexes call this machine."""
NESTED = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")


class Layered(msgspec.Struct, frozen=True):
    """An image in layers. `layers` opens them one after another, the lowest first; `env` is what it sets, and
    `workdir` where its programs start."""

    digest: str
    layers: Callable[[], Iterator[BinaryIO]]
    env: dict[str, str]
    workdir: str | None


class Platform(msgspec.Struct, frozen=True):
    architecture: str | None = None
    os: str | None = None


class Entry(msgspec.Struct, frozen=True):
    """What a document says of a blob."""

    digest: str
    media_type: str | None = msgspec.field(name="mediaType", default=None)
    platform: Platform | None = None


class Manifest(msgspec.Struct, frozen=True):
    """An index, which has manifests, or an image, which has the rest."""

    manifests: list[Entry] = []
    config: Entry | None = None
    layers: list[Entry] = []


class Own(msgspec.Struct, frozen=True):
    env: list[str] | None = msgspec.field(name="Env", default=None)
    workdir: str | None = msgspec.field(name="WorkingDir", default=None)


class Configuration(msgspec.Struct, frozen=True):
    config: Own | None = None


class Saved(msgspec.Struct, frozen=True):
    config: str = msgspec.field(name="Config")
    layers: list[str] = msgspec.field(name="Layers")


Open = Callable[[str], BinaryIO]
"""A file of an image by its path. Raises BadImage where there is none."""


@contextmanager
def layered(path: Path) -> Iterator[Layered]:
    """The image in a folder or a tar file, open as long as the context is. Raises BadImage."""
    if path.is_dir():
        yield _oci(lambda name: _file_in(path, name))
        return
    with _archive(path) as archive:
        names = {member.name.removeprefix("./"): member for member in islice(_members(archive), MAX_MEMBERS)}

        def within(name: str) -> BinaryIO:
            member = names.get(name) or next((one for one in _members(archive) if one.name == name), None)
            file = archive.extractfile(member) if member is not None and member.isfile() else None
            if file is None:
                raise BadImage(f"{path} has no {name}")
            return cast(BinaryIO, file)

        if "oci-layout" in names or "index.json" in names:
            yield _oci(within)
        elif "manifest.json" in names:
            yield _saved(within)
        else:
            yield Layered(f"sha256:{_digest(path.open('rb'))}", lambda: iter([path.open("rb")]), {}, None)


def _archive(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path, tarinfo=Member)
    except (*UNREADABLE, OSError) as error:
        raise BadImage(f"{path} is no tar archive: {error}") from error


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Raises BadImage where one says that the next is before it: tarfile would read them over and over."""
    last = -1
    for member in archive:
        if member.offset <= last:
            raise BadImage("the archive's entries are in a circle")
        last = member.offset
        yield member


def _file_in(folder: Path, name: str) -> BinaryIO:
    place = folder / name
    if "\0" in name or not place.resolve().is_relative_to(folder.resolve()) or not place.is_file():
        raise BadImage(f"{folder} has no {name}")
    return place.open("rb")


def _oci(open_: Open) -> Layered:
    """Of several images that which is for this machine, else the only one."""
    document = _document(open_("index.json"), "index.json", Manifest)
    for _ in range(MAX_NESTING):
        chosen = _chosen(document.manifests)
        document = _document(_blob(open_, chosen.digest), chosen.digest, Manifest)
        if chosen.media_type not in NESTED and not document.manifests:
            return _image(open_, document, chosen.digest)
    raise BadImage("the image's indexes are nested too deep")


def _chosen(manifests: list[Entry]) -> Entry:
    machine = MACHINES.get(platform.machine(), platform.machine())
    fitting = [one for one in manifests if one.platform is None or one.platform.architecture in (machine, None)]
    if len(fitting) != 1:
        fitting = [one for one in fitting if one.platform is not None and one.platform.os == "linux"]
    if len(fitting) != 1:
        raise BadImage(f"the index names {len(manifests)} images, and not exactly one for linux on {machine}")
    return fitting[0]


def _image(open_: Open, manifest: Manifest, digest: str) -> Layered:
    if manifest.config is None or not manifest.layers:
        raise BadImage("the image has no layers")
    names = [layer.digest for layer in manifest.layers]
    config = _document(_blob(open_, manifest.config.digest), manifest.config.digest, Configuration)
    return _with_config(digest, lambda: (_blob(open_, name) for name in names), config)


def _saved(open_: Open) -> Layered:
    """What `docker save` writes: one image, its layers as files."""
    images = _document(open_("manifest.json"), "manifest.json", list[Saved])
    if len(images) != 1:
        raise BadImage("the archive holds several images: save one")
    [image] = images
    digest = hashlib.sha256(b"".join(_digest(open_(name)).encode() for name in image.layers)).hexdigest()
    config = _document(open_(image.config), image.config, Configuration)
    return _with_config(f"sha256:{digest}", lambda: (open_(name) for name in image.layers), config)


def _with_config(digest: str, layers: Callable[[], Iterator[BinaryIO]], configuration: Configuration) -> Layered:
    own = configuration.config or Own()
    env = dict(entry.split("=", 1) for entry in own.env or () if "=" in entry)
    return Layered(digest, layers, env, own.workdir or None)


def _blob(open_: Open, digest: str) -> BinaryIO:
    kind, _, value = digest.partition(":")
    if kind != "sha256" or not value.isalnum():
        raise BadImage(f"the image names the blob {digest!r}: only sha256 digests are known")
    name = f"blobs/sha256/{value}"
    if _digest(open_(name)) != value:
        raise BadImage(f"the blob {digest} has other content than its name says")
    return open_(name)


def _document(file: BinaryIO, name: str, kind: type[T]) -> T:
    with file:
        try:
            return msgspec.json.decode(file.read(MAX_DOCUMENT), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadImage(f"{name} is not JSON as images have it: {error}") from error


def _digest(file: IO[bytes]) -> str:
    with file:
        found = hashlib.sha256()
        while chunk := file.read(CHUNK):
            found.update(chunk)
        return found.hexdigest()
