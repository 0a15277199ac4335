"""Image archives in the formats of other programs, made without these programs."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .test_unpack import layer

CONFIG = {"architecture": "amd64", "config": {"Env": ["PATH=/opt/bin:/bin", "EMPTY="], "WorkingDir": "/srv"}}
LOWER = layer(("bin/tool", b"1"), ("gone", b"1")).getvalue()
UPPER = layer((".wh.gone", b""), ("etc/name", b"2"), compression="gz").getvalue()
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def oci_files(*, machines: tuple[str, ...] = (MACHINE,), nested: bool = False) -> dict[str, bytes]:
    """Return the files of an OCI layout with an image for each machine. `nested` puts the images into an index of their
    own."""
    blobs = [json.dumps(CONFIG).encode(), LOWER, UPPER]
    manifest = {"config": {"digest": digest(blobs[0])}, "layers": [{"digest": digest(blob)} for blob in blobs[1:]]}
    entries = []
    for machine in machines:
        packed = json.dumps({**manifest, "annotations": {"for": machine}}).encode()
        blobs.append(packed)
        entries.append({"digest": digest(packed), "platform": {"architecture": machine, "os": "linux"}})
    index: dict[str, Any] = {"manifests": entries}
    if nested:
        packed = json.dumps(index).encode()
        blobs.append(packed)
        kind = "application/vnd.oci.image.index.v1+json"
        index = {"manifests": [{"digest": digest(packed), "mediaType": kind}]}
    named = {f"blobs/sha256/{digest(blob)[7:]}": blob for blob in blobs}
    return {"oci-layout": b"{}", "index.json": json.dumps(index).encode(), **named}


def saved_files() -> dict[str, bytes]:
    """Return the files that `docker save` writes."""
    manifest = [{"Config": "config.json", "RepoTags": ["x:1"], "Layers": ["a/layer.tar", "b/layer.tar"]}]
    return {
        "manifest.json": json.dumps(manifest).encode(),
        "config.json": json.dumps(CONFIG).encode(),
        "a/layer.tar": LOWER,
        "b/layer.tar": UPPER,
    }


def as_folder(files: Mapping[str, bytes], path: Path) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def as_tar(files: Mapping[str, bytes], path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def sif(path: Path, partition: bytes, *, format_: int = 1, kind: int = 2, offset: int | None = None) -> Path:
    """Write a SIF with one partition, whose descriptor comes after other descriptors."""
    at = 32 + 10 + 22 + 64
    start = at + 3 * 585 if offset is None else offset
    header = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + b"01\0" + b"02\0" + bytes(16)
    header += struct.pack("<8q", 0, 0, 0, 3, at, 3 * 585, start, len(partition))
    packed = struct.Struct("<i?IIIqqqqqqq128s384s")
    extra = struct.pack("<ii", format_, kind)
    other = packed.pack(0x4005, True, 1, 0, 0, start, 1, 1, 0, 0, 0, 0, b"other", bytes(384))
    unused = packed.pack(0x4004, False, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, b"", extra)
    used = packed.pack(0x4004, True, 3, 0, 0, start, len(partition), len(partition), 0, 0, 0, 0, b"root", extra)
    path.write_bytes((header.ljust(at, b"\0") + other + unused + used).ljust(start, b"\0") + partition)
    return path
