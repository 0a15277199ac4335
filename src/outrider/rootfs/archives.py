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
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import msgspec

from outrider.rootfs.unpack import BadImage

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


Open = Callable[[str], BinaryIO]
"""A file of an image by its path. Raises BadImage where there is none."""


@contextmanager
def layered(path: Path) -> Iterator[Layered]:
    """The image in a folder or a tar file, open as long as the context is. Raises BadImage."""
    if path.is_dir():
        yield _oci(lambda name: _file_in(path, name))
        return
    with _archive(path) as archive:
        names = {member.name.removeprefix("./"): member for member in _head(archive)}

        def within(name: str) -> BinaryIO:
            member = names.get(name) or _found(archive, name)
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
        return tarfile.open(path)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BadImage(f"{path} is no tar archive: {error}") from error


def _head(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """The members of an archive of blobs; for one of a root, which has many more, only its beginning."""
    members = []
    for member in archive:
        members.append(member)
        if len(members) > MAX_MEMBERS:
            break
    return members


def _found(archive: tarfile.TarFile, name: str) -> tarfile.TarInfo | None:
    try:
        return archive.getmember(name)
    except KeyError:
        return None


def _file_in(folder: Path, name: str) -> BinaryIO:
    place = folder / name
    if not place.resolve().is_relative_to(folder.resolve()) or not place.is_file():
        raise BadImage(f"{folder} has no {name}")
    return place.open("rb")


def _oci(open_: Open) -> Layered:
    """Of several images that which is for this machine, else the only one."""
    document = _document(open_, "index.json")
    for _ in range(MAX_NESTING):
        chosen = _chosen(document.get("manifests", []))
        document = _blob_document(open_, chosen["digest"])
        if chosen.get("mediaType") not in NESTED and "manifests" not in document:
            return _image(open_, document, chosen["digest"])
    raise BadImage("the image's indexes are nested too deep")


def _chosen(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    machine = MACHINES.get(platform.machine(), platform.machine())
    fitting = [one for one in manifests if one.get("platform", {}).get("architecture") in (machine, None)]
    if len(fitting) != 1:
        fitting = [one for one in fitting if one.get("platform", {}).get("os") == "linux"]
    if len(fitting) != 1 or "digest" not in fitting[0]:
        raise BadImage(f"the index names {len(manifests)} images, and not exactly one for linux on {machine}")
    return fitting[0]


def _image(open_: Open, manifest: dict[str, Any], digest: str) -> Layered:
    config = _blob_document(open_, manifest["config"]["digest"]).get("config") or {}
    names = [layer["digest"] for layer in manifest.get("layers", [])]
    if not names:
        raise BadImage("the image has no layers")
    return _with_config(digest, lambda: (_blob(open_, name) for name in names), config)


def _saved(open_: Open) -> Layered:
    """What `docker save` writes: one image, its layers as files."""
    images = _document(open_, "manifest.json")
    if not isinstance(images, list) or len(images) != 1:
        raise BadImage("the archive holds several images: save one")
    config_name, names = images[0]["Config"], images[0]["Layers"]
    config = _document(open_, config_name)
    digest = hashlib.sha256(b"".join(_digest(open_(name)).encode() for name in names)).hexdigest()
    return _with_config(f"sha256:{digest}", lambda: (open_(name) for name in names), config.get("config") or {})


def _with_config(digest: str, layers: Callable[[], Iterator[BinaryIO]], config: dict[str, Any]) -> Layered:
    env = dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)
    return Layered(digest, layers, env, config.get("WorkingDir") or None)


def _blob(open_: Open, digest: str) -> BinaryIO:
    kind, _, value = digest.partition(":")
    if kind != "sha256" or not value.isalnum():
        raise BadImage(f"the image names the blob {digest!r}: only sha256 digests are known")
    name = f"blobs/sha256/{value}"
    if _digest(open_(name)) != value:
        raise BadImage(f"the blob {digest} has other content than its name says")
    return open_(name)


def _blob_document(open_: Open, digest: str) -> dict[str, Any]:
    return cast("dict[str, Any]", _decoded(_blob(open_, digest), digest))


def _document(open_: Open, name: str) -> Any:
    return _decoded(open_(name), name)


def _decoded(file: BinaryIO, name: str) -> Any:
    with file:
        try:
            return msgspec.json.decode(file.read(MAX_DOCUMENT))
        except msgspec.DecodeError as error:
            raise BadImage(f"{name} is not JSON: {error}") from error


def _digest(file: IO[bytes]) -> str:
    with file:
        found = hashlib.sha256()
        while chunk := file.read(CHUNK):
            found.update(chunk)
        return found.hexdigest()
