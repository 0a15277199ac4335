"""Images for Apptainer, made from this machine's own files by the real program. Nothing is fetched."""

from __future__ import annotations

import atexit
import functools
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from support.small_root import small_root

from . import engines

ENV = ["PATH=/opt/tool:/usr/bin:/bin", "COLOUR=dark blue", "SHAPE=round"]


@functools.cache
def folder() -> Path:
    """Return a folder that is removed at the end of the process."""
    made = Path(tempfile.mkdtemp(prefix="outrider-images-"))
    made.chmod(0o755)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@functools.cache
def root() -> Path:
    """Return a root folder without Python."""
    return small_root(folder() / "root")


@functools.cache
def python_root() -> Path:
    """Return a root folder with Python, bash and the usual tools."""
    place = folder() / "python"
    with tarfile.open(fileobj=io.BytesIO(engines.archive("python"))) as archive:
        archive.extractall(place, filter="fully_trusted")
    return place


@functools.cache
def docker_archive() -> Path:
    """Write the archive that `docker save` would write of an image with the files of `root` and the variables ENV."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.add(root(), ".", filter=engines.of_root)
    digest = f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ENV, "Cmd": ["bash"]},
        "rootfs": {"type": "layers", "diff_ids": [digest]},
        "history": [{"created_by": "a test"}],
    }
    manifest = [{"Config": "config.json", "RepoTags": ["small:1"], "Layers": ["layer.tar"]}]
    path = folder() / "small.tar"
    members = {
        "manifest.json": json.dumps(manifest).encode(),
        "config.json": json.dumps(config).encode(),
        "layer.tar": layer.getvalue(),
    }
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@functools.cache
def sif(source: str) -> Path:
    """Return a SIF file that Apptainer builds from a root folder (`root`) or from an archive of `docker save`
    (`archive`)."""
    path = folder() / f"{source}.sif"
    of = {"root": lambda: str(root()), "archive": lambda: f"docker-archive:{docker_archive()}"}[source]()
    done = subprocess.run(["apptainer", "build", str(path), of], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path
