"""One OCI image runs in namespace sandboxes, in Apptainer and in every container engine. It is made of this machine's
own files and is in no registry."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.sandbox.rootfs.store import ImageStore

from . import engines, sif_images
from .world import CONTAINERS, World

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

NAME = f"localhost/outrider-test-one-{os.getpid()}:latest"
ENV = ["PATH=/opt/tool:/usr/bin:/bin", "COLOUR=dark blue"]
OCI = "application/vnd.oci.image"


class Layout:
    """The members of an archive: an OCI image layout, and beside it the list that `docker load` reads."""

    def __init__(self) -> None:
        self.members: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def blob(self, kind: str, data: bytes) -> dict[str, str | int]:
        """Add a blob. Returns its descriptor."""
        digest = hashlib.sha256(data).hexdigest()
        self.members[f"blobs/sha256/{digest}"] = data
        return {"mediaType": f"{OCI}.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    def archive(self, path: Path) -> None:
        with tarfile.open(path, "w") as archive:
            for name in ("blobs", "blobs/sha256"):  # Apptainer makes no folder that is not in the archive
                folder = tarfile.TarInfo(name)
                folder.type, folder.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(folder)
            for name, data in self.members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def layer() -> bytes:
    """Return a layer with a few programs, and another one in /opt/tool, a folder of the image's PATH."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(sif_images.root(), ".", filter=engines.of_root)
        script = b"#!/bin/sh\necho made here\n"
        for name, data in (("opt", None), ("opt/tool", None), ("opt/tool/whence", script)):
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE if data is None else tarfile.REGTYPE, 0o755
            member.size = len(data or b"")
            archive.addfile(member, io.BytesIO(data or b""))
    return out.getvalue()


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    layout = Layout()
    files = layout.blob("layer.v1.tar", layer())
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
        "os": "linux",
        "config": {"Env": ENV, "Cmd": ["bash"]},
        "rootfs": {"type": "layers", "diff_ids": [files["digest"]]},
        "history": [{"created_by": "a test"}],
    }
    about = layout.blob("config.v1+json", json.dumps(config).encode())
    whole = {"schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json", "config": about, "layers": [files]}
    manifest = layout.blob("manifest.v1+json", json.dumps(whole).encode())
    named = {**manifest, "annotations": {"org.opencontainers.image.ref.name": NAME}}
    layout.members["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [named]}).encode()
    places = [f"blobs/{str(one['digest']).replace(':', '/')}" for one in (about, files)]
    listed = [{"Config": places[0], "RepoTags": [NAME], "Layers": places[1:]}]
    layout.members["manifest.json"] = json.dumps(listed).encode()
    path = sif_images.folder() / "one.tar"
    layout.archive(path)
    yield path
    path.unlink()


@contextlib.contextmanager
def for_namespace(image: Path) -> Iterator[str]:
    ImageStore().import_(image, "one")
    yield "one"


@contextlib.contextmanager
def for_apptainer(image: Path) -> Iterator[str]:
    if shutil.which("apptainer") is None:
        pytest.skip("apptainer is not installed: `.ci/apptainer PREFIX` does it and prints what to add to the PATH")
    sif = image.with_name("one.sif")
    command = ["apptainer", "build", str(sif), f"oci-archive:{image}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    try:
        yield str(sif)
    finally:
        sif.unlink()


def for_engine(kind: str) -> Callable[[Path], contextlib.AbstractContextManager[str]]:
    @contextlib.contextmanager
    def loaded(image: Path) -> Iterator[str]:
        socket = engines.engine(kind)
        engines.request(socket, "POST", "/images/load", image.read_bytes())
        try:
            yield NAME
        finally:
            engines.request(socket, "DELETE", f"/images/{NAME}?force=true", b"")

    return loaded


WAYS = {"namespace": for_namespace, "apptainer": for_apptainer, **{kind: for_engine(kind) for kind in CONTAINERS}}


@pytest.mark.parametrize("kind", WAYS)
async def test_one_image_under_every_runtime(
    world: World, kind: str, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(sif_images.folder() / "home"))
    with WAYS[kind](image) as name:
        sandbox = await world.start(kind, image=name, env={"SHAPE": "square"})
        told = await sandbox.exec("whence; echo $COLOUR $SHAPE $0; test ! -e /usr/bin/python3", seconds=30)
        assert (told.exit_code, told.stdout) == (0, b"made here\ndark blue square bash\n"), told.stderr
        await sandbox.stop()
